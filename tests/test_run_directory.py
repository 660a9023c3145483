"""Contract of the run directory: what is done stays done, what changed is said, and nothing made is ever lost.

A stage is skipped, continued, made again or refused by its manifest alone; every file appears whole or not at all;
a log of rows survives `kill -9`; and a run that was copied elsewhere is still the same run.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file

from eagle3_train.config import Config
from eagle3_train.errors import PipelineError
from eagle3_train.run import (
    PROMPTS,
    STAGES,
    JsonlLog,
    Result,
    Run,
    Stage,
    StageSpec,
    atomic,
    check_set_aside,
    read_jsonl,
    sampled_digest,
    save_tensors,
    sha256_of,
    write_text,
)

ROOT = Path(__file__).resolve().parent.parent
# The real folder names, so that messages name real scripts; sections that no verifier is needed for.
TRACES = StageSpec(
    "01b_generate_synthetic.py",
    "01b_traces",
    needs=("01_prompts",),
    sections=("generation",),
    may_grow=("generation.max_set_aside",),
    by_id=True,
)
VOCAB = StageSpec("03_build_vocab_map.py", "03_vocab", needs=("01b_traces",), sections=("vocabulary",))
WITH_VERIFIER = StageSpec("05_export_vllm.py", "05_export", sections=("export",), reads_verifier=True)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The prompts' source, outside the run."""
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "1 + 1?"}\n')
    return path


def configured(source: Path, **sections: dict[str, Any]) -> Config:
    """A configuration that reads `source`, with these sections' fields."""
    prompts = {"source": str(source), **sections.pop("prompts", {})}
    return Config(prompts=prompts, **sections)  # type: ignore[arg-type]


def make(run: Path, spec: StageSpec, config: Config, *, force: bool = False, **files: str) -> bool:
    """Do a stage whose work is to write `files`; False when it had nothing to do."""
    stage = Stage(Run(run, config), spec)
    with stage.locked():
        if not stage.begin(force=force):
            return False
        for name, text in files.items():
            (stage.folder / name).write_text(text)
        stage.finish(Result(list(files), {"rows": len(files)}))
    return True


def set_aside(run: Path) -> list[Path]:
    attic = run / "set_aside"
    return sorted(attic.iterdir()) if attic.exists() else []


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Done, continued, refused, made again -------------------------------------------------------------------------------


def test_a_done_stage_is_skipped(tmp_path: Path, source: Path) -> None:
    run, config = tmp_path / "run", configured(source)
    assert make(run, PROMPTS, config, rows="a")
    before = contents(run)
    assert not make(run, PROMPTS, config, rows="b")
    assert contents(run) == before


def test_a_manifest_vouches_for_every_output_by_size_and_digest(tmp_path: Path, source: Path) -> None:
    run = tmp_path / "run"
    stage = Stage(Run(run, configured(source)), PROMPTS)
    assert stage.manifest is None
    assert stage.begin(force=False)
    (stage.folder / "rows").write_bytes(b"one\ntwo\n")
    (stage.folder / "shards").mkdir()
    for number in range(3):
        (stage.folder / "shards" / f"{number}").write_bytes(bytes(number + 1))
    stage.finish(Result(["rows"], {"prompts": 2}, counted=["shards"]))
    manifest = json.loads((run / "01_prompts" / "manifest.json").read_text())
    assert manifest["state"] == "done"
    assert manifest["summary"] == {"prompts": 2}
    assert manifest["outputs"] == {
        "rows": {"files": 1, "bytes": 8, "sha256": hashlib.sha256(b"one\ntwo\n").hexdigest()},
        "shards": {"files": 3, "bytes": 6, "sha256": None},
    }
    assert manifest["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert stage.manifest == manifest


def test_a_stage_stopped_before_its_end_goes_on_with_what_is_there(tmp_path: Path, source: Path) -> None:
    run, config = tmp_path / "run", configured(source)
    stage = Stage(Run(run, config), PROMPTS)
    assert stage.begin(force=False)
    (stage.folder / "half").write_text("made before the kill")
    assert Stage(Run(run, config), PROMPTS).begin(force=False)
    assert (stage.folder / "half").read_text() == "made before the kill"
    assert set_aside(run) == []


def test_a_changed_result_field_is_refused_naming_both_values_and_the_remedy(tmp_path: Path, source: Path) -> None:
    run = tmp_path / "run"
    make(run, PROMPTS, configured(source, prompts={"seed": 1}), rows="a")
    before = contents(run)
    with pytest.raises(PipelineError, match=r"prompts\.seed: 1 -> 2") as refused:
        make(run, PROMPTS, configured(source, prompts={"seed": 2}), rows="b")
    assert "--force" in str(refused.value)
    assert "--run" in str(refused.value)
    assert contents(run) == before


def test_a_stage_stopped_before_its_end_does_not_go_on_with_another_configuration(tmp_path: Path, source: Path) -> None:
    stage = Stage(Run(tmp_path / "run", configured(source, prompts={"seed": 1})), PROMPTS)
    stage.begin(force=False)
    with pytest.raises(PipelineError, match=r"prompts\.seed: 1 -> 2"):
        make(tmp_path / "run", PROMPTS, configured(source, prompts={"seed": 2}))


def test_a_field_about_how_the_work_is_done_leaves_a_done_stage_done(tmp_path: Path, source: Path) -> None:
    run = tmp_path / "run"
    make(run, PROMPTS, configured(source), rows="a")
    make(run, TRACES, configured(source), traces="a")
    others = {"concurrency": 1, "endpoint": "http://elsewhere", "server_args": ["--x"], "request_timeout_s": 1}
    assert not make(run, TRACES, configured(source, generation=others, server={"port": 1}, training={"lr": 0.5}))


@pytest.mark.parametrize(("before", "now"), [(10, 20), (20, 10), (10, None), (None, 10)])
def test_a_field_that_may_grow_makes_a_done_stage_go_on(
    tmp_path: Path, source: Path, before: int | None, now: int | None
) -> None:
    run = tmp_path / "run"
    make(run, PROMPTS, configured(source, prompts={"max_samples": before}), rows="a", other="kept")
    assert make(run, PROMPTS, configured(source, prompts={"max_samples": now}), rows="b")
    assert (run / "01_prompts" / "other").read_text() == "kept"
    assert set_aside(run) == []
    assert not make(run, PROMPTS, configured(source, prompts={"max_samples": now}))


def test_force_sets_the_old_stage_aside_and_loses_nothing(tmp_path: Path, source: Path) -> None:
    run = tmp_path / "run"
    make(run, PROMPTS, configured(source, prompts={"seed": 1}), rows="old")
    first = contents(run / "01_prompts")
    assert make(run, PROMPTS, configured(source, prompts={"seed": 2}), force=True, rows="new")
    second = contents(run / "01_prompts")
    assert second["rows"] == b"new"
    # Twice within the same second: neither may take the other's place.
    assert make(run, PROMPTS, configured(source, prompts={"seed": 3}), force=True, rows="newest")
    kept = [contents(folder) for folder in set_aside(run)]
    assert len(kept) == 2
    assert all(folder in kept for folder in (first, second))
    assert not make(run, PROMPTS, configured(source, prompts={"seed": 3}))


def test_force_on_a_stage_that_was_never_made_just_makes_it(tmp_path: Path, source: Path) -> None:
    assert make(tmp_path / "run", PROMPTS, configured(source), force=True, rows="a")
    assert set_aside(tmp_path / "run") == []


def test_a_changed_source_has_the_prompts_made_again_and_the_old_ones_kept(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, config = tmp_path / "run", configured(source)
    make(run, PROMPTS, config, rows="old")
    source.write_text('{"prompt": "1 + 2?"}\n')  # of equal size
    assert make(run, PROMPTS, config, rows="new")
    assert "source changed" in capsys.readouterr().out
    assert [contents(folder)["rows"] for folder in set_aside(run)] == [b"old"]


def test_a_changed_input_has_a_stage_made_again_unless_its_rows_are_matched_by_id(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    small, large = (configured(source, prompts={"max_samples": count}) for count in (1, 2))
    make(run, PROMPTS, small, rows="a")
    make(run, TRACES, small, traces="a")
    make(run, VOCAB, small, map="a")
    make(run, PROMPTS, large, rows="a, b")

    assert make(run, TRACES, large)
    assert (run / "01b_traces" / "traces").read_text() == "a"
    assert set_aside(run) == []
    make(run, TRACES, large, force=True, traces="a, b")

    assert make(run, VOCAB, large, map="a, b")
    assert "01b_traces changed" in capsys.readouterr().out
    assert [contents(folder)["map"] for folder in set_aside(run) if folder.name.startswith("03_vocab")] == [b"a"]
    assert not any(make(run, spec, large) for spec in (PROMPTS, TRACES, VOCAB))


def test_an_input_changed_while_a_stage_works_is_noticed_the_next_time(tmp_path: Path, source: Path) -> None:
    """The work read the old one: recording the new one at the end would vouch for what was never read."""
    run, config = tmp_path / "run", configured(source)
    stage = Stage(Run(run, config), PROMPTS)
    assert stage.begin(force=False)
    (stage.folder / "rows").write_text("of the old source")
    source.write_text('{"prompt": "1 + 2?"}\n')
    stage.finish(Result(["rows"], {}))
    assert make(run, PROMPTS, config, rows="of the new source")
    assert not make(run, PROMPTS, config)


def test_an_input_made_again_with_the_same_content_leaves_a_done_stage_done(tmp_path: Path, source: Path) -> None:
    run, config = tmp_path / "run", configured(source)
    make(run, PROMPTS, config, rows="a")
    make(run, TRACES, config, traces="a")
    make(run, PROMPTS, config, force=True, rows="a")
    assert not make(run, TRACES, config)


@pytest.mark.parametrize("damage", ["missing", "cut", "longer", "empty"])
def test_a_missing_output_or_one_of_another_size_is_noticed(
    tmp_path: Path, source: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, config = tmp_path / "run", configured(source)
    make(run, PROMPTS, config, rows="four", whole="kept")
    rows = run / "01_prompts" / "rows"
    if damage == "missing":
        rows.unlink()
    else:
        rows.write_text({"cut": "fou", "longer": "four!", "empty": ""}[damage])
    assert make(run, PROMPTS, config, rows="four", whole="kept")
    assert "rows" in capsys.readouterr().out
    assert set_aside(run) == []
    assert not make(run, PROMPTS, config)


@pytest.mark.parametrize("damage", ["one gone", "one more", "one cut"])
def test_a_folder_of_shards_with_another_number_or_size_is_noticed(tmp_path: Path, source: Path, damage: str) -> None:
    run, config = tmp_path / "run", configured(source)
    stage = Stage(Run(run, config), PROMPTS)
    stage.begin(force=False)
    shards = stage.folder / "shards"
    shards.mkdir()
    for number in range(3):
        (shards / f"{number}").write_bytes(bytes(10))
    stage.finish(Result([], {}, counted=["shards"]))
    assert not stage.begin(force=False)
    if damage == "one gone":
        (shards / "1").unlink()
    else:
        (shards / ("3" if damage == "one more" else "1")).write_bytes(bytes(9))
    assert stage.begin(force=False)


@pytest.mark.parametrize("state", ["not run", "stopped"])
def test_a_stage_whose_input_is_not_done_names_the_command_to_run_first(
    tmp_path: Path, source: Path, state: str
) -> None:
    run, config = tmp_path / "run", configured(source)
    if state == "stopped":
        Stage(Run(run, config), PROMPTS).begin(force=False)
    with pytest.raises(PipelineError) as refused:
        make(run, TRACES, config)
    assert f"python 01_prepare_data.py --run {run}" in str(refused.value)
    assert not (run / "01b_traces").exists()


def test_a_folder_without_a_manifest_is_set_aside(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (run / "01_prompts").mkdir(parents=True)
    (run / "01_prompts" / "rows").write_text("of unknown origin")
    assert make(run, PROMPTS, configured(source), rows="new")
    assert "no manifest" in capsys.readouterr().out
    assert [contents(folder) for folder in set_aside(run)] == [{"rows": b"of unknown origin"}]


@pytest.mark.parametrize("text", ["", '{"state": "do', "[]", "null"])
def test_a_damaged_manifest_is_refused_naming_the_file(tmp_path: Path, source: Path, text: str) -> None:
    run = tmp_path / "run"
    make(run, PROMPTS, configured(source), rows="a")
    manifest = run / "01_prompts" / "manifest.json"
    manifest.write_text(text)
    with pytest.raises(PipelineError) as refused:
        make(run, PROMPTS, configured(source))
    assert str(manifest) in str(refused.value)
    assert (run / "01_prompts" / "rows").read_text() == "a"


def test_every_stage_reads_only_stages_before_it() -> None:
    before: list[str] = []
    for folder, spec in STAGES.items():
        assert folder == spec.folder
        assert set(spec.needs) <= set(before)
        assert (ROOT / spec.script).is_file()
        assert set(spec.sections) <= set(Config.model_fields)
        assert {field.split(".")[0] for field in spec.may_grow} <= set(spec.sections)
        before.append(folder)


# The verifier's files -----------------------------------------------------------------------------------------------


def folder_of_weights(path: Path, content: bytes = b"weights") -> Path:
    path.mkdir()
    (path / "model.safetensors").write_bytes(content)
    return path


def test_another_verifier_at_the_same_path_is_refused(tmp_path: Path, source: Path) -> None:
    folder = folder_of_weights(tmp_path / "verifier")
    config = configured(source, verifier={"path": str(folder)})
    make(tmp_path / "run", WITH_VERIFIER, config, draft="a")
    assert not make(tmp_path / "run", WITH_VERIFIER, config)
    (folder / "model.safetensors").write_bytes(b"Weights")
    with pytest.raises(PipelineError, match="verifier files"):
        make(tmp_path / "run", WITH_VERIFIER, config)


def test_a_moved_or_absent_verifier_leaves_a_done_stage_done(tmp_path: Path, source: Path) -> None:
    folder = folder_of_weights(tmp_path / "verifier")
    config = configured(source, verifier={"path": str(folder)})
    make(tmp_path / "run", WITH_VERIFIER, config, draft="a")
    folder.rename(tmp_path / "moved")
    assert not make(tmp_path / "run", WITH_VERIFIER, config)
    moved = configured(source, verifier={"path": str(tmp_path / "moved")})
    assert not make(tmp_path / "run", WITH_VERIFIER, moved)


def test_a_stage_begun_before_its_verifier_was_there_goes_on_once_it_is(tmp_path: Path, source: Path) -> None:
    """The first try fails for a disk that is not mounted or a hub that is not reached; the second needs no --force."""
    config = configured(source, verifier={"path": str(tmp_path / "verifier")})
    assert Stage(Run(tmp_path / "run", config), WITH_VERIFIER).begin(force=False)
    folder_of_weights(tmp_path / "verifier")
    assert make(tmp_path / "run", WITH_VERIFIER, config, draft="a")
    assert not make(tmp_path / "run", WITH_VERIFIER, config)


@pytest.mark.parametrize("back", [b"weights", b"of another verifier"])
def test_a_stage_begun_again_without_its_verifier_still_knows_which_one_it_was(
    tmp_path: Path, source: Path, back: bytes
) -> None:
    folder = folder_of_weights(tmp_path / "verifier")
    config = configured(source, verifier={"path": str(folder)})
    for _ in range(2):
        assert Stage(Run(tmp_path / "run", config), WITH_VERIFIER).begin(force=False)
        shutil.rmtree(folder, ignore_errors=True)
    folder_of_weights(folder, back)
    if back == b"weights":
        assert make(tmp_path / "run", WITH_VERIFIER, config, draft="a")
    else:
        with pytest.raises(PipelineError, match="verifier files"):
            make(tmp_path / "run", WITH_VERIFIER, config)


# Moving -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source_comes_along", [True, False])
def test_a_run_moved_to_another_place_is_still_done(tmp_path: Path, source: Path, source_comes_along: bool) -> None:
    config = configured(source)
    made = {PROMPTS: "a", TRACES: "b", VOCAB: "c"}
    for spec, text in made.items():
        make(tmp_path / "run", spec, config, out=text)
    moved = tmp_path / "another" / "place"
    moved.parent.mkdir()
    shutil.move(tmp_path / "run", moved)
    if not source_comes_along:
        source.unlink()
    assert not any(make(moved, spec, config) for spec in made)


def test_nothing_in_a_run_names_its_own_place(tmp_path: Path) -> None:
    run, source = tmp_path / "where it lies", tmp_path / "questions.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"{n} + {n}?"}) + "\n" for n in range(20)) + "torn")
    preset = tmp_path / "mine.yaml"
    preset.write_text(yaml.safe_dump({"prompts": {"source": str(source), "max_set_aside": 0.5}}))
    command = [sys.executable, ROOT / "01_prepare_data.py", "--run", run, "--preset", preset]
    subprocess.run(command, check=True, capture_output=True)
    files = contents(run)
    assert {"run.yaml", "timings.jsonl", "01_prompts/manifest.json", "01_prompts/prompts.jsonl"} <= files.keys()
    for name, content in files.items():
        assert str(run).encode() not in content, name


# run.yaml -----------------------------------------------------------------------------------------------------------


def test_the_kept_configuration_is_the_one_resolved_and_its_changes_are_told(tmp_path: Path, source: Path) -> None:
    run, before = tmp_path / "run", configured(source)
    assert Run(run, before).keep_config() == []
    assert (run / "run.yaml").read_text() == before.dump()
    assert Run(run, before).keep_config() == []
    now = configured(source, training={"epochs": 5}, verifier={"aux_layer_ids": [1, 2]})
    told = Run(run, now).keep_config()
    assert sorted(told) == ["training.epochs: 3 -> 5", "verifier.aux_layer_ids: None -> [1, 2]"]
    assert (run / "run.yaml").read_text() == now.dump()


def test_a_field_taken_back_to_null_is_told_too(tmp_path: Path, source: Path) -> None:
    Run(tmp_path / "run", configured(source, prompts={"max_samples": 5})).keep_config()
    assert Run(tmp_path / "run", configured(source)).keep_config() == ["prompts.max_samples: 5 -> None"]


# One process at a time ----------------------------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from eagle3_train.config import Config
from eagle3_train.run import PROMPTS, Run, Stage
with Stage(Run(Path(sys.argv[1]), Config()), PROMPTS).locked():
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(run: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the prompts stage of `run`."""
    command = [sys.executable, "-c", HOLD, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_process_on_the_same_stage_is_refused_and_a_killed_one_leaves_no_lock(
    tmp_path: Path, source: Path
) -> None:
    run, config = tmp_path / "run", configured(source)
    with holder(run) as process:
        with pytest.raises(PipelineError, match="another process"):
            make(run, PROMPTS, config, rows="a")
        assert not (run / "01_prompts").exists()
        with Stage(Run(run, config), TRACES).locked():
            pass  # another stage of the run, and
        assert make(tmp_path / "other", PROMPTS, config, rows="a")  # another run, are free
        process.kill()
        process.wait()
        assert make(run, PROMPTS, config, rows="a")


# Files that appear whole or not at all ------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(("mode", "old", "new"), [("w", "old", "new é"), ("wb", b"old", b"\xff\x00")])
def test_a_file_is_replaced_whole_or_left_as_it_was(
    tmp_path: Path, mode: str, old: Any, new: Any, error: type[BaseException]
) -> None:
    path = tmp_path / "file"
    for before in (None, old):
        with pytest.raises(error), atomic(path, mode) as file:
            file.write(new)
            raise error
        assert [p.name for p in tmp_path.iterdir()] == ([] if before is None else ["file"])
        with atomic(path, mode) as file:
            file.write(old)
    expected = old if isinstance(old, bytes) else old.encode()
    with atomic(path, mode) as file:
        file.write(new)
        file.flush()
        assert path.read_bytes() == expected
    assert path.read_bytes() == (new if isinstance(new, bytes) else new.encode())
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_text_is_written_with_the_folders_it_needs(tmp_path: Path) -> None:
    write_text(tmp_path / "a" / "b" / "note.md", "naïve\n")
    assert (tmp_path / "a" / "b" / "note.md").read_bytes() == "naïve\n".encode()


def test_tensors_are_written_bit_for_bit_and_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "states.safetensors"
    states = torch.arange(24, dtype=torch.float32).reshape(4, 6).to(torch.bfloat16)
    save_tensors(path, {"states": states.T, "ids": torch.tensor([3, 1])}, {"id": "abc"})
    read = load_file(path)
    assert torch.equal(read["states"], states.T)
    assert read["states"].dtype == torch.bfloat16
    assert read["ids"].tolist() == [3, 1]
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"id": "abc"}
    assert path.stat().st_mode & 0o777 == 0o644
    assert [p.name for p in tmp_path.iterdir()] == ["states.safetensors"]


def test_tensors_that_cannot_be_written_leave_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "states.safetensors"
    save_tensors(path, {"states": torch.ones(2)}, {})
    before = path.read_bytes()
    with pytest.raises(TypeError):
        save_tensors(path, {"states": torch.zeros(2)}, {"tokens": 3})  # type: ignore[dict-item]
    assert contents(tmp_path) == {"states.safetensors": before}


# Digests ------------------------------------------------------------------------------------------------------------


def test_a_files_digest_is_its_sha256(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert sha256_of(path) == hashlib.sha256(b"abc").hexdigest()


def test_a_folders_digest_is_of_its_names_and_contents_wherever_it_lies(tmp_path: Path) -> None:
    def folder(name: str, **files: str) -> Path:
        for file, text in files.items():
            write_text(tmp_path / name / file.replace("__", "/"), text)
        return tmp_path / name

    base = sha256_of(folder("base", a="1", sub__b="2"))
    assert sha256_of(folder("copy", sub__b="2", a="1")) == base
    assert sha256_of(folder("content", a="1", sub__b="3")) != base
    assert sha256_of(folder("name", a="1", sub__c="2")) != base
    assert sha256_of(folder("place", a="1", b="2")) != base
    assert sha256_of(folder("more", a="1", sub__b="2", c="")) != base


def test_a_links_digest_is_of_where_it_points(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("abc")
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "same").symlink_to("target")
    (tmp_path / "other").symlink_to("elsewhere")
    assert sha256_of(tmp_path / "link") == sha256_of(tmp_path / "same")
    assert sha256_of(tmp_path / "link") != sha256_of(tmp_path / "other")


@pytest.mark.parametrize("position", [0, 1, 50_000, 99_999])
def test_one_changed_byte_of_a_small_file_changes_its_sampled_digest(tmp_path: Path, position: int) -> None:
    path = tmp_path / "file"
    content = bytearray(random.Random(0).randbytes(100_000))
    path.write_bytes(content)
    before = sampled_digest(path)
    content[position] ^= 1
    path.write_bytes(content)
    assert sampled_digest(path) != before


@pytest.mark.parametrize("change", ["first byte", "last byte", "cut", "all weights", "none"])
def test_a_large_file_is_told_apart_by_its_ends_its_size_and_its_blocks(tmp_path: Path, change: str) -> None:
    path = tmp_path / "file"
    content = bytearray(random.Random(0).randbytes(3 << 20))
    path.write_bytes(content)
    before = sampled_digest(path)
    if change.endswith("byte"):
        content[0 if change == "first byte" else -1] ^= 1
    elif change == "cut":
        content = content[:-1]
    elif change == "all weights":
        content[1 << 10 : -(1 << 10)] = random.Random(1).randbytes((3 << 20) - (2 << 10))
    path.write_bytes(content)
    assert (sampled_digest(path) == before) == (change == "none")


def test_a_folders_sampled_digest_moves_with_it_and_notices_every_file(tmp_path: Path) -> None:
    folder = tmp_path / "verifier"
    for name in ("config.json", "sub/weights"):
        write_text(folder / name, name)
    before = sampled_digest(folder)
    folder.rename(tmp_path / "moved")
    folder = tmp_path / "moved"
    assert sampled_digest(folder) == before
    (folder / "config.json").rename(folder / "konfig.json")
    assert sampled_digest(folder) != before
    (folder / "konfig.json").rename(folder / "config.json")
    (folder / "sub" / "weights").write_text("sub/Weights")
    assert sampled_digest(folder) != before


# Logs of rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows_before", [0, 1, 3])
@pytest.mark.parametrize("torn", [0, 1, 100, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, 200_000])
def test_a_torn_last_line_is_cut_off_and_the_next_row_stands_alone(tmp_path: Path, rows_before: int, torn: int) -> None:
    path = tmp_path / "log.jsonl"
    whole = [{"id": number, "text": "x" * number * 40_000} for number in range(rows_before)]
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in whole) + (b'{"id": "' + b"y" * torn)[:torn])
    assert list(read_jsonl(path)) == whole
    with JsonlLog(path) as log:
        log.append({"id": "next", "text": "é\u2028\n"})
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    assert [json.loads(line) for line in lines] == [*whole, {"id": "next", "text": "é\u2028\n"}]
    assert list(read_jsonl(path)) == [*whole, {"id": "next", "text": "é\u2028\n"}]


def test_a_whole_log_is_opened_without_a_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"id": 1}\n')
    JsonlLog(path).close()
    assert path.read_bytes() == b'{"id": 1}\n'
    assert capsys.readouterr().out == ""


def test_a_row_with_a_lone_surrogate_does_not_stop_the_log(tmp_path: Path) -> None:
    with JsonlLog(tmp_path / "log.jsonl") as log:
        log.append({"text": "a\ud800b"})
        log.append({"text": "c"})
    rows = list(read_jsonl(tmp_path / "log.jsonl"))
    assert [row["text"][-1] for row in rows] == ["b", "c"]


def test_a_row_is_readable_at_once(tmp_path: Path) -> None:
    with JsonlLog(tmp_path / "log.jsonl") as log:
        log.append({"id": 1})
        assert list(read_jsonl(tmp_path / "log.jsonl")) == [{"id": 1}]


@pytest.mark.parametrize("bad", [b"{torn\n", b"[1]\n", b"\n", b"null\n", b'{"id": 1}{"id": 2}\n', b"\xff\xfe\n"])
def test_a_bad_line_before_the_last_is_refused_naming_its_number(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"id": 1}\n' + bad + b'{"id": 3}\n')
    with pytest.raises(PipelineError, match=r"log\.jsonl, line 2"):
        list(read_jsonl(path))


APPEND = """
import sys
from pathlib import Path
from eagle3_train.run import JsonlLog, read_jsonl
path = Path(sys.argv[1])
have = len(list(read_jsonl(path))) if path.exists() else 0
with JsonlLog(path) as log:
    for number in range(have, 10**9):
        log.append({"id": number, "text": "t" * (number * 7919 % 50_000)})
"""


def test_a_kill_at_any_moment_loses_no_row_and_joins_none(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rng = random.Random(0)
    counts = [0]
    for _ in range(3):
        size = path.stat().st_size if path.exists() else 0
        with subprocess.Popen([sys.executable, "-c", APPEND, str(path)], stdout=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + 30
            while not path.exists() or path.stat().st_size < size + 200_000:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.001)
            time.sleep(rng.random() * 0.02)
            process.kill()
        rows = list(read_jsonl(path))
        assert [row["id"] for row in rows] == list(range(len(rows)))
        assert all(len(row["text"]) == row["id"] * 7919 % 50_000 for row in rows)
        counts.append(len(rows))
    assert counts == sorted(set(counts))


# Rows set aside -----------------------------------------------------------------------------------------------------


def errors_file(folder: Path, **reasons: int) -> Path:
    path = folder / "errors.jsonl"
    rows = [{"row": "x", "reason": reason.replace("_", " ")} for reason, count in reasons.items() for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_too_many_rows_set_aside_are_refused_with_the_reasons_by_number(tmp_path: Path) -> None:
    errors = errors_file(tmp_path, no_user_turn=2, empty_question=5)
    with pytest.raises(PipelineError) as refused:
        check_set_aside("rows", 7, 100, 0.05, errors)
    message = str(refused.value)
    assert "7 of 100 rows" in message
    assert "5.0%" in message
    assert message.index("5 x empty question") < message.index("2 x no user turn")
    assert str(errors) in message


@pytest.mark.parametrize(("count", "total", "limit"), [(0, 100, 0.0), (5, 100, 0.05), (4, 100, 0.05), (0, 0, 0.0)])
def test_no_more_rows_set_aside_than_allowed_go_on(tmp_path: Path, count: int, total: int, limit: float) -> None:
    check_set_aside("rows", count, total, limit, errors_file(tmp_path, empty_question=count))


def test_one_row_set_aside_is_refused_where_none_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="1 of 1000000 rows"):
        check_set_aside("rows", 1, 1_000_000, 0.0, errors_file(tmp_path, empty_question=1))


def test_a_log_grows_while_another_process_reads_it(tmp_path: Path) -> None:
    """The reader sees whole rows only, even when a row is half written."""
    path = tmp_path / "log.jsonl"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, b'{"id": 1}\n{"id"')
    assert list(read_jsonl(path)) == [{"id": 1}]
    os.write(descriptor, b": 2}\n")
    assert list(read_jsonl(path)) == [{"id": 1}, {"id": 2}]
    os.close(descriptor)
