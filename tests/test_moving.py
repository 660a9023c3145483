"""Contract of moving: a run that was stopped after a stage goes on from the next one, in another place, on another box.

The run is the session's own, from a real vLLM, cut off after its hidden states; the place it was made at is gone.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PROJECT, FinishedRun, run_pipeline

pytestmark = pytest.mark.engine

MADE_BEFORE, MADE_AFTER = ("01_prompts", "01b_traces", "02_hidden"), ("03_vocab", "04_train", "05_export")
# Another box: other GPUs, ports, time-outs, concurrency. None of it is part of what was made.
OTHER_BOX = (
    *("--verifier.tensor_parallel_size", "4", "--server.port", "8123", "--server.ready_timeout_s", "5400"),
    *("--server.gpu_memory_utilization", "0.92", "--server.args", '["--numa-bind"]'),
    *("--generation.concurrency", "512", "--generation.server_args", '["--data-parallel-size=2"]'),
    *("--extraction.concurrency", "128", "--training.data_workers", "1"),
)


def manifests(run: Path) -> dict[str, Any]:
    return {folder: json.loads((run / folder / "manifest.json").read_text()) for folder in MADE_BEFORE}


def modified(run: Path) -> dict[Path, int]:
    """When each file of the stages made before was last written [ns]."""
    return {
        path.relative_to(run): path.lstat().st_mtime_ns
        for folder in MADE_BEFORE
        for path in (run / folder).rglob("*")
        if not path.is_dir()
    }


@pytest.fixture(scope="module")
def first_place(default_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The session's run as it was after 02, in a place of its own."""
    run = tmp_path_factory.mktemp("first-place") / "pilot"
    shutil.copytree(default_run.path, run, symlinks=True)
    for folder in (*MADE_AFTER, "06_eval"):
        shutil.rmtree(run / folder)
    return run


def test_a_run_goes_on_elsewhere_from_the_stage_after(first_place: Path, tmp_path: Path) -> None:
    before = manifests(first_place)
    moved = tmp_path / "another" / "disk" / "renamed"
    shutil.copytree(first_place, moved, symlinks=True)  # as rsync -a does: times, and links as links
    shutil.rmtree(first_place)
    written = modified(moved)
    done = run_pipeline(moved, "--training.epochs", "1", *OTHER_BOX, FROM="01", TO="05")
    assert done.returncode == 0, done.stdout[-3000:]
    for folder in MADE_BEFORE:
        assert f"{folder}: done already" in done.stdout
    for folder in MADE_AFTER:
        assert f"{folder}: done in" in done.stdout
    assert manifests(moved) == before
    assert modified(moved) == written
    assert json.loads((moved / "05_export" / "manifest.json").read_text())["state"] == "done"
    assert not list(moved.glob("set_aside"))
    assert_names_no_place(moved, first_place, moved, PROJECT)


def test_no_file_of_a_whole_run_names_where_it_was_made(default_run: FinishedRun) -> None:
    assert_names_no_place(default_run.path, default_run.path, PROJECT)


def assert_names_no_place(run: Path, *places: Path) -> None:
    """No byte of any file and no link names one of the places; vLLM's own log is a record of what was then."""
    names = [str(place).encode() for place in places]
    looked_at = 0
    for path in run.rglob("*"):
        if path.is_symlink():
            content = bytes(path.readlink())
            assert not path.readlink().is_absolute(), path
        elif path.is_file() and path.name != "server.log":
            content = path.read_bytes()
        else:
            continue
        looked_at += 1
        assert not [name for name in names if name in content], path
    assert looked_at > 100
