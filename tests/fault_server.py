"""A real HTTP server in the form of vLLM's OpenAI API that misbehaves on demand, prompt by prompt; and small runs.

What it guards: stage 01b and 02 are tested over a real socket, with the answers a vLLM server (and its network)
really gives, down to the half-sent body. Nothing in the client is replaced.

    with FaultServer() as server:
        server.misbehave("What is 1 + 1?", "http 500", times=1)   # then answers well
        server.url                                                # http://127.0.0.1:PORT/v1

Token ids are the characters' code points plus 20, so that a test can tell by eye whose tokens they are.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import json
import os
import socket
import struct
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from eagle3_train import server as vllm
from eagle3_train.capture import Sample
from eagle3_train.config import Config
from eagle3_train.prompts import PROMPTS_FILE, content_id
from eagle3_train.run import Result, Run, Stage, StageSpec

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
TRACES_FILE = "traces.jsonl"
END_OF_TURN = 8
SERVER_VERSION = "0.99.1"
_CONTEXT_ERROR = "This model's maximum context length is 1024 tokens. However, your request has 4096 input tokens."


def encode(text: str) -> list[int]:
    """The server's tokenizer: one token a character."""
    return [20 + ord(character) for character in text]


def thinking_on(question: str) -> str:
    return f"The user asks: {question}"


def answer_to(question: str) -> str:
    return f"My answer to {question}"


class FaultServer:
    """vLLM's OpenAI API on a free loopback port; close it with `with`.

    Args:
        reasoning_field: `reasoning` (vLLM today) or `reasoning_content` (earlier).
        thinks: whether answers hold any thinking.
        leaks_thinking: no reasoning parser: the think tags stay inside the content.
        gives_token_ids: knows `return_token_ids`.
        engine_works: False: `/health` and `/v1/models` answer, the engine does not.
        delay_s: time an answer takes.
        models: names it serves.
    """

    def __init__(
        self,
        *,
        reasoning_field: str = "reasoning",
        thinks: bool = True,
        leaks_thinking: bool = False,
        gives_token_ids: bool = True,
        engine_works: bool = True,
        delay_s: float = 0.0,
        models: Sequence[str] = ("kimi-under-test",),
    ):
        self.reasoning_field = reasoning_field
        self.thinks = thinks
        self.leaks_thinking = leaks_thinking
        self.gives_token_ids = gives_token_ids
        self.engine_works = engine_works
        self.delay_s = delay_s
        self.models = models
        # States: (token ids, attempt, request) -> the kv_transfer_params of the answer, or bytes to send as its body.
        self.capture: Callable[[list[int], int, dict[str, Any]], dict[str, Any] | bytes | None] | None = None
        # (time it came, question, body) of every chat request, in order.
        self.requests: list[tuple[float, str, dict[str, Any]]] = []
        self.captures: Counter[tuple[int, ...]] = Counter()
        self.answered = 0
        # Chat requests that were being answered at the same time: now, and at most.
        self.at_once = self.most_at_once = 0
        self.hold_until = 0
        self.closing = threading.Event()
        self.lock = threading.Lock()
        self.connections: set[socket.socket] = set()
        self._faults: defaultdict[str, list[str]] = defaultdict(list)
        self._faults_forever: dict[str, str] = {}
        self._http = _Listener(("127.0.0.1", 0), _handler_of(self))
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> FaultServer:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End as a killed process does: nobody listens, every connection is gone. A second call does nothing."""
        if self.closing.is_set():
            return
        self.closing.set()
        self._http.shutdown()
        self._http.server_close()
        with self.lock:
            for connection in self.connections:
                with contextlib.suppress(OSError):  # its client was faster
                    connection.shutdown(socket.SHUT_RDWR)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def misbehave(self, question: str, fault: str, *, times: int | None = None) -> None:
        """Answer the next `times` requests for `question` with `fault`; None means every one."""
        assert fault in FAULTS, f"no fault {fault}; there are {', '.join(FAULTS)}"
        if times is None:
            self._faults_forever[question] = fault
        else:
            self._faults[question] += [fault] * times

    def next_fault(self, question: str) -> str | None:
        with self.lock:
            queued = self._faults[question]
            return queued.pop(0) if queued else self._faults_forever.get(question)

    def asked(self) -> Counter[str]:
        """Chat requests for each question."""
        with self.lock:
            return Counter(question for _, question, _ in self.requests)

    def bodies(self, question: str) -> list[dict[str, Any]]:
        with self.lock:
            return [body for _, asked, body in self.requests if asked == question]

    def times(self, question: str) -> list[float]:
        with self.lock:
            return [moment for moment, asked, _ in self.requests if asked == question]

    def wait_until_answered(self, count: int, timeout_s: float = 60.0) -> None:
        """Until `count` good answers have been sent in all."""
        deadline = time.monotonic() + timeout_s
        while self.answered < count:
            assert time.monotonic() < deadline, f"only {self.answered} of {count} answers within {timeout_s} s"
            time.sleep(0.002)

    def completion(self, body: dict[str, Any], question: str) -> dict[str, Any]:
        """A good chat completion, with the fields and in the shape that vLLM sends."""
        thinking = (body.get("chat_template_kwargs") or {}).get("thinking", True)
        reasoning = thinking_on(question) if self.thinks and thinking else None
        content = answer_to(question)
        said = f"{reasoning}</think>{content}" if reasoning else content
        token_ids = [*encode(said), END_OF_TURN]
        prompt_ids = encode("".join(f"{m['role']}:{m['content']};" for m in body["messages"]))
        message: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": []}
        message[self.reasoning_field] = reasoning
        if self.leaks_thinking:
            message = {"role": "assistant", "content": said, "tool_calls": []}
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        answer: dict[str, Any] = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 0,
            "model": self.models[0],
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(prompt_ids),
                "completion_tokens": len(token_ids),
                "total_tokens": len(prompt_ids) + len(token_ids),
            },
        }
        if self.gives_token_ids and body.get("return_token_ids"):
            answer["prompt_token_ids"] = prompt_ids
            choice["token_ids"] = token_ids
        if body.get("logprobs"):
            log_probs = log_probs_of([*prompt_ids, *token_ids])[-len(token_ids) :]
            choice["logprobs"] = {"content": [{"logprob": value} for value in log_probs]}
        if self.capture is not None:
            answer["kv_transfer_params"] = self.capture([*prompt_ids, *token_ids[:-1]], 1, body)
        return answer


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is what these tests are about, not news."""


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_of: FaultServer

    def setup(self) -> None:
        super().setup()
        with self.server_of.lock:
            self.server_of.connections.add(self.connection)

    def finish(self) -> None:
        with self.server_of.lock:
            self.server_of.connections.discard(self.connection)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        ours = self.server_of
        if self.path == "/v1/models":
            self.send_json({"object": "list", "data": [{"id": name, "object": "model"} for name in ours.models]})
        elif self.path == "/health":
            self.send_body(200, b"")
        elif self.path == "/version":
            self.send_json({"version": SERVER_VERSION})
        elif self.path == "/metrics":
            self.send_body(200, f"vllm:request_success_total {ours.answered}\n".encode(), kind="text/plain")
        else:
            self.send_json({"detail": "Not Found"}, status=404)

    def do_POST(self) -> None:
        ours = self.server_of
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not ours.engine_works:
            self.send_error_json(500, "EngineCore encountered an issue.")
        elif self.path == "/v1/completions":
            self._complete(body)
        elif self.path == "/v1/chat/completions":
            self._chat(body)
        else:
            self.send_json({"detail": "Not Found"}, status=404)

    def _chat(self, body: dict[str, Any]) -> None:
        ours, question = self.server_of, body["messages"][-1]["content"]
        with ours.lock:
            ours.requests.append((time.monotonic(), question, body))
            ours.at_once += 1
            ours.most_at_once = max(ours.most_at_once, ours.at_once)
        closing = ours.closing.wait(ours.delay_s)
        with ours.lock:
            ours.at_once -= 1
        if closing:
            return
        fault = ours.next_fault(question)
        answer = ours.completion(body, question)
        if fault is not None:
            FAULTS[fault](self, answer)
            return
        self.send_json(answer)
        with ours.lock:
            ours.answered += 1

    def _complete(self, body: dict[str, Any]) -> None:
        ours, prompt = self.server_of, body["prompt"]
        ours.closing.wait(ours.delay_s)
        choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": "length", "token_ids": [END_OF_TURN]}
        if "prompt_logprobs" in body:
            said = [
                {str(token): {"logprob": value}} for token, value in zip(prompt[1:], log_probs_of(prompt), strict=True)
            ]
            choice["prompt_logprobs"] = [None, *said]
        answer = {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 0,
            "model": ours.models[0],
            "choices": [choice],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": 1, "total_tokens": len(prompt) + 1},
        }
        if ours.capture is not None:
            with ours.lock:
                ours.captures[tuple(prompt)] += not is_canary(body)
                attempt = ours.captures[tuple(prompt)]
            captured = ours.capture(prompt, attempt, body)
            if isinstance(captured, bytes):
                self.send_body(200, captured)
                return
            answer["kv_transfer_params"] = captured
        self.send_json(answer)
        with ours.lock:
            ours.answered += 1

    def send_json(self, content: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_body(status, json.dumps(content).encode(), headers=headers)

    def send_error_json(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        error = {"message": message, "type": "error", "param": None, "code": status}
        self.send_json({"error": error}, status=status, headers=headers)

    def send_body(
        self, status: int, body: bytes, *, kind: str = "application/json", headers: dict[str, str] | None = None
    ) -> None:
        self.send_head(status, len(body), kind=kind, headers=headers)
        self.wfile.write(body)

    def send_head(
        self, status: int, length: int, *, kind: str = "application/json", headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()

    def drop(self, *, reset: bool) -> None:
        """Close the connection under the client: with a TCP reset, or as if the process had ended."""
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        self.close_connection = True


def _handler_of(server: FaultServer) -> type[_Handler]:
    return type("Handler", (_Handler,), {"server_of": server})


def _status(code: int, message: str, headers: dict[str, str] | None = None) -> Callable[[_Handler, dict], None]:
    return lambda handler, _answer: handler.send_error_json(code, message, headers)


def _changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[_Handler, dict], None]:
    """The good answer after `change` was applied to it."""

    def send(handler: _Handler, answer: dict[str, Any]) -> None:
        change(answer)
        handler.send_json(answer)

    return send


def _hang(handler: _Handler, _answer: dict[str, Any]) -> None:
    handler.server_of.closing.wait()


def _slow_answer(handler: _Handler, answer: dict[str, Any]) -> None:
    """A good answer that comes after `hold_until` others."""
    ours = handler.server_of
    while ours.answered < ours.hold_until and not ours.closing.wait(0.01):
        pass
    handler.send_json(answer)


def _slow_body(handler: _Handler, answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode()
    handler.send_head(200, len(body))
    third = len(body) // 3
    for start in range(0, len(body), third):
        handler.wfile.write(body[start : start + third])
        handler.wfile.flush()
        time.sleep(0.15)


def _dies_in_the_middle(handler: _Handler, answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode()
    handler.send_head(200, len(body))
    handler.wfile.write(body[: len(body) // 2])
    handler.wfile.flush()
    handler.drop(reset=False)


def _keep_alive_closed(handler: _Handler, answer: dict[str, Any]) -> None:
    """A good answer, after which the idle connection is closed without the header that announces it."""
    handler.send_json(answer)
    handler.close_connection = True


def _length(answer: dict[str, Any]) -> None:
    """Cut off while thinking, as vLLM reports it."""
    choice = answer["choices"][0]
    choice["finish_reason"] = "length"
    choice["message"]["content"] = None
    choice["token_ids"] = choice["token_ids"][:10]


def _abort(answer: dict[str, Any]) -> None:
    """What a request in flight gets when its engine is told to stop."""
    choice = answer["choices"][0]
    choice["finish_reason"] = "abort"
    choice["message"]["content"] = None
    choice["token_ids"] = choice["token_ids"][:10]


def _empty(answer: dict[str, Any]) -> None:
    choice = answer["choices"][0]
    choice["message"] = {"role": "assistant", "content": "", "reasoning": None}
    choice["token_ids"] = [END_OF_TURN]


FAULTS: dict[str, Callable[[_Handler, dict[str, Any]], None]] = {
    "http 400": _status(400, _CONTEXT_ERROR),
    "http 404": _status(404, "The model does not exist."),
    "http 408": _status(408, "Request timed out."),
    "http 409": _status(409, "Conflict."),
    "http 429": _status(429, "Too many requests.", {"Retry-After": "1"}),
    "http 500": _status(500, "Internal server error."),
    "http 503": _status(503, "Overloaded."),
    "connection reset": lambda handler, _answer: handler.drop(reset=True),
    "closed without an answer": lambda handler, _answer: handler.drop(reset=False),
    "hang": _hang,
    "slow body": _slow_body,
    "slow answer": _slow_answer,
    "dies in the middle": _dies_in_the_middle,
    "keep-alive closed": _keep_alive_closed,
    "not JSON": lambda handler, _answer: handler.send_body(200, b"<html>502 Bad Gateway</html>"),
    "HTML page": lambda handler, _answer: handler.send_body(200, b"<html>proxy</html>", kind="text/html"),
    "null message": _changed(lambda answer: answer["choices"][0].update(message=None)),
    "no choices": _changed(lambda answer: answer.update(choices=[])),
    "null choices": _changed(lambda answer: answer.update(choices=None)),
    "empty answer": _changed(_empty),
    "cut off": _changed(_length),
    "aborted": _changed(_abort),
    "no thinking": _changed(lambda answer: answer["choices"][0]["message"].update(reasoning=None)),
}


# States, as a small verifier's would be -------------------------------------------------------------------------------

LAYERS = [2, 4, 5, 8]  # of a verifier with 8 layers
HIDDEN_SIZE, VOCABULARY = 16, 512
# How far each layer's state is on its way from the token's embedding to what the head reads.
_PROGRESS = (0.05, 0.3, 0.5, 1.0)


def is_canary(body: dict[str, Any]) -> bool:
    """Whether a request is one of the parity gate's."""
    return str(body.get("request_id", "")).startswith("canary")


@functools.cache
def heads() -> dict[str, torch.Tensor]:
    """The stand-in verifier's embedding, head and final norm; the head is sharp: a state says its next token."""
    import torch

    generator = torch.Generator().manual_seed(1)
    directions = torch.randn(VOCABULARY, HIDDEN_SIZE, generator=generator)
    return {
        "language_model.model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN_SIZE, generator=generator),
        "language_model.lm_head.weight": 6 * directions / directions.norm(dim=-1, keepdim=True),
        "language_model.model.norm.weight": torch.linspace(0.2, 2.5, HIDDEN_SIZE),
    }


def states_of(token_ids: list[int]) -> torch.Tensor:
    """States [T, L, D] in bfloat16 that depend on the token ids alone, as a verifier's do.

    The last one makes the head say the next token (the end of the turn after the last one).
    """
    import torch

    embedding, head, norm = heads().values()
    ids = torch.tensor(token_ids)
    said = head[torch.tensor([*token_ids[1:], END_OF_TURN])] / norm
    layers = [(1 - share) * embedding[ids] + share * said for share in _PROGRESS]
    states = torch.stack(layers, 1)
    # Of each token and all before it.
    noise = torch.randn(4096, *states.shape[1:], generator=torch.Generator().manual_seed(2))
    context = (ids * torch.arange(1, len(ids) + 1)).cumsum(0) % len(noise)
    return (states + 0.02 * noise[context]).to(torch.bfloat16)


def log_probs_of(token_ids: list[int]) -> list[float]:
    """The stand-in verifier's log-prob of each token after the first."""
    import torch

    _, head, norm = heads().values()
    last = states_of(token_ids)[:-1, -1].float()
    normed = torch.nn.functional.rms_norm(last, (HIDDEN_SIZE,), norm, 1e-6)
    losses = torch.nn.functional.cross_entropy(normed @ head.T, torch.tensor(token_ids[1:]), reduction="none")
    return (-losses).tolist()


def write_verifier(folder: Path) -> Path:
    """A stand-in with the three tensors that are read, and nothing else."""
    from safetensors.torch import save_file

    write_config(folder, hidden_size=HIDDEN_SIZE, vocab_size=VOCABULARY)
    save_file(heads(), folder / "model.safetensors")
    return folder


def write_shard(path: Path, states: torch.Tensor, token_ids: list[int], header: dict[str, str]) -> None:
    """A file as the connector writes it: complete or not at all."""
    import torch
    from hs_connectors.fp8_utils import SCALES_KEY, quantize_tensor_to_fp8
    from safetensors.torch import save_file

    if header.get("dtype") == "float32":
        states = states.float()
    tensors = {"hidden_states": states.contiguous(), "token_ids": torch.tensor(token_ids)}
    if header.get("dtype") == "float8_e4m3":
        quantized, scales = quantize_tensor_to_fp8(states)
        tensors |= {"hidden_states": quantized, SCALES_KEY: scales}
    beside = path.with_name(f".{path.name}")
    save_file(tensors, beside, metadata=header)
    os.replace(beside, path)


class Engine:
    """Stands where `vllm.serve` starts a vLLM server with our connector: writes files as the connector does.

    Attributes:
        faults: token ids -> (what is written in place of a sound file, how many times).
        chat_faults: the same for answers that are generated, every time.
        on_canaries: applied to the states of the parity gate's requests.
        starts: servers started so far.
    """

    def __init__(self, server: FaultServer):
        self.server = server
        self.faults: dict[tuple[int, ...], tuple[str, float]] = {}
        self.chat_faults: dict[tuple[int, ...], str] = {}
        self.on_canaries: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor] = lambda states, _request: states
        self.starts = 0
        self.extra_args: list[str] = []
        self._staging = Path()
        self._header: dict[str, str] = {}
        self._locks: list[TextIO] = []
        self._files = itertools.count()
        server.capture = self._capture

    @contextlib.contextmanager
    def serve(
        self, _config: Config, *, log: Path, extra_args: list[str], what: str = "verifier"
    ) -> Iterator[vllm.Server]:
        transfer = json.loads(extra_args[extra_args.index("--kv-transfer-config") + 1])
        settings = transfer["kv_connector_extra_config"]
        self.write_to(Path(settings["shared_storage_path"]), settings["storage_dtype"], settings["verifier"])
        speculative = json.loads(extra_args[extra_args.index("--speculative-config") + 1])
        asked = speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
        assert asked == LAYERS
        assert "--no-enable-prefix-caching" in extra_args
        self.extra_args = extra_args
        self.starts += 1
        yield vllm.Server(self.server.url, self.server.models[0])

    def write_to(self, staging: Path, storage_dtype: str, verifier: str) -> None:
        """What the connector is told when its server starts."""
        self._staging = staging
        self._header = {
            "layer_ids": json.dumps(LAYERS),
            "dtype": storage_dtype,
            "verifier": verifier,
            "vllm": SERVER_VERSION,
        }

    def _capture(self, token_ids: list[int], attempt: int, body: dict[str, Any]) -> dict[str, Any] | bytes | None:
        canary = is_canary(body)
        fault, times = ("none", 0) if canary else self.faults.get(tuple(token_ids), ("none", 0))
        fault = fault if attempt <= times else "none"
        if "messages" in body:
            fault = self.chat_faults.get(tuple(token_ids), "none")
        if fault == "not JSON":
            return b"<html>502 Bad Gateway</html>"
        if fault == "nothing named":
            return None
        folder = self._staging.parent.parent if fault == "outside" else self._staging
        path = folder / f"cmpl-{next(self._files)}.safetensors"
        lock = path.with_name(path.name + ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        states = states_of(token_ids)
        if canary:
            states = self.on_canaries(states, body)
        threading.Thread(target=self._write, args=(fault, path, states, token_ids, lock)).start()
        return {"hidden_states_path": str(path)}

    def _write(self, fault: str, path: Path, states: torch.Tensor, token_ids: list[int], lock: TextIO) -> None:
        time.sleep(0.01)  # the answer is out before the file is
        header = self._header
        if fault == "NaN":
            states[1, LAYERS.index(5), 3] = float("nan")
        elif fault == "fewer rows":
            states = states[:-1]
        elif fault == "shifted":
            states[len(states) // 2 :] = states[len(states) // 2 :].roll(1, 0)
        elif fault == "other layers":
            header = header | {"layer_ids": "[1, 3, 4, 8]"}
        elif fault == "another verifier":
            header = header | {"verifier": "0123"}
        if fault == "failed write":
            path.with_name(path.name + ".error").write_text("RuntimeError: the writer fell over")
        elif fault == "disk full":
            path.with_name(path.name + ".error").write_text("OSError: [Errno 28] No space left on device")
        elif fault != "no file":
            write_shard(path, states, token_ids, header)
        if fault == "cut short":
            path.write_bytes(path.read_bytes()[:-100])
        if fault == "never finished":
            self._locks.append(lock)
        else:
            lock.close()

    def close(self) -> None:
        for lock in self._locks:
            lock.close()


def prompt_id(question: str) -> str:
    return content_id([{"role": "user", "content": question}])


def finish_stage(run: Run, spec: StageSpec, work: Callable[[Stage], Result]) -> Result:
    """What a numbered script does around its one call into the library, in this process."""
    stage = Stage(run, spec)
    with stage.locked():
        assert stage.begin(force=False), f"{spec.folder} is done already"
        result = work(stage)
        stage.finish(result)
    return result


def write_prompts(stage: Stage, splits: dict[str, str]) -> Result:
    """The work of stage 01 with the split of each question given: {question: train | val | eval}."""
    rows = [
        {
            "id": prompt_id(question),
            "messages": [{"role": "user", "content": question}],
            "source": "test",
            "split": split,
        }
        for question, split in splits.items()
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (stage.folder / PROMPTS_FILE).write_text(text, encoding="utf-8")
    return Result([PROMPTS_FILE], {"prompts": len(rows)})


def write_config(folder: Path, **text: Any) -> Path:
    """A stand-in verifier of which only config.json matters; `text` overrides fields of its text model."""
    sizes = {
        "model_type": "kimi_k2",
        "hidden_size": 16,
        "num_hidden_layers": 8,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "kimi_k25", "text_config": sizes | text}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Every line of a JSONL file; a torn one is an error here."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_hidden(
    stage: Stage, samples: list[Sample], state_of: Callable[[Sample], torch.Tensor], layer_ids: list[int]
) -> Result:
    """The work of stage 02 on given states [tokens, layers, hidden], with files as extraction leaves them."""
    import torch
    from safetensors.torch import save_file

    from eagle3_train.extraction import DATASET, INDEX, SHARDS, publish

    shards = stage.folder / SHARDS
    shards.mkdir(exist_ok=True)
    header = {"layer_ids": json.dumps(layer_ids), "dtype": "bfloat16", "verifier": "", "vllm": "0.32.0"}
    rows = []
    for sample in samples:
        path = shards / f"{sample.id}.safetensors"
        states = state_of(sample).to(torch.bfloat16).contiguous()
        save_file({"hidden_states": states, "token_ids": torch.tensor(sample.token_ids)}, path, metadata=header)
        size = path.stat().st_size
        rows.append({"id": sample.id, "ids": sample.digest, "tokens": len(sample.token_ids), "bytes": size})
    (stage.folder / INDEX).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    publish(stage.folder, sorted(samples, key=lambda sample: sample.split != "train"))
    tokens = sum(len(sample.token_ids) for sample in samples)
    return Result([INDEX, DATASET], {"samples": len(samples), "tokens": tokens}, counted=[SHARDS])


def no_work(_stage: Stage) -> Result:
    """The work of a stage whose manifest alone is needed."""
    return Result([], {})
