"""Every patch to speculators, in one place: what, why, and the version that makes it unnecessary.

speculators 0.9.0's `Trainer` asks torch for an accelerator in three places, so it cannot run on a CPU; it draws its
own bar for every epoch; it writes checkpoints in place, in bf16; it chooses the best one by loss; and on SIGTERM it
saves what it never resumes and exits 0. `DraftTrainer` is that Trainer with these replaced.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from speculators.train import checkpointer as _checkpointer
from speculators.train import trainer as _trainer

from eagle3_train.run import write_text

TRAINING_STATE = "training_state.json"
CHECKPOINT_FILES = ("config.json", "model.safetensors", "optimizer_state_dict.pt", TRAINING_STATE)
_SAVING, _REPLACED = ".saving", ".replaced-"


class _HostTimer(_trainer._StepTimer):
    """Step timer of a machine without accelerator: there is no queue to synchronise with."""

    def mark(self, name: str) -> None:
        if self.enabled:
            self._marks[name] = time.perf_counter()

    def now(self) -> float | None:
        return time.perf_counter() if self.enabled else None


class DraftTrainer(_trainer.Trainer):
    """speculators' Trainer on any device, with atomic fp32 checkpoints chosen by acceptance.

    Args:
        on_step: called after each optimizer step.
        estimate: expected acceptance length from the metrics of a validation; the best checkpoint has the highest.
    """

    def __init__(
        self,
        *args: Any,
        on_step: Callable[[DraftTrainer], None],
        estimate: Callable[[dict[str, float]], float],
        **kwargs: Any,
    ):
        self._on_step = on_step
        self._estimate = estimate
        self.epoch = 0
        _trainer.tqdm = lambda iterable, **_bar: iterable  # one bar for the whole training, drawn by the stage
        if not torch.accelerator.is_available():
            _trainer._StepTimer = _HostTimer
            _checkpointer.get_current_device = lambda: "cpu"
        super().__init__(*args, **kwargs)

    def setup_trainer(self) -> None:
        if not torch.accelerator.is_available():
            self.local_rank = "cpu"  # type: ignore[assignment]
            self.device_type = "cpu"
        super().setup_trainer()

    def train_epoch(self, epoch: int, **_step_callback: Any) -> None:
        self.epoch = epoch
        super().train_epoch(epoch, step_callback=lambda: self._on_step(self))

    def run_training(self) -> None:
        self._judge_last_checkpoint()
        # Without speculators' signal handling: the stage stops at a step's end and saves where it can resume.
        _trainer.Trainer.run_training.__wrapped__(self)

    def _judge_last_checkpoint(self) -> None:
        """Make up for a kill between an epoch's checkpoint and its validation, or while the best was linked."""
        epoch = self.checkpointer.previous_epoch
        if epoch == self.current_epoch - 1 >= 0 and not self.checkpointer.val_metrics_path(epoch).exists():
            self.maybe_update_best(epoch, self.val_epoch(epoch))
        judged = [
            (self._estimate(json.loads(path.read_text())), -int(path.parent.name))
            for path in self.checkpointer.path.glob("[0-9]*/val_metrics.json")
        ]
        if judged and self.checkpointer.read_best_epoch() is None:
            self.checkpointer.update_best_symlink(-max(judged)[1])

    def maybe_save_checkpoint(self, epoch: int | str, local_step: int = 0) -> None:
        assert isinstance(epoch, int)
        every = self.config.checkpoint_freq
        last = epoch + 1 == self.config.num_epochs
        if local_step or every < 1 or last or (epoch + 1) % int(every) == 0:
            self.save(epoch, local_step)

    def save(self, epoch: int, local_step: int) -> None:
        """Write checkpoint `epoch` beside, then rename it into place; `local_step` 0 means the epoch is complete."""
        checkpointer, final = self.checkpointer, self.checkpointer.path / str(epoch)
        staging = checkpointer.path / _SAVING
        shutil.rmtree(staging, ignore_errors=True)
        checkpointer.path = staging
        try:
            # fp32, not speculators' bf16: a resumed run must go on from the weights it had.
            checkpointer.save_checkpoint(self.model, self.optimizers, epoch, float_dtype=torch.float32)
            if self.schedulers:
                checkpointer.save_scheduler_state_dict(self.schedulers, epoch)
            self._save_training_state(epoch, local_step)
        finally:
            checkpointer.path = final.parent
        for path in (staging / str(epoch)).iterdir():
            with path.open("rb") as written:
                os.fsync(written.fileno())
        earlier = final.with_name(f"{_REPLACED}{epoch}")
        if final.exists():
            os.rename(final, earlier)
        os.rename(staging / str(epoch), final)
        shutil.rmtree(earlier, ignore_errors=True)
        shutil.rmtree(staging)

    def maybe_update_best(self, epoch: int, val_metrics: dict | None) -> None:
        if val_metrics is None or not (self.checkpointer.path / str(epoch)).exists():
            return
        write_text(self.checkpointer.val_metrics_path(epoch), json.dumps(val_metrics))
        best = self.checkpointer.read_best_epoch()
        path = self.checkpointer.val_metrics_path(best) if best is not None else None
        reached = self._estimate(json.loads(path.read_text())) if path and path.exists() else 0.0
        if best is None or self._estimate(val_metrics) > reached:
            self.checkpointer.update_best_symlink(epoch)


def _is_whole(folder: Path) -> bool:
    """Whether every file is there, and the weights and the optimizer's state end as their formats do."""
    if not all((folder / name).is_file() for name in CHECKPOINT_FILES):
        return False
    try:
        with safe_open(folder / "model.safetensors", framework="pt"):
            return zipfile.is_zipfile(folder / "optimizer_state_dict.pt")
    except (SafetensorError, OSError):
        return False


def put_aside_torn_checkpoints(checkpoints: Path) -> list[Path]:
    """Rename checkpoint folders with a missing file, which speculators would trust; returns their new paths."""
    torn = []
    shutil.rmtree(checkpoints / _SAVING, ignore_errors=True)
    for earlier in checkpoints.glob(f"{_REPLACED}*"):  # killed between the two renames of `save`
        final = earlier.with_name(earlier.name.removeprefix(_REPLACED))
        if final.exists():
            shutil.rmtree(earlier)
        else:
            os.rename(earlier, final)
    for folder in sorted(checkpoints.glob("*")):
        if folder.name.isdigit() and not folder.is_symlink() and not _is_whole(folder):
            aside = folder.with_name(f"torn-{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}")
            os.rename(folder, aside)
            torn.append(aside)
    return torn
