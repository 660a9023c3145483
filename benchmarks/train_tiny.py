"""Stage 04 on the tiny verifier's own states, on a CPU: our step beside a plain loop, and fp8 beside bf16.

    plain   the same packs and optimizer: speculators' model, called as it is, in a loop of five lines; seconds a step
    fp8     the embedded default trained in fp8, in bfloat16 and, to see what any rounding does, in float32: loss after
            the same tokens and acceptance, three seeds each

    python -m benchmarks.train_tiny plain | fp8 --run runs/tiny     2 and 20 minutes (2 busy cores); done up to stage 03

Writes benchmarks/results/train_tiny_<what>.json.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from speculators.losses import resolve_loss_config

from benchmarks.common import over_seeds, run_measured, spread, summary_of, write_result
from eagle3_train import verifier, vocabulary
from eagle3_train.checkpoints import Checkpoints, Saved, load_weights
from eagle3_train.config import Config, parse
from eagle3_train.draft import build_draft
from eagle3_train.extraction import DATASET
from eagle3_train.packs import order
from eagle3_train.run import read_jsonl
from eagle3_train.shards import Shards
from eagle3_train.step import TrainingStep, expected_acceptance_length, summarise
from eagle3_train.training import CHECKPOINTS, METRICS

STEPS = 40
SEEDS = (0, 1, 2)
WAYS = {
    "float32": ("--training.dtype", "float32", "--no-training.fp8"),
    "bfloat16": ("--training.dtype", "bfloat16", "--no-training.fp8"),
    "fp8": ("--training.dtype", "bfloat16", "--training.fp8"),
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
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for seed in SEEDS:
        for way, flags in WAYS.items():
            with tempfile.TemporaryDirectory() as folder:
                copy = Path(folder) / "run"
                checkpoints = train_copy(run, copy, *flags, "--training.seed", str(seed))
                rows = list(read_jsonl(copy / "04_train" / METRICS))
                best, last = checkpoints.best(), checkpoints.whole()[-1]
                assert best is not None
                at_best, at_last = score([best, last], run)
                of_training, of_training_in_fp8 = (score([last], run, "train", use_fp8=on)[0] for on in (False, True))
            losses = [row["train"]["loss"] for row in rows if "train" in row]
            found[way].append(
                {
                    "training_loss_of_second_half": statistics.mean(losses[len(losses) // 2 :]),
                    "last_weights_in_float32_on_training_samples": of_training["loss"],
                    "last_weights_in_fp8_on_training_samples": of_training_in_fp8["loss"],
                    "last_weights_in_float32_on_validation_samples": at_last["loss"],
                    "acceptance_of_best": at_best["greedy"],
                    "sampled_acceptance_of_best": at_best["sampled"],
                }
            )
            print(f"{way}, seed {seed}: {found[way][-1]}", flush=True)

    def ratios(ours: str, theirs: str) -> dict[str, Any]:
        pairs = list(zip(found[ours], found[theirs], strict=True))
        return {name: over_seeds([one[name] / other[name] for one, other in pairs]) for name in found[ours][0]}

    def figures(way: str) -> dict[str, Any]:
        return {name: over_seeds([row[name] for row in found[way]]) for name in found[way][0]}

    write_result(
        "train_tiny_fp8",
        module="train_tiny",
        ours=figures("fp8"),
        peer={way: figures(way) for way in ("bfloat16", "float32")},
        ratio={"fp8_over_bfloat16": ratios("fp8", "bfloat16"), "bfloat16_over_float32": ratios("bfloat16", "float32")},
        unit="loss, a sum over the TTT steps; tokens per verifier step",
        notes=[
            f"seeds {SEEDS}, the same initial weights and order of the data every way; a ratio is of the same seed",
            "training_loss_of_second_half is in the training's own arithmetic; acceptance in float32 on validation "
            "samples",
            "target: loss after the same tokens within 1 %; the fp8 products run on a CPU with the same arithmetic",
        ],
    )


def train_copy(run: Path, copy: Path, *flags: str) -> Checkpoints:
    """Stage 04 in a copy of a run that is done up to stage 03; the checkpoint of every validation is kept."""
    shutil.copytree(run, copy, symlinks=True, ignore=shutil.ignore_patterns("04_*", "05_*", "06_*", "set_aside"))
    command = [sys.executable, "04_train.py", "--run", str(copy), "--training.keep_checkpoints", "1000", *flags]
    run_measured(command, log=copy / "log")
    return Checkpoints(copy / "04_train" / CHECKPOINTS, keep=1000)


def score(saved: Sequence[Saved], run: Path, split: str = "val", *, use_fp8: bool = False) -> list[dict[str, float]]:
    """Loss and expected acceptance length of checkpoints on a run's states, in float32 or with fp8's products."""
    _, config = parse(["--run", str(run)], "")
    settings, rows = config.training, summary_of(run, "02_hidden")
    shards = _shards(config, run, 0 if split == "train" else rows["train"], rows[split])
    packs = [step[0] for step in order(shards.lengths, settings.pack_tokens, 1, 1, 0, None).steps]
    draft = _draft(config, run)
    step = _step(draft, config, use_fp8=use_fp8)
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
                "greedy": expected_acceptance_length(metrics, settings.ttt_steps),
                "sampled": expected_acceptance_length(metrics, settings.ttt_steps, "sampled_acc"),
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


def _step(draft: Any, config: Config, *, use_fp8: bool = False) -> TrainingStep:
    settings = config.training
    return TrainingStep(
        draft,
        ttt_steps=settings.ttt_steps,
        loss_config=resolve_loss_config(settings.loss, "eager"),
        loss_decay=settings.ttt_step_loss_decay,
        dtype=torch.bfloat16 if use_fp8 else torch.float32,
        use_fp8=use_fp8,
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
