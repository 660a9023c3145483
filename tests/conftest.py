"""Shared by all tests: the tiny verifier, one whole run of the pipeline, and one plain vLLM server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_train import server as vllm
from eagle3_train import verifier
from eagle3_train.config import Config, parse
from tests import kimi_standin

PROJECT = Path(__file__).resolve().parent.parent


def pytest_configure() -> None:
    """One thread a process, here and in what the tests start.

    Several threads of one operation wait for each other by spinning: on cores that other processes use as well, the
    same tests cost ten times the processor time.
    """
    torch.set_num_threads(1)
    os.environ.update({"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"})


@pytest.hookimpl(tryfirst=True)  # before xdist looks for the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Who runs what under `pytest -n 2 --dist loadgroup`: a session's fixtures are made once in each process.

    What shares the session's run and its server stays in one process, which begins with it, for it takes longest.
    Tests with a group of their own come next, the files without an engine last, each in one process.
    """
    groups = {}
    for item in items:
        engine = item.get_closest_marker("engine") is not None
        own = item.get_closest_marker("xdist_group")
        groups[item] = own.args[0] if own else "engine" if engine else item.path.stem
        if own is None:
            item.add_marker(pytest.mark.xdist_group(groups[item]))
    items.sort(key=lambda item: (groups[item] != "engine", item.get_closest_marker("engine") is None))


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
