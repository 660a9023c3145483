"""Contract of the servers that stages start: no longer there than their stage, and started again when they die."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3_train import server as vllm
from eagle3_train.config import Config
from eagle3_train.errors import PipelineError
from tests.conftest import PROJECT, run_stage, wait_for


def test_a_taken_port_is_refused_before_anything_is_loaded(tiny_config: Config, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind((vllm.LOOPBACK, 0))
        port = taken.getsockname()[1]
        config = tiny_config.model_copy(update={"server": tiny_config.server.model_copy(update={"port": port})})
        with pytest.raises(PipelineError, match=f"port {port} .* is taken"), vllm.serve(config, log=tmp_path / "log"):
            pass
    assert not (tmp_path / "log").exists()


@pytest.mark.engine
def test_a_server_that_cannot_start_shows_its_logs_own_error(tiny_config: Config, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    started = time.monotonic()
    with (
        pytest.raises(PipelineError, match=r"(?s)died with exit code.*no-such-flag.*The whole log: "),
        vllm.serve(tiny_config, log=log, extra_args=["--no-such-flag", "1"]),
    ):
        pass
    assert time.monotonic() - started < tiny_config.server.ready_timeout_s / 2
    assert log.exists()


@pytest.fixture(scope="module")
def prepared_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stage 01 with forty questions."""
    run = tmp_path_factory.mktemp("prepared") / "run"
    done = run_stage("01_prepare_data.py", "--run", str(run), "--preset", "presets/tiny.yaml", "--max-samples", "40")
    assert done.returncode == 0, done.stderr
    return run


@pytest.mark.engine
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_stage_that_is_stopped_takes_its_server_with_it(
    sent: signal.Signals, code: int, prepared_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(prepared_run, tmp_path / "run")
    stage = subprocess.Popen(
        [sys.executable, "01b_generate_synthetic.py", "--run", str(run)],
        cwd=PROJECT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    server = wait_for(lambda: _children(stage.pid), 60)
    os.kill(stage.pid, sent)
    assert stage.wait(60) == code
    assert wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in server), 60)


@pytest.mark.engine
def test_a_server_of_ours_that_dies_is_started_again_and_no_prompt_is_lost(prepared_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(prepared_run, tmp_path / "run")
    traces = run / "01b_traces" / "traces.jsonl"
    with (tmp_path / "output").open("w") as output:
        stage = subprocess.Popen(
            [sys.executable, "01b_generate_synthetic.py", "--run", str(run), "--generation.concurrency", "2"],
            cwd=PROJECT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        (server,) = wait_for(lambda: _children(stage.pid), 60)
        wait_for(lambda: traces.exists() and traces.read_bytes().count(b"\n") >= 10, 180)
        os.kill(server, signal.SIGKILL)
        assert stage.wait(300) == 0, (tmp_path / "output").read_text()[-2000:]
    assert "starting the server again (1 of 2)" in (tmp_path / "output").read_text()
    ids = [json.loads(line)["id"] for line in traces.read_text().splitlines()]
    assert len(ids) == len(set(ids)) == 40


def _children(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if "api_server" in line]
