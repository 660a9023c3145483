"""Checkpoints of stage 04: whole or not there, the last few and the best one kept.

    checkpoints/step_000500/   model.safetensors (fp32: the trained weights and the head), config.json, optimizer.pt
                               (optimizers, schedules, RNG), state.json (written last: sizes of the others, metrics)
    checkpoints/checkpoint_best -> step_000500, the highest expected acceptance length of a validation
    checkpoints/torn-step_...  what was found not whole, for a person to look at

`speculators` reads model.safetensors and config.json. The verifier's embedding is not repeated in every checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from eagle3_train.errors import PipelineError
from eagle3_train.run import save_tensors, write_text

BEST = "checkpoint_best"  # speculators' name for it
MODEL, CONFIG, OPTIMIZER, STATE = "model.safetensors", "config.json", "optimizer.pt", "state.json"
_SAVING, _REMOVING = ".saving", ".removing-"
# Of the verifier, not of the draft.
_NOT_SAVED = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight")


@dataclass(frozen=True)
class Saved:
    """A whole checkpoint.

    Attributes:
        step: optimizer steps made.
        epoch: epoch, from 0, that the last of them belongs to.
        metrics: of the validation at this step, or None where there was none.
        expected_acceptance_length: from those metrics.
    """

    path: Path
    step: int
    epoch: int
    metrics: dict[str, float] | None
    expected_acceptance_length: float | None

    @classmethod
    def read(cls, path: Path) -> Saved:
        """From a whole checkpoint's folder."""
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        return cls(path, state["step"], state["epoch"], state["metrics"], state["expected_acceptance_length"])


class Checkpoints:
    """The folder of checkpoints; `keep` newest ones stay."""

    def __init__(self, folder: Path, keep: int):
        self.folder = folder
        self._keep = keep

    def whole(self) -> list[Saved]:
        """Every whole checkpoint, oldest first."""
        saved = [Saved.read(path) for path in self.folder.glob("step_*") if _is_whole(path)]
        return sorted(saved, key=lambda one: one.step)

    def put_aside_torn(self) -> list[Path]:
        """Rename what is not whole, so that nothing goes on from it; returns the new paths."""
        for unfinished in (self.folder / _SAVING, *self.folder.glob(f"{_REMOVING}*")):
            shutil.rmtree(unfinished, ignore_errors=True)
        torn = []
        for path in sorted(self.folder.glob("step_*")):
            if not _is_whole(path):
                aside = path.with_name(f"torn-{path.name}-{time.strftime('%Y%m%d-%H%M%S')}")
                os.rename(path, aside)
                torn.append(aside)
        return torn

    def save(
        self, model: Any, training: dict[str, Any], step: int, epoch: int, metrics: dict[str, float] | None,
        expected_acceptance_length: float | None,
    ) -> None:  # fmt: skip
        """Write a checkpoint beside, rename it into place, link the best, drop what is older.

        Args:
            model: the draft.
            training: what torch.save keeps in optimizer.pt.
        """
        staging, final = self.folder / _SAVING, self.folder / f"step_{step:06d}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        weights = {
            name: tensor.detach().float().cpu() if tensor.is_floating_point() else tensor.cpu()
            for name, tensor in model.state_dict().items()
            if name not in _NOT_SAVED
        }
        save_tensors(staging / MODEL, weights, {"format": "pt"})
        model.config.architectures = [type(model).__name__]
        model.config.dtype = torch.float32
        model.config.save_pretrained(staging)
        with (staging / OPTIMIZER).open("wb") as file:
            torch.save(training, file)
            file.flush()
            os.fsync(file.fileno())
        state = {
            "step": step,
            "epoch": epoch,
            "metrics": metrics,
            "expected_acceptance_length": expected_acceptance_length,
            "files": {name: (staging / name).stat().st_size for name in (MODEL, CONFIG, OPTIMIZER)},
        }
        write_text(staging / STATE, json.dumps(state, indent=1) + "\n")
        os.rename(staging, final)
        self.tidy()

    def tidy(self) -> None:
        """Link the best checkpoint and drop those that are neither the best nor among the newest."""
        kept = self.whole()
        judged = [saved for saved in kept if saved.expected_acceptance_length is not None]
        best = max(judged, key=lambda saved: (saved.expected_acceptance_length, -saved.step), default=None)
        if best is not None:
            link = self.folder / f".{BEST}"
            link.unlink(missing_ok=True)
            link.symlink_to(best.path.name)
            os.replace(link, self.folder / BEST)
        for saved in kept[: -self._keep]:
            if saved != best:
                # Renamed first: a kill must not leave half of it to look like a checkpoint.
                removing = self.folder / f"{_REMOVING}{saved.path.name}"
                os.rename(saved.path, removing)
                shutil.rmtree(removing)

    def best(self) -> Saved | None:
        """The checkpoint with the highest expected acceptance length, the earliest of equals."""
        link = self.folder / BEST
        return Saved.read(link.resolve()) if link.exists() else None


def _is_whole(path: Path) -> bool:
    try:
        files = json.loads((path / STATE).read_text(encoding="utf-8"))["files"]
        return all((path / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def load_weights(path: Path, model: Any) -> None:
    """Put a checkpoint's weights into `model`.

    Raises:
        PipelineError: the checkpoint is of another model.
    """
    weights = load_file(path / MODEL)
    expected = {name: tensor for name, tensor in model.state_dict().items() if name not in _NOT_SAVED}
    for name in sorted({**weights, **expected}):
        there, here = _shape(weights, name), _shape(expected, name)
        if there != here:
            raise PipelineError(
                f"{path}: a checkpoint of another model ({name}: {there} there, {here} here). "
                "Set it aside with --force, or use another --run"
            )
    model.load_state_dict(weights, strict=False)


def _shape(tensors: dict[str, torch.Tensor], name: str) -> list[int] | None:
    return list(tensors[name].shape) if name in tensors else None
