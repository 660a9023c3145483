"""Contract of the trackers: none of them can end a training, and none keeps another from what it is told."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from eagle3_train.run import Run
from tests.small_training import copy_of, losses_of, new_run, trained

STEPS = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that is done up to stage 03."""
    return new_run(tmp_path_factory.mktemp("data"))


class Service:
    """A tracker's package that logs so many rows and then fails, as with a login refused or a network gone.

    Attributes:
        asked: how often it was asked for a run.
        rows: what it took.
    """

    def __init__(self, takes: int, error: Exception):
        self.takes, self.error = takes, error
        self.asked = 0
        self.rows: list[dict[str, Any]] = []

    def init(self, **_options: Any) -> Service:
        self.asked += 1
        if not self.takes:
            raise self.error
        return self

    def log(self, row: dict[str, Any], step: int) -> None:
        if len(self.rows) == self.takes:
            raise self.error
        self.rows.append({**row, "told at": step})


def install(monkeypatch: pytest.MonkeyPatch, name: str, service: Service) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    monkeypatch.setattr(module, "init", service.init, raising=False)
    monkeypatch.setitem(sys.modules, name, module)


def test_trackers_that_fail_are_left_out_with_one_warning_each_and_the_training_goes_on(
    data: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = Service(0, PermissionError("api_key not configured\nuse wandb login"))
    cut_off = Service(1, ConnectionError("network is unreachable"))
    install(monkeypatch, "wandb", refused)
    install(monkeypatch, "trackio", cut_off)
    run = copy_of(data, tmp_path, max_steps=STEPS, trackers=["wandb", "trackio", "tensorboard"])
    trained(run)
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")] == [
        "warning: wandb failed and is left out from here on (PermissionError: api_key not configured)",
        "warning: trackio failed and is left out from here on (ConnectionError: network is unreachable)",
    ]
    assert (refused.asked, cut_off.asked) == (1, 1)
    assert [(row["train/loss"], row["told at"]) for row in cut_off.rows] == [(losses_of(run)[0], 1)]
    assert len(losses_of(run)) == STEPS
    (folder,) = {path.parent for path in (run.folder("04_train") / "trackers").rglob("events.*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]


def test_a_tracker_that_cannot_write_its_last_rows_does_not_undo_a_training(
    data: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_writer: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.close", full)
    run = copy_of(data, tmp_path, max_steps=1, trackers=["tensorboard"])
    assert trained(run).summary["steps"] == 1
    said = capsys.readouterr().out
    assert said.count("warning: tensorboard failed and is left out from here on (OSError: [Errno 28]") == 1
