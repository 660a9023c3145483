"""Contract of the configuration: one place for every tunable, flags over preset over defaults, and mistakes named.

A wrong flag or preset must end in a `ConfigError` (exit code 2) that says which field, what was found and what
the nearest right name is; never in a traceback, and never in a silently ignored setting.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3_train.config import PRESETS, Arguments, Config, known_presets, parse, result_fields, section_names
from eagle3_train.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
ALL_FIELDS = [(section, name) for section in section_names() for name in type(getattr(Config(), section)).model_fields]


def write_preset(folder: Path, text: str | bytes) -> Path:
    path = folder / "mine.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def resolve(folder: Path, *flags: str, preset: str | bytes = "") -> Config:
    """The configuration of a new run in `folder`, from a preset with this text and these flags."""
    argv = ["--run", str(folder / "run"), "--preset", str(write_preset(folder, preset)), *flags]
    return parse(argv, "a stage")[1]


def refusal(folder: Path, *flags: str, preset: str | bytes = "") -> str:
    """The message of the ConfigError that `resolve` must end in."""
    with pytest.raises(ConfigError) as refused:
        resolve(folder, *flags, preset=preset)
    assert refused.value.exit_code == 2
    return str(refused.value)


# Precedence ---------------------------------------------------------------------------------------------------------


def test_a_flag_beats_the_preset_and_the_preset_beats_the_default(tmp_path: Path) -> None:
    preset = "generation: {max_tokens: 3, top_p: 0.5}"
    resolved = resolve(tmp_path, "--generation.max_tokens", "1", preset=preset).generation
    assert (resolved.max_tokens, resolved.top_p, resolved.seed) == (1, 0.5, 0)


def test_an_empty_preset_gives_the_defaults(tmp_path: Path) -> None:
    assert resolve(tmp_path, preset="").dump() == Config().dump()


@pytest.mark.parametrize(
    ("flags", "section", "field", "value"),
    [
        (["--prompts.max_samples", "7"], "prompts", "max_samples", 7),
        (["--prompts.max_samples=7"], "prompts", "max_samples", 7),
        (["--max-samples", "7"], "prompts", "max_samples", 7),
        (["--prompts.max_samples", "null"], "prompts", "max_samples", None),
        (["--endpoint", "http://127.0.0.1:8000/v1"], "generation", "endpoint", ["http://127.0.0.1:8000/v1"]),
        (["--no-draft.norm_before_residual"], "draft", "norm_before_residual", False),
        (["--draft.fc_norm"], "draft", "fc_norm", True),
        (["--training.lr", "3e-4"], "training", "lr", 0.0003),
        (["--verifier.aux_layer_ids", "2,4,5"], "verifier", "aux_layer_ids", [2, 4, 5]),
        (["--verifier.aux_layer_ids", "[2, 4, 5]"], "verifier", "aux_layer_ids", [2, 4, 5]),
        (["--server.args=--enforce-eager"], "server", "args", ["--enforce-eager"]),
        (["--server.env", "VLLM_MLA_DISABLE=1"], "server", "env", {"VLLM_MLA_DISABLE": "1"}),
        (["--draft.sliding_window", "null"], "draft", "sliding_window", None),
        (["--prepared-data", "/data/prepared"], "training", "prepared_data", "/data/prepared"),
        (["--batch-size", "8"], "training", "batch_size", 8),
        (["--max-steps", "200"], "training", "max_steps", 200),
    ],
)
def test_a_flag_reaches_its_field(tmp_path: Path, flags: list[str], section: str, field: str, value: Any) -> None:
    preset = "prompts: {max_samples: 3}\nverifier: {aux_layer_ids: [1, 2]}"
    assert getattr(getattr(resolve(tmp_path, *flags, preset=preset), section), field) == value


def test_null_as_a_flag_takes_a_list_back_to_its_default(tmp_path: Path) -> None:
    config = resolve(tmp_path, "--verifier.aux_layer_ids", "null", preset="verifier: {aux_layer_ids: [2, 4, 5]}")
    assert config.verifier.aux_layer_ids is None


def test_without_a_preset_the_runs_own_configuration_is_used(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.yaml").write_text(resolve(tmp_path, preset="training: {epochs: 7, ttt_steps: 5}").dump())
    arguments, config = parse(["--run", str(run), "--training.epochs", "9"], "a stage")
    assert (config.training.epochs, config.training.ttt_steps) == (9, 5)
    assert (arguments.run, arguments.preset, arguments.force) == (run, None, False)


def test_a_named_preset_is_used_instead_of_the_runs_own_configuration(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.yaml").write_text("training: {epochs: 7}")
    preset = write_preset(tmp_path, "training: {ttt_steps: 5}")
    config = parse(["--run", str(run), "--preset", str(preset)], "a stage")[1]
    assert (config.training.epochs, config.training.ttt_steps) == (Config().training.epochs, 5)


def test_a_new_run_without_a_preset_is_refused_and_told_the_presets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="new run") as refused:
        parse(["--run", str(tmp_path / "new")], "a stage")
    assert "presets/tiny.yaml" in str(refused.value)
    assert refused.value.exit_code == 2
    assert not (tmp_path / "new").exists()


def test_the_run_is_required() -> None:
    with pytest.raises(ConfigError, match="--run is required"):
        parse([], "a stage")


def test_environment_variables_never_change_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = resolve(tmp_path, preset="prompts: {seed: 1}").dump()
    for section, name in ALL_FIELDS:
        for variable in (f"{section}__{name}", f"{section}.{name}", f"{section}_{name}", name):
            # An upper-case MAX_SAMPLES or PORT is what a shell is likely to export.
            monkeypatch.setenv(variable.upper(), "77")
            monkeypatch.setenv(variable, "77")
    for name in section_names():
        monkeypatch.setenv(name.upper(), '{"seed": 77}')
        monkeypatch.setenv(name, '{"seed": 77}')
    for name in ("preset", "force"):
        monkeypatch.setenv(name.upper(), "1")
        monkeypatch.setenv(name, "1")
    assert resolve(tmp_path, preset="prompts: {seed: 1}").dump() == before
    monkeypatch.setenv("RUN", str(tmp_path))
    monkeypatch.setenv("run", str(tmp_path))
    with pytest.raises(ConfigError, match="--run is required"):
        parse([], "a stage")


# Mistakes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("--prompts.max_sample", "--prompts.max_samples"),
        ("--promts.max_samples", "--prompts.max_samples"),
        ("--max_samples", "--max-samples"),
        ("--training.epoch", "--training.epochs"),
        ("--forse", "--force"),
    ],
)
@pytest.mark.parametrize("joined", [False, True])
def test_an_unknown_flag_is_refused_with_the_nearest_name(
    tmp_path: Path, flag: str, nearest: str, joined: bool
) -> None:
    message = refusal(tmp_path, *([f"{flag}=3"] if joined else [flag, "3"]))
    assert f"{flag}: did you mean {nearest}?" in message
    assert "--help" in message


def test_a_flag_may_not_be_abbreviated(tmp_path: Path) -> None:
    """`--training.epo` would change its meaning on the day another field starts alike."""
    assert "did you mean --training.epochs?" in refusal(tmp_path, "--training.epo", "3")


@pytest.mark.parametrize(
    ("preset", "named", "nearest"),
    [
        ("prompts: {max_sample: 3}", "prompts.max_sample", "prompts.max_samples"),
        ("training: {epoch: 1}", "training.epoch", "training.epochs"),
        ("draft: {num_layer: 4}", "draft.num_layer", "draft.num_layers"),
        ("generation: {temprature: 1}", "generation.temprature", "generation.temperatures"),
        ("promts: {seed: 1}", "promts", "prompts"),
        ("Training: {epochs: 1}", "Training", "training"),
    ],
)
def test_an_unknown_field_or_section_of_a_preset_is_refused_with_the_nearest_name(
    tmp_path: Path, preset: str, named: str, nearest: str
) -> None:
    assert f"{named}: no such field; did you mean {nearest}?" in refusal(tmp_path, preset=preset)


def test_a_name_like_no_other_is_refused_with_the_names_there_are(tmp_path: Path) -> None:
    message = refusal(tmp_path, preset="zzz: {a: 1}")
    assert all(section in message for section in section_names())
    message = refusal(tmp_path, preset="vocabulary: {zzz: 1}")
    assert "vocabulary.draft_size" in message


@pytest.mark.parametrize(
    ("section", "field", "value", "shown"),
    [
        ("prompts", "max_samples", "many", "many"),
        ("prompts", "max_samples", 0, "0"),
        ("prompts", "val_fraction", 0.5, "0.5"),
        ("prompts", "seed", 1.5, "1.5"),
        ("training", "weight_decay", -0.1, "-0.1"),
        ("generation", "top_p", 1.1, "1.1"),
        ("extraction", "cut_off", "kep", "kep"),
        ("server", "port", 70000, "70000"),
        ("vocabulary", "draft_size", 63, "63"),
        ("extraction", "storage_dtype", "float16", "float16"),
        ("training", "epochs", 0, "0"),
        ("training", "lr", ".nan", "nan"),
        ("training", "lr", ".inf", "inf"),
        ("evaluation", "min_acceptance_length", 0.5, "0.5"),
    ],
)
@pytest.mark.parametrize("place", ["preset", "flag"])
def test_a_wrong_value_is_refused_naming_field_and_value(
    tmp_path: Path, section: str, field: str, value: Any, shown: str, place: str
) -> None:
    if place == "preset":
        message = refusal(tmp_path, preset=f"{section}: {{{field}: {value}}}")
    else:
        message = refusal(tmp_path, f"--{section}.{field}={str(value).removeprefix('.')}")
    # What a flag gives is text, so it is quoted there.
    assert re.search(rf"^{section}\.{field}: .*, got '?{re.escape(shown)}'?$", message, re.MULTILINE), message


@pytest.mark.parametrize("field", ["prompts.source", "verifier.path"])
def test_an_empty_path_is_refused(tmp_path: Path, field: str) -> None:
    """`--prompts.source "$UNSET"` would otherwise read everything in the current directory."""
    assert field in refusal(tmp_path, f"--{field}=")


def test_all_mistakes_of_a_preset_are_told_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, preset="prompts: {max_sample: 3, seed: x}\ntraining: {epochs: 0}")
    assert all(field in message for field in ("prompts.max_sample", "prompts.seed", "training.epochs"))


@pytest.mark.parametrize("missing", ["presets/nope.yaml", "."])
def test_a_missing_preset_is_refused_listing_those_there_are(tmp_path: Path, missing: str) -> None:
    path = tmp_path / missing
    with pytest.raises(ConfigError) as refused:
        parse(["--run", str(tmp_path / "run"), "--preset", str(path)], "a stage")
    assert str(path) in str(refused.value)
    assert "presets/tiny.yaml" in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("prompts: [", id="unclosed"),
        pytest.param("prompts:\n\tseed: 1", id="tab"),
        pytest.param("prompts: {seed: 1}}", id="brace"),
        pytest.param("a: *nowhere", id="alias"),
        pytest.param(b"\x00\x01\x02", id="binary"),
        pytest.param("prompts: {source: caf\xe9}".encode("latin-1"), id="latin-1"),
        pytest.param("- prompts", id="list"),
        pytest.param("just words", id="scalar"),
        pytest.param("prompts:", id="section without fields"),
        pytest.param("prompts: 3", id="section that is a number"),
        pytest.param("1: {seed: 1}", id="section named by a number"),
    ],
)
def test_a_preset_that_is_not_a_mapping_of_sections_is_refused_naming_the_file(
    tmp_path: Path, text: str | bytes
) -> None:
    assert str(tmp_path / "mine.yaml") in refusal(tmp_path, preset=text)


def test_a_section_written_twice_is_refused(tmp_path: Path) -> None:
    """YAML keeps the last one alone: half of the preset would be ignored without a word."""
    assert "training" in refusal(tmp_path, preset="training: {epochs: 2}\nprompts: {seed: 1}\ntraining: {lr: 0.1}")


@pytest.mark.parametrize("by_flag", [False, True])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, ["num_attention_heads", "num_key_value_heads"]),
        ({"norm_before_fc": True, "fc_norm": True}, ["norm_before_fc", "fc_norm"]),
    ],
)
def test_settings_that_exclude_each_other_are_refused(
    tmp_path: Path, fields: dict[str, Any], named: list[str], by_flag: bool
) -> None:
    if by_flag:
        flags = [f"--draft.{name}" if value is True else f"--draft.{name}={value}" for name, value in fields.items()]
        message = refusal(tmp_path, *flags)
    else:
        message = refusal(tmp_path, preset=yaml.safe_dump({"draft": fields}))
    assert all(name in message for name in named)


@pytest.mark.parametrize("heads", [(8, 8), (8, 4), (8, 1)])
def test_query_heads_may_be_any_multiple_of_key_heads(tmp_path: Path, heads: tuple[int, int]) -> None:
    flags = [f"--draft.num_attention_heads={heads[0]}", f"--draft.num_key_value_heads={heads[1]}"]
    draft = resolve(tmp_path, *flags).draft
    assert (draft.num_attention_heads, draft.num_key_value_heads) == heads


def test_a_wrong_flag_ends_a_script_with_code_2_and_no_traceback(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "01_prepare_data.py", "--run", tmp_path / "run", "--prompts.max_sample", "3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert "did you mean --prompts.max_samples?" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


# Documentation ------------------------------------------------------------------------------------------------------


def test_every_field_and_section_is_documented() -> None:
    for section, name in ALL_FIELDS:
        values = type(getattr(Config(), section))
        assert values.__doc__, section
        assert values.model_fields[name].description, f"{section}.{name}"
    for name in ("run", "preset", "force"):
        assert Arguments.model_fields[name].description, name


def test_help_shows_every_flag_with_its_meaning_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--help"], "what this stage does")
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "what this stage does" in shown
    for section, name in ALL_FIELDS:
        values = getattr(Config(), section)
        description = " ".join(str(type(values).model_fields[name].description).split())
        # The flag, its type or choices, then the meaning, then the default: nothing of another flag in between.
        entry = rf"--{section}\.{name}\b(?:(?! --\w+\.).)*? {re.escape(description)}"
        default = re.escape(f"(default: {getattr(values, name)})")
        assert re.search(rf"{entry} {default}", shown), f"{section}.{name}"
    for flag in ("--run", "--preset", "--force", "--max-samples", "--endpoint"):
        assert flag in shown


# Keeping and comparing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "preset",
    [
        "",
        "training: {lr: 2.0e-3, ttt_step_loss_decay: 0.1}\nprompts: {max_samples: null, val_fraction: 0.07}",
        "verifier: {path: /données/模型, aux_layer_ids: [2, 4, 5]}",
        'server: {env: {A: "1", B: "null", C: "yes", D: "0x1f", E: ": #"}, args: [--x, "a b", "on"]}',
        (PRESETS / "tiny.yaml").read_text(),
    ],
)
def test_a_kept_configuration_reads_back_identical(tmp_path: Path, preset: str) -> None:
    config = resolve(tmp_path, preset=preset)
    again = resolve(tmp_path, preset=config.dump())
    assert again.dump() == config.dump()
    assert all(getattr(again, section) == getattr(config, section) for section in section_names())


def test_a_kept_configuration_holds_every_field_and_none_of_the_command_line(tmp_path: Path) -> None:
    kept = yaml.safe_load(resolve(tmp_path, "--force").dump())
    assert [(section, name) for section, fields in kept.items() for name in fields] == ALL_FIELDS
    assert str(tmp_path) not in resolve(tmp_path, "--force").dump()


@pytest.mark.parametrize(
    "field",
    [
        "verifier.path",
        "verifier.tensor_parallel_size",
        "generation.endpoint",
        "generation.concurrency",
        "generation.request_timeout_s",
        "generation.max_retries",
        "generation.server_args",
        "extraction.concurrency",
        "training.data_workers",
        *(
            f"training.{name}"
            for name in ("checkpoint_steps", "keep_checkpoints", "processes", "trackers", "recompute")
        ),
        "evaluation.concurrency",
        *(f"server.{name}" for name in type(Config().server).model_fields),
    ],
)
def test_a_field_about_how_the_work_is_done_decides_no_result(field: str) -> None:
    assert field not in result_fields(Config(), tuple(section_names()))


@pytest.mark.parametrize(
    "field",
    [
        "verifier.dtype",
        "verifier.aux_layer_ids",
        "prompts.source",
        "prompts.max_samples",
        "prompts.seed",
        "generation.temperatures",
        "generation.thinking_share",
        "generation.seed",
        "extraction.storage_dtype",
        "vocabulary.draft_size",
        "draft.num_layers",
        "draft.sliding_window",
        "training.lr",
        "training.ttt_steps",
        "training.batch_size",
        "training.max_steps",
        "training.optimizer",
        "training.validation_steps",
        "training.prepared_data",
        "training.gradients",
        "draft.init_from",
        "export.format",
        "evaluation.draft_tokens",
    ],
)
def test_a_field_that_changes_what_comes_out_decides_the_result(field: str) -> None:
    section, name = field.split(".")
    fields = result_fields(Config(), (section,))
    assert fields[field] == getattr(getattr(Config(), section), name)
    assert all(other.startswith(f"{section}.") for other in fields)


# Presets ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(PRESETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_that_comes_along_loads(tmp_path: Path, path: Path) -> None:
    config = parse(["--run", str(tmp_path / "run"), "--preset", str(path)], "a stage")[1]
    written = yaml.safe_load(path.read_text())
    for section, fields in written.items():
        for name, value in fields.items():
            assert getattr(getattr(config, section), name) == value, f"{section}.{name}"
    assert f"presets/{path.name}" in known_presets()


def test_the_tiny_preset_asks_the_questions_that_come_along() -> None:
    source = parse(["--run", "new", "--preset", str(PRESETS / "tiny.yaml")], "a stage")[1].prompts.source
    assert (ROOT / source).is_file()
