"""Contract of cloud/: SkyPilot itself reads the task, its numbers agree with the plan, and its commands are ours.

SkyPilot is installed into an environment of its own (about 25 s), for its pins are not vLLM's. What it would look up on
the network, the accelerators that clouds offer, is written down here as its public catalogue had it (version 8).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from string import Template
from typing import Any

import pytest
import yaml

from eagle3_train.config import parse
from eagle3_train.plan_command import PlanArguments
from eagle3_train.planning import make_plan
from tests import kimi_standin
from tests.conftest import PROJECT, run_stage

TASK = PROJECT / "cloud" / "b300.sky.yaml"
CATALOGUE = """\
AcceleratorName,Clouds
B200,"['AWS', 'Lambda', 'PrimeIntellect', 'RunPod', 'Shadeform', 'nebius']"
B300,"['AWS', 'Shadeform']"
GH200,['Lambda']
"""
READ = """
import json, sys
from pathlib import Path
import sky
from sky.catalog import common
from sky.client.cli.command import cli

print(json.dumps({name: [flag for p in command.params for flag in p.opts] for name, command in cli.commands.items()}))
catalogue = Path(common.get_catalog_path("common/accelerators.csv"))
catalogue.parent.mkdir(parents=True)
catalogue.write_text(sys.argv[1])
for path in sys.argv[2:]:
    try:
        task = sky.Task.from_yaml(path)
        task.validate()
    except ValueError as error:
        print(json.dumps({"refused": str(error)}))
        continue
    (wanted,) = task.resources
    print(json.dumps({
        "accelerators": wanted.accelerators,
        "disk": [wanted.disk_size, wanted.disk_tier.value],
        "autostop": [wanted.autostop_config.enabled, wanted.autostop_config.idle_minutes, wanted.autostop_config.down],
        "workdir": task.workdir,
        "envs": task.envs,
        "secrets": [secret.name for secret in task.managed_secret_refs],
        "setup": task.setup,
        "run": task.run,
    }))
"""
WRONG = {
    "accelerators:": "acelerators:",
    "idle_minutes:": "idle_minute:",
    "B300:8": "B300:eight",
    "down: false": "down: maybe",
}


@pytest.fixture(scope="session")
def sky_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with SkyPilot, on top of this environment: pip adds only what is missing here or pinned apart."""
    folder = tmp_path_factory.mktemp("sky") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "-r", "cloud/requirements.txt"], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return python


@pytest.fixture(scope="session")
def read_by_sky(sky_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """SkyPilot's commands with their flags, as `commands`; what it makes of the task, as `task`, and of the task with
    each line in `WRONG` spoilt."""
    home = tmp_path_factory.mktemp("home")
    text = TASK.read_text(encoding="utf-8")
    paths = {"task": TASK}
    for number, (right, wrong) in enumerate(WRONG.items()):
        paths[right] = home / f"{number}.yaml"
        paths[right].write_text(re.sub(rf"^(\s+.*){re.escape(right)}", rf"\1{wrong}", text, count=1, flags=re.M))
    done = subprocess.run(
        [str(sky_python), "-c", READ, CATALOGUE, *map(str, paths.values())],
        cwd=PROJECT,
        env=os.environ | {"HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(["commands", *paths], found, strict=True))


def values() -> dict[str, Any]:
    return yaml.safe_load(TASK.read_text(encoding="utf-8"))


def environment() -> dict[str, str]:
    return {name: str(value) for name, value in values()["envs"].items()}


def test_skypilot_reads_the_task_as_it_is_meant(read_by_sky: dict[str, dict[str, Any]]) -> None:
    assert read_by_sky["task"] == {
        "accelerators": {"B300": 8},
        "disk": [13000, "best"],
        "autostop": [True, 15, False],
        "workdir": str(PROJECT),
        "envs": environment(),
        "secrets": ["HF_TOKEN"],
        "setup": values()["setup"],
        "run": values()["run"],
    }


@pytest.mark.parametrize("right", WRONG)
def test_skypilot_would_have_refused_a_slip(read_by_sky: dict[str, dict[str, Any]], right: str) -> None:
    assert WRONG[right].rstrip(":").split(": ")[-1] in read_by_sky[right]["refused"]


def test_the_commands_in_its_head_are_skypilots(read_by_sky: dict[str, dict[str, Any]]) -> None:
    lines = re.findall(r"^# +sky (.+?)(?:\s{2,}.*)?$", TASK.read_text(encoding="utf-8"), re.MULTILINE)
    assert {line.split()[0] for line in lines} == {"launch", "exec", "logs", "start", "down"}
    for line in lines:
        command, *words = line.split()
        assert {word for word in words if word.startswith("-")} <= set(read_by_sky["commands"][command]), line


def test_no_secret_stands_in_the_task() -> None:
    assert set(values()["secrets"].values()) == {None}
    assert not re.search(r"hf_\w{8}|AKIA|-----BEGIN", TASK.read_text(encoding="utf-8"))


def commands(part: str) -> list[list[str]]:
    """The commands of `setup` or `run` with the task's own values, as words."""
    lines = values()[part].replace("\\\n", " ").splitlines()
    return [shlex.split(Template(line).safe_substitute(environment())) for line in lines if not line.startswith("#")]


def started(part: str, program: str) -> list[str]:
    """The arguments of the one command of that part that starts `program`."""
    (found,) = (words for words in commands(part) if words[0] == program)
    return [word for word in found[1:] if word != "$@"]


def test_the_tasks_own_budgets_allow_the_tasks_own_run() -> None:
    done = run_stage(*started("setup", ".venv/bin/python"))
    assert done.returncode == 0, done.stderr
    assert "50,000 samples on b300x8" in done.stdout
    dearer = run_stage(*started("setup", ".venv/bin/python"), "--max-samples", "100000")
    assert dearer.returncode == 1
    assert "--max-hours" in dearer.stderr and "--max-usd" in dearer.stderr and "--max-disk-gb" in dearer.stderr


def test_the_disk_holds_the_plans_peak_and_the_weights() -> None:
    arguments = started("setup", ".venv/bin/python")[1:]
    planned = make_plan(parse(arguments, "", PlanArguments)[1])
    (options,) = planned.options.values()
    weights = sum(tensor.nbytes for _, tensor in kimi_standin.tensors(experts=384))
    assert options[0].peak_bytes + weights < values()["resources"]["disk_size"] * 1e9


def test_the_pipeline_is_started_with_flags_that_it_knows() -> None:
    arguments = started("run", "bash")
    shown = subprocess.run(
        ["bash", *arguments, "--dry-run"],
        cwd=PROJECT,
        env=os.environ | environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    lines = [line.split() for line in shown.stdout.splitlines() if line.startswith("   python plan.py")]
    ((_, script, *flags),) = lines
    assert run_stage(script, *flags).returncode == 0
    assert {"--preset", "presets/kimi-k2.5-b300x8.yaml", "runs/hero", "50000"} <= set(flags)


def test_the_weights_are_fetched_to_where_the_run_reads_them() -> None:
    where = environment()["VERIFIER"]
    assert started("setup", ".venv/bin/hf") == ["download", "moonshotai/Kimi-K2.5", "--local-dir", where]
    flags = started("run", "bash")
    assert flags[flags.index("--verifier.path") + 1] == where
    helped = subprocess.run(
        [Path(sys.executable).with_name("hf"), "download", "--help"], capture_output=True, text=True, check=False
    )
    assert helped.returncode == 0 and "--local-dir" in helped.stdout
