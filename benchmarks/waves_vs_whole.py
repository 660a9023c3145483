"""A training within a tenth of the disk that its hidden states take, beside one with all of them.

2,000 questions, one set of traces, two epochs. Whole: every state on disk, a few seeds, which is the noise to compare
with. Waves: `extraction.disk_budget_gb` at a tenth of what the whole took, stages 02 and 04 in turn, once for each
`extraction.wave_epochs`, with the first seed. The states' bytes (shards, unfinished ones, the parity gate's) are looked
at every 50 ms. Each wave starts the verifier and the trainer anew, about 40 s here: this says nothing of speed.

    python -m benchmarks.waves_vs_whole [--ways replay again] [--seeds 3]      replay 15 minutes, again 30 (estimated)

Writes benchmarks/results/waves_vs_whole.json and .png.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, over_seeds, stage_command, summary_of, write_result
from eagle3_train import charts, tiny, waves
from eagle3_train.errors import MoreStates
from eagle3_train.extraction import SHARDS

NAME = "waves_vs_whole"
SAMPLES, EPOCHS, SHARE = 2_000, 2, 0.1
QUESTIONS = "questions.jsonl"
# What is kept for good, and what the parity gate makes for a moment, must leave room within a tenth.
FLAGS = {
    "prompts__val_fraction": 0.02,
    "training__epochs": EPOCHS,
    "extraction__concurrency": 8,
}
_LOOK_EVERY_S = 0.05


def main() -> None:
    """Traces once, the whole for every seed, then each way in waves; the result file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=["replay", "again"], default=["replay", "again"])
    parser.add_argument("--seeds", type=int, default=3, help="of the whole")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        traced, whole = folder / "traced", folder / "whole"
        tiny.write_prompts(folder / QUESTIONS, count=SAMPLES)
        for script in ("01_prepare_data.py", "01b_generate_synthetic.py"):
            _call(script, traced)
        shutil.copytree(traced, whole)
        with _watched(whole) as disk:
            for script in ("02_extract_hidden.py", "03_build_vocab_map.py"):
                _call(script, whole)
        full, on_disk = max(size for _, size in disk), {"whole": disk}
        found = []
        for seed in range(given.seeds):
            trained = folder / f"whole-{seed}"
            shutil.copytree(whole, trained, symlinks=True)
            _call("04_train.py", trained, training__seed=seed)
            found.append(summary_of(trained, "04_train"))
        ways: dict[str, dict[str, Any]] = {}
        for way in given.ways:
            run = folder / way
            shutil.copytree(traced, run)
            with _watched(run) as disk:
                made = _in_waves(run, extraction__disk_budget_gb=SHARE * full / 1e9, extraction__wave_epochs=way)
            on_disk[way] = disk
            peak = max(size for _, size in disk)
            ways[way] = {"waves": made, "peak_bytes": peak, **_figures([summary_of(run, "04_train")])}
            _write(full, found, ways, on_disk)


def _call(script: str, run: Path, **flags: Any) -> int:
    """Run a stage; 0, or the code with which 04 asks for more states."""
    command = stage_command(script, run, **FLAGS, prompts__source=run.with_name(QUESTIONS), **flags)
    log = run.with_name(f"{run.name}.log")
    run.mkdir(exist_ok=True)
    with log.open("ab") as output:
        code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if code not in (0, MoreStates.exit_code):
        raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{log.read_text(errors='replace')[-3000:]}")
    return code


def _in_waves(run: Path, **flags: Any) -> int:
    """02 and 04 in turn, as run_pipeline.sh has them; the number of waves."""
    _call("02_extract_hidden.py", run, **flags)
    _call("03_build_vocab_map.py", run, **flags)
    while _call("04_train.py", run, **flags):
        _call("02_extract_hidden.py", run, **flags)
        print(f"{run.name}: {waves.current(run / '02_hidden')}", flush=True)
    wave = waves.current(run / "02_hidden")
    assert wave is not None
    return wave.number


@contextmanager
def _watched(run: Path) -> Iterator[list[tuple[float, int]]]:
    """Seconds since now, and bytes of states on disk."""
    seen: list[tuple[float, int]] = [(0.0, 0)]
    ended, started = threading.Event(), time.monotonic()

    def look() -> None:
        while not ended.wait(_LOOK_EVERY_S):
            seen.append((time.monotonic() - started, _bytes_of_states(run / "02_hidden")))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield seen
    finally:
        ended.set()
        looking.join()


def _bytes_of_states(hidden: Path) -> int:
    total = 0
    for folder in (hidden / SHARDS, hidden / "staging", hidden / "canary_states"):
        with suppress(FileNotFoundError):
            for path in folder.iterdir():
                with suppress(FileNotFoundError):
                    total += path.stat().st_size
    return total


def _figures(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    names = {
        "greedy": "expected_acceptance_length",
        "sampled": "expected_sampled_acceptance_length",
        "loss": "val_loss",
    }
    values = {short: [summary[name] for summary in summaries] for short, name in names.items()}
    return {short: over_seeds(each) if len(each) > 1 else each[0] for short, each in values.items()}


def _write(
    full: int,
    found: list[dict[str, Any]],
    ways: dict[str, dict[str, Any]],
    on_disk: dict[str, list[tuple[float, int]]],
) -> None:
    charts.disk(RESULTS / f"{NAME}.png", on_disk, SHARE * full)
    whole = _figures(found)
    mean = statistics.mean(one["expected_acceptance_length"] for one in found)
    write_result(
        NAME,
        ours={"budget_bytes": round(SHARE * full), **ways},
        peer={"what": "every state on disk", "peak_bytes": full, "steps": found[0]["steps"], **whole},
        ratio={way: {"peak": round(each["peak_bytes"] / full, 4), "greedy": round(each["greedy"] / mean, 4)}
               for way, each in ways.items()},
        unit="bytes of states on disk; expected acceptance length of the validation split, of 4 possible",
        notes=[f"{SAMPLES} questions, {EPOCHS} epochs, tiny verifier; waves train with the first of the seeds"],
    )  # fmt: skip


if __name__ == "__main__":
    main()
