"""Does storing the verifier's states as float8_e4m3 instead of bfloat16 cost acceptance? Half the disk, same questions.

One set of traces; stage 02 makes their states twice, once in each storage; stage 04 trains on either, a few seeds each:
initial weights and order of the data are a seed's own and the same for both storages. Serving rounds no state, so every
checkpoint is also judged on the bfloat16 validation states, whichever it was trained on; each side's best checkpoint is
the one that stage 04 chose on its own.

    python -m benchmarks.fp8_vs_bf16_states [--run DIR] [--seeds 3]      20 minutes on 2 busy cores; run: done up to 01b

Writes benchmarks/results/fp8_vs_bf16_states.json and .png.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, over_seeds, run_measured, stage_command, summary_of, write_result
from benchmarks.train_tiny import score, train_copy
from eagle3_train import charts, parity
from eagle3_train.capture import read_states, token_bytes
from eagle3_train.config import FLOAT8, parse
from eagle3_train.run import read_jsonl

NAME = "fp8_vs_bf16_states"
EXACT = "bfloat16"
STORAGES = (EXACT, FLOAT8)
FIGURES = {"greedy": "expected acceptance length, greedy", "sampled": "the same, sampled", "loss": "validation loss"}


@dataclass(frozen=True)
class Training:
    """One storage, one seed.

    Attributes:
        own: stage 04's figures of its best checkpoint, on the states that it was given.
        best: the best checkpoint's on bfloat16 states.
        best_step: of that checkpoint.
        by_step: every validation's figures, on bfloat16 states.
    """

    own: dict[str, float]
    best: dict[str, float]
    best_step: int
    by_step: dict[int, dict[str, float]]


def main() -> None:
    """States twice, every seed on both; then the result file and its picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="take questions and traces from this run; left out, make them")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = given.run or _traced(folder / "traced")
        runs = {storage: _extracted(source, folder / storage, storage) for storage in STORAGES}
        trainings: dict[str, list[Training]] = {storage: [] for storage in STORAGES}
        for seed in range(given.seeds):
            for storage, run in runs.items():
                training = _trained(run, folder / f"{storage}-{seed}", seed, runs[EXACT])
                trainings[storage].append(training)
                print(f"{storage}, seed {seed}: {training.own}; on exact states {training.best}", flush=True)
        _write(runs, trainings)


def _traced(run: Path) -> Path:
    run.mkdir()
    for script in ("01_prepare_data.py", "01b_generate_synthetic.py"):
        run_measured(stage_command(script, run), log=run / "log")
    return run


def _extracted(source: Path, run: Path, storage: str) -> Path:
    run.mkdir()
    shutil.copy(source / "run.yaml", run)
    for folder in ("01_prompts", "01b_traces"):
        shutil.copytree(source / folder, run / folder)
    for script in ("02_extract_hidden.py", "03_build_vocab_map.py"):
        command = [sys.executable, script, "--run", str(run), "--extraction.storage_dtype", storage]
        run_measured(command, log=run / "log")
    return run


def _trained(run: Path, copy: Path, seed: int, exact: Path) -> Training:
    checkpoints = train_copy(run, copy, "04_train.py", "--training.seed", str(seed))
    best, whole = checkpoints.best(), checkpoints.whole()
    assert best is not None
    summary = summary_of(copy, "04_train")
    own = {
        "greedy": summary["expected_acceptance_length"],
        "sampled": summary["expected_sampled_acceptance_length"],
        "loss": summary["val_loss"],
    }
    again = score([best], run)[0]
    if any(abs(again[figure] - own[figure]) > 1e-3 for figure in FIGURES):
        raise RuntimeError(f"{copy}: stage 04 says {own} of its best checkpoint, measured again it is {again}")
    by_step = dict(zip([one.step for one in whole], score(whole, exact), strict=True))
    shutil.rmtree(copy)
    return Training(own, by_step[best.step], best.step, by_step)


def _write(runs: dict[str, Path], trainings: dict[str, list[Training]]) -> None:
    judged: dict[str, Callable[[Training], dict[str, float]]] = {
        "best_checkpoint": lambda training: training.best,
        "last_step": lambda training: list(training.by_step.values())[-1],
        "best_checkpoint_on_own_states": lambda training: training.own,
    }

    def side(storage: str) -> dict[str, Any]:
        return {
            "storage": storage,
            "bytes_a_token": _bytes_a_token(runs[storage]),
            **{
                way: {figure: over_seeds([of(one)[figure] for one in trainings[storage]]) for figure in FIGURES}
                for way, of in judged.items()
            },
            "best_step": [one.best_step for one in trainings[storage]],
            "by_step": [
                {step: {name: round(value, 4) for name, value in found.items()} for step, found in one.by_step.items()}
                for one in trainings[storage]
            ],
        }

    def differences(of: Callable[[Training], dict[str, float]]) -> dict[str, Any]:
        pairs = list(zip(trainings[FLOAT8], trainings[EXACT], strict=True))
        return {
            figure: over_seeds([of(ours)[figure] - of(theirs)[figure] for ours, theirs in pairs]) for figure in FIGURES
        }

    sizes = {storage: _bytes_a_token(run) for storage, run in runs.items()}
    seeds = len(trainings[EXACT])
    _, config = parse(["--run", str(runs[EXACT])], "")
    write_result(
        NAME,
        ours={**side(FLOAT8), "distance_by_layer": _distance_by_layer(runs)},
        peer=side(EXACT),
        ratio={
            "bytes_a_token": round(sizes[FLOAT8]["states"] / sizes[EXACT]["states"], 4),
            "bytes_a_token_with_header_and_ids": round(sizes[FLOAT8]["on_disk"] / sizes[EXACT]["on_disk"], 4),
            "float8_minus_bfloat16": {way: differences(of) for way, of in judged.items()},
        },
        unit=f"tokens per verifier step, of {1 + config.training.ttt_steps} possible; loss",
        notes=[
            f"{seeds} seeds, the same for both; a difference is of the same seed, its standard error over the seeds",
            "best_checkpoint, last_step and by_step: judged on the bfloat16 states; best_checkpoint_on_own_states is "
            "what stage 04 says",
            "distance_by_layer: of a float8 row from the bfloat16 one, as a share of its length; mean of all tokens",
            f"{summary_of(runs[EXACT], '02_hidden')['train']} training samples, "
            f"{summary_of(runs[EXACT], '02_hidden')['val']} validation samples, verifier {config.verifier.path}",
        ],
    )
    panels = {
        title: {
            storage: {
                step: [one.by_step[step][figure] for one in trainings[storage]]
                for step in trainings[storage][0].by_step
            }
            for storage in STORAGES
        }
        for figure, title in (("greedy", "Greedy"), ("sampled", "Sampled"))
    }
    picture = Path(os.environ.get("OUT") or RESULTS) / f"{NAME}.png"
    charts.over_seeds(picture, panels, "expected tokens per verifier step")


def _bytes_a_token(run: Path) -> dict[str, float]:
    """Of the states alone, and of the whole files."""
    _, config = parse(["--run", str(run)], "")
    summary = summary_of(run, "02_hidden")
    return {"states": token_bytes(config), "on_disk": round(summary["bytes"] / summary["tokens"], 1)}


def _distance_by_layer(runs: dict[str, Path]) -> list[float]:
    distances = []
    for row in read_jsonl(runs[EXACT] / "02_hidden" / "index.jsonl"):
        ours, theirs = (
            read_states(runs[storage] / "02_hidden" / "shards" / f"{row['id']}.safetensors").restored()
            for storage in (FLOAT8, EXACT)
        )
        distances.append(parity.row_distances(ours, theirs))
    return [round(distance, 4) for distance in torch.cat(distances).mean(0).tolist()]


if __name__ == "__main__":
    main()
