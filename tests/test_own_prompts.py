"""Contract of a user's own prompts, in another format: a draft that vLLM accepts tokens from, and a sweep over it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import FinishedRun, run_pipeline


@pytest.mark.engine
def test_users_own_prompts_make_a_draft_in_speculators_format_that_vllm_accepts(tmp_path: Path) -> None:
    own = tmp_path / "my.jsonl"
    questions = [f"What is {a} + {b}?" for a in range(2, 12) for b in range(1, 9)]
    own.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    done = run_pipeline(
        tmp_path / "mine",
        *("--prompts.source", str(own)),
        # speculators looks the verifier's config up by the recorded name: here a path relative to the project.
        *("--export.format", "speculators", "--export.verifier_name", "models/tiny-kimi-k2.5"),
        *("--evaluation.sweep", "[1]", "--evaluation.load_concurrency", "[1]"),
        MAX_SAMPLES="64",
        PRESET="presets/tiny.yaml",
    )
    assert done.returncode == 0, done.stdout[-3000:]
    run = FinishedRun(tmp_path / "mine", done.stdout)
    assert len(run.rows("01_prompts/prompts.jsonl")) == 64
    results = run.json("06_eval/results.json")
    assert results["overall"]["greedy"]["mean_acceptance_length"] > 1.5
    swept = results["sweep"]["rows"]
    assert list(swept) == ["1", "3"]
    assert 1 < swept["1"]["mean_acceptance_length"] <= 2 < swept["3"]["mean_acceptance_length"]
    assert results["sweep"]["fastest"] == max(swept, key=lambda count: swept[count]["tokens_per_s"])

    from speculators import SpeculatorModel

    draft = SpeculatorModel.from_pretrained(str(run.path / "05_export"))
    assert draft.config.eagle_aux_hidden_state_layer_ids == [2, 4, 5]
