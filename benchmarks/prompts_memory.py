"""Stage 01 on a million rows: memory above the interpreter's own, and speed.

The rows are generated into a temporary folder (about 300 characters each, 1 % of them duplicates). The stage runs as
its own command on the tiny preset, once with prompts.max_samples 100000 and once with every question kept. The other
side is an interpreter that has imported the same modules and done nothing.

    python -m benchmarks.prompts_memory [--rows 1000000]      about 6 minutes
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import run_measured, stage_command, summary_of, write_result

LIMIT_MIB = 1024
SAMPLE = 100_000
SMALL = 1000
IMPORTS = (
    "import eagle3_train.cli, eagle3_train.prompts, eagle3_train.charts, eagle3_train.verifier, yaml; "
    "import matplotlib.pyplot, py3langid; from transformers import AutoTokenizer"
)
_TEXT = (
    "why does the river bend near old bridge explain how a compiler keeps registers when many values live at once "
    "write short poem about winter light compare two ways to store sparse matrices and say which is faster for rows"
)
_WORDS = _TEXT.split()


def main() -> None:
    """Base, small, sampled and whole; then the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = run_measured([sys.executable, "-c", IMPORTS], log=folder / "log").peak_mib
        print(f"interpreter with the same imports: {base:.0f} MiB", flush=True)
        small = _stage(folder, _write_rows(folder, SMALL), base)
        source = _write_rows(folder, given.rows)
        mib = source.stat().st_size / 2**20
        print(f"{given.rows} rows, {mib:.0f} MiB", flush=True)
        ours = {
            f"{SMALL}_rows": small,
            f"max_samples_{SAMPLE}": _stage(folder, source, base, prompts__max_samples=SAMPLE),
            "all_kept": _stage(folder, source, base),
        }
    worst = max(figures["above_base_mib"] for figures in ours.values())
    write_result(
        "prompts_memory",
        ours=ours,
        peer={"interpreter_with_imports_mib": round(base, 1)},
        ratio={"worst_above_base_of_limit": round(worst / LIMIT_MIB, 2)},
        unit="MiB",
        notes=[
            f"{given.rows} rows, {mib:.0f} MiB of JSONL, 1 % of them duplicates",
            f"target: under {LIMIT_MIB} MiB above the interpreter that imported the same modules",
            f"the stage on {SMALL} rows holds the tokenizer, the language model and the picture: what does not grow",
        ],
    )


def _stage(folder: Path, source: Path, base: float, **flags: Any) -> dict[str, float]:
    run = folder / f"run-{source.stem}-{len(flags)}"
    took = run_measured(stage_command("01_prepare_data.py", run, prompts__source=source, **flags), log=folder / "log")
    summary = summary_of(run, "01_prompts")
    figures = {
        "rows": summary["rows"],
        "prompts": summary["prompts"],
        "duplicates": summary["duplicates"],
        "peak_mib": round(took.peak_mib, 1),
        "above_base_mib": round(took.peak_mib - base, 1),
        "seconds": round(took.wall_s, 1),
        "cpu_seconds": round(took.cpu_s, 1),
        "rows_per_second": round(summary["rows"] / took.wall_s),
    }
    print(figures, flush=True)
    return figures


def _write_rows(folder: Path, count: int) -> Path:
    path = folder / f"rows-{count}.jsonl"
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            distinct = number if number % 100 else 0
            question = f"Question {distinct}: " + " ".join(draw.choices(_WORDS, k=20) if distinct else _WORDS[:20])
            turns = [{"from": "human", "value": question}, {"from": "gpt", "value": " ".join(_WORDS[:20])}]
            file.write(json.dumps({"conversations": turns}) + "\n")
    return path


if __name__ == "__main__":
    main()
