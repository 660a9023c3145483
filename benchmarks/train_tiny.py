"""Stage 04 on the tiny verifier's own states, on a CPU: our step beside a plain loop, and fp8 beside bf16.

    plain   the same packs and optimizer: speculators' model, called as it is, in a loop of five lines; seconds a step
    fp8     the embedded default trained in bfloat16, in fp8, and in fp8 with the products of one direction in bfloat16,
            which tells whose rounding it is; in float32, to see what any rounding does: loss after the same tokens and
            acceptance, eight seeds each, two trainings at a time

    python -m benchmarks.train_tiny plain | fp8 --run runs/tiny     2 and 40 minutes (2 cores); done up to stage 03

Writes benchmarks/results/train_tiny_<what>.json.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from speculators.losses import resolve_loss_config
from torch import nn

from benchmarks.common import over_seeds, run_measured, spread, summary_of, write_result
from eagle3_train import fp8 as fp8_products
from eagle3_train import verifier, vocabulary
from eagle3_train.checkpoints import Checkpoints, Saved, load_weights
from eagle3_train.config import Config, parse
from eagle3_train.draft import build_draft
from eagle3_train.expected import summarise
from eagle3_train.extraction import DATASET
from eagle3_train.packs import order
from eagle3_train.run import read_jsonl
from eagle3_train.shards import Shards
from eagle3_train.step import TrainingStep
from eagle3_train.training import CHECKPOINTS, METRICS

STEPS = 40
SEEDS = range(8)
_FP8 = ("--training.dtype", "bfloat16", "--training.fp8")
# Each a stage 04, by its flags; `python -m benchmarks.train_tiny forward` is one in fp8 whose forward products are not.
WAYS: dict[str, tuple[str, ...]] = {
    "float32": ("04_train.py", "--training.dtype", "float32", "--no-training.fp8"),
    "bfloat16": ("04_train.py", "--training.dtype", "bfloat16", "--no-training.fp8"),
    "fp8": ("04_train.py", *_FP8),
    "fp8, forward in bfloat16": ("-m", "benchmarks.train_tiny", "forward", *_FP8),
    "fp8, backward in bfloat16": ("-m", "benchmarks.train_tiny", "backward", *_FP8),
}


def plain(run: Path) -> None:
    """The two loops take turns, pack by pack, each on a model of its own."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import ArrowDataset, CollateFn

    _, config = parse(["--run", str(run)], "")
    settings, dataset = config.training, run / "02_hidden" / DATASET
    rows = summary_of(run, "02_hidden")
    shards = _shards(config, run, 0, rows["train"])
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
    step = _step(ours, config)
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
    """Each seed every way, in copies of the run; judged after the same steps, so after the same tokens."""
    cores: Queue[int] = Queue()
    for core in sorted(os.sched_getaffinity(0)):
        cores.put(core)

    def one(seed: int, way: str) -> dict[str, float]:
        core = cores.get()
        try:
            with tempfile.TemporaryDirectory() as folder:
                figures = _of_one_training(run, Path(folder) / "run", way, seed, core)
        finally:
            cores.put(core)
        print(f"{way}, seed {seed}: {figures}", flush=True)
        return figures

    with ThreadPoolExecutor(cores.qsize()) as trainings:
        started = {way: [trainings.submit(one, seed, way) for seed in SEEDS] for way in WAYS}
        found = {way: [training.result() for training in of_way] for way, of_way in started.items()}

    def ratios(ours: str, theirs: str) -> dict[str, Any]:
        pairs = list(zip(found[ours], found[theirs], strict=True))
        return {name: over_seeds([one[name] / other[name] for one, other in pairs]) for name in found[ours][0]}

    def figures(way: str) -> dict[str, Any]:
        return {name: over_seeds([row[name] for row in found[way]]) for name in found[way][0]}

    write_result(
        "train_tiny_fp8",
        module="train_tiny",
        ours=figures("fp8"),
        peer={way: figures(way) for way in WAYS if way != "fp8"},
        ratio={f"{way}, over bfloat16": ratios(way, "bfloat16") for way in WAYS if way != "bfloat16"},
        unit="loss, a sum over the TTT steps; tokens per verifier step",
        notes=[
            f"seeds {list(SEEDS)}, the same first weights and order of the data every way; a ratio is of the same seed",
            "training_loss_of_second_half is in the training's own arithmetic; acceptance in float32 on validation "
            "samples",
            "target: loss after the same tokens within 1 %; the fp8 products run on a CPU with the same arithmetic",
        ],
    )


def _of_one_training(run: Path, copy: Path, way: str, seed: int, core: int) -> dict[str, float]:
    checkpoints = train_copy(run, copy, *WAYS[way], "--training.seed", str(seed), core=core)
    losses = [row["train"]["loss"] for row in read_jsonl(copy / "04_train" / METRICS) if "train" in row]
    best = checkpoints.best()
    assert best is not None
    at_best, at_last = score([best, checkpoints.whole()[-1]], run)
    return {
        "training_loss_of_second_half": statistics.mean(losses[len(losses) // 2 :]),
        "last_weights_in_float32_on_validation_samples": at_last["loss"],
        "acceptance_of_best": at_best["greedy"],
        "sampled_acceptance_of_best": at_best["sampled"],
    }


def train_copy(run: Path, copy: Path, *command: str, core: int | None = None) -> Checkpoints:
    """Stage 04, given by script or module and flags, in a copy of a run that is done up to stage 03; the checkpoint of
    every validation is kept."""
    shutil.copytree(run, copy, symlinks=True, ignore=shutil.ignore_patterns("04_*", "05_*", "06_*", "set_aside"))
    flags = ["--run", str(copy), "--training.keep_checkpoints", "1000"]
    run_measured([sys.executable, *command, *flags], log=copy / "log", core=core)
    return Checkpoints(copy / "04_train" / CHECKPOINTS, keep=1000)


def fp8_but_for(direction: str, flags: Sequence[str]) -> None:
    """Stage 04 in fp8 with the products of one direction, "forward" or "backward", in bfloat16."""

    whole = fp8_products._Linear

    class Linear(whole):
        @staticmethod
        def forward(ctx: Any, rows: torch.Tensor, plain: torch.Tensor, weight: fp8_products.Weight) -> torch.Tensor:
            product = whole.forward(ctx, rows, plain, weight)
            ctx.rows = rows
            return nn.functional.linear(rows, plain) if direction == "forward" else product

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
            if direction == "forward":
                return whole.backward(ctx, *gradients)
            of_rows = gradients[0] @ ctx.weight.plain if ctx.needed else None
            return of_rows, gradients[0].t() @ ctx.rows, None

    fp8_products._Linear = Linear  # type: ignore[misc]
    sys.argv = ["04_train.py", *flags]
    runpy.run_path(sys.argv[0], run_name="__main__")


def score(saved: Sequence[Saved], run: Path) -> list[dict[str, float]]:
    """Loss and expected acceptance length of checkpoints on a run's validation samples, in float32."""
    _, config = parse(["--run", str(run)], "")
    settings, rows = config.training, summary_of(run, "02_hidden")
    shards = _shards(config, run, rows["train"], rows["val"])
    packs = [step[0] for step in order(shards.lengths, settings.pack_tokens, 1, 1, 0, None).steps]
    draft = _draft(config, run)
    step = _step(draft, config)
    found = []
    for one in saved:
        load_weights(one.path, draft)
        sums: dict[str, float] = defaultdict(float)
        with torch.no_grad():
            for pack in shards.packs(packs, 0):
                for name, value in step(pack, measure=True)[1].items():
                    sums[name] += float(value)
        metrics = summarise(sums, len(packs), settings.ttt_steps)
        found.append(
            {
                "loss": metrics["loss"],
                "greedy": metrics["expected_acceptance_length"],
                "sampled": metrics["expected_sampled_acceptance_length"],
            }
        )
    return found


def _shards(config: Config, run: Path, first: int, count: int) -> Shards:
    settings = config.training
    return Shards(
        run / "02_hidden" / DATASET,
        first,
        count,
        pack_tokens=settings.pack_tokens,
        ttt_steps=settings.ttt_steps,
        whole=config.draft.num_layers > 1,
        pinned=False,
    )


def _step(draft: Any, config: Config) -> TrainingStep:
    settings = config.training
    return TrainingStep(
        draft,
        ttt_steps=settings.ttt_steps,
        loss_config=resolve_loss_config(settings.loss, "eager"),
        loss_decay=settings.ttt_step_loss_decay,
        dtype=torch.float32,
    )


def main() -> None:
    """One of the two."""
    if sys.argv[1:] and sys.argv[1] in ("forward", "backward"):  # of `WAYS`
        fp8_but_for(sys.argv[1], sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["plain", "fp8"])
    parser.add_argument("--run", type=Path, required=True)
    arguments = parser.parse_args()
    {"plain": plain, "fp8": fp8}[arguments.what](arguments.run)


if __name__ == "__main__":
    main()
