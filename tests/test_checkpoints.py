"""Contract of the checkpoints: one is whole or not there, whatever the moment of a kill, and the best is never lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig

from eagle3_train.checkpoints import BEST, CONFIG, MODEL, OPTIMIZER, STATE, Checkpoints, load_weights
from eagle3_train.errors import PipelineError

FILES = (MODEL, CONFIG, OPTIMIZER, STATE)
# Everything that Python itself does to a file or folder; each is announced before it is done.
EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.chmod", "shutil.rmtree"}


class Model(nn.Module):
    """Two trained weights, and one of the verifier's that no checkpoint repeats."""

    def __init__(self, value: float = 0.0):
        super().__init__()
        self.fc = nn.Linear(3, 2, bias=False)
        self.embed_tokens = nn.Embedding(4, 2)
        self.register_buffer("d2t", torch.arange(2))
        nn.init.constant_(self.fc.weight, value)
        self.config = PretrainedConfig()


def save(checkpoints: Checkpoints, step: int, expected: float | None = None) -> None:
    """A checkpoint whose weights and optimizer both hold its step."""
    metrics = None if expected is None else {"loss": 1.0}
    checkpoints.save(Model(step), {"step": torch.tensor(step)}, step, step // 10, metrics, expected)


def steps(checkpoints: Checkpoints) -> list[int]:
    return [saved.step for saved in checkpoints.whole()]


def best(checkpoints: Checkpoints) -> int | None:
    found = checkpoints.best()
    return found and found.step


def assert_holds(checkpoints: Checkpoints, step: int) -> None:
    """The newest is this one, and everything in it is its own."""
    newest = checkpoints.whole()[-1]
    assert newest.step == step
    model = Model()
    load_weights(newest.path, model)
    assert model.fc.weight.unique().tolist() == [step]
    assert torch.load(newest.path / OPTIMIZER, weights_only=True)["step"] == step


# ---- which are kept


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, expected in [(5, None), (10, 2.5), (15, None), (20, 2.4), (25, None), (30, 2.45)]:
        save(checkpoints, step, expected)
    assert steps(checkpoints) == [10, 25, 30]
    assert best(checkpoints) == 10
    save(checkpoints, 35, 2.6)
    assert steps(checkpoints) == [30, 35]
    assert best(checkpoints) == 35


def test_one_is_enough_to_keep(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (1, 2, 3):
        save(checkpoints, step)
    assert steps(checkpoints) == [3]
    assert checkpoints.best() is None
    assert not (tmp_path / BEST).is_symlink()


@pytest.mark.parametrize(
    ("judged", "expected"),
    [([2.2, 2.6, 2.4], 2), ([2.6, 2.4, 2.2], 1), ([2.2, 2.4, 2.6], 3), ([2.5, 2.5, 2.5], 1), ([None, 1.0, None], 2)],
)
def test_the_best_has_the_highest_acceptance_and_is_the_earliest_of_equals(
    tmp_path: Path, judged: list[float | None], expected: int
) -> None:
    for step, value in enumerate(judged, 1):
        save(Checkpoints(tmp_path, keep=9), step, value)  # a new process each time: nothing is remembered
    assert best(Checkpoints(tmp_path, keep=9)) == expected
    link = tmp_path / BEST
    assert link.readlink() == Path(f"step_{expected:06d}")


def test_beyond_a_million_steps_the_newest_is_still_the_newest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (999_998, 999_999, 1_000_000, 1_000_001):
        save(checkpoints, step)
    assert steps(checkpoints) == [1_000_000, 1_000_001]


def test_a_moved_folder_is_the_same(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path / "here", keep=2), 7, 2.0)
    shutil.copytree(tmp_path / "here", tmp_path / "there", symlinks=True)
    shutil.rmtree(tmp_path / "here")
    assert best(Checkpoints(tmp_path / "there", keep=2)) == 7
    assert_holds(Checkpoints(tmp_path / "there", keep=2), 7)


# ---- what is in one


def test_a_checkpoint_holds_the_draft_in_float32_without_what_is_the_verifiers(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    Checkpoints(tmp_path, keep=1).save(Model(0.5).bfloat16(), {}, 1, 0, None, None)
    weights = load_file(tmp_path / "step_000001" / MODEL)
    assert {name: tensor.dtype for name, tensor in weights.items()} == {"fc.weight": torch.float32, "d2t": torch.int64}
    assert json.loads((tmp_path / "step_000001" / CONFIG).read_text())["architectures"] == ["Model"]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda model: setattr(model, "fc", nn.Linear(5, 2, bias=False)), r"fc\.weight: \[2, 3\] there, \[2, 5\] here"),
        (lambda model: setattr(model, "more", nn.Linear(1, 1)), r"more\.bias: None there, \[1\] here"),
        (lambda model: delattr(model, "d2t"), r"d2t: \[2\] there, None here"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, other: Callable[[Model], None], said: str) -> None:
    save(Checkpoints(tmp_path, keep=1), 1)
    model = Model()
    other(model)
    with pytest.raises(PipelineError, match=rf"step_000001: a checkpoint of another model \({said}"):
        load_weights(tmp_path / "step_000001", model)


# ---- torn


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("spoil", [Path.unlink, empty, cut])
@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint_with_a_file_missing_empty_or_cut_is_put_aside(
    tmp_path: Path, name: str, spoil: Callable[[Path], None]
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    save(checkpoints, 1, 2.0)
    save(checkpoints, 2, 3.0)
    spoil(tmp_path / "step_000002" / name)
    if name == STATE and spoil is cut:  # its last newline alone: still whole
        cut(tmp_path / "step_000002" / name)
    assert steps(checkpoints) == [1]
    (aside,) = checkpoints.put_aside_torn()
    assert aside.name.startswith("torn-step_000002-")
    assert not (tmp_path / "step_000002").exists()
    assert checkpoints.put_aside_torn() == []
    checkpoints.tidy()
    assert best(checkpoints) == 1
    assert_holds(checkpoints, 1)


def test_without_its_best_the_folder_has_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    save(checkpoints, 1, 2.0)
    save(checkpoints, 2)
    (tmp_path / "step_000001" / MODEL).unlink()
    checkpoints.put_aside_torn()
    checkpoints.tidy()
    assert best(checkpoints) is None
    save(checkpoints, 3, 1.5)
    assert best(checkpoints) == 3


def killed_at(operation: int, work: Callable[[], Any]) -> bool:
    """Do the work in another process that ends as by kill -9 before its file operation of this number.

    Returns:
        Whether it came so far; otherwise the work was done.
    """
    child = os.fork()
    if not child:
        seen = 0

        def watch(event: str, _arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            seen += event in EVENTS
            if seen > operation and event in EVENTS:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@pytest.mark.parametrize("expected", [None, 3.0, 1.0])
def test_killed_between_any_two_file_operations_training_goes_on(tmp_path: Path, expected: float | None) -> None:
    """Of a save that drops one checkpoint, and takes over the link, or not."""
    before, whole = tmp_path / "before", tmp_path / "whole"
    for step, value in [(1, 2.0), (2, None), (3, None)]:
        save(Checkpoints(before, keep=2), step, value)
    shutil.copytree(before, whole, symlinks=True)
    save(Checkpoints(whole, keep=2), 4, expected)
    assert steps(Checkpoints(whole, keep=2)) == ([3, 4] if expected == 3.0 else [1, 3, 4])
    operation, newest = 0, []
    while True:
        folder = tmp_path / f"killed-{operation}"
        shutil.copytree(before, folder, symlinks=True)
        checkpoints = Checkpoints(folder, keep=2)
        if not killed_at(operation, lambda at=checkpoints: save(at, 4, expected)):
            break
        assert checkpoints.put_aside_torn() == [], "half a checkpoint lay in the place of a whole one"
        newest.append(steps(checkpoints)[-1])
        assert_holds(checkpoints, newest[-1])
        assert best(checkpoints) in (1, 4)
        checkpoints.tidy()
        assert best(checkpoints) == (4 if expected == 3.0 and newest[-1] == 4 else 1)
        if newest[-1] == 3:  # the step is made again
            save(checkpoints, 4, expected)
        assert contents(folder) == contents(whole)
        operation += 1
    assert newest == sorted(newest)
    assert {3, 4} == set(newest), "it was not killed both before and after the checkpoint was there"
    assert operation > 15
