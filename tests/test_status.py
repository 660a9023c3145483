"""Contract of the status: a run's own files say it all, at any moment, and looking changes nothing."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3_train import status
from eagle3_train.run import STAGES

ROOT = Path(__file__).resolve().parent.parent
SUMMARIES = {
    "01_prompts": {"prompts": 100, "train": 80, "val": 10, "eval": 10},
    "02_hidden": {"samples": 90, "train": 80, "val": 10, "tokens": 9_000},
    "04_train": {"steps": 36},
}


def write_rows(path: Path, rows: list[dict[str, Any]], torn: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)


def write_manifest(run: Path, folder: str, state: str, written: float | None = None) -> None:
    (run / folder).mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(written))
    manifest = {"stage": folder, "state": state, "written": stamp, "summary": SUMMARIES.get(folder, {})}
    (run / folder / "manifest.json").write_text(json.dumps(manifest))


def attempt(stage: str, seconds: float, outcome: str = "done") -> dict[str, Any]:
    return {"stage": stage, "outcome": outcome, "date": "2026-12-02T00:00:00+0000", "seconds": seconds}


@contextmanager
def locked(run: Path, folder: str) -> Iterator[None]:
    """Hold the stage's lock as a stage does."""
    (run / ".locks").mkdir(parents=True, exist_ok=True)
    with (run / ".locks" / folder).open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@pytest.fixture
def half_done(tmp_path: Path) -> Path:
    """Prompts are there, 40 of 100 traces after 10 s, and one was set aside; the box costs 36 USD an hour."""
    run = tmp_path / "run"
    write_manifest(run, "01_prompts", "done")
    write_rows(run / "01_prompts" / "prompts.jsonl", [{"id": str(n)} for n in range(100)])
    write_manifest(run, "01b_traces", "running", time.time() - 10)
    write_rows(run / "01b_traces" / "traces.jsonl", [{"id": str(n)} for n in range(40)])
    write_rows(run / "01b_traces" / "errors.jsonl", [{"id": "7", "reason": "HTTP 500", "detail": "engine"}])
    write_rows(run / "timings.jsonl", [attempt("01_prompts", 90)])
    (run / "run.yaml").write_text(
        yaml.safe_dump({"plan": {"price": [36.0]}, "training": {"epochs": 12, "pack_tokens": 1000}})
    )
    return run


def states(run: Path) -> dict[str, str]:
    return {stage.folder: stage.state for stage in status.read(run).stages}


def test_a_stage_at_work_shows_done_total_rate_time_left_and_cost(half_done: Path) -> None:
    with locked(half_done, "01b_traces"):
        found = status.read(half_done)
        text = status.shown(found)
    traces = found.stages[1]
    assert traces.state == f"running (pid {os.getpid()})"
    assert str(traces.count) == "40 / 100 traces"
    assert traces.rate == pytest.approx(40 / 10, rel=0.3)
    assert traces.left_s == pytest.approx(60 / 4, rel=0.3)
    # 90 s of the prompts and 10 s of the traces so far, at a cent a second.
    assert found.seconds == pytest.approx(100, abs=3)
    assert "1.0" in text and "USD" in text
    assert "01b_traces: 1 set aside, the last:" in text
    assert "7: HTTP 500 engine" in text
    assert "free disk" in text


def test_a_stage_without_a_process_is_stopped_or_failed(half_done: Path) -> None:
    assert states(half_done)["01b_traces"] == "stopped"
    write_rows(half_done / "timings.jsonl", [attempt("01b_traces", 5, "PipelineError")])
    found = status.read(half_done)
    assert found.stages[1].state == "failed (PipelineError)"
    assert found.stages[1].left_s is None
    assert "01b_traces: PipelineError on 2026-12-02T00:00:00+0000" in found.errors


def test_a_failure_that_was_mended_is_no_longer_shown(half_done: Path) -> None:
    write_rows(half_done / "timings.jsonl", [attempt("01_prompts", 5, "TypeError"), attempt("01_prompts", 5)])
    assert not any("TypeError" in error for error in status.read(half_done).errors)


def test_a_finished_run_is_done_everywhere(half_done: Path) -> None:
    for folder in STAGES:
        write_manifest(half_done, folder, "done")
    write_rows(half_done / "02_hidden" / "index.jsonl", [{"id": str(n)} for n in range(90)])
    found = status.read(half_done)
    assert found.wave is None
    assert {stage.state for stage in found.stages} == {"done"}
    assert str(found.stages[2].count) == "90 / 90 shards"
    assert str(found.stages[4].count) == "36 / 36 steps"
    assert all(stage.left_s is None for stage in found.stages)


def test_states_are_counted_against_the_prompts_that_are_not_held_out(half_done: Path) -> None:
    write_manifest(half_done, "02_hidden", "running")
    write_rows(half_done / "02_hidden" / "index.jsonl", [{"id": str(n)} for n in range(30)], torn='{"id": "30')
    assert str(status.read(half_done).stages[2].count) == "30 / 90 shards"


def test_training_goes_by_its_last_steps(half_done: Path) -> None:
    steps = [{"train": {"loss": 1.0}, "steps_per_s": 4.0, "step": step + 1, "of": 60, "epoch": 0} for step in range(8)]
    validation = {"val": {"loss": 1.0}, "step": 5, "of": 60, "epoch": 0}
    write_rows(half_done / "04_train" / "metrics.jsonl", [*steps[:5], validation, *steps[5:]])
    write_manifest(half_done, "04_train", "running")
    with locked(half_done, "04_train"):
        training = status.read(half_done).stages[4]
    assert str(training.count) == "8 / 60 steps"
    assert training.rate == 4
    assert training.left_s == 52 / 4


@pytest.fixture
def in_waves(half_done: Path) -> Path:
    """The second of the waves of 60 steps is being made: 04 has trained on the first one and waits."""
    wave = {"number": 2, "first_step": 25, "last_step": 45, "steps": 60, "room": 1000, "whole": False}
    write_manifest(half_done, "02_hidden", "running")
    (half_done / "02_hidden" / "wave.json").write_text(json.dumps(wave))
    write_rows(half_done / "02_hidden" / "index.jsonl", [{"id": str(n)} for n in range(30)])
    write_manifest(half_done, "04_train", "running")
    for step in (20, 25):
        checkpoint = half_done / "04_train" / "checkpoints" / f"step_{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text("{}")
    (half_done / "04_train" / "checkpoints" / "step_000031").mkdir()
    write_rows(half_done / "timings.jsonl", [attempt("01_prompts", 90), attempt("04_train", 50, "MoreStates")])
    return half_done


def test_within_a_disk_budget_it_says_which_wave_and_what_is_learnt(in_waves: Path) -> None:
    with locked(in_waves, "02_hidden"):
        found = status.read(in_waves)
    assert found.wave == "wave 2: states for steps 26 to 45 of 60; 25 are in the newest checkpoint"
    assert found.wave in status.shown(found).splitlines()
    assert str(found.stages[2].count) == "30 shards"
    assert found.stages[2].left_s is None


def test_training_that_waits_for_states_has_not_failed(in_waves: Path) -> None:
    assert states(in_waves)["04_train"] == "waits for states"
    assert not any("MoreStates" in error for error in status.read(in_waves).errors)
    with locked(in_waves, "04_train"):
        assert states(in_waves)["04_train"].startswith("running")


@pytest.mark.parametrize("torn", ['{"number": 2, "fir', "{}", "[1]"])
def test_a_wave_that_cannot_be_read_is_left_out(in_waves: Path, torn: str) -> None:
    (in_waves / "02_hidden" / "wave.json").write_text(torn)
    assert status.read(in_waves).wave is None


def test_before_the_first_epoch_ends_the_steps_are_reckoned_from_the_tokens(half_done: Path) -> None:
    write_manifest(half_done, "02_hidden", "done")
    write_manifest(half_done, "04_train", "running")
    # 9,000 tokens, 80 of 90 samples train: eight packs.
    assert str(status.read(half_done).stages[4].count) == "~0 / 96 steps"


def test_a_torn_run_is_read_as_far_as_it_goes(half_done: Path) -> None:
    (half_done / "run.yaml").write_text("plan: {price: [3")
    (half_done / "01b_traces" / "manifest.json").write_text('{"state": "runn')
    write_rows(half_done / "timings.jsonl", [attempt("01_prompts", 90)], torn='{"stage": "01b_tra')
    write_rows(half_done / "01b_traces" / "traces.jsonl", [{"id": "1"}], torn='{"id": "2", "out')
    write_rows(half_done / "04_train" / "metrics.jsonl", [], torn='{"train": {"lo')
    (half_done / "01b_traces" / "errors.jsonl").write_text('{"id": "1", "rea')
    found = status.read(half_done)
    assert str(found.stages[1].count) == "1 / 100 traces"
    assert found.usd_an_hour is None
    assert found.seconds == 90
    assert status.shown(found)


def test_an_empty_directory_is_a_run_in_which_nothing_has_started(tmp_path: Path) -> None:
    assert set(states(tmp_path).values()) == {"-"}


def test_looking_writes_nothing(half_done: Path) -> None:
    (half_done / ".locks").mkdir()
    (half_done / ".locks" / "01b_traces").touch()
    before = {path: path.stat().st_mtime_ns for path in half_done.rglob("*")}
    status.shown(status.read(half_done))
    assert {path: path.stat().st_mtime_ns for path in half_done.rglob("*")} == before


def test_a_stage_can_take_its_lock_at_any_moment_of_being_watched(half_done: Path) -> None:
    watching = subprocess.Popen(
        [sys.executable, "status.py", str(half_done), "--watch", "0.001"], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            with locked(half_done, "01b_traces"):
                pass
        assert watching.poll() is None
    finally:
        watching.kill()
        watching.wait()


def test_watching_takes_the_rate_of_the_time_between(half_done: Path) -> None:
    with locked(half_done, "01b_traces"):
        before = status.read(half_done)
        write_manifest(half_done, "01b_traces", "running", time.time() - 20)
        write_rows(half_done / "01b_traces" / "traces.jsonl", [{"id": str(n)} for n in range(60)])
        after = status.read(half_done)
    assert status._since(before.stages[1], after.stages[1]).rate == pytest.approx(20 / 10, rel=0.3)


def test_rows_of_a_large_file_are_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_COUNTED_BYTES", 1 << 14)
    monkeypatch.setattr(status, "_BLOCK_BYTES", 1 << 12)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": n, "text": "x" * (n % 50)}) + "\n" for n in range(10_000)))
    rows, about = status.count_rows(path)
    assert about
    assert rows == pytest.approx(10_000, rel=0.05)


def test_the_command_answers_within_a_second_and_without_torch(half_done: Path) -> None:
    took = []
    for _ in range(3):
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "status.py", str(half_done)], cwd=ROOT, capture_output=True, text=True, check=True
        )
        took.append(time.monotonic() - started)
    assert min(took) < 1
    assert "40 / 100 traces" in done.stdout
    code = "import sys, eagle3_train.status; print('torch' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "False"


def test_a_run_that_is_not_there_is_refused() -> None:
    assert status.main("", ["runs/no_such_run"]) == 1
