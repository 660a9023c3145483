"""Stage 04 on the tiny verifier's own states, on a CPU: our step beside a plain loop, and fp8 beside bf16.

    plain   the same packs and optimizer: speculators' model, called as it is, in a loop of five lines; seconds a step
    fp8     the embedded default trained in bfloat16 and in fp8 (three seeds): validation loss and acceptance

    python -m benchmarks.train_tiny plain | fp8 --run runs/tiny     2 and 5 minutes; the run must be done up to stage 03

Writes benchmarks/results/train_tiny_<what>.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT, spread, write_result
from eagle3_train import verifier, vocabulary
from eagle3_train.config import Config, parse
from eagle3_train.draft import build_draft
from eagle3_train.extraction import DATASET
from eagle3_train.packs import order
from eagle3_train.shards import Shards
from eagle3_train.step import TrainingStep

STEPS = 40
SEEDS = (0, 1, 2)


def plain(run: Path) -> None:
    """The two loops take turns, pack by pack, each on a model of its own."""
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import ArrowDataset, CollateFn

    _, config = parse(["--run", str(run)], "")
    settings, dataset = config.training, run / "02_hidden" / DATASET
    rows = json.loads((run / "02_hidden" / "manifest.json").read_text())["summary"]
    shape: dict[str, Any] = {"pack_tokens": settings.pack_tokens, "ttt_steps": settings.ttt_steps}
    shards = Shards(dataset, 0, rows["train"], whole=False, pinned=False, **shape)
    packs = [step[0] for step in order(shards.lengths, settings.pack_tokens, 1, 2, 0, STEPS).steps]
    theirs = ArrowDataset(
        settings.pack_tokens, dataset, on_missing="raise", train_ratio=(rows["train"] + 0.5) / rows["samples"]
    )
    hidden = verifier.text_config(config.verifier).hidden_size
    collate = CollateFn(settings.pack_tokens, hidden, 3, dtype=torch.float32, preprocess=shift_batch)
    losses = resolve_loss_config(settings.loss, "eager")
    model = _draft(config, run)

    def speculators_loss(pack: list[int]) -> torch.Tensor:
        batch = collate([theirs[row] for row in pack])
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        return model(**tensors, ttt_steps=settings.ttt_steps, loss_config=losses)[1]

    ours = _draft(config, run)
    step = TrainingStep(ours, ttt_steps=settings.ttt_steps, loss_config=losses, loss_decay=1.0, dtype=torch.float32)
    sides = [
        _steps(ours, lambda pack: step(shards.pack(pack))[0], packs, settings.lr),
        _steps(model, speculators_loss, packs, settings.lr),
    ]
    seconds: list[list[float]] = [[], []]
    last = [0.0, 0.0]
    for _ in packs:
        for side, steps in enumerate(sides):
            taken, last[side] = next(steps)
            seconds[side].append(taken)
    medians = [statistics.median(values) for values in seconds]
    write_result(
        "train_tiny_plain",
        module="train_tiny",
        ours={"step_s": spread(seconds[0], 4), "last_loss": round(last[0], 4)},
        peer={"step_s": spread(seconds[1], 4), "last_loss": round(last[1], 4)},
        ratio={"steps_per_s": round(medians[1] / medians[0], 2)},
        unit="s a step, reading included",
        notes=[f"{STEPS} steps each, in turns, {torch.get_num_threads()} threads, float32; the same packs"],
    )


def _draft(config: Config, run: Path) -> Any:
    torch.manual_seed(config.training.seed)
    target_size = verifier.text_config(config.verifier).vocab_size
    return build_draft(config, vocabulary.load(run / "03_vocab", target_size)).float()


def _steps(
    model: Any, loss_of: Callable[[list[int]], torch.Tensor], packs: list[list[int]], lr: float
) -> Iterator[tuple[float, float]]:
    """One optimizer step at a time: its seconds and its loss."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, fused=True)
    for pack in packs:
        started = time.perf_counter()
        loss = loss_of(pack)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        yield time.perf_counter() - started, loss.item()


def fp8(run: Path) -> None:
    """Each seed in both, in copies of the run."""
    found: dict[str, list[dict[str, float]]] = {"bfloat16": [], "fp8": []}
    curves: dict[str, list[float]] = {}
    for seed in SEEDS:
        for way, flag in (("bfloat16", "--no-training.fp8"), ("fp8", "--training.fp8")):
            with tempfile.TemporaryDirectory() as folder:
                copy = Path(folder) / "run"
                shutil.copytree(run, copy, symlinks=True, ignore=shutil.ignore_patterns("04_*", "05_*", "06_*"))
                command = [sys.executable, "04_train.py", "--run", str(copy), "--training.dtype", "bfloat16", flag]
                subprocess.run([*command, "--training.seed", str(seed)], cwd=ROOT, check=True)
                summary = json.loads((copy / "04_train" / "manifest.json").read_text())["summary"]
                found[way].append({name: summary[name] for name in ("val_loss", "expected_acceptance_length")})
                if seed == SEEDS[0]:
                    rows = (json.loads(line) for line in (copy / "04_train" / "metrics.jsonl").read_text().splitlines())
                    curves[way] = [round(row["train"]["loss"], 4) for row in rows if "train" in row]
    means = {way: statistics.mean(row["val_loss"] for row in rows) for way, rows in found.items()}
    accepted = {way: statistics.mean(r["expected_acceptance_length"] for r in rows) for way, rows in found.items()}
    write_result(
        "train_tiny_fp8",
        module="train_tiny",
        ours={"fp8": found["fp8"], "training_loss": curves["fp8"]},
        peer={"bfloat16": found["bfloat16"], "training_loss": curves["bfloat16"]},
        ratio={
            "validation_loss": round(means["fp8"] / means["bfloat16"], 4),
            "expected_acceptance_length": round(accepted["fp8"] / accepted["bfloat16"], 4),
            "training_loss_second_half": round(
                sum(curves["fp8"][len(curves["fp8"]) // 2 :]) / sum(curves["bfloat16"][len(curves["fp8"]) // 2 :]), 4
            ),
        },
        unit="loss; tokens per verifier step",
        notes=[f"seeds {SEEDS}; the best checkpoint of each; the fp8 products run on a CPU with the same arithmetic"],
    )


def main() -> None:
    """One of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["plain", "fp8"])
    parser.add_argument("--run", type=Path, required=True)
    arguments = parser.parse_args()
    {"plain": plain, "fp8": fp8}[arguments.what](arguments.run)


if __name__ == "__main__":
    main()
