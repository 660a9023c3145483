"""What someone gets who types one command: a draft that a real vLLM accepts tokens from, and a run they can trust."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import PROJECT, FinishedRun, run_pipeline, run_stage

STAGES = ("01_prompts", "01b_traces", "02_hidden", "03_vocab", "04_train", "05_export", "06_eval")
SCRIPTS = sorted(path.name for path in PROJECT.glob("0*.py"))

pytestmark = pytest.mark.engine


def test_the_draft_is_accepted_on_held_out_prompts(default_run: FinishedRun) -> None:
    results = default_run.json("06_eval/results.json")
    assert results["draft_tokens"] == 3
    assert results["overall"]["greedy"]["mean_acceptance_length"] >= 2.0
    assert results["overall"]["sampled"]["mean_acceptance_length"] >= 2.0
    trained_on = {row["id"] for row in default_run.rows("02_hidden/index.jsonl")}
    held_out = {row["id"] for row in default_run.rows("01_prompts/prompts.jsonl") if row["split"] == "eval"}
    assert len(held_out) >= results["prompts"]["eval"] >= 20
    assert not trained_on & held_out


def test_acceptance_by_position_adds_up_to_the_mean_length(default_run: FinishedRun) -> None:
    for values in default_run.json("06_eval/results.json")["overall"].values():
        shares = values["accepted_by_position"]
        assert values["mean_acceptance_length"] == pytest.approx(1 + sum(shares))
        assert shares == sorted(shares, reverse=True)


def test_greedy_output_with_the_draft_is_the_verifiers_on_every_prompt(default_run: FinishedRun) -> None:
    results = default_run.json("06_eval/results.json")
    assert results["greedy_identical"] == results["greedy_prompts"] == results["prompts"]["eval"]
    assert results["greedy_apart_at_token"] == {}


def test_sampled_output_with_the_draft_is_as_likely_as_the_verifiers_own(default_run: FinishedRun) -> None:
    # The unpatched CPU sampler gives tokens that the verifier finds all but impossible (mean log-prob below -1).
    results = default_run.json("06_eval/results.json")
    with_draft, alone = results["scores"]["with draft"]["mean"], results["scores"]["alone"]["mean"]
    assert abs(with_draft - alone) < 0.1
    assert results["standard_errors_apart"] < 4


def test_the_estimate_while_training_agrees_with_what_vllm_measures(default_run: FinishedRun) -> None:
    estimated = default_run.json("04_train/manifest.json")["summary"]["expected_acceptance_length"]
    measured = default_run.json("06_eval/results.json")["overall"]["greedy"]["mean_acceptance_length"]
    assert estimated == pytest.approx(measured, abs=0.2)


def test_every_step_says_what_it_does_and_shows_a_bar(default_run: FinishedRun) -> None:
    for heading in ("set-up", "verifier", "01 ", "01b", "02", "03", "04", "05", "06"):
        assert re.search(rf"^== {heading}", default_run.output, re.MULTILINE), heading
    for label in ("01 prompts", "01b traces", "02 states", "03 vocabulary", "04 training", "06 eval, greedy, draft"):
        assert re.search(rf"{label}: +\d+", default_run.output), label
    assert "mean acceptance length" in default_run.output


def test_every_prompt_has_exactly_one_trace_with_thinking_and_token_ids(default_run: FinishedRun) -> None:
    prompts = [row["id"] for row in default_run.rows("01_prompts/prompts.jsonl")]
    traces = default_run.rows("01b_traces/traces.jsonl")
    assert sorted(row["id"] for row in traces) == sorted(prompts)
    assert all(row["reasoning"] and row["prompt_token_ids"] and row["output_token_ids"] for row in traces)


def test_a_second_call_finds_everything_done(default_run: FinishedRun) -> None:
    again = run_pipeline(default_run.path)
    assert again.returncode == 0
    for stage in STAGES:
        assert f"{stage}: done already" in again.stdout


def test_of_a_moved_run_only_a_deleted_stage_is_made_again_and_what_that_leaves_unchanged_is_still_done(
    default_run: FinishedRun, tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(default_run.path, moved, symlinks=True)
    shutil.rmtree(moved / "03_vocab")
    again = run_pipeline(moved)
    assert again.returncode == 0
    assert "03_vocab: done in" in again.stdout
    for stage in STAGES:
        assert (f"{stage}: done already" in again.stdout) == (stage != "03_vocab")


def test_nothing_in_a_run_names_a_path_of_this_machine(default_run: FinishedRun) -> None:
    places = (str(default_run.path), str(PROJECT), str(Path.home()))
    for path in default_run.path.rglob("*"):
        if path.suffix in {".json", ".jsonl", ".yaml", ".md", ".csv"} and path.is_file():
            text = path.read_text()
            assert not [place for place in places if len(place) > 1 and place in text], path
        if path.is_symlink():
            assert not os.path.isabs(os.readlink(path))  # noqa: PTH115, PTH117


def test_no_server_is_left_behind(default_run: FinishedRun) -> None:
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(default_run.path) not in "\n".join(line for line in listed.splitlines() if "vllm" in line)


def test_every_stage_attempt_is_timed(default_run: FinishedRun) -> None:
    rows = default_run.rows("timings.jsonl")
    assert {row["stage"] for row in rows if row["outcome"] == "done"} == set(STAGES)
    assert all(row["seconds"] >= 0 and row["hardware"] and row["versions"]["torch"] for row in rows)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_of_each_script_says_what_it_reads_and_writes_and_every_field(script: str) -> None:
    shown = run_stage(script, "--help")
    assert shown.returncode == 0
    assert "Reads" in shown.stdout
    assert "Writes" in shown.stdout
    assert "--training.lr" in shown.stdout


def test_the_pipeline_stops_at_the_first_failure_with_its_message_last(tmp_path: Path) -> None:
    failed = run_pipeline(tmp_path / "run", "--prompts.source", "no_such_file.jsonl")
    assert failed.returncode == 1
    last = failed.stdout.strip().splitlines()[-1]
    assert last == "01_prepare_data.py: prompts.source no_such_file.jsonl: no such file or directory"
    assert "01b" not in failed.stdout
