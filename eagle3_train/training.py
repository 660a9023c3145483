"""Stage 04: speculators' Eagle3DraftModel, trained by its Trainer on the shards of stage 02.

04_train/checkpoints/<epoch>/    model.safetensors (fp32), config.json, optimizer, schedule, training_state.json
04_train/checkpoints/checkpoint_best -> <epoch> with the highest expected acceptance length on the validation split
04_train/metrics.jsonl           speculators' metrics of every logged step and every validation
04_train/curves.png
"""

from __future__ import annotations

import json
import logging
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from eagle3_train import charts, verifier, vocabulary
from eagle3_train.config import Config
from eagle3_train.errors import PipelineError, Terminated
from eagle3_train.extraction import DATASET, LINKS
from eagle3_train.progress import bar
from eagle3_train.run import JsonlLog, Result, Stage, read_jsonl

if TYPE_CHECKING:
    from torch.utils.data import DataLoader
    from tqdm import tqdm
    from transformers import PretrainedConfig

    from eagle3_train.speculators_patch import DraftTrainer

CHECKPOINTS, METRICS, CURVES = "checkpoints", "metrics.jsonl", "curves.png"
BEST = "checkpoint_best"  # speculators' name for the link to the best checkpoint
PREFETCHED_PACKS = 4  # that each reading process keeps ready
# Metrics of a step cost a synchronisation with the GPU.
_LOG_EVERY_STEPS_ON_GPU = 10


def train(stage: Stage) -> Result:
    """Train to the end, going on from the last whole checkpoint."""
    import torch
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.cli import set_seed
    from speculators.train.dataloader import create_train_val_loaders
    from speculators.train.trainer import TrainerConfig

    from eagle3_train import speculators_patch

    _quiet_libraries()
    config, settings = stage.config, stage.config.training
    dataset = stage.input("02_hidden") / DATASET
    rows = check_dataset(dataset, verifier.captured_layer_ids(config.verifier))
    set_seed(settings.seed)
    model = build_draft(config, stage.input("03_vocab"))
    train_loader, val_loader = create_train_val_loaders(
        data_path=str(dataset),
        total_seq_len=settings.pack_tokens,
        hidden_states_dtype=getattr(torch, settings.dtype),
        vllm_endpoint="",
        on_missing="raise",
        verifier_name_or_path=verifier.location(config.verifier),
        request_timeout=None,
        max_retries=0,
        generation_validation_retries=0,
        max_consecutive_generation_failures=1,
        hidden_size=model.config.transformer_layer_config.hidden_size,
        num_target_layers=len(model.target_layer_ids),
        num_workers=settings.data_workers,
        prefetch_factor=PREFETCHED_PACKS,
        preprocess=shift_batch,
        # The rows are ordered train, then val; the half row keeps the boundary whole in floating point.
        train_data_ratio=(rows["train"] + 0.5) / (rows["train"] + rows["val"]),
        seed=settings.seed,
    )
    train_kwargs, val_kwargs = model.get_trainer_kwargs(
        loss_fn=settings.loss,
        loss_implementation="fused" if torch.cuda.is_available() else "eager",
        ttt_steps=settings.ttt_steps,
        ttt_step_loss_decay=settings.ttt_step_loss_decay,
    )
    checkpoints = stage.folder / CHECKPOINTS
    checkpoints.mkdir(exist_ok=True)
    for torn in speculators_patch.put_aside_torn_checkpoints(checkpoints):
        print(f"warning: {torn.name} is not a whole checkpoint; going on from an earlier one")
    steps = [_steps_in_epoch(train_loader, epoch) for epoch in range(settings.epochs)]
    progress = bar(total=sum(steps), desc="04 training", unit="step")
    with progress, _metrics_log(stage.folder / METRICS) as latest, _stop_requests() as stop:
        trainer = _make_trainer(
            model,
            TrainerConfig(
                lr=settings.lr,
                num_epochs=settings.epochs,
                save_path=str(checkpoints),
                resume_from_checkpoint=True,
                train_call_kwargs=train_kwargs,
                val_call_kwargs=val_kwargs,
                optimizer=settings.optimizer,
                weight_decay=settings.weight_decay,
                scheduler_type=settings.scheduler,
                scheduler_warmup_ratio=settings.warmup_ratio,
                scheduler_total_steps=sum(steps),
                checkpoint_freq=settings.checkpoint_epochs,
                hidden_states_dtype=getattr(torch, settings.dtype),
                log_freq=_LOG_EVERY_STEPS_ON_GPU if torch.cuda.is_available() else 1,
            ),
            train_loader,
            val_loader,
            on_step=lambda t: _after_step(t, progress, latest, stop, steps, stage.folder),
            estimate=lambda metrics: expected_acceptance_length(metrics, settings.ttt_steps),
        )
        if trainer.global_step:
            print(f"going on after step {trainer.global_step} of {sum(steps)}")
        started, resumed_at = time.monotonic(), trainer.global_step
        progress.update(resumed_at)
        progress.unpause()
        trainer.run_training()
    if stop:
        raise stop[0]
    # Of this attempt alone and without start-up: what the plan of a larger run is drawn from.
    timing = {
        "training_seconds": round(time.monotonic() - started, 2),
        "trained_tokens": round(rows["train_tokens"] * settings.epochs * (sum(steps) - resumed_at) / sum(steps)),
    }
    return _summarise(stage, sum(steps), rows, timing)


def _make_trainer(model: Any, config: Any, *loaders: Any, **hooks: Any) -> DraftTrainer:
    """The trainer, at the last whole checkpoint.

    Raises:
        PipelineError: the checkpoint is of another model.
    """
    from eagle3_train.speculators_patch import DraftTrainer

    try:
        return DraftTrainer(model, config, *loaders, **hooks)
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise
        raise PipelineError(
            f"{config.save_path}: a checkpoint of another model ({str(error).splitlines()[-1].strip()}). "
            "Set it aside with --force, or use another --run"
        ) from None


def check_dataset(dataset: Path, layer_ids: list[int]) -> dict[str, int]:
    """Rows of each split and training tokens, after a look at every shard: whole, of its row's tokens and the layers.

    speculators drops what it cannot read without a word, and a short shard shifts every later document of a pack.

    Raises:
        PipelineError: naming the first shard that will not do.
    """
    import datasets
    from safetensors import SafetensorError, safe_open

    counts = {"train": 0, "val": 0, "train_tokens": 0}
    table = datasets.load_from_disk(str(dataset)).with_format(None).remove_columns(["loss_mask"])
    for number, row in enumerate(bar(table, desc="04 checking shards", unit="shard")):
        path = dataset / LINKS / f"hs_{number}.safetensors"
        try:
            with safe_open(path, framework="pt") as shard:
                ids = shard.get_tensor("token_ids").tolist()
                shape = shard.get_slice("hidden_states").get_shape()
                layers = json.loads((shard.metadata() or {}).get("layer_ids", "null"))
        except (SafetensorError, OSError) as error:
            raise PipelineError(f"{path.resolve()}: not a whole shard ({error}); rerun 02_extract_hidden.py") from None
        if shape[0] != row["seq_len"] or layers != layer_ids:
            raise PipelineError(
                f"{path.resolve()}: {shape[0]} tokens of layers {layers}, but its row has {row['seq_len']} tokens and "
                f"this verifier's layers are {layer_ids}; rerun 02_extract_hidden.py"
            )
        if ids != row["input_ids"]:
            raise PipelineError(f"{path.resolve()}: a shard of other tokens than its row; rerun 02_extract_hidden.py")
        counts[row["split"]] += 1
        counts["train_tokens"] += row["seq_len"] if row["split"] == "train" else 0
    return counts


def build_draft(config: Config, vocab_folder: Path) -> Any:
    """A fresh Eagle3DraftModel on the verifier's frozen embedding, head and final norm.

    Raises:
        PipelineError: one of the verifier's three tensors is missing, packed or of another shape.
    """
    import torch
    from speculators import Eagle3DraftModel

    verifier.head_weights(config.verifier)
    sizes = verifier.text_config(config.verifier)
    vocab = vocabulary.load(vocab_folder, sizes.vocab_size)
    draft = config.draft
    model = Eagle3DraftModel.from_training_args(
        draft_layer_config(config),
        t2d=vocab.t2d,
        d2t=vocab.d2t,
        draft_vocab_size=vocab.size,
        norm_before_residual=draft.norm_before_residual,
        norm_before_fc=draft.norm_before_fc,
        fc_norm=draft.fc_norm,
        norm_output=draft.norm_output,
        ttt_steps=config.training.ttt_steps,
        verifier_name_or_path=verifier.location(config.verifier),
        draft_attn_impl="simple_flex_attention" if torch.cuda.is_available() else "sdpa",
        target_layer_ids=verifier.aux_layer_ids(config.verifier),
        trust_remote_code=config.verifier.trust_remote_code,
    )
    # Its weights are loaded; what is kept must name no path of this machine.
    model.config.speculators_config.verifier.name_or_path = verifier.hub_name(
        config.verifier, config.export.verifier_name
    )
    return model


def draft_layer_config(config: Config) -> PretrainedConfig:
    """The draft's Llama layer: sizes, rope (with its scaling) and context from the verifier, shape from the preset."""
    from speculators.train.cli import create_transformer_layer_config

    draft = config.draft
    layers = list(range(draft.num_layers))
    layer = create_transformer_layer_config(
        verifier.location(config.verifier),
        num_layers=draft.num_layers,
        draft_arch="llama",
        hidden_act=None,
        sliding_window=draft.sliding_window or verifier.text_config(config.verifier).max_position_embeddings,
        full_attention_indices=layers if draft.sliding_window is None else [],
        trust_remote_code=config.verifier.trust_remote_code,
    )
    # speculators takes these from the verifier, where under MLA they mean something else.
    layer.num_attention_heads = draft.num_attention_heads
    layer.num_key_value_heads = draft.num_key_value_heads
    layer.head_dim = draft.head_dim
    layer.intermediate_size = draft.intermediate_size
    return layer


def _steps_in_epoch(loader: DataLoader, epoch: int) -> int:
    # The packing is drawn anew each epoch, so their numbers of steps differ by a few.
    return len(loader.batch_sampler._generate_batches(epoch))  # type: ignore[union-attr]


def _after_step(
    trainer: DraftTrainer,
    progress: tqdm,
    latest: dict[str, Any],
    stop: list[BaseException],
    steps: list[int],
    folder: Path,
) -> None:
    progress.update()
    metrics = latest.get("train")
    if metrics:
        if metrics["error_records"]:
            raise PipelineError(f"{folder}: a shard could not be read during training; rerun 02_extract_hidden.py")
        progress.set_postfix_str(f"epoch {trainer.epoch + 1}/{len(steps)}, loss {metrics['loss']:.3f}", refresh=False)
    if stop:
        trainer.save(trainer.epoch, trainer.global_step - sum(steps[: trainer.epoch]))
        raise stop[0]


@contextmanager
def _stop_requests() -> Iterator[list[BaseException]]:
    """Collects Ctrl-C and SIGTERM, to be obeyed between two steps, where weights and optimizer agree."""
    asked: list[BaseException] = []

    def note(number: int, _frame: FrameType | None) -> None:
        asked.append(KeyboardInterrupt() if number == signal.SIGINT else Terminated())

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _metrics_log(path: Path) -> Iterator[dict[str, Any]]:
    """Writes speculators' metrics to `path`; yields a dict that holds the latest ones."""
    latest: dict[str, Any] = {}
    logger = logging.getLogger("speculators.metrics")

    class Writer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            row: dict[str, Any] = dict(record.msg)  # type: ignore[arg-type]
            if "val" in row:
                row["step"] = record.step  # type: ignore[attr-defined]
            latest.update(row)
            log.append(row)

    with JsonlLog(path) as log:
        handler = Writer()
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        try:
            yield latest
        finally:
            logger.removeHandler(handler)


def expected_acceptance_length(metrics: dict[str, float], ttt_steps: int) -> float:
    """Tokens per verifier step if vLLM drafts `ttt_steps` tokens greedily.

    1 (the verifier's own token) + sum over k of P(draft tokens 0..k all right), the latter being speculators'
    `full_acc_k` on the validation split: the chain of conditional acceptances, as in EAGLE-3 (arXiv 2503.01840).
    """
    return 1 + sum(metrics[f"full_acc_{step}_epoch"] for step in range(ttt_steps))


def _quiet_libraries() -> None:
    """Keep the screen for our own bar and messages."""
    from loguru import logger
    from transformers.utils import logging as transformers_logging

    logger.disable("speculators")
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*pin_memory.*no accelerator.*")
    warnings.filterwarnings("ignore", message="In CPU autocast")  # float32 is meant, and autocast has nothing to do


def _summarise(stage: Stage, steps: int, rows: dict[str, int], timing: dict[str, float]) -> Result:
    ttt_steps = stage.config.training.ttt_steps
    best = stage.folder / CHECKPOINTS / BEST
    metrics = json.loads((best / "val_metrics.json").read_text(encoding="utf-8"))
    epoch = int(best.resolve().name)
    expected = expected_acceptance_length(metrics, ttt_steps)
    charts.training(stage.folder / CURVES, *_curves(stage.folder / METRICS, ttt_steps), ttt_steps)
    summary = {
        "steps": steps,
        "samples": rows["train"],
        "best_epoch": epoch + 1,
        "val_loss": round(metrics["loss_epoch"], 4),
        "expected_acceptance_length": round(expected, 4),
        **timing,
    }
    line = (
        f"{steps} steps; best after epoch {epoch + 1}: validation loss {summary['val_loss']}, "
        f"expected acceptance length {expected:.2f}"
    )
    return Result([CHECKPOINTS, CURVES], summary, [line], counted=[METRICS])


def _curves(path: Path, ttt_steps: int) -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
    """Training loss, validation loss and expected acceptance length, each by step; a repeated step counts once."""
    train: dict[int, float] = {}
    val: dict[int, float] = {}
    expected: dict[int, float] = {}
    for row in read_jsonl(path):
        if "train" in row:
            train[row["global_step"]] = row["train"]["loss"]
        else:
            val[row["step"]] = row["val"]["loss_epoch"]
            expected[row["step"]] = expected_acceptance_length(row["val"], ttt_steps)
    return train, val, expected
