"""What the benchmarks share: measured processes, runs to measure, and the result file."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_train.config import Config
from eagle3_train.generation import TRACES_FILE
from eagle3_train.prompts import PROMPTS_FILE
from eagle3_train.run import PROMPTS, TRACES, Result, Run, Stage, hardware, versions, write_text

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@dataclass(frozen=True)
class Measured:
    """What a process took.

    Attributes:
        wall_s: from its start to its end.
        cpu_s: user and system time of it and of the children that it waited for.
        peak_mib: its largest resident set.
        output: stdout and stderr.
    """

    wall_s: float
    cpu_s: float
    peak_mib: float
    output: str


def run_measured(command: Sequence[str], *, log: Path, core: int | None = None) -> Measured:
    """Run `command` in the project's root, on one core if told so.

    Raises:
        RuntimeError: it failed; with the end of its output.
    """
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*on_core(core), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **OFFLINE},
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    said = log.read_text(encoding="utf-8", errors="replace")
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{said[-3000:]}")
    return Measured(
        time.monotonic() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, said.replace("\r", "\n")
    )


def on_core(core: int | None) -> list[str]:
    """The start of a command line that keeps a process on one core."""
    return [] if core is None else ["taskset", "-c", str(core)]


def stage_command(script: str, run: Path, **flags: Any) -> list[str]:
    """The command line of a numbered script on the tiny preset; `prompts__source=x` is `--prompts.source x`."""
    command = [sys.executable, script, "--run", str(run), "--preset", "presets/tiny.yaml"]
    for name, value in flags.items():
        command += [f"--{name.replace('__', '.')}", str(value)]
    return command


def traced_run(path: Path, config: Config, prompts: Iterable[dict[str, Any]], traces: Callable[[Stage], None]) -> Run:
    """A run that is done up to stage 01b, with these rows of prompts.jsonl; `traces` writes traces.jsonl."""
    run = Run(path, config)
    path.mkdir(parents=True)
    run.keep_config()

    def write_prompts(stage: Stage) -> None:
        text = "".join(json.dumps({"source": "benchmark", **row}) + "\n" for row in prompts)
        (stage.folder / PROMPTS_FILE).write_text(text, encoding="utf-8")

    for spec, work, made in ((PROMPTS, write_prompts, PROMPTS_FILE), (TRACES, traces, TRACES_FILE)):
        stage = Stage(run, spec)
        stage.begin(force=False)
        work(stage)
        stage.finish(Result([made], {}))
    return run


def summary_of(run: Path, folder: str) -> dict[str, Any]:
    """The figures that a finished stage left in its manifest."""
    return json.loads((run / folder / "manifest.json").read_text(encoding="utf-8"))["summary"]


def spread(values: Sequence[float], digits: int = 1) -> dict[str, float | int]:
    """Median, smallest and largest of repeated measurements."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "repeats": len(values),
    }


def over_seeds(values: Sequence[float], digits: int = 4) -> dict[str, Any]:
    """Each seed's value, their mean, standard deviation and the mean's standard error."""
    deviation = statistics.stdev(values)
    return {
        "mean": round(statistics.mean(values), digits),
        "standard_deviation": round(deviation, digits),
        "standard_error": round(deviation / len(values) ** 0.5, digits),
        "by_seed": [round(value, digits) for value in values],
    }


def write_result(
    name: str,
    *,
    ours: dict[str, Any],
    peer: dict[str, Any],
    ratio: dict[str, Any],
    unit: str,
    notes: list[str],
    module: str | None = None,
) -> None:
    """Replace `benchmarks/results/<name>.json` and show it; where $OUT names a folder, the file goes there.

    Args:
        module: the script's name, where the result has another.
    """
    result = {
        "name": name,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": commit(),
        "command": " ".join(["python", "-m", f"benchmarks.{module or name}", *sys.argv[1:]]),
        "hardware": hardware(),
        "versions": versions(),
        "ours": ours,
        "peer": peer,
        "ratio": ratio,
        "unit": unit,
        "notes": notes,
    }
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    write_text(Path(os.environ.get("OUT") or RESULTS) / f"{name}.json", text)
    print(text)


def commit() -> str:
    """The commit, with `+` when the code that was measured is not what it holds; empty where there is no git."""
    if shutil.which("git") is None:
        return ""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", "eagle3_train", "benchmarks/*.py", "presets")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
