"""What 05 and 06 promise together: no draft that is silently wrong gets past them, and the figures are right."""

from __future__ import annotations

import csv
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_train import acceptance, evaluation, prompt_sets, report
from eagle3_train import server as vllm
from eagle3_train.acceptance import Output, Step
from eagle3_train.config import Config
from eagle3_train.errors import ConfigError, PipelineError
from eagle3_train.export import verify
from eagle3_train.run import EVALUATE, Run, Stage
from tests.conftest import FinishedRun, run_stage

THINK_END = 99


@pytest.fixture
def stage(tmp_path: Path, tiny_config: Config) -> Stage:
    return Stage(Run(tmp_path / "run", tiny_config), EVALUATE)


# -- the arithmetic, against counts by hand ---------------------------------------------------------------------------


def test_acceptance_is_one_plus_accepted_over_steps_and_positions_are_joint() -> None:
    steps = [Step(accepted, 3, 0, acceptance.ANSWER) for accepted in (3, 0, 1, 3)]
    summary = acceptance.summarise(steps, 3)
    assert summary["mean_acceptance_length"] == 1 + 7 / 4
    assert summary["accepted_by_position"] == [3 / 4, 2 / 4, 2 / 4]
    assert summary["conditional_by_position"] == [3 / 4, 2 / 3, 2 / 2]
    # Drafting only one token would have kept min(accepted, 1) of each step.
    assert summary["length_with_fewer"] == [1 + 3 / 4, 1 + 5 / 4, 1 + 7 / 4]


def test_steps_stand_where_their_tokens_do_in_context_and_section() -> None:
    # Output token 0 comes from the prompt's own pass; then steps of 2+1, 0+1 and 1+1 tokens; `</think>` is token 3.
    output = Output([7] * 10, [1, 2, 3, THINK_END, 5, 6, 8], [2, 0, 1], [3, 3, 3])
    steps = output.steps(THINK_END)
    assert [step.context for step in steps] == [11, 14, 15]
    assert [step.section for step in steps] == [acceptance.THINKING, acceptance.ANSWER, acceptance.ANSWER]
    assert sum(step.accepted + 1 for step in steps) + 1 == len(output.output_ids)


def test_an_output_cut_off_while_thinking_is_all_thinking_and_without_thinking_all_answer() -> None:
    output = Output([7], [1, 2, 3], [1], [3])
    assert [step.section for step in output.steps(THINK_END)] == [acceptance.THINKING]
    assert [step.section for step in output.steps(None)] == [acceptance.ANSWER]


def test_context_buckets_hold_every_step_once() -> None:
    steps = [Step(1, 3, context, acceptance.ANSWER) for context in (0, 1023, 1024, 5000)]
    buckets = acceptance.by_context(steps, 3, 1024)
    assert {start: values["steps"] for start, values in buckets.items()} == {0: 2, 1024: 1, 4096: 1}


def test_the_interval_brackets_the_mean_and_narrows_with_more_prompts() -> None:
    answers = [[Step(accepted, 3, 0, acceptance.ANSWER)] for accepted in (0, 1, 2, 3)]
    low, high = acceptance.confidence_interval(answers)
    assert 1 <= low < 2.5 < high <= 4
    narrow_low, narrow_high = acceptance.confidence_interval(answers * 25)
    assert narrow_high - narrow_low < (high - low) / 2


def test_greedy_outputs_that_part_are_named_with_the_token_they_part_at() -> None:
    found = evaluation._identity({"a": [1, 2, 3], "b": [1, 2], "c": [1]}, {"a": [1, 9, 3], "b": [1, 2, 3], "c": [1]})
    assert found["greedy_identical"] == 1
    assert found["greedy_apart_at_token"] == {"a": 1, "b": 2}


# -- beside what stage 04 expected ------------------------------------------------------------------------------------


def set_up(run: Run, ttt_steps: int, exported_from: str = "trained") -> None:
    """Manifests of 04 and 05 as they leave them, with 04's expectation."""
    trained = {
        "config": {"training.ttt_steps": ttt_steps},
        "inputs": {},
        "digest": "trained",
        "summary": {"expected_acceptance_length": 2.5, "expected_sampled_acceptance_length": 2.0},
    }
    exported = {"config": {}, "inputs": {"04_train": exported_from}, "digest": "exported", "summary": {}}
    for folder, manifest in (("04_train", trained), ("05_export", exported)):
        path = run.folder(folder) / "manifest.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"state": "done", "outputs": {}, **manifest}))


def measurements(**accepted: list[int]) -> dict[str, Any]:
    """One answer to each set's only prompt, the same for both ways of decoding; 3 draft tokens."""
    outputs = {}
    for name, counts in accepted.items():
        ids = list(range(1 + sum(count + 1 for count in counts)))
        answer = {"prompt_ids": [7], "output_ids": ids, "accepted": counts, "drafted": [3] * len(counts)}
        outputs[name] = {way: {"prompt": answer} for way in ("greedy", "sampled")}
    drafted: dict[str, Any] = {"outputs": outputs, "load": {}}
    alone = drafted | {"scores": {"with draft": [-0.5, -0.7], "alone": [-0.5, -0.7]}}
    return evaluation.compare(drafted, alone, {}, None, 3)


def test_what_was_expected_stands_beside_what_was_measured_on_the_runs_own_questions(stage: Stage) -> None:
    set_up(stage.run, ttt_steps=3)
    found = evaluation.beside_training(stage, measurements(gsm8k=[0, 0], eval=[3, 0, 1, 3]))
    assert found == {
        "prompts": "eval",
        "draft_tokens": 3,
        "by_decoding": {
            "greedy": {"expected": 2.5, "measured": 2.75, "difference": 0.25},
            "sampled": {"expected": 2.0, "measured": 2.75, "difference": 0.75},
        },
    }
    elsewhere = evaluation.beside_training(stage, measurements(gsm8k=[0, 0], aime=[3, 0, 1, 3]))
    assert elsewhere["prompts"] == "all"
    assert elsewhere["by_decoding"]["greedy"]["measured"] == pytest.approx(1 + 7 / 6)


def test_more_draft_tokens_than_trained_steps_are_compared_as_if_cut_to_them(stage: Stage) -> None:
    set_up(stage.run, ttt_steps=2)
    found = evaluation.beside_training(stage, measurements(eval=[3, 0, 1, 3]))
    assert found["draft_tokens"] == 2
    assert found["by_decoding"]["greedy"]["measured"] == 1 + (2 + 0 + 1 + 2) / 4


def with_settings(stage: Stage, **changes: Any) -> Stage:
    settings = stage.config.evaluation.model_copy(update=changes)
    return Stage(Run(stage.run.path, stage.config.model_copy(update={"evaluation": settings})), EVALUATE)


def test_what_cannot_be_compared_is_left_out_and_says_why(stage: Stage) -> None:
    results = measurements(eval=[3, 0, 1, 3])
    assert "05_export was not made from what 04_train holds" in str(evaluation.beside_training(stage, results))
    set_up(stage.run, ttt_steps=4)
    assert evaluation.beside_training(stage, results) == {
        "left_out": "3 draft tokens were served, 04's figure is for 4 (training.ttt_steps)"
    }
    another = with_settings(stage, draft="owner/another")
    assert "another draft was measured" in evaluation.beside_training(another, results)["left_out"]
    shutil.rmtree(stage.run.path)
    set_up(stage.run, ttt_steps=3, exported_from="an earlier training")
    assert "05_export was not made from what 04_train holds" in str(evaluation.beside_training(stage, results))


def test_sampling_at_another_temperature_than_04_reckons_with_is_not_compared(stage: Stage) -> None:
    set_up(stage.run, ttt_steps=3)
    found = evaluation.beside_training(with_settings(stage, sampled_temperature=0.6), measurements(eval=[3, 0]))
    assert list(found["by_decoding"]) == ["greedy"]


@pytest.mark.parametrize(
    ("ttt_steps", "written", "said", "cause"),
    [
        (
            3,
            "| decoding | expected | measured, eval | difference |\n| --- | --- | --- | --- |\n"
            "| greedy | 2.500 | 2.750 | +0.250 |\n| sampled | 2.000 | 2.750 | +0.750 |\n",
            "stage 04 had expected 2.50 greedy (measured 2.75, +0.25), 2.00 sampled (measured 2.75, +0.75)",
            "1. the draft is not trained enough: the validation split expected 2.50, and 2.75 was measured",
        ),
        (
            4,
            "Left out: 3 draft tokens were served",
            "not beside what stage 04 expected: 3 draft tokens were served",
            "1. nothing that 04 expected can be compared with: 3 draft tokens were served",
        ),
    ],
)
def test_the_report_the_screen_and_the_diagnosis_say_what_was_expected(
    stage: Stage, ttt_steps: int, written: str, said: str, cause: str
) -> None:
    set_up(stage.run, ttt_steps)
    stage.folder.mkdir()
    results = measurements(eval=[3, 0, 1, 3])
    results |= {"draft": "05_export", "prompts": {"eval": 1}, "hardware": "-", "versions": {}, "date": "-"}
    results["expected"] = evaluation.beside_training(stage, results)
    report.write(stage, results)
    assert written in (stage.folder / "report.md").read_text()
    assert said in "\n".join(report.lines(stage, results))
    assert cause in report.diagnosis(stage, results)


# -- prompt sets ------------------------------------------------------------------------------------------------------

NAMED_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "mt_bench": ({"question_id": 81, "turns": ["Compose a travel blog", "Rewrite it"]}, "Compose a travel blog"),
    "gsm8k": ({"question": "How many eggs?", "answer": "9\n#### 9"}, "How many eggs?"),
    "humaneval": ({"task_id": "HumanEval/0", "prompt": "def f(x):\n", "test": "..."}, "def f(x):\n"),
    "math500": ({"problem": "Find x.", "solution": "1", "level": 2}, "Find x."),
    "aime": ({"Problem": "Find n.", "Answer": 1}, "Find n."),
    "ceval": ({"question": "下列哪项?", "A": "一", "B": "二", "C": "三", "D": "四", "answer": "A"}, "下列哪项?\nA. 一"),
}


@pytest.mark.parametrize("name", prompt_sets.NAMED_SETS)
def test_each_named_set_is_read_from_a_local_file_of_its_form(
    name: str, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, asked = NAMED_ROWS[name]
    monkeypatch.setattr(prompt_sets, "BENCHMARKS", tmp_path)
    (tmp_path / f"{name}.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n")
    (prompt,) = prompt_sets.load(stage, name, 10)
    assert asked in prompt["messages"][0]["content"]


def test_a_named_set_of_another_form_is_refused(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_sets, "BENCHMARKS", tmp_path)
    (tmp_path / "gsm8k.jsonl").write_text('{"problem": "?"}\n')
    with pytest.raises(PipelineError, match=r"gsm8k\.jsonl: not of the form of gsm8k"):
        prompt_sets.load(stage, "gsm8k", 10)


def test_a_file_is_a_prompt_set_and_an_unknown_name_lists_the_known(stage: Stage, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text("".join(json.dumps({"prompt": f"question {number}"}) + "\n" for number in range(5)))
    assert len(prompt_sets.load(stage, str(own), 3)) == 3
    with pytest.raises(PipelineError, match="no known set; known: eval, mt_bench, gsm8k"):
        prompt_sets.load(stage, "mmlu", 3)


# -- a server that others use or restart ------------------------------------------------------------------------------


@pytest.fixture
def metrics_server() -> Iterator[tuple[vllm.Server, dict[str, float]]]:
    values = {"tokens": 0.0, "requests": 0.0, "started": 1.0}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = (
                "# TYPE vllm:generation_tokens counter\n"
                f'vllm:generation_tokens_total{{engine="0"}} {values["tokens"]}\n'
                f'vllm:generation_tokens_created{{engine="0"}} {values["started"]}\n'
                "# TYPE vllm:request_success counter\n"
                f'vllm:request_success_total{{finished_reason="stop"}} {values["requests"]}\n'
            )
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            return

    server = HTTPServer((vllm.LOOPBACK, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield vllm.Server(f"http://{vllm.LOOPBACK}:{server.server_port}/v1", "m"), values
    server.shutdown()
    server.server_close()


def test_traffic_of_others_and_a_restart_are_noticed(
    metrics_server: tuple[vllm.Server, dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "_COUNTERS_SETTLE_S", 0.3)
    server, values = metrics_server
    before = evaluation.counters(server)
    answers = [Output([1], [2, 3], [], [])]
    values |= {"tokens": 2, "requests": 1}
    evaluation._check_undisturbed(server, before, answers, drafts=False)
    values |= {"tokens": 7, "requests": 2}
    with pytest.raises(PipelineError, match="it has other traffic"):
        evaluation._check_undisturbed(server, before, answers, drafts=False)
    values |= {"tokens": 2, "requests": 1, "started": 9}
    with pytest.raises(PipelineError, match="was restarted"):
        evaluation._check_undisturbed(server, before, answers, drafts=False)


# -- a good checkpoint, broken in one way -----------------------------------------------------------------------------

Breakage = Callable[[dict[str, torch.Tensor], dict[str, Any]], None]


def _zero(name: str) -> Breakage:
    return lambda tensors, _config: tensors.update({name: torch.zeros_like(tensors[name])})


def _drop(name: str) -> Breakage:
    def drop(tensors: dict[str, torch.Tensor], _config: dict[str, Any]) -> None:
        del tensors[name]

    return drop


def _configure(**changes: Any) -> Breakage:
    return lambda _tensors, config: config.update(changes)


def _absolute_d2t(tensors: dict[str, torch.Tensor], _config: dict[str, Any]) -> None:
    tensors["d2t"] = torch.arange(len(tensors["d2t"])) + tensors["d2t"]


def _unsorted_d2t(tensors: dict[str, torch.Tensor], _config: dict[str, Any]) -> None:
    targets = (torch.arange(len(tensors["d2t"])) + tensors["d2t"]).flip(0)
    tensors["d2t"] = targets - torch.arange(len(targets))


def _shifted_d2t(tensors: dict[str, torch.Tensor], _config: dict[str, Any]) -> None:
    tensors["d2t"] = tensors["d2t"] + 1


def _swapped_projections(tensors: dict[str, torch.Tensor], _config: dict[str, Any]) -> None:
    q, k = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight"
    tensors[q], tensors[k] = tensors[k].clone(), tensors[q].clone()


BREAKAGES: dict[str, tuple[Breakage, str]] = {
    "q_proj missing": (_drop("layers.0.self_attn.q_proj.weight"), r"missing: layers\.0\.self_attn\.q_proj"),
    "fc missing": (_drop("fc.weight"), r"missing: fc\.weight"),
    "hidden_norm missing": (_drop("layers.0.hidden_norm.weight"), r"missing: layers\.0\.hidden_norm"),
    "input_norm missing": (_drop("input_norm.weight"), r"missing: input_norm"),
    "d2t missing": (_drop("d2t"), "missing: d2t"),
    "lm_head missing": (_drop("lm_head.weight"), r"missing: lm_head\.weight"),
    "o_proj zeroed": (_zero("layers.0.self_attn.o_proj.weight"), r"o_proj\.weight: all zero"),
    "d2t absolute": (_absolute_d2t, "d2t: target ids"),
    "d2t unsorted": (_unsorted_d2t, "d2t: target ids .* not strictly rising"),
    "d2t shifted": (_shifted_d2t, "d2t"),
    "layer ids shifted": (_configure(eagle_aux_hidden_state_layer_ids=[1, 3, 4]), "eagle_aux_hidden_state_layer_ids"),
    "layer ids missing": (lambda _t, config: config.pop("eagle_aux_hidden_state_layer_ids") and None, "layer_ids"),
    "norm_before_residual wrong": (_configure(norm_before_residual=False), "norm_before_residual: False"),
    "norm_output wrong": (_configure(norm_output=False), "norm_output: False"),
    "norm_before_fc wrong": (_configure(norm_before_fc=False), "norm_before_fc|input_norm"),
    "rope lost": (_configure(rope_parameters={"rope_type": "default", "rope_theta": 500.0}), "rope_parameters"),
    "head_dim wrong": (_configure(head_dim=64), "head_dim|shape"),
    "projections swapped": (_swapped_projections, "logits differ"),
    "extra tensor": (lambda t, _c: t.update({"verifier_norm.weight": t["norm.weight"].clone()}), "not known to vLLM"),
}


@pytest.mark.engine
@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_good_checkpoint_broken_in_one_way_is_refused(
    breakage: str, default_run: FinishedRun, tiny_config: Config, tmp_path: Path
) -> None:
    good = default_run.path / "05_export"
    tensors, config = load_file(good / "model.safetensors"), json.loads((good / "config.json").read_text())
    break_it, message = BREAKAGES[breakage]
    break_it(tensors, config)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = default_run.path / "04_train" / "checkpoints" / "checkpoint_best"
    shards = sorted((default_run.path / "02_hidden" / "shards").glob("*.safetensors"))[:1]
    with pytest.raises(PipelineError, match=message):
        verify(tmp_path, checkpoint, tiny_config, shards)


@pytest.mark.engine
def test_the_published_draft_gives_the_trained_models_logits(default_run: FinishedRun, tiny_config: Config) -> None:
    checkpoint = default_run.path / "04_train" / "checkpoints" / "checkpoint_best"
    shards = sorted((default_run.path / "02_hidden" / "shards").glob("*.safetensors"))[:8]
    assert verify(default_run.path / "05_export", checkpoint, tiny_config, shards) < 1e-4


@pytest.mark.engine
def test_a_dead_draft_that_vllm_serves_without_a_word_fails_the_gate(
    default_run: FinishedRun, plain_server: vllm.Server, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(default_run.path, run, symlinks=True)
    dead = tmp_path / "dead_draft"
    shutil.copytree(run / "05_export", dead)
    tensors = load_file(dead / "model.safetensors")
    # Zeroed, not missing: what vLLM finds in the memory of a missing tensor is anybody's guess.
    tensors["lm_head.weight"].zero_()
    save_file(tensors, dead / "model.safetensors")
    failed = run_stage(
        "06_evaluate.py",
        *("--run", str(run), "--evaluation.draft", str(dead), "--evaluation.endpoint_alone", plain_server.root_url),
        *("--evaluation.load_concurrency", "[]", "--evaluation.max_prompts", "8"),
        *("--evaluation.min_acceptance_length", "2"),
    )
    assert failed.returncode == 3, failed.stderr
    assert "is below evaluation.min_acceptance_length 2.00" in failed.stderr
    assert "Usual causes, likeliest first" in failed.stderr
    results = json.loads((run / "06_eval_dead_draft" / "results.json").read_text())
    assert results["overall"]["greedy"]["mean_acceptance_length"] < 1.1
    assert (run / "06_eval" / "results.json").read_bytes() == (default_run.path / "06_eval/results.json").read_bytes()
    table = report.comparison([run, default_run.path])
    assert table.count("| 05_export |") == 4
    assert table.count("| dead_draft |") == 2


def test_comparing_what_was_never_evaluated_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no results\.json in it"):
        report.comparison([tmp_path])


@pytest.mark.engine
def test_the_report_agrees_with_the_record_of_every_step(default_run: FinishedRun) -> None:
    measured = default_run.json("06_eval/measurements/with_draft.json")["outputs"]["eval"]["greedy"].values()
    accepted = [count for answer in measured for count in answer["accepted"]]
    expected = 1 + sum(accepted) / len(accepted)
    rows = list(csv.DictReader((default_run.path / "06_eval" / "acceptance.csv").open()))
    greedy = next(row for row in rows if row["decoding"] == "greedy")
    assert float(greedy["mean_acceptance_length"]) == pytest.approx(expected, abs=1e-4)
    assert f"**{expected:.3f}**" in (default_run.path / "06_eval" / "report.md").read_text()
    for answer in measured:
        # One token from the prompt's pass, then a step's accepted tokens and one of the verifier's own; the last step
        # may run past the end of the answer.
        yielded = 1 + sum(count + 1 for count in answer["accepted"])
        assert 0 <= yielded - len(answer["output_ids"]) <= 3


@pytest.mark.engine
def test_every_picture_and_table_of_the_report_is_there(default_run: FinishedRun) -> None:
    folder = default_run.path / "06_eval"
    text = (folder / "report.md").read_text()
    for picture in ("by_position.png", "by_context.png", "speed_up.png"):
        assert f"({picture})" in text
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
    results = default_run.json("06_eval/results.json")
    assert set(results["load"]["alone"]) == set(results["load"]["with draft"]) == {"1", "8"}
    assert {"thinking", "answer"} == set(results["by_section"]["greedy"])
    training = default_run.json("04_train/manifest.json")["summary"]
    expected = results["expected"]["by_decoding"]
    assert expected["greedy"]["expected"] == training["expected_acceptance_length"]
    assert expected["sampled"]["expected"] == training["expected_sampled_acceptance_length"]
    assert expected["greedy"]["measured"] == results["overall"]["greedy"]["mean_acceptance_length"]
    assert "stage 04 had expected" in default_run.output
    sections = results["by_section"]["greedy"].values()
    assert sum(part["steps"] for part in sections) == results["overall"]["greedy"]["steps"]
    card = (default_run.path / "05_export" / "README.md").read_text()
    assert f"| eval | greedy | {results['overall']['greedy']['mean_acceptance_length']:.2f} |" in card
