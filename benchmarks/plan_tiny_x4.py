"""The plan of a run from one of a quarter of its size, beside what that run then took, stage by stage.

Two whole runs of the embedded default, 100 and 400 questions, on real vLLM. The larger one is planned from the timings
of the smaller one (`plan.py --from`); the other side is what it really took. The two timings.jsonl are kept beside the
result, so that the prediction can be drawn again without a run.

    python -m benchmarks.plan_tiny_x4            about 10 minutes on 2 cores
    python -m benchmarks.plan_tiny_x4 --again    seconds: from the timings kept by the last one
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from benchmarks.common import RESULTS, ROOT, run_measured, stage_command, write_result
from eagle3_train import plan_command, planning
from eagle3_train.config import parse
from eagle3_train.rates import read_run
from eagle3_train.run import HIDDEN, TRACES, TRAIN, VOCAB, read_jsonl

SMALL, LARGE = 100, 400
TARGET = 0.25
SCRIPTS = sorted(path.name for path in ROOT.glob("0[1-6]*.py"))


def main() -> None:
    """Two runs, unless their timings are kept; then the plan of one from the other, and the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="no runs: plan from the timings that are kept")
    if not parser.parse_args().again:
        with tempfile.TemporaryDirectory() as name:
            for samples in (SMALL, LARGE):
                _run(Path(name), samples)
    predicted, took = prediction(kept(SMALL), kept(LARGE))
    write_result(
        "plan_tiny_x4",
        ours={"predicted_seconds": {stage: round(value, 2) for stage, value in predicted.items()}},
        peer={"measured_seconds": {stage: round(value, 2) for stage, value in took.items()}},
        ratio={stage: round(predicted[stage] / took[stage], 3) for stage in took},
        unit="s",
        notes=[
            f"{LARGE} questions planned from the timings of {SMALL}: {kept(SMALL).name}, {kept(LARGE).name}",
            f"target: the whole within {TARGET:.0%}",
            f"OMP_NUM_THREADS: {os.environ.get('OMP_NUM_THREADS', 'not set')}; "
            "other work on the machine shows in one-off differences of a stage",
        ],
    )


def kept(samples: int) -> Path:
    """Where the timings of the run of so many questions are kept."""
    return RESULTS / f"plan_tiny_{samples}.jsonl"


def prediction(small: Path, large: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds by stage and of `all`: of the larger run as planned from the smaller one's timings, and as it took."""
    flags = ["--preset", str(ROOT / "presets" / "tiny.yaml"), "--max-samples", str(LARGE), "--from", str(small)]
    _, config = parse(flags, "", plan_command.PlanArguments)
    planned = planning.make_plan(config)
    ((whole, *_),) = planned.options.values()
    work = planning.workload(config, LARGE, planned.length)
    tokens = {
        TRACES.folder: work.generated,
        HIDDEN.folder: work.extracted,
        VOCAB.folder: work.counted,
        TRAIN.folder: work.trained,
    }
    took = {row["stage"]: row["seconds"] for row in read_jsonl(large) if row["outcome"] == "done"}
    speeds = read_run(small, config.training.epochs).speeds
    predicted = {stage: speeds[stage].seconds(tokens.get(stage, 0)).likely for stage in took}
    return {**predicted, "all": whole.seconds.likely}, {**took, "all": sum(took.values())}


def _run(folder: Path, samples: int) -> None:
    run = folder / str(samples)
    for script in SCRIPTS:
        took = run_measured(stage_command(script, run, prompts__max_samples=samples), log=folder / "log")
        print(f"{samples} questions, {script}: {took.wall_s:.1f} s", flush=True)
    shutil.copy(run / "timings.jsonl", kept(samples))


if __name__ == "__main__":
    main()
