"""Shared by all tests: the tiny verifier, one whole run of the pipeline, and one plain vLLM server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from xdist.scheduler import LoadFileScheduling

from eagle3_train import server as vllm
from eagle3_train import verifier
from eagle3_train.config import Config, parse
from tests import kimi_standin

PROJECT = Path(__file__).resolve().parent.parent
# The files with tests that use `default_run` or `plain_server`.
SHARING = ("test_engine", "test_pipeline", "test_moving", "test_evaluation", "test_waves")


def pytest_configure() -> None:
    """One thread a process, here and in what the tests start.

    Several threads of one operation wait for each other by spinning: on cores that other processes use as well, the
    same tests cost ten times the processor time. Ctrl-C is heeded again: a shell without job control starts what
    runs in its background with that signal ignored, and processes inherit it.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    os.environ.update({"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What shares a run or a server first, then those with servers of their own: they take longest."""
    for item in items:
        shared = {"default_run", "plain_server"} & set(getattr(item, "fixturenames", ()))
        if shared and item.path.stem not in SHARING:
            raise pytest.UsageError(f"{item.path.name} asks for {shared}: name it in tests/conftest.py's SHARING")
    items.sort(key=lambda item: (item.path.stem not in SHARING, item.get_closest_marker("engine") is None))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """Of several processes (`pytest -n 2`), each takes a file at a time, and one takes all that share.

    A session's fixtures are made once in each process that asks for them. Not `--dist loadgroup`: xdist 3.8 does not
    see its groups with pytest 9.2.
    """
    return _SharingTogether(config, log)


class _SharingTogether(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "sharing" if Path(file).stem in SHARING else file


def run_pipeline(run: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`bash run_pipeline.sh` as a user calls it, in this environment; output of both streams together."""
    environment = os.environ | {"RUN": str(run), "VENV": str(Path(sys.prefix))} | variables
    return subprocess.run(
        ["bash", "run_pipeline.sh", *arguments],
        cwd=PROJECT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def run_stage(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One numbered script by hand."""
    return subprocess.run(
        [sys.executable, script, *arguments], cwd=PROJECT, capture_output=True, text=True, check=False
    )


def wait_for(condition: Callable[[], Any], seconds: float) -> Any:
    """What `condition` returns as soon as it is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.2)
    raise AssertionError("waited in vain")


@dataclass(frozen=True)
class FinishedRun:
    """A run that `run_pipeline.sh` took to its end, and what it said."""

    path: Path
    output: str

    def json(self, name: str) -> dict[str, Any]:
        return json.loads((self.path / name).read_text())

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / name).read_text().splitlines()]


@pytest.fixture(scope="session")
def tiny_config() -> Config:
    """The configuration of presets/tiny.yaml."""
    _, config = parse(["--run", "unused", "--preset", str(PROJECT / "presets" / "tiny.yaml")], "")
    return config


@pytest.fixture(scope="session")
def tiny_verifier(tiny_config: Config) -> Path:
    """The embedded verifier's directory, built on first use."""
    return Path(verifier.location(tiny_config.verifier))


@pytest.fixture(scope="session")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Kimi-K2.5's stand-in; its remote code is copied into a folder of the tests' own, not into the user's cache."""
    folder = tmp_path_factory.mktemp("kimi")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder / "modules"))
        patch.setenv("HF_MODULES_CACHE", str(folder / "modules"))
        yield kimi_standin.build(folder / "Kimi-K2.5")


@pytest.fixture(scope="session")
def default_run(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> FinishedRun:
    """The embedded default, from questions to report."""
    path = tmp_path_factory.mktemp("runs") / "default"
    done = run_pipeline(path)
    assert done.returncode == 0, done.stdout[-5000:]
    return FinishedRun(path, done.stdout)


@pytest.fixture(scope="session")
def plain_server(
    tmp_path_factory: pytest.TempPathFactory, tiny_config: Config, tiny_verifier: Path
) -> Iterator[vllm.Server]:
    """A vLLM server with the tiny verifier and nothing else."""
    with vllm.serve(tiny_config, log=tmp_path_factory.mktemp("server") / "server.log") as server:
        yield server
