"""What a run's own files say about it, read from outside while its stages write.

Nothing is written, and no lock is taken: a stage claims its lock with LOCK_EX | LOCK_NB and gives up when it cannot
have it, so even a shared lock held for a moment could turn a stage away that starts in that moment. Who holds a lock
is read from /proc/locks instead, which disturbs nobody. Without that file (not Linux, another machine's lock on a
network disk) a stage that is not done counts as stopped.

A file that is missing, torn or not what it should be is a gap in the answer, never an error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from eagle3_train.errors import MoreStates
from eagle3_train.rates import TIMINGS
from eagle3_train.run import ERRORS, EVALUATE, HIDDEN, MANIFEST, PROMPTS, STAGES, TRACES, TRAIN
from eagle3_train.tables import duration, size, table

# Up to here rows are counted, beyond estimated from evenly spaced blocks: an answer within a second from any file.
_COUNTED_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20
_TAIL_BYTES = 256 << 10
_LAST_STEPS = 50
_ERRORS_SHOWN = 3
_WIDEST_ERROR = 160
_LOCKS = Path("/proc/locks")
_LEDGER = "wave.json"  # waves.py, which would load torch
_HOLDER = re.compile(r"FLOCK\s+\S+\s+WRITE\s+(\d+)\s+\S+:(\d+)\s")


@dataclass(frozen=True)
class Count:
    """Done and total of a stage's unit, as far as the files say; `about` where either is estimated."""

    unit: str
    done: int
    total: int | None
    about: bool = False

    def __str__(self) -> str:
        total = f" / {self.total:,}" if self.total is not None else ""
        return f"{'~' if self.about else ''}{self.done:,}{total} {self.unit}"


@dataclass(frozen=True)
class StageStatus:
    """One stage as it is now.

    Attributes:
        state: `done`, `running (pid N)`, `waits for states`, `stopped`, `failed (why)` or `-` when it has not started.
        seconds: of all its attempts, with the running one.
        rate: of the unit [1/s]; of the last steps where the stage keeps them, else since its attempts began.
    """

    folder: str
    state: str
    count: Count | None
    seconds: float
    rate: float | None

    @property
    def left_s(self) -> float | None:
        """Seconds left at this rate; None when not running or not known."""
        if not self.state.startswith("running") or not self.rate or self.count is None or self.count.total is None:
            return None
        return max(self.count.total - self.count.done, 0) / self.rate


@dataclass(frozen=True)
class RunStatus:
    """A run as it is now.

    Attributes:
        wave: within a disk budget, which steps the states on disk are for, and how many are made.
    """

    path: Path
    stages: list[StageStatus]
    wave: str | None
    usd_an_hour: float | None
    errors: list[str]
    free_bytes: int

    @property
    def seconds(self) -> float:
        """Of every recorded attempt of every stage, and of the running one."""
        return sum(stage.seconds for stage in self.stages)


def read(path: Path) -> RunStatus:
    """Look at the run once."""
    settings = _settings(path / "run.yaml")
    attempts = list(_rows(path / TIMINGS))
    stages = [_stage(path, folder, settings, attempts) for folder in STAGES]
    prices = settings.get("plan", {}).get("price") or [None]
    errors = [line for folder in STAGES for line in _errors(path / folder)]
    latest = {row["stage"]: row for row in attempts}.values()
    failed = [f"{row['stage']}: {row['outcome']} on {row['date']}" for row in latest if _failed(row)]
    return RunStatus(path, stages, _wave(path), prices[0], errors + failed, shutil.disk_usage(path).free)


def shown(status: RunStatus, before: RunStatus | None = None) -> str:
    """The status as a table and three lines; with an earlier one, rates are those of the time between."""
    rows = []
    earlier = {stage.folder: stage for stage in before.stages} if before else {}
    for stage in status.stages:
        current = _since(earlier[stage.folder], stage) if stage.folder in earlier else stage
        rate = f"{current.rate:,.3g}/s" if current.rate and current.count and current.state != "done" else "-"
        left = "-" if current.left_s is None else duration(current.left_s)
        spent = duration(current.seconds) if current.seconds else "-"
        rows.append([current.folder, current.state, str(current.count or "-"), rate, left, spent])
    lines = [f"{status.path}", "", table(["stage", "state", "done", "rate", "time left", "time spent"], rows), ""]
    lines += [status.wave] if status.wave else []
    cost = f", {status.seconds / 3600 * status.usd_an_hour:,.2f} USD" if status.usd_an_hour is not None else ""
    lines.append(f"spent: {duration(status.seconds)}{cost} in recorded attempts; free disk: {size(status.free_bytes)}")
    return "\n".join([*lines, *(f"error: {error[:_WIDEST_ERROR]}" for error in status.errors)])


def _since(before: StageStatus, now: StageStatus) -> StageStatus:
    """`now` with the rate between the two looks, where anything was done in between."""
    if now.folder == TRAIN.folder or before.count is None or now.count is None:
        return now
    done, seconds = now.count.done - before.count.done, now.seconds - before.seconds
    if done <= 0 or seconds <= 0:
        return now
    return StageStatus(now.folder, now.state, now.count, now.seconds, done / seconds)


def _stage(path: Path, folder: str, settings: dict[str, Any], attempts: list[dict[str, Any]]) -> StageStatus:
    manifest = _json(path / folder / MANIFEST)
    own = [row for row in attempts if row["stage"] == folder]
    pid = lock_holder(path / ".locks" / folder)
    seconds = sum(row["seconds"] for row in own)
    if pid is not None:
        state = f"running (pid {pid})"
        seconds += _seconds_since(manifest.get("written")) if manifest.get("state") == "running" else 0
    elif manifest.get("state") == "done":
        state = "done"
    elif not manifest:
        state = "-"
    elif own and own[-1]["outcome"] == MoreStates.__name__:
        state = "waits for states"
    else:
        state = f"failed ({own[-1]['outcome']})" if own and _failed(own[-1]) else "stopped"
    count = _COUNTERS[folder](path, settings, manifest) if folder in _COUNTERS else None
    rate = count.done / seconds if count and seconds else None
    if folder == TRAIN.folder:
        rate = _steps_a_second(path / folder / "metrics.jsonl")
    return StageStatus(folder, state, count, seconds, rate)


def lock_holder(path: Path) -> int | None:
    """The process that holds the lock file, without touching the lock.

    The inode alone is compared: overlay and btrfs report other device numbers there than to stat.
    """
    try:
        inode = path.stat().st_ino
        table_of_locks = _LOCKS.read_text(encoding="utf-8")
    except OSError:
        return None
    holders = (match for match in _HOLDER.finditer(table_of_locks) if int(match[2]) == inode)
    return next((int(match[1]) for match in holders), None)


# Done and total, from each stage's own files -------------------------------------------------------------------------


def _prompts(path: Path, _settings: dict[str, Any], _manifest: dict[str, Any]) -> Count | None:
    done, about = count_rows(path / PROMPTS.folder / "prompts.jsonl")
    return Count("prompts", done, done, about) if done else None


def _traces(path: Path, _settings: dict[str, Any], _manifest: dict[str, Any]) -> Count | None:
    total, about_total = count_rows(path / PROMPTS.folder / "prompts.jsonl")
    done, about = count_rows(path / TRACES.folder / "traces.jsonl")
    return Count("traces", done, total or None, about or about_total) if done or total else None


def _shards(path: Path, _settings: dict[str, Any], manifest: dict[str, Any]) -> Count | None:
    done, about = count_rows(path / HIDDEN.folder / "index.jsonl")
    if _json(path / HIDDEN.folder / _LEDGER):
        return Count("shards", done, None, about)  # of the wave; how many it will be, 02 alone knows
    if manifest.get("state") == "done":
        return Count("shards", done, manifest.get("summary", {}).get("samples"), about)
    prompts = _json(path / PROMPTS.folder / MANIFEST).get("summary", {})
    # The evaluation split has no states. A trace that was set aside or left out has none either.
    total = prompts["train"] + prompts["val"] if {"train", "val"} <= prompts.keys() else None
    return Count("shards", done, total, about) if done or total else None


def _wave(path: Path) -> str | None:
    wave = _json(path / HIDDEN.folder / _LEDGER)
    if not {"number", "first_step", "last_step", "steps"} <= wave.keys():
        return None
    # state.json is written last, and the folder renamed into place after it.
    made = [int(found.parent.name[5:]) for found in (path / TRAIN.folder).glob("checkpoints/step_*/state.json")]
    return (
        f"wave {wave['number']}: states for steps {wave['first_step'] + 1:,} to {wave['last_step']:,} of "
        f"{wave['steps']:,}; {max(made, default=0):,} are in the newest checkpoint"
    )


def _steps(path: Path, settings: dict[str, Any], manifest: dict[str, Any]) -> Count | None:
    if manifest.get("state") == "done":
        steps = manifest.get("summary", {}).get("steps")
        return Count("steps", steps, steps) if steps else None
    rows = _tail(path / TRAIN.folder / "metrics.jsonl")
    if made := [row for row in rows if {"step", "of"} <= row.keys()]:
        return Count("steps", made[-1]["step"], made[-1]["of"])
    total = _steps_by_tokens(path, settings.get("training", {}))
    return Count("steps", 0, total, about=True) if total else None


def _steps_by_tokens(path: Path, training: dict[str, Any]) -> int | None:
    """About how many there will be, before the first one."""
    hidden = _json(path / HIDDEN.folder / MANIFEST).get("summary", {})
    if not {"epochs", "pack_tokens"} <= training.keys() or not {"tokens", "train", "samples"} <= hidden.keys():
        return None
    pack_tokens = training["pack_tokens"] * training.get("batch_size", 1)
    return round(hidden["tokens"] * hidden["train"] / hidden["samples"] / pack_tokens) * training["epochs"]


def _measurements(path: Path, settings: dict[str, Any], _manifest: dict[str, Any]) -> Count | None:
    evaluation = settings.get("evaluation", {})
    swept = [count for count in evaluation.get("sweep") or [] if count != evaluation.get("draft_tokens")]
    done = len(list((path / EVALUATE.folder / "measurements").glob("*.json")))
    return Count("servers", done, 2 + len(swept)) if done else None


_COUNTERS = {
    PROMPTS.folder: _prompts,
    TRACES.folder: _traces,
    HIDDEN.folder: _shards,
    TRAIN.folder: _steps,
    EVALUATE.folder: _measurements,
}


def count_rows(path: Path) -> tuple[int, bool]:
    """Whole lines of a file, and whether their number is estimated (files beyond `_COUNTED_BYTES`)."""
    try:
        nbytes = path.stat().st_size
        with path.open("rb") as file:
            if nbytes <= _COUNTED_BYTES:
                return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK_BYTES), b"")), False
            blocks = _COUNTED_BYTES // _BLOCK_BYTES
            rows = 0
            for number in range(blocks):
                file.seek(number * (nbytes - _BLOCK_BYTES) // (blocks - 1))
                rows += file.read(_BLOCK_BYTES).count(b"\n")
            return round(rows * nbytes / (blocks * _BLOCK_BYTES)), True
    except OSError:
        return 0, False


def _steps_a_second(metrics: Path) -> float | None:
    rates = [row["steps_per_s"] for row in _tail(metrics) if "steps_per_s" in row][-_LAST_STEPS:]
    return sum(rates) / len(rates) if rates else None


# Reading what others write -------------------------------------------------------------------------------------------


def _failed(row: dict[str, Any]) -> bool:
    return row["outcome"] not in ("done", "KeyboardInterrupt", "Terminated", MoreStates.__name__)


def _errors(folder: Path) -> list[str]:
    rows = _tail(folder / ERRORS)[-_ERRORS_SHOWN:]
    number, about = count_rows(folder / ERRORS)
    head = [f"{folder.name}: {'~' if about else ''}{number} set aside, the last:"] if rows else []
    return head + [
        f"  {row.get('id', '?')}: {row.get('reason', '?')} {row.get('detail') or ''}".rstrip() for row in rows
    ]


def _seconds_since(written: str | None) -> float:
    try:
        return max(time.time() - datetime.strptime(written or "", "%Y-%m-%dT%H:%M:%S%z").timestamp(), 0)
    except ValueError:
        return 0


def _settings(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The attempts in timings.jsonl; lines that are torn or something else are left out."""
    for row in _objects(path, 0):
        if {"stage", "outcome", "seconds", "date"} <= row.keys():
            yield row


def _tail(path: Path) -> list[dict[str, Any]]:
    """The objects in the last part of a JSONL file."""
    return list(_objects(path, _TAIL_BYTES))


def _objects(path: Path, last_bytes: int) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            if last_bytes:
                file.seek(max(0, os.fstat(file.fileno()).st_size - last_bytes))
            lines = file.read().split(b"\n")
    except OSError:
        return
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


# The command ---------------------------------------------------------------------------------------------------------


def main(description: str | None, argv: list[str] | None = None) -> int:
    """status.py: show the run once, or again and again; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="status.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="directory of the run, e.g. runs/tiny")
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="show it again every so many seconds")
    arguments = parser.parse_args(argv)
    if not arguments.run.is_dir():
        print(f"status.py: {arguments.run}: no such run", file=sys.stderr)
        return 1
    try:
        _show(arguments.run, arguments.watch)
    except KeyboardInterrupt:
        print()
    return 0


def _show(path: Path, every_s: float | None) -> None:
    status = read(path)
    print(shown(status))
    while every_s is not None:
        time.sleep(every_s)
        before, status = status, read(path)
        print(f"\n{time.strftime('%H:%M:%S')}  {shown(status, before)}", flush=True)
