"""README, playbook and headers stay true: every command, flag and file they name exists and is understood."""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from eagle3_train import preflight
from tests import boxes, kimi_standin
from tests.conftest import PROJECT, run_stage

PLAYBOOK = "next-steps-eagle.md"
DOCUMENTS = ("README.md", PLAYBOOK)
SCRIPTS = sorted(path.name for path in PROJECT.glob("*.py"))
# Files that a run or the set-up makes, and pictures of what a user has to fill in.
MADE_LATER = ("runs/", "my.jsonl", ".venv", "elsewhere", "models/")


def text_of(document: str) -> str:
    return (PROJECT / document).read_text(encoding="utf-8")


def commands() -> list[tuple[str, str]]:
    """(document, command) for each indented or inline command line of ours."""
    found = []
    for document in (*DOCUMENTS, *SCRIPTS, "run_pipeline.sh"):
        for line in text_of(document).splitlines():
            stripped = line.strip().lstrip("# ").strip("`")
            command = re.split(r"\s{2,}|\s#\s", stripped)[0]
            variables = r"(?:[A-Z_]+=\S+ )*"
            if re.match(rf"{variables}(python|bash) \S+\.(py|sh)\b", command) and "..." not in command:
                found.append((document, command))
    return sorted(set(found))


@functools.cache
def help_of(script: str) -> subprocess.CompletedProcess[str]:
    return run_stage(script, "--help")


@pytest.mark.parametrize(("document", "command"), commands())
def test_every_command_of_the_documents_is_understood(document: str, command: str) -> None:
    words = shlex.split(command)
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    program, script, *arguments = words[len(variables) :]
    assert (PROJECT / script).is_file(), f"{document}: {script} does not exist"
    flags = [argument.split("=")[0] for argument in arguments if argument.startswith("--")]
    if script == "run_pipeline.sh":
        shown = subprocess.run(
            ["bash", script, *arguments, "--dry-run"],
            cwd=PROJECT,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert shown.returncode == 0, shown.stderr
        known = help_of("01_prepare_data.py")
        missing = [flag for flag in flags if flag not in ("--dry-run", "--help") and flag not in known.stdout]
    elif program == "bash":
        assert subprocess.run(["bash", "-n", script], cwd=PROJECT, check=False).returncode == 0
        missing = []
    else:
        known = help_of(script)
        assert known.returncode == 0, known.stderr
        missing = [flag for flag in flags if flag not in known.stdout]
    assert not missing, f"{document}: {command} names flags that {script} does not have: {missing}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_the_documents_name_exists(document: str) -> None:
    named = set(re.findall(r"`([\w./-]+\.(?:py|sh|yaml|md|txt|json|jsonl|toml|png))`", text_of(document)))
    named |= set(re.findall(r"\]\(([\w./-]+)\)", text_of(document)))
    in_a_run = {
        path for path in named if not any((PROJECT / folder / path).exists() for folder in (".", "eagle3_train"))
    }
    unknown = [
        path
        for path in in_a_run
        if not path.startswith(MADE_LATER) and not any(path.endswith(name) for name in RUN_FILES)
    ]
    assert not unknown, f"{document} names files that are not there: {unknown}"


# What stages write into a run, as the documents call it.
RUN_FILES = (
    "run.yaml",
    "timings.jsonl",
    "manifest.json",
    "errors.jsonl",
    "server.log",
    "report.md",
    "results.json",
    "curves.png",
    "preflight.json",
    "prompts.jsonl",
    "traces.jsonl",
    "acceptance.csv",
)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_setting_the_documents_name_exists(document: str, tiny_config: object) -> None:
    from eagle3_train.config import Config, section_names

    for section, field in re.findall(r"`-{0,2}(\w+)\.(\w+)[^`]*`", text_of(document)):
        if section in section_names() and field not in ("py", "log"):
            known = Config.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
            assert field in known, f"{document}: {section}.{field} is no setting"


@pytest.mark.parametrize("preset", sorted((PROJECT / "presets").glob("kimi-*.yaml")), ids=lambda path: path.stem)
def test_every_field_of_a_boxs_preset_has_its_reason(preset: Path) -> None:
    lines = preset.read_text(encoding="utf-8").splitlines()
    fields = [line for line in lines if re.match(r"\s+(- --|\w+: *[^\s#])", line)]
    assert len(fields) > 40
    assert not [line for line in fields if not re.search(r"\s# \S", line)]


def test_the_boxs_presets_differ_only_where_the_boxes_do() -> None:
    first, second = (
        {
            f"{section}.{name}": value
            for section, fields in yaml.safe_load((PROJECT / "presets" / preset).read_text(encoding="utf-8")).items()
            for name, value in fields.items()
        }
        for preset in ("kimi-k2.5-rtx6000x8.yaml", "kimi-k2.5-b300x8.yaml")
    )
    of_the_model = ("prompts.", "vocabulary.", "draft.", "export.", "evaluation.")
    assert {name for name in first.keys() | second.keys() if first.get(name) != second.get(name)} <= {
        name for name in first.keys() | second.keys() if not name.startswith(of_the_model)
    }


def test_every_script_is_a_door_with_a_header_that_says_what_it_is() -> None:
    for script in SCRIPTS:
        lines = text_of(script).splitlines()
        assert len(lines) < 80, f"{script} is a room"
        assert lines[0].startswith('"""'), script


@pytest.mark.usefixtures("kimi")  # its remote code goes to one folder: Python imports it from the first alone
def test_the_playbooks_pre_flight_tables_are_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "WRITE_PROBE_BYTES", 1 << 20)  # the line about this disk is left out
    made = boxes.preflight_tables(kimi_standin.build(tmp_path / "Kimi-K2.5", experts=384))
    found = dict(re.findall(r"<!-- preflight: (\w+) -->\n(.*?)\n<!-- /preflight -->", text_of(PLAYBOOK), re.DOTALL))
    assert found == made, "python -m tests.boxes"
    passing = {name for name, text in made.items() if text.splitlines()[-2].endswith(" 0 fail")}
    assert passing == {"rtx6000x8", "b300x8"}
    assert "no CUDA GPU" in made["without_a_gpu"] and "box of 8 GPUs" in made["without_a_gpu"]


def test_no_tracked_file_names_a_machines_own_paths() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=PROJECT, capture_output=True, text=True, check=False
    ).stdout.split()
    pattern = re.compile(r"(?<![\w.])/(?:work|root|farm|home)/")
    for name in tracked:
        path = PROJECT / name
        if path.suffix in {".py", ".sh", ".md", ".yaml", ".json", ".jsonl", ".toml", ".txt"} and path.is_file():
            if path == Path(__file__):
                continue
            assert not pattern.search(path.read_text(encoding="utf-8")), name
