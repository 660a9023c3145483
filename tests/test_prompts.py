"""Contract of stage 01: every form of data set that users bring becomes questions, or is set aside with its reason.

One bad row never ends a run, no row is lost in silence, and a question's id, its place in the sample and its split
depend on its content and the seed alone: never on the order, the number or the format of what lies around it.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from eagle3_train import verifier
from eagle3_train.config import Config, Prompts
from eagle3_train.errors import PipelineError
from eagle3_train.prompts import assign_splits, content_id, prepare
from eagle3_train.run import PROMPTS, Run, Stage

ROOT = Path(__file__).resolve().parent.parent
FILLERS = [{"prompt": f"What is {n} times {n}?"} for n in range(3)]


def run_stage(source: Path | str, run: Path, *, force: bool = False, **settings: Any) -> dict[str, Any]:
    """Do stage 01 on `source`; returns the manifest's summary."""
    config = Config(prompts={"source": str(source), "max_set_aside": 1.0, **settings})  # type: ignore[arg-type]
    stage = Stage(Run(run, config), PROMPTS)
    with stage.locked():
        assert stage.begin(force=force)
        stage.finish(prepare(stage))
    manifest = stage.manifest
    assert manifest is not None
    return manifest["summary"]


def rows_of(run: Path, name: str = "prompts.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "01_prompts" / name).read_bytes().splitlines()]


def write_rows(path: Path, rows: list[Any]) -> Path:
    """Rows as the format that the file's name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        keys = dict.fromkeys(key for row in rows for key in row)
        columns = {key: [row.get(key) for row in rows] for key in keys}
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ask(folder: Path, *rows: Any, **settings: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What stage 01 makes of these rows among three good ones: their prompts, and the rows set aside."""
    summary = run_stage(write_rows(folder / "data.jsonl", [*rows, *FILLERS]), folder / "run", **settings)
    fillers = {filler["prompt"] for filler in FILLERS}
    prompts, errors = rows_of(folder / "run"), rows_of(folder / "run", "errors.jsonl")
    mine = [prompt for prompt in prompts if prompt["messages"][-1]["content"] not in fillers]
    assert len(prompts) == len(mine) + len(FILLERS), "a bad row took a good one with it"
    assert summary["rows"] == len(rows) + len(FILLERS)
    assert summary.get("set aside", 0) == len(errors)
    return mine, errors


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


# Forms of a row -----------------------------------------------------------------------------------------------------

GOOD_ROWS = {
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]},
        [user("Why?")],
    ),
    "ShareGPT with a system turn": (
        {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Why?"}]},
        [system("Be brief."), user("Why?")],
    ),
    "messages": ({"messages": [user("Why?"), assistant("So.")]}, [user("Why?")]),
    "messages with a system turn": (
        {"messages": [system("Be brief."), user("Why?")]},
        [system("Be brief."), user("Why?")],
    ),
    "several turns": ({"messages": [user("Why?"), assistant("So."), user("And?"), assistant("So.")]}, [user("Why?")]),
    "other names of the speakers": (
        {"conversations": [{"from": "user", "value": "Why?"}, {"from": "chatgpt", "value": "So."}]},
        [user("Why?")],
    ),
    "conversations in messages' form": ({"conversations": [user("Why?"), assistant("So.")]}, [user("Why?")]),
    "messages in ShareGPT's form": ({"messages": [{"from": "human", "value": "Why?"}]}, [user("Why?")]),
    "prompt": ({"prompt": "Why?"}, [user("Why?")]),
    "question": ({"question": "Why?", "answer": "So."}, [user("Why?")]),
    "instruction": ({"instruction": "Why?", "input": "", "output": "So."}, [user("Why?")]),
    "instruction without input": ({"instruction": "Why?", "input": None}, [user("Why?")]),
    "instruction with input": ({"instruction": "Add.", "input": "1 and 2"}, [user("Add.\n\n1 and 2")]),
    "text parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]}]},
        [user("Why?")],
    ),
    "empty conversations beside a prompt": ({"conversations": [], "prompt": "Why?"}, [user("Why?")]),
    "no tools": ({"messages": [user("Why?")], "tools": []}, [user("Why?")]),
    "both forms' keys, one of them null": (
        {"messages": [{"from": None, "value": None, "role": "user", "content": "Why?"}]},
        [user("Why?")],
    ),
    "not Latin": ({"prompt": "为什么？ \U0001f914\u2028é"}, [user("为什么？ \U0001f914\u2028é")]),
    "white space kept": ({"prompt": "  def f():\n\treturn 1\n"}, [user("  def f():\n\treturn 1\n")]),
}


@pytest.mark.parametrize(("row", "messages"), GOOD_ROWS.values(), ids=GOOD_ROWS.keys())
def test_a_row_of_any_known_form_becomes_its_question(tmp_path: Path, row: Any, messages: list[dict[str, str]]) -> None:
    prompts, errors = ask(tmp_path, row)
    assert [prompt["messages"] for prompt in prompts] == [messages]
    assert errors == []


def test_rows_of_all_forms_may_be_mixed_in_one_file(tmp_path: Path) -> None:
    distinct = [
        json.loads(json.dumps(row).replace("Why?", f"Why {n}?").replace("Add.", f"Add {n}."))
        for n, (row, _) in enumerate(GOOD_ROWS.values())
    ]
    prompts, errors = ask(tmp_path, *distinct)
    assert len(prompts) == len(GOOD_ROWS)
    assert errors == []


def test_a_row_says_where_it_came_from(tmp_path: Path) -> None:
    prompts, _ = ask(tmp_path, {"prompt": "Why?", "source": "of-mine"}, {"prompt": "How?"})
    assert {prompt["messages"][0]["content"]: prompt["source"] for prompt in prompts} == {
        "Why?": "of-mine",
        "How?": "data.jsonl",
    }


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
BAD_ROWS = {
    "unknown role": ({"messages": [{"role": "moderator", "content": "Why?"}]}, "unknown role 'moderator'"),
    "unknown role that answers": (
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "bard", "value": "So."}]},
        "unknown role 'bard'",
    ),
    "a tool's turn": ({"messages": [user("Why?"), {"role": "tool", "content": "{}"}]}, "unknown role 'tool'"),
    "no role": ({"messages": [{"content": "Why?"}]}, "unknown role None"),
    "a role that is a list": ({"messages": [{"role": ["user"], "content": "Why?"}]}, "role"),
    "a role that is an object": ({"conversations": [{"from": {}, "value": "Why?"}]}, "role"),
    "a role that is a number": ({"conversations": [{"from": 1, "value": "Why?"}]}, "role"),
    "empty content": ({"messages": [user("")]}, "empty question"),
    "blank content": ({"messages": [user(" \n\t\u3000")]}, "empty question"),
    "blank prompt": ({"prompt": "  "}, "empty question"),
    "empty parts": ({"messages": [{"role": "user", "content": []}]}, "empty question"),
    "null content": ({"messages": [{"role": "user", "content": None}]}, "without text"),
    "content that is a number": ({"messages": [{"role": "user", "content": 5}]}, "without text"),
    "content that is an object": ({"messages": [{"role": "user", "content": {"text": "Why?"}}]}, "without text"),
    "only a system turn": ({"messages": [system("Be brief.")]}, "no user turn"),
    "two user turns in a row": ({"messages": [user("Why?"), user("How?")]}, "two user turns in a row"),
    "two user turns after a system turn": (
        {"messages": [system("Be brief."), user("Why?"), user("How?")]},
        "two user turns in a row",
    ),
    "an assistant turn first": ({"messages": [assistant("So."), user("Why?")]}, "opens with a turn of the assistant"),
    "an assistant turn after the system": (
        {"messages": [system("Be brief."), assistant("So."), user("Why?")]},
        "opens with a turn of the assistant",
    ),
    "two system turns": ({"messages": [system("a"), system("b"), user("Why?")]}, "opens with a turn of the system"),
    "tools": ({"messages": [user("Why?")], "tools": [{"name": "search"}]}, "tools"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, IMAGE]}]}, "not text"),
    "a part that is a string": ({"messages": [{"role": "user", "content": ["Why?"]}]}, "not text"),
    "an empty object": ({}, "none of conversations, messages"),
    "no known key": ({"text": "Why?"}, "none of conversations, messages"),
    "an empty conversation": ({"conversations": []}, "none of conversations, messages"),
    "a conversation that is a string": ({"conversations": "Why?"}, "not a list of turns"),
    "a conversation that is an object": ({"messages": {"role": "user", "content": "Why?"}}, "not a list of turns"),
    "a turn that is a string": ({"messages": ["Why?"]}, "not an object"),
    "a turn that is null": ({"messages": [None]}, "not an object"),
    "a prompt that is a number": ({"prompt": 5}, "without text"),
    "an input that is a list": ({"instruction": "Add.", "input": [1, 2]}, "text"),
    "a list": ([1, 2], "not a JSON object"),
    "a string": ("Why?", "not a JSON object"),
    "a number": (5, "not a JSON object"),
    "null": (None, "not a JSON object"),
    "a NUL": ({"prompt": "Wh\x00y?"}, "NUL"),
    "a NUL in the system turn": ({"messages": [system("\x00"), user("Why?")]}, "NUL"),
    "a NUL in the input": ({"instruction": "Add.", "input": "1\x002"}, "NUL"),
    "a lone surrogate": ({"prompt": "Wh\ud800y?"}, "surrogate"),
    "a lone surrogate in the system turn": ({"messages": [system("\udfff"), user("Why?")]}, "surrogate"),
    "a lone surrogate in a later turn": ({"messages": [user("Why?"), assistant("\ud800")]}, "surrogate"),
    "a lone surrogate in the input": ({"instruction": "Add.", "input": "1\ud800"}, "surrogate"),
    "a lone surrogate in a role": ({"messages": [{"role": "\ud800", "content": "Why?"}]}, "unknown role"),
    "a question of 2 MB": ({"prompt": "Why? " * 400_000}, "longer than prompts.max_prompt_chars (131072)"),
}


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_row_that_cannot_be_used_is_set_aside_with_its_line_and_reason(tmp_path: Path, row: Any, reason: str) -> None:
    prompts, errors = ask(tmp_path, {"prompt": "First?"}, row)
    assert [prompt["messages"] for prompt in prompts] == [[user("First?")]]
    assert [error["row"] for error in errors] == ["data.jsonl:2"]
    assert reason in errors[0]["reason"]
    assert len(errors[0]["reason"]) < 200


def test_a_lone_surrogate_in_a_field_that_is_not_asked_does_not_end_the_run(tmp_path: Path) -> None:
    prompts, errors = ask(tmp_path, {"prompt": "Why?", "source": "\ud800"}, {"prompt": "How?", "note": "\ud800"})
    assert len(prompts) + len(errors) == 2
    assert [user("How?")] in [prompt["messages"] for prompt in prompts]


def test_the_longest_question_allowed_is_kept_and_one_character_more_is_not(tmp_path: Path) -> None:
    prompts, errors = ask(tmp_path, {"prompt": "é" * 25}, {"prompt": "é" * 26}, max_prompt_chars=25)
    assert [prompt["messages"] for prompt in prompts] == [[user("é" * 25)]]
    assert "max_prompt_chars (25)" in errors[0]["reason"]


# Files --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "set_aside"),
    [
        pytest.param(b'{"prompt": "Why', 1, id="torn"),
        pytest.param(b"not JSON at all", 1, id="words"),
        pytest.param(b"\x00" * 100, 1, id="NULs"),
        pytest.param(b"x" * 2_000_000, 1, id="2 MB of nothing"),
        pytest.param(b"[" * 2_000_000, 1, id="2 MB of brackets"),
        pytest.param(b'{"a":' * 200_000, 1, id="1 MB of objects in objects"),
        pytest.param(b"9" * 10_000, 1, id="a huge number"),
        pytest.param(b'{"prompt": "Why?"}{"prompt": "How?"}', 1, id="two rows in one line"),
        pytest.param(b'{"prompt": NaN}', 1, id="NaN"),
        pytest.param(b"", 0, id="empty"),
        pytest.param(b" \t ", 0, id="blank"),
    ],
)
@pytest.mark.parametrize("last", [False, True])
def test_a_line_that_is_no_row_is_set_aside_and_the_others_are_read(
    tmp_path: Path, line: bytes, set_aside: int, last: bool
) -> None:
    lines = [json.dumps(row).encode() for row in FILLERS]
    lines.insert(3 if last else 1, line)
    (tmp_path / "data.jsonl").write_bytes(b"\n".join(lines) + (b"" if last else b"\n"))
    summary = run_stage(tmp_path / "data.jsonl", tmp_path / "run")
    assert summary["prompts"] == 3
    errors = rows_of(tmp_path / "run", "errors.jsonl")
    assert [error["row"] for error in errors] == [f"data.jsonl:{4 if last else 2}"] * set_aside
    assert all(len(error["reason"]) < 500 for error in errors)


@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_byte_order_mark_and_windows_line_ends_change_nothing(
    tmp_path: Path, mark: bytes, ending: bytes, name: str
) -> None:
    rows = [{"prompt": f"Frage {n}: süß?"} for n in range(4)]
    if name == "data.json":
        text = json.dumps(rows, ensure_ascii=False, indent=1).encode().replace(b"\n", ending)
    else:
        text = ending.join(json.dumps(row, ensure_ascii=False).encode() for row in rows)
    (tmp_path / name).write_bytes(mark + text)
    run_stage(tmp_path / name, tmp_path / "run")
    assert {p["messages"][0]["content"] for p in rows_of(tmp_path / "run")} == {row["prompt"] for row in rows}
    assert rows_of(tmp_path / "run", "errors.jsonl") == []


@pytest.mark.parametrize("garbage", [b'{"prompt": "caf\xe9?"}', b"\xff\xfe\x00\x01", b"\xc3"])
def test_bytes_that_are_no_text_end_no_run(tmp_path: Path, garbage: bytes) -> None:
    lines = [garbage, *(json.dumps(row).encode() for row in FILLERS)]
    (tmp_path / "data.jsonl").write_bytes(b"\n".join(lines))
    summary = run_stage(tmp_path / "data.jsonl", tmp_path / "run")
    assert summary["rows"] == 4
    assert summary["prompts"] + summary.get("set aside", 0) == 4


MIXED = [
    {"conversations": [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "1"}]},
    {"messages": [system("Be brief."), user("Two?"), assistant("2")]},
    {"prompt": "Three?"},
    {"instruction": "Four?", "input": "4"},
    {"question": "Five \U0001f914?", "source": "of-mine"},
    {"messages": [assistant("So.")]},
]


def by_content(run: Path) -> dict[str, tuple[str, str]]:
    """messages -> (id, split)."""
    return {json.dumps(row["messages"]): (row["id"], row["split"]) for row in rows_of(run)}


@pytest.mark.parametrize("name", ["data.json", "data.jsonl", "data.parquet"])
def test_a_file_gives_the_same_prompts_in_every_format(tmp_path: Path, name: str) -> None:
    run_stage(write_rows(tmp_path / name, MIXED), tmp_path / "run")
    run_stage(write_rows(tmp_path / "reference.jsonl", MIXED), tmp_path / "reference")
    assert len(rows_of(tmp_path / "run")) == 5
    assert by_content(tmp_path / "run") == by_content(tmp_path / "reference")
    errors = rows_of(tmp_path / "run", "errors.jsonl")
    assert errors == [{"row": f"{name}:6", "reason": "opens with a turn of the assistant"}]


def test_a_parquet_file_may_hold_turns_with_the_keys_of_both_forms(tmp_path: Path) -> None:
    """Parquet gives every turn every key that any turn has, null where it has none."""
    rows = [
        {"messages": [{"from": "human", "value": "One?"}]},
        {"messages": [user("Two?")]},
        {"messages": [user("Three?")]},
    ]
    summary = run_stage(write_rows(tmp_path / "data.parquet", rows), tmp_path / "run")
    assert summary["prompts"] == 3


def test_a_directory_is_read_with_everything_below_it(tmp_path: Path) -> None:
    write_rows(tmp_path / "set" / "a.json", MIXED[:2])
    write_rows(tmp_path / "set" / "sub" / "b.jsonl", MIXED[2:4])
    write_rows(tmp_path / "set" / "sub" / "c.parquet", MIXED[4:])
    (tmp_path / "set" / "README.md").write_text("# not rows\n")
    run_stage(tmp_path / "set", tmp_path / "run")
    run_stage(write_rows(tmp_path / "reference.jsonl", MIXED), tmp_path / "reference")
    assert by_content(tmp_path / "run") == by_content(tmp_path / "reference")
    assert [error["row"] for error in rows_of(tmp_path / "run", "errors.jsonl")] == ["c.parquet:2"]


@pytest.mark.parametrize("beside_others", [False, True])
def test_a_compressed_file_is_read_or_named_never_passed_over_in_silence(
    tmp_path: Path, beside_others: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "set" / "more.jsonl.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress("".join(json.dumps({"prompt": f"{n}?"}) + "\n" for n in range(5)).encode()))
    if beside_others:
        write_rows(tmp_path / "set" / "good.jsonl", FILLERS)
    try:
        summary = run_stage(packed.parent if beside_others else packed, tmp_path / "run", max_set_aside=0.01)
    except PipelineError as refused:
        assert "more.jsonl.gz" in str(refused)
        return
    told = capsys.readouterr().out + json.dumps(rows_of(tmp_path / "run", "errors.jsonl"))
    assert summary["prompts"] == 5 + 3 * beside_others or "more.jsonl.gz" in told


def parquet_cut(path: Path) -> None:
    write_rows(path, FILLERS * 100)
    path.write_bytes(path.read_bytes()[:-100])


def parquet_with_a_broken_page(path: Path) -> None:
    rows = [{"prompt": "".join(random.Random(n).choices("abcdefgh ", k=200))} for n in range(500)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[4 : len(content) // 2] = bytes(len(content) // 2 - 4)
    path.write_bytes(content)


BAD_FILES = {
    "an empty JSONL file": ("data.jsonl", lambda path: path.write_bytes(b"")),
    "a JSONL file of blank lines": ("data.jsonl", lambda path: path.write_bytes(b"\n\n \n")),
    "an empty JSON file": ("data.json", lambda path: path.write_bytes(b"")),
    "an empty JSON array": ("data.json", lambda path: path.write_bytes(b"[]")),
    "a JSON array cut short": ("data.json", lambda path: path.write_bytes(b'[{"prompt": "a"}, {"prom')),
    "a JSON array of brackets": ("data.json", lambda path: path.write_bytes(b"[" * 200_000)),
    "an empty Parquet file": ("data.parquet", lambda path: path.write_bytes(b"")),
    "a Parquet file that is text": ("data.parquet", lambda path: path.write_bytes(b'{"prompt": "a"}\n' * 100)),
    "a Parquet file cut short": ("data.parquet", parquet_cut),
    "a Parquet file with a broken page": ("data.parquet", parquet_with_a_broken_page),
    "a Parquet file without rows": ("data.parquet", lambda path: write_rows(path, FILLERS[:0])),
    "an empty directory": ("data", lambda path: path.mkdir()),
    "a directory of other files": ("data", lambda path: write_rows(path / "notes.txt", FILLERS)),
    "a directory with one broken file": ("data", lambda path: parquet_cut(write_rows(path / "a.parquet", FILLERS))),
    "a file that is not there": ("data.jsonl", lambda path: None),
    "a directory that is not there": ("sub/dir", lambda path: None),
}


@pytest.mark.parametrize(("name", "write"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_source_that_cannot_be_read_is_refused_naming_it(tmp_path: Path, name: str, write: Any) -> None:
    write(tmp_path / name)
    with pytest.raises(PipelineError) as refused:
        run_stage(tmp_path / name, tmp_path / "run")
    assert str(tmp_path / name) in str(refused.value)
    assert refused.value.exit_code == 1
    assert not (tmp_path / "run" / "01_prompts" / "prompts.jsonl").exists()


def test_a_json_file_of_one_object_over_many_lines_ends_in_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(json.dumps({"data": FILLERS}, indent=1))
    with pytest.raises(PipelineError) as refused:
        run_stage(tmp_path / "data.json", tmp_path / "run", max_set_aside=0.01)
    assert "not a JSON object" in str(refused.value)


def test_a_refused_source_ends_the_script_with_code_1_and_no_traceback(tmp_path: Path) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_text(yaml.safe_dump({"prompts": {"source": str(tmp_path / "nowhere.jsonl")}}))
    ended = subprocess.run(
        [sys.executable, ROOT / "01_prepare_data.py", "--run", tmp_path / "run", "--preset", preset],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "nowhere.jsonl: no such file" in ended.stderr
    assert "Traceback" not in ended.stderr


# How much may be set aside ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bad", "allowed"), [(0, True), (1, True), (2, True), (3, False)])
def test_rows_set_aside_are_allowed_up_to_the_presets_share(tmp_path: Path, bad: int, allowed: bool) -> None:
    rows = [{"prompt": f"{n}?"} for n in range(100 - bad)] + [{"messages": [system("x")]}] * bad
    source = write_rows(tmp_path / "data.jsonl", rows)
    if allowed:
        summary = run_stage(source, tmp_path / "run", max_set_aside=0.02)
        assert (summary["prompts"], summary.get("set aside", 0)) == (100 - bad, bad)
        return
    with pytest.raises(PipelineError) as refused:
        run_stage(source, tmp_path / "run", max_set_aside=0.02)
    assert "3 of 100 rows" in str(refused.value)
    assert "3 x no user turn" in str(refused.value)
    assert len(rows_of(tmp_path / "run", "errors.jsonl")) == 3


def test_after_the_limit_is_raised_the_same_command_goes_on(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "data.jsonl", [*FILLERS, {}])
    with pytest.raises(PipelineError):
        run_stage(source, tmp_path / "run", max_set_aside=0.01)
    assert run_stage(source, tmp_path / "run", max_set_aside=0.5)["prompts"] == 3


# Ids, samples, splits -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 questions."""
    rows = [{"prompt": f"What is {n} + {n * n}?"} for n in range(600)]
    return write_rows(tmp_path_factory.mktemp("many") / "many.jsonl", rows)


def shuffled(source: Path, to: Path, count: int | None = None) -> Path:
    lines = source.read_text().splitlines(keepends=True)
    random.Random(1).shuffle(lines)
    to.write_text("".join(lines[:count]))
    return to


def test_ids_and_splits_do_not_depend_on_order_or_number_of_rows(tmp_path: Path, many: Path) -> None:
    run_stage(many, tmp_path / "all")
    run_stage(shuffled(many, tmp_path / "b.jsonl"), tmp_path / "shuffled")
    run_stage(shuffled(many, tmp_path / "c.jsonl", 300), tmp_path / "half")
    everything, half = by_content(tmp_path / "all"), by_content(tmp_path / "half")
    assert by_content(tmp_path / "shuffled") == everything
    assert len(everything) == len({prompt_id for prompt_id, _ in everything.values()}) == 600
    assert len(half) == 300
    assert half.items() <= everything.items()


def test_the_rows_themselves_come_out_the_same_whatever_their_order(tmp_path: Path, many: Path) -> None:
    run_stage(many, tmp_path / "all", max_samples=100)
    run_stage(shuffled(many, tmp_path / "many.jsonl"), tmp_path / "shuffled", max_samples=100)
    first, second = (tmp_path / name / "01_prompts" / "prompts.jsonl" for name in ("all", "shuffled"))
    assert first.read_bytes() == second.read_bytes()


def test_another_system_turn_makes_another_question(tmp_path: Path) -> None:
    rows = [{"messages": [*before, user("Why?")]} for before in ([], [system("a")], [system("b")])]
    prompts, _ = ask(tmp_path, *rows)
    assert len({prompt["id"] for prompt in prompts}) == 3


@pytest.mark.parametrize("sizes", [(50, 120, 600), (3, 4, 5)])
def test_a_larger_sample_holds_the_smaller_one(tmp_path: Path, many: Path, sizes: tuple[int, ...]) -> None:
    samples = []
    for size in sizes:
        run_stage(many, tmp_path / f"{size}", max_samples=size)
        samples.append({row["id"] for row in rows_of(tmp_path / f"{size}")})
    assert [len(sample) for sample in samples] == list(sizes)
    assert all(small < large for small, large in itertools.pairwise(samples))


def test_a_larger_sample_keeps_the_split_of_what_was_there(tmp_path: Path, many: Path) -> None:
    shares = {"val_fraction": 0.1, "eval_fraction": 0.1}
    run_stage(many, tmp_path / "run", max_samples=100, **shares)
    before = by_content(tmp_path / "run")
    run_stage(many, tmp_path / "run", max_samples=500, **shares)
    assert before.items() <= by_content(tmp_path / "run").items()
    assert not (tmp_path / "run" / "set_aside").exists()


def test_a_sample_is_not_the_head_of_the_file(tmp_path: Path, many: Path) -> None:
    run_stage(many, tmp_path / "run", max_samples=100)
    first = {json.dumps([user(json.loads(line)["prompt"])]) for line in many.read_text().splitlines()[:300]}
    # Hypergeometric: 50 expected, standard deviation 4.6.
    assert 30 < len(first & by_content(tmp_path / "run").keys()) < 70


def test_another_seed_takes_another_sample_with_the_same_ids(tmp_path: Path, many: Path) -> None:
    for seed in (0, 1):
        run_stage(many, tmp_path / f"{seed}", max_samples=100, seed=seed)
    zero, one = (by_content(tmp_path / f"{seed}") for seed in (0, 1))
    shared = zero.keys() & one.keys()
    assert 0 < len(shared) < 50  # 17 expected
    assert all(zero[content][0] == one[content][0] for content in shared)


def test_splits_have_the_shares_asked_for(tmp_path: Path, many: Path) -> None:
    summary = run_stage(many, tmp_path / "run", val_fraction=0.1, eval_fraction=0.2)
    # Binomial: standard deviations 7 and 10.
    assert abs(summary["val"] - 60) < 30
    assert abs(summary["eval"] - 120) < 40
    assert summary["train"] + summary["val"] + summary["eval"] == summary["prompts"] == 600
    assert Counter(row["split"] for row in rows_of(tmp_path / "run")) == {
        split: summary[split] for split in ("train", "val", "eval")
    }


def small_samples() -> Iterator[Any]:
    for count in (3, 4, 6):
        for fraction in (0.01, 0.4, 0.49):
            yield pytest.param(count, fraction, id=f"{count} prompts, {fraction}")


@pytest.mark.parametrize(("count", "fraction"), small_samples())
def test_no_split_of_a_small_sample_is_empty(count: int, fraction: float) -> None:
    ids = [content_id([user(f"{number}?")]) for number in range(count)]
    for seed in range(50):
        settings = Prompts(val_fraction=fraction, eval_fraction=fraction, seed=seed)
        found = Counter(assign_splits(ids, settings).values())
        assert set(found) == {"train", "val", "eval"}, f"seed {seed}: {found}"
        assert found.total() == count


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_prompts_for_three_splits_are_refused(tmp_path: Path, count: int) -> None:
    with pytest.raises(PipelineError, match=f"{count} prompts are too few"):
        run_stage(write_rows(tmp_path / "data.jsonl", FILLERS[:count]), tmp_path / "run")


def test_an_attempt_to_grow_that_cannot_read_its_source_leaves_the_prompts_done(tmp_path: Path) -> None:
    """A run that was moved without its data set must stay usable after one wrong command."""
    source = write_rows(tmp_path / "data.jsonl", FILLERS)
    run_stage(source, tmp_path / "run")
    source.unlink()
    with pytest.raises(PipelineError):
        run_stage(source, tmp_path / "run", max_samples=100)
    config = Config(prompts={"source": str(source), "max_set_aside": 1.0})  # type: ignore[arg-type]
    assert not Stage(Run(tmp_path / "run", config), PROMPTS).begin(force=False)


# Duplicates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["What is 2 + 2?", "What is  2 + 2?", " What is 2 + 2?\n", "What\tis\n2 + 2?"])
def test_a_question_asked_twice_is_kept_once_and_counted(tmp_path: Path, other: str) -> None:
    source = write_rows(tmp_path / "data.jsonl", [{"prompt": "What is 2 + 2?"}, {"question": other}, *FILLERS])
    summary = run_stage(source, tmp_path / "run")
    assert (summary["rows"], summary["duplicates"], summary["prompts"]) == (5, 1, 4)
    assert rows_of(tmp_path / "run", "errors.jsonl") == []


def test_which_of_two_alike_questions_is_kept_does_not_depend_on_their_order(tmp_path: Path) -> None:
    twins = [{"prompt": f"What is{' ' * (1 + n % 2)}{n // 2} + 2?"} for n in range(20)]
    run_stage(write_rows(tmp_path / "a.jsonl", twins), tmp_path / "a")
    run_stage(write_rows(tmp_path / "b.jsonl", twins[::-1]), tmp_path / "b")
    assert len(by_content(tmp_path / "a")) == 10
    assert {row["id"]: row["split"] for row in rows_of(tmp_path / "a")} == {
        row["id"]: row["split"] for row in rows_of(tmp_path / "b")
    }


def test_duplicates_do_not_push_a_question_out_of_the_sample(tmp_path: Path, many: Path) -> None:
    run_stage(many, tmp_path / "once", max_samples=50)
    (tmp_path / "many.jsonl").write_text(many.read_text() * 3)
    summary = run_stage(tmp_path / "many.jsonl", tmp_path / "thrice", max_samples=50)
    assert by_content(tmp_path / "thrice") == by_content(tmp_path / "once")
    assert summary["duplicates"] == 1200


# Hub data sets: the network is the one thing replaced here ------------------------------------------------------------


def test_a_hub_data_set_is_read_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(name: str, split: str, streaming: bool) -> Iterator[dict[str, Any]]:
        asked.append((name, split, streaming))
        return iter(MIXED)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    run_stage("owner/name", tmp_path / "run", hub_split="train_sft")
    run_stage(write_rows(tmp_path / "reference.jsonl", MIXED), tmp_path / "reference")
    assert asked == [("owner/name", "train_sft", True)]
    assert by_content(tmp_path / "run") == by_content(tmp_path / "reference")
    assert {row["source"] for row in rows_of(tmp_path / "run")} == {"owner/name", "of-mine"}
    assert rows_of(tmp_path / "run", "errors.jsonl")[0]["row"] == "owner/name:6"


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach the hub"),
        ConnectionError(),
        ValueError('Unknown split "validation"'),
        FileNotFoundError("no such data set"),
        TimeoutError("slow"),
    ],
    ids=lambda error: repr(error)[:30],
)
@pytest.mark.parametrize("rows_before", [0, 2])
def test_a_hub_data_set_that_cannot_be_read_is_refused_naming_it_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, rows_before: int
) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield from FILLERS[:rows_before]
        raise error

    monkeypatch.setattr("datasets.load_dataset", lambda *_args, **_options: rows())
    with pytest.raises(PipelineError) as refused:
        run_stage("owner/name", tmp_path / "run", hub_split="validation")
    message = str(refused.value)
    assert all(part in message for part in ("owner/name", "validation", str(error), "local file"))
    assert not (tmp_path / "run" / "01_prompts" / "prompts.jsonl").exists()


@pytest.mark.parametrize("source", ["./owner/name", "data/nowhere.jsonl", "nowhere", "a/b/c"])
def test_a_name_that_is_no_hub_id_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    def load_dataset(*_args: Any, **_options: Any) -> None:
        pytest.fail("asked the hub")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PipelineError) as refused:
        run_stage(source, tmp_path / "run")
    assert f"prompts.source {source}:" in str(refused.value)


# Several sources, conversations, lengths -----------------------------------------------------------------------------


def source_file(folder: Path, name: str, count: int) -> str:
    return str(write_rows(folder / f"{name}.jsonl", [{"prompt": f"{name} {number}?"} for number in range(count)]))


def test_weights_decide_the_mix_and_a_larger_sample_still_holds_the_smaller(tmp_path: Path) -> None:
    sources = [
        {"path": source_file(tmp_path, "code", 400), "name": "code", "weight": 3},
        {"path": source_file(tmp_path, "prose", 4000), "name": "prose", "weight": 1},
    ]
    samples = []
    for size in (100, 200):
        summary = run_stage("unused", tmp_path / f"{size}", sources=sources, max_samples=size)
        # Three quarters expected; binomial standard deviation 0.04.
        assert 0.6 < summary["by_source"]["code"] / size < 0.9
        samples.append({row["id"] for row in rows_of(tmp_path / f"{size}")})
    assert samples[0] < samples[1]


def test_without_weights_sources_are_taken_as_they_come(tmp_path: Path) -> None:
    sources = [{"path": source_file(tmp_path, name, count)} for name, count in (("few", 100), ("many", 900))]
    summary = run_stage("unused", tmp_path / "run", sources=sources, max_samples=300)
    assert 10 < summary["by_source"]["few.jsonl"] < 55  # 30 expected


def test_the_same_question_in_two_sources_is_kept_once(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}?"} for number in range(20)]
    sources = [{"path": str(write_rows(tmp_path / name, rows))} for name in ("a.jsonl", "b.jsonl")]
    summary = run_stage("unused", tmp_path / "run", sources=sources)
    assert (summary["prompts"], summary["duplicates"]) == (20, 20)


def test_one_weight_without_the_others_is_refused() -> None:
    with pytest.raises(ValueError, match="either every source has a weight or none has"):
        Prompts(sources=[{"path": "a", "weight": 1}, {"path": "b"}])


def test_all_user_turns_are_kept_in_order_when_asked_for(tmp_path: Path) -> None:
    row = {"messages": [system("Be brief."), user("One?"), {"role": "assistant", "content": "1"}, user("Two?")]}
    (first,), _ = ask(tmp_path, row)
    assert "follow_ups" not in first
    (whole,), _ = ask(tmp_path / "all", row, turns="all")
    assert whole["messages"] == [system("Be brief."), user("One?")]
    assert whole["follow_ups"] == ["Two?"]
    assert whole["id"] == first["id"]


def test_length_is_counted_by_the_verifiers_own_tokenizer(tmp_path: Path, tiny_config: Config) -> None:
    tokenizer = verifier.tokenizer(tiny_config.verifier)
    text = "What is 12 + 34? " * 8
    tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert tokens < len(text.encode())  # otherwise bytes alone would decide
    kept, _ = ask(tmp_path / "kept", {"prompt": text}, max_prompt_tokens=tokens)
    assert len(kept) == 1
    _, errors = ask(tmp_path / "dropped", {"prompt": text}, max_prompt_tokens=tokens - 1)
    assert f"max_prompt_tokens ({tokens} > {tokens - 1})" in errors[0]["reason"]


def test_the_summary_counts_languages_and_lengths_and_draws_them(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"What is the meaning of the number {number}, and why do people like it?"} for number in range(30)
    ]
    rows += [
        {"prompt": f"\u4ec0\u4e48\u662f\u673a\u5668\u5b66\u4e60\uff1f\u8bf7\u8be6\u7ec6\u89e3\u91ca {number}"}
        for number in range(10)
    ]
    summary = run_stage(write_rows(tmp_path / "data.jsonl", rows), tmp_path / "run")
    assert summary["by_language"]["zh"] == 10
    assert summary["by_language"]["en"] >= 25
    assert 0 < summary["p50_tokens"] <= summary["p95_tokens"] <= summary["max_tokens"]
    assert (tmp_path / "run" / "01_prompts" / "prompts.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["data.jsonl.gz", "data.jsonl.zst", "data.json.gz"])
def test_compressed_files_are_read(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": f"{number}?"} for number in range(5)]
    plain = json.dumps(rows) if ".json." in name else "".join(json.dumps(row) + "\n" for row in rows)
    codec = "gzip" if name.endswith(".gz") else "zstd"
    with pyarrow.CompressedOutputStream(str(tmp_path / name), codec) as file:
        file.write(plain.encode())
    assert run_stage(tmp_path / name, tmp_path / "run")["prompts"] == 5
