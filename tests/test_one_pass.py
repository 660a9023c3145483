"""Contract of `generation.capture: one_pass`: the same data set as two passes make, from one load of the verifier.

Guarded: states saved while the verifier answers are those of its tokens, or are made again, or are left to 02, never
kept wrong; what is kept is taken over by 02 without a server; the gate refuses a sampler that draws something else.
The engine is FaultServer's stand-in; states of the real one are held against transformers in test_engine.py.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from eagle3_train import parity
from eagle3_train import server as vllm
from eagle3_train.capture import STAGING, DiskFull
from eagle3_train.config import Config, Extraction, Generation, Verifier
from eagle3_train.config import Server as ServerSettings
from eagle3_train.errors import PipelineError
from eagle3_train.extraction import INDEX, SHARDS, extract
from eagle3_train.generation import generate
from eagle3_train.one_pass import STATES, STATES_INDEX
from eagle3_train.run import HIDDEN, PROMPTS, TRACES, Result, Run
from tests.fault_server import (
    END_OF_TURN,
    TRACES_FILE,
    Engine,
    FaultServer,
    answer_to,
    encode,
    finish_stage,
    prompt_id,
    rows_of,
    states_of,
    thinking_on,
    write_prompts,
    write_verifier,
)
from tests.test_extraction import ShrinkingDisk

# In the order of their ids: the first eight are the canaries.
QUESTIONS = sorted((f"Question {number}?" for number in range(12)), key=prompt_id)
VAL, EVAL, LAST = QUESTIONS[8], QUESTIONS[9], QUESTIONS[11]
TRAINED = [question for question in QUESTIONS if question != EVAL]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    with FaultServer() as server, contextlib.closing(Engine(server)) as running:
        monkeypatch.setattr(vllm, "serve", running.serve)
        yield running


def new_run(folder: Path, *, extraction: dict[str, Any] | None = None, **generation: Any) -> Run:
    """A run whose stage 01 is done."""
    settings = {
        "capture": "one_pass",
        "temperatures": [0.0],
        "concurrency": 4,
        "request_timeout_s": 5,
        "max_tokens": 99,
    }
    config = Config(
        verifier=Verifier(path=str(write_verifier(folder / "verifier"))),
        server=ServerSettings(max_model_len=1024),
        generation=Generation(**(settings | generation)),
        extraction=Extraction(**({"concurrency": 3, "request_timeout_s": 5} | (extraction or {}))),
    )
    run = Run(folder / "run", config)
    splits = {**dict.fromkeys(QUESTIONS, "train"), VAL: "val", EVAL: "eval"}
    finish_stage(run, PROMPTS, lambda stage: write_prompts(stage, splits))
    return run


def ask(run: Run) -> Result:
    return finish_stage(run, TRACES, generate)


def capture(run: Run) -> Result:
    return finish_stage(run, HIDDEN, extract)


def whole(question: str) -> list[int]:
    """Prompt and output of a question's trace."""
    said = encode(f"{thinking_on(question)}</think>{answer_to(question)}")
    return [*encode(f"user:{question};"), *said, END_OF_TURN]


def shard(run: Run, question: str) -> Path:
    return run.folder("02_hidden") / SHARDS / f"{prompt_id(question)}.safetensors"


def saved(run: Run) -> set[str]:
    """Questions whose states stage 01b has saved."""
    names = {path.stem for path in (run.folder("01b_traces") / STATES).iterdir()}
    return {question for question in QUESTIONS if prompt_id(question) in names}


def assert_states_are_right(run: Run, questions: list[str] = TRAINED) -> None:
    for question in questions:
        tensors = load_file(shard(run, question))
        assert tensors["token_ids"].tolist() == whole(question)[:-1]
        assert torch.equal(tensors["hidden_states"], states_of(whole(question)[:-1]))
    assert {row["id"] for row in rows_of(run.folder("02_hidden") / INDEX)} == {prompt_id(q) for q in questions}


def prefilled(engine: Engine) -> dict[str, int]:
    """Captures from token ids, the gate's left out."""
    questions = {tuple(whole(question)[:-1]): question for question in QUESTIONS}
    return {questions[ids]: count for ids, count in engine.server.captures.items() if count}


def test_states_saved_while_answering_are_taken_over_without_a_second_server(tmp_path: Path, engine: Engine) -> None:
    run = new_run(tmp_path)
    ask(run)
    assert saved(run) == set(TRAINED)
    assert not (run.folder("01b_traces") / STAGING).exists()
    result = capture(run)
    assert engine.starts == 1
    assert prefilled(engine) == {}
    assert (result.summary["taken_over"], result.summary["extracted_tokens"]) == (11, 0)
    assert_states_are_right(run)
    assert saved(run) == set()


def test_the_data_set_has_the_form_and_the_values_of_two_passes(tmp_path: Path, engine: Engine) -> None:
    import datasets

    tables = []
    for way in ("one_pass", "two_pass"):
        run = new_run(tmp_path / way)
        ask(run)
        if way == "two_pass":
            shutil.rmtree(run.folder("01b_traces") / STATES)
            (run.folder("01b_traces") / STATES_INDEX).unlink()
        capture(run)
        assert_states_are_right(run)
        table = datasets.load_from_disk(str(run.folder("02_hidden") / "dataset")).with_format(None)
        tables.append((table.features, table.to_list()))
    assert tables[0] == tables[1]


def test_the_server_is_started_without_asynchronous_scheduling_and_with_extractions_arguments_last(
    tmp_path: Path, engine: Engine
) -> None:
    run = new_run(
        tmp_path, server_args=["--kv-cache-dtype=fp8"], extraction={"server_args": ["--kv-cache-dtype=bfloat16"]}
    )
    ask(run)
    arguments = engine.extra_args
    assert "--no-async-scheduling" in arguments
    assert arguments.index("--kv-cache-dtype=fp8") < arguments.index("--kv-cache-dtype=bfloat16")


def test_states_one_row_off_are_made_again_from_the_token_ids(tmp_path: Path, engine: Engine) -> None:
    engine.chat_faults[tuple(whole(LAST)[:-1])] = "shifted"
    run = new_run(tmp_path)
    ask(run)
    assert prefilled(engine) == {LAST: 1}
    capture(run)
    assert engine.starts == 1
    assert_states_are_right(run)


@pytest.mark.parametrize("fault", ["NaN", "fewer rows", "cut short", "no file", "failed write"])
def test_a_file_that_is_not_sound_is_made_again_as_well(tmp_path: Path, engine: Engine, fault: str) -> None:
    engine.chat_faults[tuple(whole(LAST)[:-1])] = fault
    run = new_run(tmp_path)
    ask(run)
    capture(run)
    assert_states_are_right(run)


def test_states_that_stay_wrong_leave_the_trace_and_are_left_to_02(tmp_path: Path, engine: Engine) -> None:
    engine.chat_faults[tuple(whole(LAST)[:-1])] = "shifted"
    engine.faults[tuple(whole(LAST)[:-1])] = ("NaN", 1)
    run = new_run(tmp_path)
    ask(run)
    assert saved(run) == set(TRAINED) - {LAST}
    assert len(rows_of(run.folder("01b_traces") / TRACES_FILE)) == 12
    result = capture(run)
    assert engine.starts == 2
    assert result.summary["extracted_tokens"] == len(whole(LAST)) - 1
    assert_states_are_right(run)


def test_states_in_another_type_than_asked_now_are_made_again(tmp_path: Path, engine: Engine) -> None:
    run = new_run(tmp_path)
    ask(run)
    settings = run.config.extraction.model_copy(update={"storage_dtype": "float32"})
    other = Run(run.path, run.config.model_copy(update={"extraction": settings}))
    result = capture(other)
    assert result.summary["taken_over"] == 0
    header = shard(run, LAST).read_bytes()
    assert b'"F32"' in header


def test_an_answer_whose_trace_is_lost_is_asked_again_and_its_states_replaced(tmp_path: Path, engine: Engine) -> None:
    """As after a kill between the states' row and the trace's."""
    run = new_run(tmp_path)
    ask(run)
    traces = run.folder("01b_traces") / TRACES_FILE
    traces.write_text("".join(line for line in traces.open() if prompt_id(LAST) not in line))
    ask(run)
    capture(run)
    assert_states_are_right(run)


def test_a_kill_while_states_are_taken_over_costs_no_second_server(tmp_path: Path, engine: Engine) -> None:
    run = new_run(tmp_path)
    ask(run)
    index = run.folder("01b_traces") / STATES_INDEX
    row = next(row for row in rows_of(index) if row["id"] == prompt_id(LAST))
    folder = run.folder("02_hidden")

    def killed(stage: Any) -> Result:
        (folder / INDEX).write_text(json.dumps(row) + "\n")  # the row is there, the file not yet
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finish_stage(run, HIDDEN, killed)
    capture(run)
    assert engine.starts == 1
    assert_states_are_right(run)


def test_no_room_for_states_stops_the_stage_and_no_answer_is_lost(tmp_path: Path, engine: Engine) -> None:
    engine.chat_faults[tuple(whole(LAST)[:-1])] = "disk full"
    run = new_run(tmp_path, concurrency=1)
    with pytest.raises(DiskFull, match="No space left"):
        ask(run)
    assert prompt_id(LAST) in {row["id"] for row in rows_of(run.folder("01b_traces") / TRACES_FILE)}
    engine.chat_faults.clear()
    ask(run)
    capture(run)
    assert_states_are_right(run)


@pytest.mark.parametrize(("looks", "starts"), [(0, 0), (1, 1)])
def test_no_room_for_states_is_noticed_before_the_server_starts_and_before_each_sample(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, looks: int, starts: int
) -> None:
    run = new_run(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", ShrinkingDisk(looks))
    with pytest.raises(DiskFull, match=r"0\.50 GiB free.*make room"):
        ask(run)
    assert engine.starts == starts
    assert set(engine.server.asked()) == set(QUESTIONS[:8] if starts else []), "beyond the canaries"


def test_a_sampler_that_draws_something_else_is_refused_before_anything_is_kept(tmp_path: Path, engine: Engine) -> None:
    """Its answers are the likeliest tokens, whatever the temperature: far more likely than samples at 3.0."""
    run = new_run(tmp_path, temperatures=[3.0], top_p=1.0)
    with pytest.raises(PipelineError, match=r"standard deviations more likely"):
        ask(run)
    assert rows_of(run.folder("01b_traces") / TRACES_FILE) == []
    assert saved(run) == set()


def test_canaries_whose_states_are_one_row_off_stop_the_stage(tmp_path: Path, engine: Engine) -> None:
    engine.chat_faults[tuple(whole(QUESTIONS[2])[:-1])] = "shifted"
    run = new_run(tmp_path)
    with pytest.raises(PipelineError, match="canary 2, saved while it was generated"):
        ask(run)
    assert saved(run) == set()


def test_the_gate_leaves_its_numbers_in_the_traces_folder(tmp_path: Path, engine: Engine) -> None:
    run = new_run(tmp_path)
    ask(run)
    (row,) = rows_of(run.folder("01b_traces") / parity.LOG)
    assert row["passed"]
    assert row["canaries"] == 8


def test_one_pass_with_a_server_of_someone_else_is_refused() -> None:
    with pytest.raises(ValidationError, match="needs a server of our own"):
        Generation(capture="one_pass", endpoint=["http://127.0.0.1:1/v1"])
