"""Stages 01b, 02 and 06 on one GPU, with a verifier that is large enough to measure: ratios, each within one run.

    python -m benchmarks.gpu.larger OUT [PART ...] [--limit 560]     OUT/larger.json, OUT/logs.tar.gz

Parts, in the order of their measuring; left out, all of them:
  extraction  stage 02, at once and in waves, beside a server that only prefills; the disk's own rate
  float8      `extraction` with states stored as float8_e4m3
  two_pass    answers, then their states
  one_pass    answers whose states are saved meanwhile, beside answers alone on the plain server
  causes      what makes one pass slower than answers alone: one difference after the other
  drafting    tokens a second without a draft, and with one of an imposed acceptance length: the length that breaks even
  client      stage 01b beside vLLM's own `bench serve`

The verifier has random weights and Kimi-K2.5's shape (larger_model.py). Servers start side by side and are idle while
another is measured. A figure is in OUT/larger.json as soon as it is measured; a part that fails, or has no time left,
is named there with its error while the others go on. Exit code 1 when one did. `--tiny` is a dry run on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import ROOT, commit, spread, traced_run
from benchmarks.extraction_vs_prefill import prefill, samples_of, stage_02, synthetic_run
from benchmarks.gpu import larger_model
from eagle3_train import one_pass, verifier
from eagle3_train import server as vllm
from eagle3_train.asking import Answerer, post, session
from eagle3_train.capture import Capturer, fresh_staging, token_bytes
from eagle3_train.config import FLOAT8, Config, read_preset
from eagle3_train.evaluation import counters
from eagle3_train.extraction import SHARDS
from eagle3_train.generation import TRACES_FILE, _Asking, sampling_of
from eagle3_train.load_test import measure
from eagle3_train.run import ERRORS, HIDDEN, JsonlLog, Run, Stage, hardware, read_jsonl, versions, write_text

PRESET = ROOT / "benchmarks" / "gpu" / "tiny-gpu.yaml"
QUESTIONS = ROOT / "data" / "tiny_prompts.jsonl"
NAME = "larger.json"
DRAFT_TOKENS = 3
WAVES = 4
# What is left of the limit for stopping the servers and packing their logs.
ENDING_S = 20.0
SETTLE_S = 0.5

Interval = tuple[float, float]


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        shape: of the verifier.
        tokenizer: the tiny verifier whose tokenizer it takes.
        samples, shortest, longest: of stage 02's random token ids [tokens].
        questions, answer: of the stages that generate; every answer has this length [tokens].
        in_flight: requests of the stages.
        decoding: requests in flight at which drafting is measured.
        stream: output of each of its requests [tokens].
        start_s: patience with servers that start together.
        server: `server` of the preset, where it differs.
    """

    shape: larger_model.Shape
    tokenizer: str
    samples: int
    shortest: int
    longest: int
    questions: int
    answer: int
    in_flight: int
    decoding: tuple[int, ...]
    stream: int
    start_s: float
    server: dict[str, Any]


FULL = Sizes(
    shape=larger_model.Shape(),
    tokenizer="tiny-kimi-k2.5-mla",
    samples=384,
    shortest=512,
    longest=4096,
    questions=256,
    answer=384,
    in_flight=64,
    decoding=(1, 8, 16, 64),
    stream=256,
    start_s=220,
    server={
        "max_model_len": 4352,
        "gpu_memory_utilization": 0.12,  # only asked whether it is free; six servers of at most 20 GB each
        "args": ["--max-num-seqs=64", f"--kv-cache-memory-bytes={8 << 30}"],
    },
)
DRY = Sizes(
    shape=larger_model.TINY,
    tokenizer="tiny-kimi-k2.5",
    samples=24,
    shortest=32,
    longest=128,
    questions=16,
    answer=24,
    in_flight=8,
    decoding=(1, 4),
    stream=16,
    start_s=500,
    server={
        "max_model_len": 256,
        "gpu_memory_utilization": 0.1,
        "cpu_kv_cache_gib": 1,
        "args": [],
        "env": {"VLLM_MLA_DISABLE": "1"},
    },
)


class OutOfTime(KeyboardInterrupt):
    """A limit was reached. A KeyboardInterrupt, for that alone passes through everything, an event loop's callbacks
    too."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the block once it has taken so long. Main thread alone."""

    def ring(_signal: int, _frame: Any) -> None:
        raise OutOfTime(f"stopped after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# What is written down -------------------------------------------------------------------------------------------------


class Report:
    """OUT/larger.json, whole after every figure; used from several threads."""

    def __init__(self, path: Path, header: dict[str, Any]):
        self._path, self._started, self._lock = path, time.monotonic(), threading.Lock()
        self.figures: dict[str, dict[str, Any]] = {}
        self.errors: dict[str, str] = {}
        self._content = header | {"figures": self.figures, "errors": self.errors, "seconds": {}, "starts_s": {}}
        self._write()

    def say(self, what: str) -> None:
        """A line on the screen, with the seconds since the start."""
        print(f"{time.monotonic() - self._started:6.1f} s  {what}", flush=True)

    def add(self, part: str, **figures: Any) -> None:
        """Figures of a part, beside those it has."""
        with self._lock:
            self.figures.setdefault(part, {}).update(figures)
            self._write()
        self.say(f"{part}: {json.dumps(figures)}")

    def note(self, section: str, name: str, value: Any) -> None:
        """One entry of `seconds`, `starts_s` or `errors`."""
        with self._lock:
            self._content[section][name] = value
            self._write()
        self.say(f"{section} {name}: {value}")

    def _write(self) -> None:
        write_text(self._path, json.dumps(self._content, indent=1) + "\n")


# Servers --------------------------------------------------------------------------------------------------------------


@dataclass
class _Held:
    thread: threading.Thread
    leave: threading.Event
    ready: Future[vllm.Server]


class Fleet:
    """Servers by name, started side by side. A thread holds each of them: a server dies with the thread that made it.

    Args:
        commands: name -> configuration and arguments of its own.
        folder: of the logs, one a server.
    """

    def __init__(self, commands: dict[str, tuple[Config, list[str]]], folder: Path, report: Report):
        self._commands, self._folder, self._report = commands, folder, report
        self._held: dict[str, _Held] = {}

    def __getitem__(self, name: str) -> vllm.Server:
        held = self._held[name]
        if not held.ready.done():
            raise RuntimeError(f"server {name} did not start in time")
        server = held.ready.result()
        server.check_alive()
        return server

    def start(self, names: Sequence[str], patience_s: float) -> None:
        """Start those that are not there; returns when each answers or has failed, which `fleet[name]` raises."""
        new = [name for name in names if name not in self._held]
        for name in new:
            leave, ready = threading.Event(), Future[vllm.Server]()
            thread = threading.Thread(target=self._hold, args=(name, leave, ready, patience_s), daemon=True)
            self._held[name] = _Held(thread, leave, ready)
            thread.start()
        deadline = time.monotonic() + patience_s + ENDING_S / 2
        for name in new:
            with contextlib.suppress(TimeoutError):
                self._held[name].ready.exception(max(0.1, deadline - time.monotonic()))

    def stop(self, names: Sequence[str]) -> None:
        """Stop them side by side."""
        held = [self._held.pop(name) for name in names if name in self._held]
        for one in held:
            one.leave.set()
        for one in held:
            one.thread.join(ENDING_S)

    def stop_all(self) -> None:
        """Stop every server, those that have not started yet as well."""
        for name, held in self._held.items():
            if not held.ready.done():
                self._report.say(f"{name} is stopped while it starts")
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if any("api_server" in word for word in child.cmdline()):
                    child.terminate()
        self.stop(list(self._held))

    def _hold(self, name: str, leave: threading.Event, ready: Future[vllm.Server], patience_s: float) -> None:
        config, extra = self._commands[name]
        config = changed(config, "server", ready_timeout_s=patience_s)
        started = time.monotonic()
        try:
            with vllm.serve(config, log=self._folder / f"{name}.log", extra_args=extra, what=name) as server:
                self._report.note("starts_s", name, round(time.monotonic() - started, 1))
                ready.set_result(server)
                leave.wait()
        except BaseException as error:
            self._report.note("errors", f"server {name}", _words(error))
            if not ready.done():
                ready.set_exception(RuntimeError(f"server {name} did not start: {_words(error)}"))


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:1500]}"


def changed(config: Config, section: str, **fields: Any) -> Config:
    """The configuration with some fields of a section set otherwise."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=fields)})


# The machine of all parts ---------------------------------------------------------------------------------------------


class Bench:
    """What the parts share.

    Attributes:
        sizes: how much is measured.
        work: a folder on the disk that is measured; everything in it is deleted in the end.
        config: of a run with the larger verifier, states in bfloat16.
        float8: the same, with states in float8_e4m3.
        staging: of each server that saves states.
        times: of each server that saves states, the file of its TimedConnector.
        lengths: imposed acceptance lengths.
    """

    def __init__(self, sizes: Sizes, work: Path, report: Report, repeats: int, lengths: list[float]):
        self.sizes, self.work, self.report, self.lengths = sizes, work, report, lengths
        self._most_repeats = repeats
        self._numbers = itertools.count()
        sections = read_preset(PRESET)
        sections["verifier"]["path"] = str(work / "verifier")
        sections["server"] |= sizes.server
        sections["server"]["env"] = sections["server"]["env"] | {"PYTHONPATH": str(ROOT)}
        sections["server"]["stop_timeout_s"] = 8
        sections["generation"] |= {
            "temperatures": [1.0],
            "max_tokens": sizes.answer,
            "concurrency": sizes.in_flight,
            "request_timeout_s": 100,
        }
        sections["extraction"] |= {"concurrency": sizes.in_flight, "request_timeout_s": 60}
        self.config = Config(**sections)
        self.float8 = changed(self.config, "extraction", storage_dtype=FLOAT8)
        (work / "runs").mkdir()
        self.staging, self.times = {}, {}
        for name in ("capture", "one-pass", "float8"):
            (work / "states" / name).mkdir(parents=True)
            self.staging[name] = fresh_staging(work / "states" / name, work / "runs")
            self.times[name] = work / "states" / name / "times.jsonl"
        self.fleet: Fleet

    def make_models(self) -> dict[str, Any]:
        """The verifier and its draft; then the servers can be named."""
        source = ROOT / "models" / self.sizes.tokenizer
        made = {"verifier": larger_model.build_verifier(self.work / "verifier", source, self.sizes.shape)}
        made["draft"] = larger_model.build_draft(self.work / "draft", self.work / "verifier", self.sizes.shape)
        self.fleet = Fleet(self._servers(), self.work / "logs", self.report)
        return made

    def _servers(self) -> dict[str, tuple[Config, list[str]]]:
        plain = ["--no-enable-prefix-caching"]
        servers = {
            "plain": (self.config, plain),
            "capture": (self.config, vllm.extraction_args(self.config, self.staging["capture"])),
            "synchronous": (self.config, [*plain, "--no-async-scheduling"]),
            "one-pass": (self.config, one_pass.server_args(self.config, self.staging["one-pass"])),
            "float8": (self.float8, vllm.extraction_args(self.float8, self.staging["float8"])),
        }
        for name, times in self.times.items():
            servers[name] = (servers[name][0], _with_clock(servers[name][1], times))
        for length in self.lengths:
            speculative = {
                "method": "eagle3",
                "model": str(self.work / "draft"),
                "num_speculative_tokens": DRAFT_TOKENS,
            }
            if vllm.has_gpu():  # vLLM's CPU sampling cannot impose it; what counts is the length that was reached
                speculative |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
            servers[draft_server(length)] = (self.config, [*plain, "--speculative-config", json.dumps(speculative)])
        # vLLM's compile cache is not made for several servers that start at once.
        return {name: (self._with_cache(config, name), arguments) for name, (config, arguments) in servers.items()}

    def _with_cache(self, config: Config, name: str) -> Config:
        return changed(config, "server", env=config.server.env | {"VLLM_CACHE_ROOT": str(self.work / "cache" / name)})

    def share_cache(self, source: str, name: str) -> None:
        """Let a server start from what another one of the same graph has compiled."""
        if (self.work / "cache" / source).exists() and not (self.work / "cache" / name).exists():
            shutil.copytree(self.work / "cache" / source, self.work / "cache" / name)

    def repeats(self, seconds: float) -> Iterator[int]:
        """Numbers of repeats, as long as another one of the same duration ends within so many seconds."""
        started = time.monotonic()
        for number in range(self._most_repeats):
            elapsed = time.monotonic() - started
            if number and elapsed * (number + 1) / number > seconds:
                return
            yield number

    def new_run(self) -> Path:
        """A folder for another run."""
        return self.work / "runs" / str(next(self._numbers))


def draft_server(length: float) -> str:
    """The name of the server whose draft has this imposed acceptance length."""
    return f"draft-{length:g}"


def _with_clock(arguments: list[str], times: Path) -> list[str]:
    place = arguments.index("--kv-transfer-config") + 1
    transfer = json.loads(arguments[place])
    transfer |= {"kv_connector": "TimedConnector", "kv_connector_module_path": "benchmarks.gpu.timed_connector"}
    transfer["kv_connector_extra_config"]["times"] = str(times)
    return [*arguments[:place], json.dumps(transfer), *arguments[place + 1 :]]


def _ratio(rates: list[float], peers: list[float]) -> dict[str, Any]:
    """Each repeat's rate by its peer's of the same repeat."""
    return spread([rate / peer for rate, peer in zip(rates, peers, strict=True)], 3)


# Stage 02 -------------------------------------------------------------------------------------------------------------


def extraction(bench: Bench) -> None:
    """Stage 02 in bfloat16, at once and in waves, and the disk alone."""
    run = _against_prefill(bench, "extraction", bench.config, "capture")
    samples, _, _ = samples_of(run)
    rates = [_disk_rate(bench.work, [sample.tokens * token_bytes(run.config) for sample in samples]) for _ in range(2)]
    bench.report.add("extraction", disk_alone_gb_per_s=spread(rates, 2))


def float8(bench: Bench) -> None:
    """Stage 02 in float8_e4m3, at once and in waves."""
    _against_prefill(bench, "float8", bench.float8, "float8")


def _against_prefill(bench: Bench, part: str, config: Config, name: str) -> Run:
    """Prefill alone, stage 02 at once and stage 02 in waves, in turn; all in tokens a second."""
    sizes = bench.sizes
    # The head's large weights for what is never said would make float8's rounding look like wrong states.
    said = larger_model.text_ids(bench.work / "verifier")
    run = synthetic_run(bench.new_run(), config, sizes.samples, sizes.shortest, sizes.longest, said)
    samples, _, _ = samples_of(run)
    tokens = sum(sample.tokens for sample in samples)
    plain, capture, staging = bench.fleet["plain"], bench.fleet[name], bench.staging[name]
    bare: list[float] = []
    ours: list[float] = []
    waves: list[float] = []
    shares: list[dict[str, float]] = []
    # A server's first requests are slower.
    asyncio.run(prefill(run, plain, bench.work))
    stage_02(run, capture, staging)
    for _ in bench.repeats(110):
        bare.append(asyncio.run(prefill(run, plain, bench.work)))
        with _checks() as checks:
            ours.append(stage_02(run, capture, staging))
        ended = time.monotonic()
        window = (ended - tokens / ours[-1], ended)
        time.sleep(SETTLE_S)
        shares.append(shares_of(list(read_jsonl(bench.times[name])), checks, window, token_bytes(config)))
        _delete_states(run)
        waves.append(stage_02(run, capture, staging, WAVES))
        _delete_states(run)
        bench.report.add(
            part,
            samples=len(samples),
            tokens=tokens,
            bytes_per_token=token_bytes(config),
            prefill_tokens_per_s=spread(bare),
            stage_02_tokens_per_s=spread(ours),
            to_prefill=_ratio(ours, bare),
            waves=WAVES,
            waves_tokens_per_s=spread(waves),
            waves_to_prefill=_ratio(waves, bare),
            waves_to_at_once=_ratio(waves, ours),
            shares=shares,
        )
    return run


def shares_of(
    records: list[dict[str, float]], checks: list[Interval], window: Interval, bytes_per_token: int
) -> dict[str, float]:
    """What copying, writing and checking took of a measured time, and the rates of writing.

    Args:
        records: of TimedConnector.
        checks: when the client checked and moved a file.
        window: the measured time [s of CLOCK_MONOTONIC].
        bytes_per_token: of a file.
    """
    seconds = window[1] - window[0]
    within_it = [record for record in records if window[0] < record["ended"] <= window[1] + SETTLE_S]
    submitted = [record["submit_s"] for record in within_it if "submit_s" in record]
    written = [record for record in within_it if "write_s" in record]
    writing = [(record["ended"] - record["write_s"], record["ended"]) for record in written]
    nbytes = sum(record["tokens"] for record in written) * bytes_per_token
    busy = covered(writing, window)
    return {
        "seconds": round(seconds, 2),
        "engine_thread_share": round(sum(submitted) / seconds, 4),
        "mean_copies_waited_for": round(sum(record["wait_s"] for record in written) / seconds, 3),
        "writing_share": round(busy / seconds, 3),
        "mean_writers": round(sum(record["write_s"] for record in written) / seconds, 2),
        "checking_share": round(covered(checks, window) / seconds, 3),
        "mean_checkers": round(sum(end - start for start, end in checks) / seconds, 2),
        "written_gb_per_s": round(nbytes / seconds / 1e9, 3),
        "written_gb_per_s_while_writing": round(nbytes / busy / 1e9, 3) if busy else 0.0,
    }


def covered(intervals: list[Interval], window: Interval) -> float:
    """Seconds of the window that lie in at least one interval."""
    total, reached = 0.0, window[0]
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, window[1])  # noqa: PLW2901
        if end > start:
            total += end - start
            reached = end
    return total


@contextlib.contextmanager
def _checks() -> Iterator[list[Interval]]:
    """When stage 02's client checks and moves a file, in any of its threads."""
    original, times = Capturer._check_and_move, []

    def timed(self: Capturer, *arguments: Any) -> Any:
        started = time.monotonic()
        try:
            return original(self, *arguments)
        finally:
            times.append((started, time.monotonic()))

    Capturer._check_and_move = timed  # type: ignore[method-assign, assignment]
    try:
        yield times
    finally:
        Capturer._check_and_move = original  # type: ignore[method-assign]


def _delete_states(run: Run) -> None:
    shutil.rmtree(run.folder(HIDDEN.folder) / SHARDS, ignore_errors=True)


def _disk_rate(folder: Path, sizes: list[int]) -> float:
    """GB/s of files of these sizes, written and flushed by as many threads as the connector has."""
    block = memoryview(os.urandom(max(sizes)))
    target = folder / "disk"
    target.mkdir()

    def write(number: int) -> None:
        with (target / str(number)).open("wb") as file:
            file.write(block[: sizes[number]])
            os.fsync(file.fileno())

    started = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(len(sizes))))
    seconds = time.monotonic() - started
    shutil.rmtree(target)
    return sum(sizes) / seconds / 1e9


# Stage 01b ------------------------------------------------------------------------------------------------------------


class _OnServer(_Asking):
    """Stage 01b's asking, on a server that is there already."""

    def __init__(
        self, stage: Stage, prompts: list[dict[str, Any]], server: vllm.Server, staging: Path, **logs: JsonlLog
    ):
        super().__init__(stage, prompts, {}, logs["traces"], logs["errors"], thinking_seen=True)
        self._server, self._staging = server, staging
        self._longest_bytes = stage.config.server.max_model_len * token_bytes(stage.config)

    @contextlib.contextmanager
    def _servers(self) -> Iterator[list[vllm.Server]]:
        yield [self._server]


@dataclass(frozen=True)
class Answers:
    """What one go at all questions took: seconds from the first to the last, the gate left out."""

    run: Run
    seconds: float
    tokens: int

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return self.tokens / self.seconds


def _answer(bench: Bench, config: Config, name: str) -> Answers:
    """Stage 01b's answers to all questions, by the server of this name."""
    server, staging = bench.fleet[name], bench.staging.get(name, bench.work)
    made: dict[str, Any] = {}

    def traces(stage: Stage) -> None:
        with JsonlLog(stage.folder / TRACES_FILE) as kept, JsonlLog(stage.folder / ERRORS) as errors:
            asking = _OnServer(stage, prompts, server, staging, traces=kept, errors=errors)
            made.update(seconds=asking.run(done=0), tokens=asking.tokens)
        if asking.set_aside:
            raise RuntimeError(f"answers set aside: {(stage.folder / ERRORS).read_text()[:1000]}")

    prompts = questions(bench.sizes.questions)
    return Answers(traced_run(bench.new_run(), config, prompts, traces), **made)


def questions(count: int) -> list[dict[str, Any]]:
    """Rows of prompts.jsonl: the tiny verifier's questions over and over, each with an id of its own."""
    texts = [row["conversations"][0]["value"] for row in read_jsonl(QUESTIONS)]
    rows = []
    for number in range(count):
        text = texts[number % len(texts)]
        sample_id = hashlib.sha256(f"{number} {text}".encode()).hexdigest()[:16]
        split = "train" if number % 20 else "val"
        rows.append({"id": sample_id, "messages": [{"role": "user", "content": text}], "split": split})
    return rows


def two_pass(bench: Bench) -> None:
    """Answers on the plain server, then their states on the one that captures."""
    rates, seconds, states = [], [], []
    for _ in bench.repeats(40):
        answers = _answer(bench, bench.config, "plain")
        tokens = sum(sample.tokens for sample in samples_of(answers.run)[0])
        rate = stage_02(answers.run, bench.fleet["capture"], bench.staging["capture"])
        shutil.rmtree(answers.run.path)
        rates.append(answers.rate)
        seconds.append(answers.seconds)
        states.append(tokens / rate)
        bench.report.add(
            "two_pass",
            questions=bench.sizes.questions,
            answer_tokens=bench.sizes.answer,
            answering_s=spread(seconds, 2),
            answering_tokens_per_s=spread(rates),
            extraction_s=spread(states, 2),
            share_of_extraction=spread([b / (a + b) for a, b in zip(seconds, states, strict=True)], 3),
        )


def one_pass_part(bench: Bench) -> None:
    """Answers whose states are saved, beside answers alone: on the plain server, and on the same one."""
    saving = changed(bench.config, "generation", capture="one_pass")
    alone, both, unsaved, seconds, kept = [], [], [], [], []
    _warm_up(bench, "plain", "states and log-probs")
    for _ in bench.repeats(120):
        answers = _answer(bench, bench.config, "plain")
        alone.append(answers.rate)
        before = answers.seconds
        saved = _answer(bench, saving, "one-pass")
        both.append(saved.rate)
        kept.append(sum(1 for _ in read_jsonl(saved.run.folder("01b_traces") / one_pass.STATES_INDEX)))
        unsaved.append(_answer(bench, bench.config, "one-pass").rate)
        for path in (bench.work / "runs").iterdir():
            shutil.rmtree(path)
        _empty(bench.staging["one-pass"])
        seconds.append((before, saved.seconds))
        figures = {
            "plain_tokens_per_s": spread(alone),
            "one_pass_tokens_per_s": spread(both),
            "one_pass_to_plain": _ratio(both, alone),
            "same_server_nothing_kept_tokens_per_s": spread(unsaved),
            "states_kept": kept,
        }
        if (extracted := bench.report.figures.get("two_pass", {}).get("extraction_s")) is not None:
            whole = [(plain + extracted["median"]) / one for plain, one in seconds]
            figures["two_pass_to_one_pass_seconds"] = spread(whole, 3)
        bench.report.add("one_pass", **figures)


_STATES, _LOG_PROBS = {"kv_transfer_params": one_pass.ASKED["kv_transfer_params"]}, {"logprobs": True}
# From answers alone to one pass, a difference at a time: server, what a request asks beside its answer, and what of
# every sixteenth.
CAUSES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("plain", {}, {}),
    "no asynchronous scheduling": ("synchronous", {}, {}),
    "log-probs": ("synchronous", _LOG_PROBS, _LOG_PROBS),
    "a server that can save states": ("one-pass", {}, {}),
    "states saved": ("one-pass", _STATES, _STATES),
    "states, log-probs of every sixteenth": ("one-pass", _STATES, _STATES | _LOG_PROBS),
    "states and log-probs": ("one-pass", _STATES | _LOG_PROBS, _STATES | _LOG_PROBS),
}


def causes(bench: Bench) -> None:
    """Output tokens a second with one difference after the other; no file is looked at."""
    rates: dict[str, list[float]] = {}
    _warm_up(bench, "plain", "log-probs", "states and log-probs")
    for _ in bench.repeats(270):
        for cause, way in CAUSES.items():
            rates.setdefault(cause, []).append(asyncio.run(_asked(bench, *way, bench.sizes.questions)))
            _empty(bench.staging["one-pass"])
            bench.report.add(
                "causes",
                tokens_per_s={name: spread(of) for name, of in rates.items()},
                to_plain={name: _ratio(of, rates["plain"][: len(of)]) for name, of in rates.items()},
            )


def _warm_up(bench: Bench, *asked: str) -> None:
    """A server's first requests are slower; they are asked in these of CAUSES' ways."""
    for cause in asked:
        asyncio.run(_asked(bench, *CAUSES[cause], bench.config.generation.concurrency))
    _empty(bench.staging["one-pass"])


async def _asked(bench: Bench, name: str, asked: dict[str, Any], of_sixteenth: dict[str, Any], count: int) -> float:
    settings, queue, said = bench.config.generation, questions(count), 0
    async with Answerer([bench.fleet[name]], settings) as answerer:

        async def worker() -> None:
            nonlocal said
            while queue:
                row = queue.pop()
                further = asked if len(queue) % 16 else of_sixteenth
                sampling = sampling_of(settings, row["id"])
                answer, _, _ = await answerer.ask(row["messages"], sampling, thinking=True, **further)
                said += len(answer["choices"][0]["token_ids"])

        started = time.monotonic()
        await answerer.run([worker() for _ in range(settings.concurrency)])
        return said / (time.monotonic() - started)


def _empty(folder: Path) -> None:
    time.sleep(SETTLE_S)  # the last files are still being written
    for path in folder.iterdir():
        path.unlink(missing_ok=True)


def client(bench: Bench) -> None:
    """Stage 01b's client and vLLM's `bench serve` in turn, greedily, on the plain server."""
    sizes, server = bench.sizes, bench.fleet["plain"]
    greedy = changed(bench.config, "generation", temperatures=[0.0])
    folder = bench.work / "bench"
    folder.mkdir()
    lines = [json.dumps({"prompt": row["messages"][0]["content"]}) + "\n" for row in questions(sizes.questions)]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    spec = {
        "base_url": server.root_url,
        "model": server.model,
        "tokenizer": verifier.location(bench.config.verifier),
        "trust_remote_code": False,
        "prompts": str(folder / "prompts.jsonl"),
        "output_tokens": sizes.answer,
        "concurrency": [sizes.in_flight],
        "requests": sizes.questions,
    }
    ours, theirs, tokens = [], [], []
    for _ in bench.repeats(70):
        figures = measure(spec, folder)[sizes.in_flight]
        theirs.append(figures["output_throughput"])
        answers = _answer(bench, greedy, "plain")
        ours.append(answers.rate)
        tokens.append((answers.tokens, round(figures["output_throughput"] * figures["duration"])))
        bench.report.add(
            "client",
            in_flight=sizes.in_flight,
            stage_01b_tokens_per_s=spread(ours),
            bench_serve_tokens_per_s=spread(theirs),
            to_bench_serve=_ratio(ours, theirs),
            tokens=tokens,
        )


# Drafting -------------------------------------------------------------------------------------------------------------


def drafting(bench: Bench) -> None:
    """Tokens a second alone and with a draft of imposed acceptance lengths, in turn, at each number in flight."""
    servers = {}
    for length in bench.lengths:
        try:
            servers[length] = bench.fleet[draft_server(length)]
        except RuntimeError as error:
            bench.report.add("drafting", **{f"missing_{length:g}": _words(error)})
    if not servers:
        raise RuntimeError("no server with a draft started")
    plain = bench.fleet["plain"]
    measured: dict[int, list[dict[str, Any]]] = {count: [] for count in bench.sizes.decoding}
    for server in (plain, *servers.values()):
        for count in bench.sizes.decoding:
            asyncio.run(_decode(server, count, 8))
    for _ in bench.repeats(75):
        for count, rows in measured.items():
            alone, _ = _decoding_rate(plain, count, bench.sizes.stream)
            drafted = {}
            for length, server in servers.items():
                rate, reached = _decoding_rate(server, count, bench.sizes.stream)
                drafted[length] = {"tokens_per_s": rate, "acceptance_length": reached}
            rows.append({"alone": alone, "drafted": drafted})
        bench.report.add("drafting", draft_tokens=DRAFT_TOKENS, in_flight=break_even(measured))


def break_even(measured: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """Of each number in flight: rates, speed-ups and the acceptance length at which the draft gains nothing.

    A verifier step with a draft takes as long whatever is accepted, so tokens a second grow with the acceptance length
    L: the break-even length is L x (rate alone / rate with the draft), the same for every imposed L but for noise.

    Args:
        measured: in flight -> repeats of `alone` [tokens/s] and `drafted`, imposed length -> tokens_per_s and the
            acceptance_length reached.
    """
    found: dict[str, Any] = {}
    for count, rows in measured.items():
        of = found[str(count)] = {"alone_tokens_per_s": spread([row["alone"] for row in rows])}
        every = []
        for imposed in rows[0]["drafted"]:
            drafted = [(row["alone"], row["drafted"][imposed]) for row in rows]
            needed = [one["acceptance_length"] * alone / one["tokens_per_s"] for alone, one in drafted]
            every += needed
            of[f"imposed_{imposed:g}"] = {
                "acceptance_length": spread([one["acceptance_length"] for _, one in drafted], 3),
                "tokens_per_s": spread([one["tokens_per_s"] for _, one in drafted]),
                "to_alone": spread([one["tokens_per_s"] / alone for alone, one in drafted], 3),
                "break_even_length": spread(needed, 3),
            }
        of["break_even_length"] = spread(every, 3)
    return found


def _decoding_rate(server: vllm.Server, in_flight: int, tokens: int) -> tuple[float, float]:
    """Output tokens a second, and the mean acceptance length by vLLM's own counters (1 without a draft)."""
    before = counters(server)
    rate = asyncio.run(_decode(server, in_flight, tokens))
    time.sleep(SETTLE_S)  # the last answers may reach us a moment before vLLM counts them
    after = counters(server)
    drafts = after["drafts"] - before["drafts"]
    return rate, 1 + (after["accepted"] - before["accepted"]) / drafts if drafts else 1.0


async def _decode(server: vllm.Server, in_flight: int, tokens: int) -> float:
    """Output tokens a second of so many streams, each of two answers of so many tokens to a short prompt."""
    client = session(server, connect_timeout_s=10)

    async def stream(number: int) -> int:
        said = 0
        for turn in range(2):
            prompt = [20 + (7 * number + 131 * turn + 3 * place) % 400 for place in range(32)]
            body = {"model": server.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            status, _, content = await post(client, f"{server.base_url}/completions", body)
            if status != 200:
                raise RuntimeError(f"HTTP {status}: {content[:500]!r}")
            said += json.loads(content)["usage"]["completion_tokens"]
        return said

    try:
        started = time.monotonic()
        said = await asyncio.gather(*(stream(number) for number in range(in_flight)))
        return sum(said) / (time.monotonic() - started)
    finally:
        await client.close()


# The run --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One of the command's parts.

    Attributes:
        work: measures.
        servers: that it cannot do without.
        limit_s: after which it is stopped, whatever it has.
    """

    work: Callable[[Bench], None]
    servers: tuple[str, ...]
    limit_s: float


PARTS = {
    "extraction": Part(extraction, ("plain", "capture"), 130),
    "float8": Part(float8, ("plain", "float8"), 130),
    "two_pass": Part(two_pass, ("plain", "capture"), 70),
    "one_pass": Part(one_pass_part, ("plain", "one-pass"), 150),
    "causes": Part(causes, ("plain", "synchronous", "one-pass"), 300),
    "drafting": Part(drafting, ("plain",), 130),
    "client": Part(client, ("plain",), 120),
}
# Servers of a round start together, once the round before it is measured.
ROUNDS = (("extraction", "float8", "two_pass"), ("one_pass", "causes", "drafting", "client"))


def main() -> None:
    """Everything that was asked for, as far as the time goes."""
    given = _arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    given.scratch.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + given.limit
    header = {
        "name": "larger",
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": commit(),
        "command": " ".join(["python", "-m", "benchmarks.gpu.larger", *sys.argv[1:]]),
        "hardware": hardware(),
        "versions": versions(),
    }
    report = Report(given.out / NAME, header)
    signal.signal(signal.SIGTERM, _end)
    sizes = DRY if given.tiny else FULL
    work = Path(tempfile.mkdtemp(prefix="larger-", dir=given.scratch)).resolve()
    bench = None
    try:
        bench = Bench(sizes, work, report, given.repeats, given.lengths)
        started = time.monotonic()
        report.add("models", **bench.make_models())
        report.note("seconds", "models", round(time.monotonic() - started, 1))
        for chosen in ([part for part in names if part in given.parts] for names in ROUNDS):
            if chosen:
                _round(bench, chosen, deadline)
    except BaseException as error:
        traceback.print_exc()
        report.note("errors", "all", _words(error))
    finally:
        if bench is not None and hasattr(bench, "fleet"):
            bench.fleet.stop_all()
        with tarfile.open(given.out / "logs.tar.gz", "w:gz") as packed:
            if (work / "logs").exists():
                packed.add(work / "logs", "logs")
        shutil.rmtree(work, ignore_errors=True)
    print("\n".join(["", *lines(report.figures), *(f"{name}: {error}" for name, error in report.errors.items())]))
    sys.exit(bool(report.errors))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of larger.json and logs.tar.gz")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--limit", type=float, default=560, help="seconds, after which all is stopped and written")
    parser.add_argument("--repeats", type=int, default=3, help="most repeats of each side")
    parser.add_argument("--lengths", type=float, nargs="+", default=[1.5, 3.0], help="imposed acceptance lengths")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--tiny", action="store_true", help="the verifier of 4 M parameters, for a CPU")
    given = parser.parse_args()
    if unknown := set(given.parts) - PARTS.keys():
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    given.parts = given.parts or list(PARTS)
    return given


def _end(_signal: int, _frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends it twice, and the second must not end the ending
    raise OutOfTime("terminated")


def _round(bench: Bench, chosen: list[str], deadline: float) -> None:
    """Start what these parts need, stop the rest, and measure one part after the other."""
    report = bench.report
    needed = list(dict.fromkeys(name for part in chosen for name in PARTS[part].servers))
    if "drafting" in chosen:
        needed += [draft_server(length) for length in bench.lengths]
    bench.fleet.stop([name for name in bench.staging if name not in needed])
    bench.share_cache("capture", "one-pass")
    started = time.monotonic()
    patience = min(bench.sizes.start_s, deadline - started - ENDING_S)
    if patience > ENDING_S:
        report.say(f"starting {', '.join(needed)}")
        bench.fleet.start(needed, patience)
        report.note("seconds", f"start of {', '.join(chosen)}", round(time.monotonic() - started, 1))
    for part in chosen:
        left = deadline - time.monotonic() - ENDING_S
        if left < 5:
            report.note("errors", part, "no time was left")
            continue
        report.say(f"== {part}")
        started = time.monotonic()
        try:
            with within(min(PARTS[part].limit_s, left)):
                PARTS[part].work(bench)
        except (Exception, OutOfTime) as error:
            traceback.print_exc()
            report.note("errors", part, _words(error))
        report.note("seconds", part, round(time.monotonic() - started, 1))


def lines(figures: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The ratios, a line a part."""
    for part in ("extraction", "float8"):
        if of := figures.get(part):
            yield (
                f"{part}: {of['stage_02_tokens_per_s']['median']:.0f} of {of['prefill_tokens_per_s']['median']:.0f} "
                f"tok/s of prefill alone, {of['to_prefill']['median']:.3f}; in waves "
                f"{of['waves_to_prefill']['median']:.3f}; disk alone {of.get('disk_alone_gb_per_s')}; "
                f"{of['shares'][-1]}"
            )
    for part in ("two_pass", "one_pass", "client"):
        if of := figures.get(part):
            yield f"{part}: " + ", ".join(
                f"{name} {value['median']}" for name, value in of.items() if isinstance(value, dict)
            )
    for cause, ratio in figures.get("causes", {}).get("to_plain", {}).items():
        yield f"causes, {cause}: {ratio['median']} of plain"
    for count, of in figures.get("drafting", {}).get("in_flight", {}).items():
        yield f"drafting, {count} in flight: {of['alone_tokens_per_s']['median']:.0f} tok/s alone; " + ", ".join(
            f"{name} {value['to_alone']['median']:.2f} (L {value['acceptance_length']['median']:.2f}, even at "
            f"{value['break_even_length']['median']:.2f})"
            for name, value in of.items()
            if name.startswith("imposed")
        )


if __name__ == "__main__":
    main()
