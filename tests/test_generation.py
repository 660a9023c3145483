"""Contract of stage 01b: each prompt ends with exactly one trace of the verifier's own words, whatever happens.

The server is real HTTP (fault_server.py), the stage and its run directory are the real ones. Guarded: the rows'
fields; which faults are retried and which are set aside; what stops the stage early; and that a run stopped at any
moment, by SIGTERM, Ctrl-C or kill -9, ends with the same traces once the same command has been run again.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3_train import verifier
from eagle3_train.asking import watch_server
from eagle3_train.cli import _terminate
from eagle3_train.config import Config, Generation, Verifier, parse
from eagle3_train.errors import PipelineError, Terminated
from eagle3_train.generation import _TokenCheck, ends_in_a_loop, generate, sampling_of
from eagle3_train.run import ERRORS, PROMPTS, TRACES, Result, Run, Stage
from eagle3_train.server import Server
from tests.fault_server import (
    END_OF_TURN,
    ROOT,
    SERVER_VERSION,
    TRACES_FILE,
    FaultServer,
    answer_to,
    encode,
    finish_stage,
    prompt_id,
    rows_of,
    thinking_on,
    write_config,
    write_prompts,
)

TRACE_FIELDS = {
    "id",
    "prompt_token_ids",
    "output_token_ids",
    "reasoning",
    "content",
    "finish_reason",
    "usage",
    "sampling",
    "flags",
    "server",
}


@pytest.fixture
def server() -> Iterator[FaultServer]:
    with FaultServer() as running:
        yield running


def numbered(count: int) -> list[str]:
    return [f"Question {number}?" for number in range(count)]


def new_run(folder: Path, endpoint: str | list[str], questions: list[str], **generation: Any) -> Run:
    """A run directory whose stage 01 is done, with patience fit for a test."""
    settings = {
        "endpoint": endpoint,
        "concurrency": 8,
        "request_timeout_s": 5,
        "connect_timeout_s": 2,
        "max_retries": 2,
        "max_tokens": 64,
    }
    verifier = Verifier(path=str(write_config(folder / "verifier")))
    run = Run(folder / "run", Config(verifier=verifier, generation=Generation(**(settings | generation))))
    run.keep_config()
    finish_stage(run, PROMPTS, lambda stage: write_prompts(stage, dict.fromkeys(questions, "train")))
    return run


def ask(run: Run) -> Result:
    return finish_stage(run, TRACES, generate)


def traces_of(run: Run) -> dict[str, dict[str, Any]]:
    """The traces by id, after a look that none is there twice."""
    rows = rows_of(run.folder("01b_traces") / TRACES_FILE)
    assert max(Counter(row["id"] for row in rows).values(), default=1) == 1, "a prompt has two traces"
    return {row["id"]: row for row in rows}


def reasons_of(run: Run) -> dict[str, str]:
    return {row["id"]: row["reason"] for row in rows_of(run.folder("01b_traces") / ERRORS)}


def start_script(run: Run) -> subprocess.Popen[str]:
    """The real script, as a user runs it, in another process."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "01b_generate_synthetic.py"), "--run", str(run.path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_script(run: Run) -> tuple[int, str, str]:
    process = start_script(run)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


# ---- what a trace is


def test_each_prompt_gets_one_trace_with_the_servers_own_token_ids(tmp_path: Path, server: FaultServer) -> None:
    questions = numbered(12)
    run = new_run(tmp_path, server.url, questions)
    result = ask(run)
    traces = traces_of(run)
    assert set(traces) == {prompt_id(question) for question in questions}
    for question in questions:
        trace = traces[prompt_id(question)]
        assert set(trace) == TRACE_FIELDS
        assert trace["prompt_token_ids"] == encode(f"user:{question};")
        said = [*encode(f"{thinking_on(question)}</think>{answer_to(question)}"), END_OF_TURN]
        assert trace["output_token_ids"] == said
        assert trace["reasoning"] == thinking_on(question)
        assert trace["content"] == answer_to(question)
        assert trace["finish_reason"] == "stop"
        assert trace["usage"]["completion_tokens"] == len(said)
        assert trace["server"]["model"] == "kimi-under-test"
    assert server.asked() == Counter(questions)
    assert result.summary["traces"] == result.summary["with_thinking"] == len(questions)
    assert result.summary["set_aside"] == 0
    assert result.summary["output_tokens"] == sum(len(trace["output_token_ids"]) for trace in traces.values())


def test_a_trace_records_the_sampling_that_was_asked_of_the_server(tmp_path: Path, server: FaultServer) -> None:
    question = "Which settings?"
    run = new_run(tmp_path, server.url, [question], temperatures=[0.5], top_p=0.75, max_tokens=33)
    ask(run)
    (sent,) = server.bodies(question)
    sampling = traces_of(run)[prompt_id(question)]["sampling"]
    assert sampling == {name: sent[name] for name in ("temperature", "top_p", "max_tokens", "seed")}
    assert (sampling["temperature"], sampling["top_p"], sampling["max_tokens"]) == (0.5, 0.75, 33)


def test_a_trace_records_the_version_of_the_server_that_answered(tmp_path: Path, server: FaultServer) -> None:
    run = new_run(tmp_path, server.url, ["Which version are you?"])
    ask(run)
    (trace,) = traces_of(run).values()
    assert trace["server"]["version"] == SERVER_VERSION


def test_seeds_depend_on_the_prompt_and_the_base_seed_alone(tmp_path: Path, server: FaultServer) -> None:
    questions = numbered(6)
    ask(new_run(tmp_path / "first", server.url, questions, concurrency=6))
    ask(new_run(tmp_path / "again", server.url, [*questions[::-1], "One more?"], concurrency=1))
    ask(new_run(tmp_path / "other", server.url, questions, seed=1))
    seeds = {question: [body["seed"] for body in server.bodies(question)] for question in questions}
    for first, again, other in seeds.values():
        assert first == again, "the order and the number of prompts changed a seed"
        assert other != first
    assert len({first for first, _, _ in seeds.values()}) == len(questions), "two prompts share a seed"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_thinking_is_captured_under_the_new_and_the_old_name(tmp_path: Path, field: str) -> None:
    with FaultServer(reasoning_field=field) as server:
        run = new_run(tmp_path, server.url, ["Think!"])
        ask(run)
    (trace,) = traces_of(run).values()
    assert trace["reasoning"] == thinking_on("Think!")
    assert trace["content"] == answer_to("Think!")


def test_an_answer_cut_off_while_thinking_is_recorded_as_cut_off(tmp_path: Path, server: FaultServer) -> None:
    server.misbehave("Long?", "cut off")
    run = new_run(tmp_path, server.url, ["Long?", "Short?"])
    result = ask(run)
    trace = traces_of(run)[prompt_id("Long?")]
    assert trace["finish_reason"] == "length"
    assert trace["content"] is None
    assert trace["reasoning"]
    assert len(trace["output_token_ids"]) == 10
    assert result.summary["finish_reasons"] == {"length": 1, "stop": 1}


def test_an_answer_aborted_by_the_engine_never_counts_as_a_trace(tmp_path: Path, server: FaultServer) -> None:
    server.misbehave("Aborted?", "aborted")
    run = new_run(tmp_path, server.url, ["Aborted?", "Whole?"], max_set_aside=1)
    ask(run)
    assert set(traces_of(run)) == {prompt_id("Whole?")}, "half an answer would be trained on as if it had ended"
    assert prompt_id("Aborted?") in reasons_of(run)


# ---- faults of one request


def test_passing_faults_cost_a_retry_and_end_with_whole_traces(tmp_path: Path, server: FaultServer) -> None:
    passing = (
        "http 408",
        "http 409",
        "http 429",
        "http 500",
        "http 503",
        "connection reset",
        "closed without an answer",
        "dies in the middle",
        "hang",
    )
    for fault in passing:
        server.misbehave(f"With {fault}?", fault, times=1)
    for fault in ("slow body", "keep-alive closed"):
        server.misbehave(f"With {fault}?", fault, times=1)
    questions = [f"With {fault}?" for fault in (*passing, "slow body", "keep-alive closed", "no fault at all")]
    run = new_run(tmp_path, server.url, questions, concurrency=16, request_timeout_s=1)
    ask(run)
    traces = traces_of(run)
    assert {question: traces[prompt_id(question)]["content"] for question in questions} == {
        question: answer_to(question) for question in questions
    }
    asked = server.asked()
    assert {fault: asked[f"With {fault}?"] for fault in passing} == dict.fromkeys(passing, 2)
    assert asked["With slow body?"] == asked["With no fault at all?"] == 1
    assert reasons_of(run) == {}


def test_retry_after_is_honoured(tmp_path: Path, server: FaultServer) -> None:
    server.misbehave("Busy?", "http 429", times=2)
    ask(new_run(tmp_path, server.url, ["Busy?"]))
    first, second, third = server.times("Busy?")
    assert second - first >= 1.0
    assert third - second >= 1.0


def test_retries_end_at_max_retries(tmp_path: Path, server: FaultServer) -> None:
    server.misbehave("Broken?", "http 500")
    server.misbehave("Hanging?", "hang")
    run = new_run(
        tmp_path,
        server.url,
        ["Broken?", "Hanging?", "Fine?"],
        max_retries=1,
        request_timeout_s=0.4,
        max_set_aside=1,
    )
    ask(run)
    assert server.asked() == {"Broken?": 2, "Hanging?": 2, "Fine?": 1}
    reasons = reasons_of(run)
    assert "500" in reasons[prompt_id("Broken?")]
    assert "request_timeout_s" in reasons[prompt_id("Hanging?")]
    assert set(traces_of(run)) == {prompt_id("Fine?")}


def test_a_prompt_beyond_the_context_is_set_aside_at_once_with_the_servers_words(
    tmp_path: Path, server: FaultServer
) -> None:
    server.misbehave("Too long?", "http 400")
    run = new_run(tmp_path, server.url, ["Too long?", "Fine?"], max_set_aside=1)
    ask(run)
    (row,) = rows_of(run.folder("01b_traces") / ERRORS)
    assert row["id"] == prompt_id("Too long?")
    assert "400" in row["reason"]
    assert "maximum context length" in row["detail"]
    assert server.asked()["Too long?"] == 1


@pytest.mark.parametrize(
    "fault",
    ["null message", "no choices", "null choices", "empty answer", "not JSON", "HTML page"],
)
def test_an_unusable_answer_is_set_aside_with_a_reason(tmp_path: Path, server: FaultServer, fault: str) -> None:
    server.misbehave("Odd?", fault)
    run = new_run(tmp_path, server.url, ["Odd?", "Fine?"], max_set_aside=1, max_retries=0)
    result = ask(run)
    assert set(traces_of(run)) == {prompt_id("Fine?")}
    reasons = reasons_of(run)
    assert set(reasons) == {prompt_id("Odd?")}
    assert reasons[prompt_id("Odd?")]
    assert result.summary["set_aside"] == 1


def test_one_slow_request_does_not_hold_up_the_others(tmp_path: Path, server: FaultServer) -> None:
    questions = numbered(40)
    server.misbehave(questions[0], "slow answer")
    server.hold_until = len(questions) - 1  # were the others to wait for it, it would never come
    run = new_run(tmp_path, server.url, questions, concurrency=2, request_timeout_s=30, max_retries=0)
    ask(run)
    rows = rows_of(run.folder("01b_traces") / TRACES_FILE)
    assert len(rows) == len(questions)
    assert prompt_id(questions[0]) in [row["id"] for row in rows[-2:]], "asked first, it came last"


# ---- limits, reruns


def test_more_set_aside_than_allowed_is_refused_and_what_is_good_is_kept(tmp_path: Path, server: FaultServer) -> None:
    questions = numbered(20)
    bad = questions[:3]
    for question in bad:
        server.misbehave(question, "empty answer", times=1)
    run = new_run(tmp_path, server.url, questions, max_set_aside=0.1)
    code, _, err = run_script(run)
    assert code == 1
    assert "Traceback" not in err
    assert "3 of 20" in err
    assert "3 x empty answer" in err
    assert "errors.jsonl" in err
    assert set(reasons_of(run)) == {prompt_id(question) for question in bad}
    assert set(traces_of(run)) == {prompt_id(question) for question in questions[3:]}
    result = ask(run)
    assert result.summary["traces"] == len(questions)
    assert server.asked() == Counter(questions) + Counter(bad), "the rerun asked more than what was missing"
    assert reasons_of(run) == {}, "what was set aside before and is good now is still listed"


def test_set_aside_up_to_the_limit_is_accepted(tmp_path: Path, server: FaultServer) -> None:
    questions = numbered(10)
    server.misbehave(questions[0], "empty answer")
    run = new_run(tmp_path, server.url, questions, max_set_aside=0.1)
    assert ask(run).summary["set_aside"] == 1


def test_a_finished_stage_asks_nothing_again(tmp_path: Path, server: FaultServer) -> None:
    run = new_run(tmp_path, server.url, numbered(3))
    ask(run)
    server.close()
    code, out, _ = run_script(run)
    assert code == 0
    assert "done already" in out


def test_a_larger_sample_asks_only_the_new_prompts(tmp_path: Path, server: FaultServer) -> None:
    few, many = numbered(4), numbered(9)
    run = new_run(tmp_path, server.url, few)
    ask(run)
    prompts = Stage(run, PROMPTS)
    prompts.finish(write_prompts(prompts, dict.fromkeys(many, "train")))
    ask(run)
    assert server.asked() == Counter(many)
    assert set(traces_of(run)) == {prompt_id(question) for question in many}


def test_a_torn_last_line_is_cut_off_and_its_prompt_asked_again(
    tmp_path: Path, server: FaultServer, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = numbered(6)
    run = new_run(tmp_path, server.url, questions)
    ask(run)
    path = run.folder("01b_traces") / TRACES_FILE
    whole = path.read_bytes()
    torn = json.loads(whole.splitlines()[-1])["id"]
    path.write_bytes(whole[:-40])
    ask(run)
    assert "torn" in capsys.readouterr().out
    assert set(traces_of(run)) == {prompt_id(question) for question in questions}
    again = [question for question, count in server.asked().items() if count == 2]
    assert [prompt_id(question) for question in again] == [torn]


# ---- a server that is set up wrongly


def test_a_missing_reasoning_parser_stops_the_stage_and_names_the_flag(tmp_path: Path) -> None:
    with FaultServer(leaks_thinking=True) as server:
        run = new_run(tmp_path, server.url, numbered(50), concurrency=2)
        with pytest.raises(PipelineError, match="--reasoning-parser"):
            ask(run)
        assert sum(server.asked().values()) <= 4
    assert traces_of(run) == {}


def test_answers_that_all_lack_thinking_stop_the_stage_early(tmp_path: Path) -> None:
    with FaultServer(thinks=False) as server:
        run = new_run(tmp_path, server.url, numbered(60), concurrency=2)
        with pytest.raises(PipelineError, match="thinking") as refused:
            ask(run)
        assert sum(server.asked().values()) < 20
    assert "--reasoning-parser" in str(refused.value)
    assert "--generation.thinking_share 0" in str(refused.value)


def test_a_short_run_without_any_thinking_is_refused_too(tmp_path: Path) -> None:
    with FaultServer(thinks=False) as server:
        run = new_run(tmp_path, server.url, numbered(5))
        with pytest.raises(PipelineError, match="thinking"):
            ask(run)


def test_once_the_parser_is_mended_no_trace_without_thinking_is_left(tmp_path: Path) -> None:
    questions = numbered(30)
    with FaultServer(thinks=False) as server:
        run = new_run(tmp_path, server.url, questions, concurrency=2)
        with pytest.raises(PipelineError):
            ask(run)
        server.thinks = True
        ask(run)
    traces = traces_of(run)
    assert set(traces) == {prompt_id(question) for question in questions}
    assert [trace["id"] for trace in traces.values() if not trace["reasoning"]] == []


def test_some_answers_without_thinking_are_the_verifiers_own_choice(tmp_path: Path, server: FaultServer) -> None:
    questions = numbered(15)
    for question in questions[1:]:
        server.misbehave(question, "no thinking")
    run = new_run(tmp_path, server.url, questions, concurrency=1)
    assert ask(run).summary["with_thinking"] == 1


def test_without_thinking_is_fine_when_it_was_asked_for(tmp_path: Path, server: FaultServer) -> None:
    questions = numbered(15)
    run = new_run(tmp_path, server.url, questions, thinking_share=0)
    result = ask(run)
    assert (result.summary["traces"], result.summary["with_thinking"]) == (15, 0)
    assert [body["chat_template_kwargs"] for body in server.bodies(questions[0])] == [{"thinking": False}]


def test_a_server_that_gives_no_token_ids_is_refused(tmp_path: Path) -> None:
    with FaultServer(gives_token_ids=False) as server:
        run = new_run(tmp_path, server.url, numbered(30), concurrency=2)
        with pytest.raises(PipelineError, match="token ids"):
            ask(run)
        assert sum(server.asked().values()) <= 4
    assert traces_of(run) == {}


def test_an_endpoint_where_nobody_answers_is_refused_with_its_address(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
    run = new_run(tmp_path, endpoint, numbered(3))
    code, _, err = run_script(run)
    assert code == 1
    assert f"no server answers at {endpoint}" in err
    assert "Traceback" not in err


def test_a_dead_engine_behind_a_healthy_front_is_refused(tmp_path: Path) -> None:
    with FaultServer(engine_works=False) as server:
        run = new_run(tmp_path, server.url, numbered(3))
        with pytest.raises(PipelineError, match="one-token request"):
            ask(run)


def test_a_server_of_several_models_is_refused(tmp_path: Path) -> None:
    with FaultServer(models=("one", "two")) as server:
        run = new_run(tmp_path, server.url, numbered(3))
        with pytest.raises(PipelineError, match="expected one model"):
            ask(run)


def test_an_attached_server_that_dies_stops_the_stage_instead_of_failing_every_prompt(
    tmp_path: Path, server: FaultServer
) -> None:
    questions = numbered(80)
    server.delay_s = 0.05
    run = new_run(tmp_path, server.url, questions, concurrency=2, max_retries=1, silence_s=6)
    process = start_script(run)
    server.wait_until_answered(5)
    server.close()  # killed: connections in flight are cut, new ones refused
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert server.url in err, "the message does not name the server that is gone"
    assert len(reasons_of(run)) < len(questions) / 2, "every prompt was tried against a server that is gone"
    assert traces_of(run)


# ---- stopped at any moment


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_script_says_so_with_its_exit_code_and_the_rerun_completes(
    tmp_path: Path, server: FaultServer, number: signal.Signals, code: int
) -> None:
    questions = numbered(60)
    server.delay_s = 0.3  # the signal must find work left, on a busy machine too
    run = new_run(tmp_path, server.url, questions, concurrency=4)
    process = start_script(run)
    server.wait_until_answered(12)
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert "Traceback" not in err
    assert "the same command goes on" in err
    kept = traces_of(run)
    assert 0 < len(kept) < len(questions)
    before = server.asked()
    server.delay_s = 0.0
    ask(run)
    assert set(traces_of(run)) == {prompt_id(question) for question in questions}
    again = server.asked() - before
    assert {prompt_id(question) for question in again} == {prompt_id(q) for q in questions} - set(kept)
    assert set(again.values()) == {1}


def strike() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000):  # the interpreter delivers it between two of these
        pass


def assert_sigterm_ends(worker: Coroutine[Any, Any, None]) -> None:
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        with pytest.raises(Terminated):
            asyncio.run(watch_server(Server("http://127.0.0.1:1/v1", "none"), [worker]))
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_is_obeyed_whatever_the_event_loop_is_doing() -> None:
    """A signal that arrives while a callback of the loop runs, as each byte from the network is one."""

    async def worker() -> None:
        asyncio.get_running_loop().call_soon(strike)
        await asyncio.sleep(1)

    assert_sigterm_ends(worker())


def test_a_signal_that_ends_a_librarys_own_task_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def of_a_library() -> None:
        strike()

    async def worker() -> None:
        task = asyncio.create_task(of_a_library())
        await asyncio.sleep(1)
        await task

    assert_sigterm_ends(worker())
    gc.collect()  # an unread exception is reported when its task goes
    assert "never retrieved" not in caplog.text


def generate_in_this_process(run: Path) -> None:
    """Stage 01b of a run by hand; started in processes that are made to be killed."""
    _, config = parse(["--run", str(run)], "")
    finish_stage(Run(run, config), TRACES, generate)


def test_killed_at_thirty_moments_five_hundred_prompts_end_with_one_trace_each(
    tmp_path: Path, server: FaultServer
) -> None:
    rng = random.Random(0)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["transformers.models.auto.tokenization_auto", "openai", "tests.test_generation"])
    questions = numbered(500)
    server.delay_s = 0.02
    run = new_run(tmp_path, server.url, questions, concurrency=4)
    kept: set[str] = set()
    for _ in range(30):
        process = processes.Process(target=generate_in_this_process, args=(run.path,))
        process.start()
        server.wait_until_answered(server.answered + rng.randint(1, 14), timeout_s=60)
        time.sleep(rng.random() * 0.05)
        process.kill()
        process.join()
        text = (run.folder("01b_traces") / TRACES_FILE).read_text(encoding="utf-8")
        whole = {json.loads(line)["id"] for line in text.splitlines(keepends=True) if line.endswith("\n")}
        assert kept <= whole, "a kill lost traces that were there before"
        kept = whole
    assert 0 < len(kept) < len(questions)
    server.delay_s = 0.0
    ask(run)
    traces = traces_of(run)
    assert set(traces) == {prompt_id(question) for question in questions}
    assert all(traces[prompt_id(question)]["content"] == answer_to(question) for question in questions)


def test_a_second_process_on_the_same_run_is_refused(tmp_path: Path, server: FaultServer) -> None:
    server.delay_s = 0.2
    run = new_run(tmp_path, server.url, numbered(40), concurrency=2)
    first = start_script(run)
    server.wait_until_answered(1)
    code, _, err = run_script(run)
    assert code == 1
    assert "another process works on" in err
    server.delay_s = 0.0
    _, err = first.communicate(timeout=30)
    assert first.returncode == 0, err
    assert len(traces_of(run)) == 40


# ---- what the preset may ask for


def test_each_user_turn_is_asked_with_the_verifiers_own_answers_before_it(tmp_path: Path, server: FaultServer) -> None:
    run = new_run(tmp_path, server.url, ["First?"])
    path = run.folder("01_prompts") / "prompts.jsonl"
    (row,) = rows_of(path)
    path.write_text(json.dumps(row | {"follow_ups": ["Second?", "Third?"]}) + "\n")
    ask(run)
    traces = traces_of(run)
    first = prompt_id("First?")
    assert set(traces) == {first, f"{first}.2", f"{first}.3"}
    (body,) = server.bodies("Third?")
    assert [(m["role"], m["content"]) for m in body["messages"]] == [
        ("user", "First?"),
        ("assistant", answer_to("First?")),
        ("user", "Second?"),
        ("assistant", answer_to("Second?")),
        ("user", "Third?"),
    ]
    assert body["messages"][1]["reasoning"] == thinking_on("First?")


def test_a_conversation_stopped_in_the_middle_goes_on_with_the_same_history(
    tmp_path: Path, server: FaultServer
) -> None:
    server.misbehave("Second?", "empty answer", times=1)
    run = new_run(tmp_path, server.url, ["First?"], max_set_aside=1.0)
    path = run.folder("01_prompts") / "prompts.jsonl"
    (row,) = rows_of(path)
    path.write_text(json.dumps(row | {"follow_ups": ["Second?"]}) + "\n")
    ask(run)
    assert set(traces_of(run)) == {prompt_id("First?")}
    stage = Stage(run, TRACES)
    stage.folder.joinpath("manifest.json").unlink()
    stage._write_manifest("running", *stage.fingerprints(), Result([], {}))
    ask(run)
    assert len(traces_of(run)) == 2
    assert server.asked() == {"First?": 1, "Second?": 2}
    assert server.bodies("Second?")[1]["messages"][1]["content"] == answer_to("First?")


def test_temperatures_and_thinking_are_shared_out_by_id_and_recorded(tmp_path: Path, server: FaultServer) -> None:
    questions = numbered(60)
    run = new_run(tmp_path, server.url, questions, temperatures=[0.0, 1.0], thinking_share=0.5)
    ask(run)
    traces = traces_of(run)
    for question in questions:
        (body,) = server.bodies(question)
        trace = traces[prompt_id(question)]
        asked_to_think = (body.get("chat_template_kwargs") or {}).get("thinking", True)
        assert ("thinking_off" in trace["flags"]) == (not asked_to_think) == (trace["reasoning"] is None)
        assert trace["sampling"]["temperature"] == body["temperature"]
    warm = sum(trace["sampling"]["temperature"] == 1.0 for trace in traces.values())
    thoughtful = sum(trace["reasoning"] is not None for trace in traces.values())
    # Binomial: 30 expected, standard deviation 3.9.
    assert 15 < warm < 45
    assert 15 < thoughtful < 45
    assert sampling_of(run.config.generation, prompt_id(questions[0])) == traces[prompt_id(questions[0])]["sampling"]


@pytest.mark.parametrize(
    ("ids", "loops"),
    [
        (list(range(500)), False),
        ([*range(300), *[7] * 48], True),
        ([*range(300), *[7] * 47], False),
        ([*range(100), *([1, 2, 3, 4, 5] * 10)], True),
        ([*range(100), *([1, 2, 3, 4, 5] * 10), 6], False),
        (([*range(60)] * 4), True),
        (([*range(60)] * 3), False),
        ([7] * 20, False),
    ],
)
def test_an_output_that_ends_in_one_cycle_over_and_over_is_a_loop(ids: list[int], loops: bool) -> None:
    assert ends_in_a_loop(ids) is loops


# ---- several servers, and one that cannot keep up


def test_several_servers_share_the_work_and_a_dead_one_is_left_out(tmp_path: Path) -> None:
    questions = numbered(60)
    with FaultServer(delay_s=0.05) as one, FaultServer(delay_s=0.05) as other:
        run = new_run(tmp_path, [one.url, other.url], questions, silence_s=2, max_retries=6)
        killer = threading.Thread(target=lambda: (other.wait_until_answered(8), other.close()))
        killer.start()
        ask(run)
        killer.join()
        assert set(traces_of(run)) == {prompt_id(question) for question in questions}
        assert other.answered >= 8
        assert one.answered >= 30


def test_requests_in_flight_grow_with_the_answers_and_shrink_when_refused(tmp_path: Path) -> None:
    questions = numbered(150)
    with FaultServer(delay_s=0.02) as server:
        run = new_run(tmp_path, server.url, questions, concurrency=64)
        ask(run)
        assert server.most_at_once > 12  # it starts with 8
    busy = [question for question in questions if question.endswith("3?")]
    with FaultServer(delay_s=0.02) as server:
        for question in busy:
            server.misbehave(question, "http 503", times=1)
        run = new_run(tmp_path / "busy", server.url, questions, concurrency=64)
        ask(run)
        assert server.most_at_once < 40
        assert len(traces_of(run)) == len(questions)


# ---- whose tokens are they


def tiny_trace(config: Config, asked: str, said: str) -> dict[str, Any]:
    tokenizer = verifier.tokenizer(config.verifier)
    return {
        "prompt_token_ids": tokenizer(asked, add_special_tokens=False)["input_ids"],
        "output_token_ids": tokenizer(said, add_special_tokens=False)["input_ids"],
        "reasoning": "Because.",
        "content": "So.",
    }


def test_the_verifiers_own_template_and_tokenizer_pass_and_others_are_refused(tiny_config: Config) -> None:
    messages = [{"role": "user", "content": "Why?"}]
    asked = "<|im_user|>user<|im_middle|>Why?<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
    said = "Because.</think>So.<|im_end|>"
    check = _TokenCheck(tiny_config)
    check.look(messages, tiny_trace(tiny_config, asked, said), thinking=True)
    check.look(messages, tiny_trace(tiny_config, asked + "</think>", said), thinking=False)
    with pytest.raises(PipelineError, match="not the verifier's chat template"):
        check.look(messages, tiny_trace(tiny_config, "USER: Why? ASSISTANT:", said), thinking=True)
    with pytest.raises(PipelineError, match="not those of its text"):
        check.look(messages, tiny_trace(tiny_config, asked, "Quite other words"), thinking=True)
