"""How long each stage takes a token: measured by a run, or known beforehand of a box; each figure says which.

measured   from the `timings.jsonl` of a run
prior      published or counted by others, or by us on another machine: its source is named
estimate   derived from a prior by a stated rule, because nobody has published the figure

Rates are by token, never by row: a row of the pilot held 505 tokens, a reasoning trace holds thousands.
The priors are of Kimi-K2.5; another verifier is planned from a run of its own.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eagle3_train.config import FLOAT8
from eagle3_train.errors import MoreStates, PipelineError
from eagle3_train.run import EVALUATE, EXPORT, HIDDEN, PROMPTS, TRACES, TRAIN, VOCAB, read_jsonl

TIMINGS = "timings.jsonl"
MEASURED, PRIOR, ESTIMATE = "measured", "prior", "estimate"
# A stage stopped by hand, or out of states, went on in its next attempt; one that failed may have begun anew.
_WENT_ON = ("KeyboardInterrupt", "Terminated", MoreStates.__name__)


@dataclass(frozen=True)
class Range:
    """A quantity with its low and high end; all three the same where it was measured once."""

    low: float
    likely: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> Range:
        """A quantity known without a range."""
        return cls(value, value, value)

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.likely + other.likely, self.high + other.high)

    def __mul__(self, factor: float | Range) -> Range:
        by = factor if isinstance(factor, Range) else Range.exactly(factor)
        return Range(self.low * by.low, self.likely * by.likely, self.high * by.high)


@dataclass(frozen=True)
class Figure:
    """A duration [s] or a rate [tokens/s], and where it comes from."""

    value: Range
    basis: str
    source: str


@dataclass(frozen=True)
class Speed:
    """What a stage takes: `start_s` once (a server's start, imports), then its tokens at `tokens_per_s`."""

    start_s: Figure
    tokens_per_s: Figure | None = None

    def working(self, tokens: float) -> Range:
        """Seconds that so many tokens take, once it has started."""
        if self.tokens_per_s is None:
            return Range.exactly(0)
        rate = self.tokens_per_s.value
        return Range(tokens / rate.high, tokens / rate.likely, tokens / rate.low)

    def seconds(self, tokens: float) -> Range:
        """Seconds of the stage from its start to its end."""
        return self.start_s.value + self.working(tokens)


@dataclass(frozen=True)
class Box:
    """A machine and the speed of each stage on it, by the stage's folder."""

    name: str
    gpus: int
    gpu: str
    speeds: dict[str, Speed]


@dataclass(frozen=True)
class MeasuredRun:
    """What a run's timings say.

    Attributes:
        name: the run's own name, for labels.
        rows: every line of timings.jsonl.
        verifier: from the run.yaml beside, else by name from the rows; None where neither says.
        epochs: from the run.yaml beside; None for a timings file on its own.
        storage: extraction.storage_dtype, from the run.yaml beside; None for a timings file on its own.
        hardware: of the last finished stage.
        speeds: of each stage that can be measured from its rows.
    """

    name: str
    rows: list[dict[str, Any]]
    verifier: str | None
    epochs: int | None
    storage: str | None
    hardware: str
    speeds: dict[str, Speed]

    def last(self, stage: str) -> dict[str, Any] | None:
        """The stage's last finished attempt."""
        return _last(self.rows, stage)

    @property
    def one_pass(self) -> bool:
        """Whether its states were saved while the verifier answered."""
        hidden = self.last(HIDDEN.folder)
        return bool(hidden and hidden.get("taken_over"))

    @property
    def float8(self) -> bool:
        """Whether its extraction was measured with states in float8."""
        return self.storage == FLOAT8 and HIDDEN.folder in self.speeds

    @property
    def gpus(self) -> int:
        """GPUs of its machine, 0 without any."""
        return int(found[1]) if (found := re.search(r"GiB, (\d+) x ", self.hardware)) else 0

    def was_on(self, box: Box) -> bool:
        """Whether its machine is such a box."""
        return self.gpus == box.gpus and box.gpu in self.hardware


def read_run(path: Path, epochs: int) -> MeasuredRun:
    """The measured speeds of a run, or of a timings file on its own.

    Args:
        path: a run's directory or its timings.jsonl.
        epochs: the training's epochs, where no run.yaml lies beside.

    Raises:
        PipelineError: no timings there, or no finished stage in them.
    """
    timings = path / TIMINGS if path.is_dir() else path
    if not timings.exists():
        raise PipelineError(f"{timings}: no such file; --from names a run that has finished a stage, or its {TIMINGS}")
    rows = list(read_jsonl(timings))
    finished = [row for row in rows if row["outcome"] == "done"]
    if not finished:
        raise PipelineError(f"{timings}: no stage of this run has finished, so nothing is measured")
    kept = timings.with_name("run.yaml")
    settings = yaml.safe_load(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    verifier = settings.get("verifier", {}).get("path") or finished[-1].get("verifier")
    own_epochs = settings.get("training", {}).get("epochs")
    storage = settings.get("extraction", {}).get("storage_dtype")
    name = path.name if path.is_dir() else path.stem
    speeds = _measured_speeds(name, rows, own_epochs or epochs)
    return MeasuredRun(name, rows, verifier, own_epochs, storage, finished[-1]["hardware"], speeds)


def _measured_speeds(name: str, rows: list[dict[str, Any]], epochs: int) -> dict[str, Speed]:
    def figure(value: float, row: dict[str, Any]) -> Figure:
        return Figure(Range.exactly(value), MEASURED, f"{name}, {row['hardware']}, {row['date'][:10]}")

    speeds = {}
    for stage, seconds, tokens in (
        (TRACES.folder, "asked_seconds", "asked_tokens"),
        (HIDDEN.folder, "extraction_seconds", "extracted_tokens"),
    ):
        # The attempt that did the most: a rerun that asked for three missing rows says little about the rate.
        attempts = [row for row in _done(rows, stage) if row.get(tokens)]
        if attempts:
            most = max(attempts, key=lambda attempt: attempt[tokens])
            start, rate = most["seconds"] - most[seconds], most[tokens] / most[seconds]
            speeds[stage] = Speed(figure(start, most), figure(rate, most))
    if vocab := _last(rows, VOCAB.folder):
        counting = vocab["train_tokens"] / COUNTING.value.likely
        speeds[VOCAB.folder] = Speed(figure(max(vocab["seconds"] - counting, 0), vocab), COUNTING)
    if (hidden := _last(rows, HIDDEN.folder)) and (row := _last(rows, TRAIN.folder)):
        trained = trained_tokens(hidden, row, epochs)
        working = row.get("training_seconds") or _seconds_of_all_attempts(rows, TRAIN.folder)
        speeds[TRAIN.folder] = Speed(figure(max(row["seconds"] - working, 0), row), figure(trained / working, row))
    for stage in (PROMPTS.folder, EXPORT.folder, EVALUATE.folder):
        if whole := _last(rows, stage):
            speeds[stage] = Speed(figure(_seconds_of_all_attempts(rows, stage), whole))
    return speeds


def trained_tokens(hidden: dict[str, Any], train: dict[str, Any], epochs: int) -> float:
    """Tokens of all epochs: as stage 04 counted them, else the training samples' share of 02's tokens."""
    return train.get("trained_tokens") or hidden["tokens"] * hidden["train"] / hidden["samples"] * epochs


def _done(rows: list[dict[str, Any]], stage: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["stage"] == stage and row["outcome"] == "done"]


def _last(rows: list[dict[str, Any]], stage: str) -> dict[str, Any] | None:
    done = _done(rows, stage)
    return done[-1] if done else None


def _seconds_of_all_attempts(rows: list[dict[str, Any]], stage: str) -> float:
    """Of the last finished attempt and the stopped ones right before it, that it went on from."""
    attempts = [row for row in rows if row["stage"] == stage]
    while attempts[-1]["outcome"] != "done":
        attempts.pop()
    total = attempts.pop()["seconds"]
    while attempts and attempts[-1]["outcome"] in _WENT_ON:
        total += attempts.pop()["seconds"]
    return total


def _between(low: float, high: float, source: str) -> Figure:
    """An estimate of which only the ends are argued: likely is their geometric mean."""
    return Figure(Range(low, math.sqrt(low * high), high), ESTIMATE, source)


# Dense bf16 [TFLOP/s] and memory [TB/s] by NVIDIA; the B300's read there, the others as those quote who cite it:
# RTX PRO 6000  white paper "RTX PRO Blackwell GPU Architecture", table 4: 503.8 and 1.792, Workstation Edition. The
#               Server Edition's datasheet has 1.597, its page 1 PFLOP, taken to be with sparsity. Which edition the box
#               holds is not on record; by the Workstation's memory the B300 gains less.
# H200          "H200 Tensor Core GPU" datasheet: 1,979 with sparsity, half of it without.
# B300          table of peak throughput and B300 reference system of NVIDIA/exemplar-performance: 2,250 and 7.7 in an
#               8-GPU system (8 in a GB300).
_BF16_TFLOPS = {"RTX PRO 6000": 500, "H200": 989, "B300": 2250}
_MEMORY_TB_S = {"RTX PRO 6000": 1.792, "B300": 7.7}
# What this box spends on AllReduce over PCIe when it decodes one stream (the owner's profile).
_ALLREDUCE_SHARE = 0.515
# benchmarks/results/train_step_bf16.json, and train_step_memory.json for a pack that is one document of 20,480 tokens.
_H200_TRAINING, _H200_TRAINING_LONG = 40_705, 30_544
_PILOT_TRAINING = 9_500 * 505 / (27.7 * 60)
# benchmarks/results/gpu_larger.json and gpu_larger_extraction.json, bf16: 0.71 and 0.78 of prefill alone, at 90,000
# tok/s, where the disk all but limits it. A Kimi prefills slower, so it is the low end.
_SHARE_OF_PREFILL = Range(0.71, math.sqrt(0.71), 1.0)

COUNTING = Figure(
    Range.exactly(1_230_000), PRIOR, "400 rows of 4,096 tokens counted once on 2 cores of an AMD EPYC, 2026-12-02"
)
_EVERYWHERE = {
    PROMPTS.folder: Speed(
        _between(60, 900, "a million rows, 100,000 kept: 66 s on 2 cores; a data set from the hub is downloaded first")
    ),
    VOCAB.folder: Speed(_between(5, 60, "imports and maps: 5 s on the tiny run, more for 163,840 tokens"), COUNTING),
    EXPORT.folder: Speed(_between(10, 120, "3.3 GB read, checked and written at 0.1 to 1 GB/s")),
}
_TRAINER_START = _between(60, 600, "weights of the verifier's head, kernels compiled; not measured at this size")


def _rtx6000() -> Box:
    gpu = "RTX PRO 6000"
    load = Figure(
        Range(22.5 * 60, 22.5 * 60, 25 * 60), PRIOR, "the owner's pilot on this box: 22.5 min; ready time-out 25 min"
    )
    decode = Figure(
        Range(980, 2_000, 2_235),
        PRIOR,
        "published for this model and box: about 2,000 to 2,235 tok/s at 128 streams, 980 at 16k context",
    )
    prefill = Range(7_049, 7_049, 7_900) * _SHARE_OF_PREFILL
    extraction = Figure(
        Range(2_912, prefill.likely, prefill.high),
        PRIOR,
        "published for this model and box: prefill 7,049 to 7,900 tok/s, of which 02 reaches 0.71 to 1 (0.71 measured "
        "on an H200 with 2.6 B parameters); low end: extraction in the owner's pilot",
    )
    one_stream = Figure(Range(82.5, 82.5, 88), PRIOR, "one stream: 82.5 tok/s (the owner), 88 (published)")
    training = _between(
        _PILOT_TRAINING,
        _H200_TRAINING * _BF16_TFLOPS[gpu] / _BF16_TFLOPS["H200"],
        "a GPU: low the owner's pilot (9,500 steps of 505 tokens in 27.7 min), high our step on an H200, 40,705 tok/s "
        "measured, by the ratio of their dense bf16 (500 / 989 TFLOP/s)",
    )
    return Box("rtx6000x8", 8, gpu, _speeds(load, decode, extraction, one_stream, training))


def _b300() -> Box:
    gpu, other = "B300", "RTX PRO 6000"
    memory, arithmetic = _MEMORY_TB_S[gpu] / _MEMORY_TB_S[other], _BF16_TFLOPS[gpu] / _BF16_TFLOPS[other]
    load = _between(5 * 60, 22.5 * 60, "5 min to the 22.5 min of the rtx6000x8 box; the rented disk decides")
    decode = _between(
        2_000 / (1 - _ALLREDUCE_SHARE),
        2_235 * memory,
        "low: rtx6000x8's 2,000 tok/s without its AllReduce (51.5 %); high: its 2,235 by memory speed (7.7 / 1.792)",
    )
    extraction = _between(
        7_049 * _SHARE_OF_PREFILL.low,
        7_900 * arithmetic,
        "low: rtx6000x8's prefill, 7,049 tok/s, of which 02 reaches 0.71 (measured on an H200 with 2.6 B parameters); "
        "high: its 7,900 by dense bf16 (2,250 / 500 TFLOP/s)",
    )
    one_stream = _between(
        82.5 / (1 - _ALLREDUCE_SHARE), 88 * memory, "one stream: rtx6000x8's without AllReduce, to its by memory speed"
    )
    training = _between(
        _H200_TRAINING_LONG,
        _H200_TRAINING * _BF16_TFLOPS[gpu] / _BF16_TFLOPS["H200"],
        "a GPU: low our step on an H200 with documents of 20,480 tokens (30,544 tok/s, measured), high with documents "
        "of 2,048 (40,705) by dense bf16 (2,250 / 989)",
    )
    return Box("b300x8", 8, gpu, _speeds(load, decode, extraction, one_stream, training))


def _speeds(load: Figure, decode: Figure, extraction: Figure, one_stream: Figure, training: Figure) -> dict[str, Speed]:
    return _EVERYWHERE | {
        TRACES.folder: Speed(load, decode),
        HIDDEN.folder: Speed(load, extraction),
        TRAIN.folder: Speed(_TRAINER_START, training),
        EVALUATE.folder: Speed(load, one_stream),
    }


BOXES = {box.name: box for box in (_rtx6000(), _b300())}
