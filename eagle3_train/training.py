"""Stage 04: speculators' Eagle3DraftModel, trained on the shards of stage 02 by our own step.

04_train/checkpoints/             see checkpoints.py; `checkpoint_best` has the highest expected acceptance length
04_train/metrics.jsonl            a line for every logged step and every validation; what a warm start took over
04_train/trackers/                the same, for TensorBoard
04_train/curves.png               redrawn at every validation

The order of all packs is drawn before the first step, for all GPUs together, so a training that was stopped, or that
goes on with another number of GPUs, takes the steps it would have taken.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_train import charts, verifier, vocabulary
from eagle3_train.config import Config
from eagle3_train.errors import PipelineError
from eagle3_train.extraction import DATASET, LINKS, train_lengths
from eagle3_train.progress import bar
from eagle3_train.run import TRAIN, Result, Stage, StageSpec, read_jsonl

if TYPE_CHECKING:
    from eagle3_train.vocabulary import VocabMap
    from eagle3_train.waves import Wave

CHECKPOINTS, METRICS, CURVES = "checkpoints", "metrics.jsonl", "curves.png"
_VALIDATION_SHARE = 0.1  # of prepared data that names no split: speculators' own default


def spec(config: Config) -> StageSpec:
    """Stage 04 on this run's own states, or on a data set prepared elsewhere."""
    return dataclasses.replace(TRAIN, needs=()) if config.training.prepared_data else TRAIN


@dataclass(frozen=True)
class Data:
    """What is trained and validated on.

    Attributes:
        path: a data set in speculators' format; its first `train` rows are trained on, the last `val` validate.
        cut: training rows longer than a pack.
        wave: the part of the training that there are states for; None where there are states for all of it.
    """

    path: Path
    train: int
    val: int
    cut: int
    wave: Wave | None = None


def train(stage: Stage) -> Result:
    """Check the data, train to the end from the last whole checkpoint on, and say what came of it.

    Raises:
        PipelineError: the shards, the verifier's tensors or a checkpoint will not do.
    """
    from eagle3_train import training_loop, waves

    data = check_data(stage)
    if data.cut:
        print(f"{data.cut} samples are longer than training.pack_tokens and are cut to it")
    steps, timing = training_loop.run(stage, data)
    if data.wave is not None and data.wave.last_step < steps:
        raise waves.more_states(stage.run, data.wave.last_step)
    return _summarise(stage, steps, data, timing)


def check_data(stage: Stage) -> Data:
    """Look at every shard: whole, of its row's tokens, of the layers this verifier's draft reads.

    Raises:
        PipelineError: naming the first shard that will not do.
        MoreStates: the next step's states are not on disk.
    """
    config = stage.config
    prepared = config.training.prepared_data
    dataset = Path(prepared) if prepared else stage.input("02_hidden") / DATASET
    wave, absent = _wave(stage, dataset) if config.in_waves else (None, set())
    data = check_dataset(
        dataset,
        verifier.captured_layer_ids(config.verifier),
        verifier.text_config(config.verifier).hidden_size,
        config.training.pack_tokens,
        remedy="prepare it again for this verifier" if prepared else "rerun 02_extract_hidden.py",
        absent=absent,
    )
    return dataclasses.replace(data, wave=wave)


def _wave(stage: Stage, dataset: Path) -> tuple[Wave, set[int]]:
    """The wave that is trained on, and the training rows that are not of it."""
    from eagle3_train import waves

    lengths = train_lengths(dataset)
    wave, rows = waves.of_training(stage, lengths)
    return wave, set(range(len(lengths))) - rows


def check_dataset(
    dataset: Path,
    layer_ids: list[int],
    hidden_size: int,
    pack_tokens: int,
    remedy: str,
    absent: Collection[int] = frozenset(),
) -> Data:
    """See `check_data`; rows that are `absent` need no shard.

    speculators drops what it cannot read without a word, and a short shard shifts every later document of a pack.
    """
    import datasets
    from safetensors import SafetensorError, safe_open

    try:
        table = datasets.load_from_disk(str(dataset))
    except (OSError, ValueError) as error:
        raise PipelineError(f"{dataset}: no data set in speculators' format ({error}); {remedy}") from None
    train = _training_rows(table, dataset, remedy)
    cut = 0
    rows = table.with_format(None).select_columns(["input_ids", "seq_len"])
    for number, row in enumerate(bar(rows, desc="04 checking shards", unit="shard")):
        cut += number < train and row["seq_len"] > pack_tokens
        if number in absent:
            continue
        path = dataset / LINKS / f"hs_{number}.safetensors"
        try:
            with safe_open(path, framework="pt") as shard:
                ids = shard.get_tensor("token_ids").tolist()
                shape = shard.get_slice("hidden_states").get_shape()
                layers = json.loads((shard.metadata() or {}).get("layer_ids", "null"))
        except (SafetensorError, OSError) as error:
            raise PipelineError(f"{path.resolve()}: not a whole shard ({error}); {remedy}") from None
        wanted = [row["seq_len"], len(layer_ids), hidden_size]
        if shape != wanted or layers not in (None, layer_ids):
            raise PipelineError(
                f"{path.resolve()}: states {shape} of layers {layers or '(not named)'}, wanted {wanted} [tokens of its "
                f"row, layers, this verifier's hidden size] of layers {layer_ids}; {remedy}"
            )
        if ids != row["input_ids"] or len(ids) != row["seq_len"]:
            raise PipelineError(f"{path.resolve()}: a shard of other tokens than its row; {remedy}")
    return Data(dataset, train, len(table) - train, cut)


def _training_rows(table: Any, dataset: Path, remedy: str) -> int:
    """How many of its first rows are trained on.

    Raises:
        PipelineError: not a table that speculators reads, or its rows are not training first, then validation.
    """
    columns = table.column_names
    if missing := {"input_ids", "loss_mask", "seq_len"} - set(columns):
        raise PipelineError(f"{dataset}: it has columns {columns}, but not {sorted(missing)}; {remedy}")
    rows = len(table)
    train = int(rows * (1 - _VALIDATION_SHARE))
    if "split" in columns:
        splits = table.with_format(None)["split"]
        train = sum(split == "train" for split in splits)
        if list(splits) != ["train"] * train + ["val"] * (rows - train):
            raise PipelineError(f"{dataset}: its splits must be train in the first rows, val in the last; {remedy}")
    if not 0 < train < rows:
        raise PipelineError(f"{dataset}: {rows} rows leave none to train on, or none to validate on; {remedy}")
    return train


def draft_vocabulary(stage: Stage, data: Data) -> VocabMap:
    """Of stage 03, or for prepared data drawn from what that data says."""
    target_size = verifier.text_config(stage.config.verifier).vocab_size
    if not stage.config.training.prepared_data:
        return vocabulary.load(stage.input("03_vocab"), target_size)
    counts = vocabulary.count_supervised(data.path, target_size)
    return vocabulary.choose(counts["train"], stage.config)


def _summarise(stage: Stage, steps: int, data: Data, timing: dict[str, float]) -> Result:
    from eagle3_train.checkpoints import Checkpoints

    settings = stage.config.training
    best = Checkpoints(stage.folder / CHECKPOINTS, settings.keep_checkpoints).best()
    assert best is not None
    assert best.metrics is not None
    sampled = best.metrics["expected_sampled_acceptance_length"]
    draw_curves(stage.folder, settings.ttt_steps)
    summary = {
        "steps": steps,
        "samples": data.train,
        "best_epoch": best.epoch + 1,
        "best_step": best.step,
        "val_loss": round(best.metrics["loss"], 4),
        "expected_acceptance_length": round(best.expected_acceptance_length or 0, 4),
        "expected_sampled_acceptance_length": round(sampled, 4),
        "cut": data.cut,
        **timing,
    }
    line = (
        f"{steps} steps; best at step {best.step}, in epoch {best.epoch + 1}: validation loss {summary['val_loss']}, "
        f"expected acceptance length {best.expected_acceptance_length:.2f} greedy, {sampled:.2f} sampled"
    )
    return Result([CHECKPOINTS, CURVES], summary, [line], counted=[METRICS])


def draw_curves(folder: Path, ttt_steps: int) -> None:
    """`curves.png` from `metrics.jsonl`; a step made twice counts once."""
    train: dict[int, float] = {}
    val: dict[int, float] = {}
    expected: dict[int, float] = {}
    for row in read_jsonl(folder / METRICS):
        if "train" in row:
            train[row["step"]] = row["train"]["loss"]
        elif "val" in row:
            val[row["step"]] = row["val"]["loss"]
            expected[row["step"]] = row["val"]["expected_acceptance_length"]
    charts.training(folder / CURVES, train, val, expected, ttt_steps)
