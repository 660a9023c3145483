"""Contract of the plan: tokens by hand, rates by their source, budgets that refuse, tables that are fresh.

What a run measured reproduces that run; a larger one costs more only where there are more tokens; measured, prior and
estimate are never one unnamed figure; and the document's tables hold nothing that the timings do not.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

from benchmarks import plan_tiny_x4
from eagle3_train import charts, plan_command, planning, rates
from eagle3_train.config import Config, Plan, parse
from eagle3_train.errors import ConfigError, PipelineError
from eagle3_train.plan_command import PlanArguments
from eagle3_train.planning import KIMI, Lengths, Machine, Way, make_plan, most_samples, project, repeated
from eagle3_train.rates import BOXES, ESTIMATE, MEASURED, PRIOR, Range

ROOT = Path(__file__).resolve().parent.parent
TINY_TIMINGS = ROOT / "benchmarks" / "results" / "tiny_timings.jsonl"
PLAYBOOK = ROOT / "next-steps-eagle.md"
RTX_HARDWARE = "64 x AMD EPYC, 1007 GiB, 8 x NVIDIA RTX PRO 6000 Blackwell Server Edition"
TWO_PASSES, ONE_PASS = Way(False, "bfloat16"), Way(True, "bfloat16")


def row(stage: str, seconds: float, **summary: Any) -> dict[str, Any]:
    common = {"outcome": "done", "date": "2026-11-02T10:00:00+0000", "hardware": RTX_HARDWARE}
    return {"stage": stage, "seconds": seconds, **common, **summary}


# The pilot as its notes have it: verifier load 22.5 min, extraction 2.9 min at 2,912 tok/s, training 27.7 min.
PILOT_TOKENS = round(2.9 * 60 * 2912)
PILOT = [
    row(
        "02_hidden",
        (22.5 + 2.9) * 60,
        samples=1000,
        train=950,
        val=50,
        tokens=PILOT_TOKENS,
        extracted_tokens=PILOT_TOKENS,
        extraction_seconds=2.9 * 60,
    ),
    row("03_vocab", 10.0, train_tokens=300_000),
    row("04_train", 27.7 * 60, steps=9500, samples=950),
    row("05_export", 20.0),
    row("06_eval", 600.0, prompts=64),
]
# A small run with its own generation; every work and every start is a round number.
SMALL = [
    row("01b_traces", 100.0 + 50.0, traces=100, output_tokens=10_000, asked_tokens=10_000, asked_seconds=50.0),
    row(
        "02_hidden",
        100.0 + 20.0,
        samples=90,
        train=80,
        val=10,
        tokens=10_800,
        extracted_tokens=10_800,
        extraction_seconds=20.0,
    ),
    row("03_vocab", 5.0, train_tokens=8_000),
    row("04_train", 40.0 + 96.0, steps=30, trained_tokens=28_800, training_seconds=96.0),
    row("05_export", 3.0),
    row("06_eval", 90.0, prompts=10),
]


def timings(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "timings.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in rows))
    return path


def resolve(*argv: str) -> Config:
    """The configuration that these flags of plan.py make, of Kimi-K2.5 where they name no verifier."""
    return parse(["--verifier.path", KIMI, *argv], "", PlanArguments)[1]


def seconds(projection: planning.Projection) -> dict[str, float]:
    return {cost.stage: cost.seconds.likely for cost in projection.costs}


def plan(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "plan.py", *argv], cwd=ROOT, capture_output=True, text=True, check=False)


# Measured -----------------------------------------------------------------------------------------------------------


def projected(rows: list[dict[str, Any]], folder: Path, factor: float, way: Way = TWO_PASSES) -> planning.Projection:
    config = resolve("--training.epochs", "10")
    run = rates.read_run(timings(folder, rows), config.training.epochs)
    return project(config, Machine("here", 8, run.speeds, None), repeated(run, factor, config.training.epochs), way)


def test_the_pilots_own_figures_are_reproduced(tmp_path: Path) -> None:
    pilot = projected(PILOT, tmp_path, 1)
    assert seconds(pilot)["verifier load"] == pytest.approx(22.5 * 60)
    assert seconds(pilot)["02 extraction"] == pytest.approx(2.9 * 60)
    assert seconds(pilot)["04 training"] == pytest.approx(27.7 * 60)
    states = planning.disk(resolve(), repeated(rates.read_run(tmp_path, 10), 1, 10), "bfloat16")
    assert (states.kept_states + states.train_states) / 2**30 == pytest.approx(27, abs=0.1)


def test_rows_eight_times_as_long_cost_eight_times_the_extraction_and_the_disk(tmp_path: Path) -> None:
    timings(tmp_path, PILOT)
    common = ("--box", "rtx6000x8", "--from", str(tmp_path), "--max-samples", "1000", "--plan.prompt_tokens", "100")
    short, long = (
        make_plan(resolve(*common, "--plan.output_tokens", str(output))).options["rtx6000x8"][0]
        for output in (400, 3900)
    )
    assert short.samples == long.samples
    assert seconds(long)["02 extraction"] == pytest.approx(8 * seconds(short)["02 extraction"])
    assert seconds(long)["verifier load"] == seconds(short)["verifier load"]


def test_a_run_four_times_as_large_pays_its_starts_once_and_its_tokens_four_times(tmp_path: Path) -> None:
    assert seconds(projected(SMALL, tmp_path, 1)) == pytest.approx(
        {
            "verifier load": 200,
            "01b generation": 50,
            "02 extraction": 20,
            "03 vocabulary": 5,
            "04 training": 40 + 96,
            "05 export": 3,
            "06 evaluation": 90,
        }
    )
    counting = 3 * 8_000 / rates.COUNTING.value.likely
    assert seconds(projected(SMALL, tmp_path, 4)) == pytest.approx(
        {
            "verifier load": 200,
            "01b generation": 4 * 50,
            "02 extraction": 4 * 20,
            "03 vocabulary": 5 + counting,
            "04 training": 40 + 4 * 96,
            "05 export": 3,
            "06 evaluation": 90,
        }
    )


def test_the_plan_of_a_measured_run_by_hand(tmp_path: Path) -> None:
    timings(tmp_path, SMALL)
    config = resolve("--from", str(tmp_path), "--max-samples", "1000", "--training.epochs", "3")
    planned = make_plan(config)
    # 10,000 / 100 said, 10,800 / 90 in all; 5 % each are kept for validation and for evaluation.
    assert (planned.length.prompt, planned.length.output, planned.length.basis) == (20, 100, MEASURED)
    own = planned.options[RTX_HARDWARE][0]
    assert {cost.stage: cost.tokens for cost in own.costs} == pytest.approx(
        {
            "verifier load": 0,
            "01b generation": 1000 * 100,
            "02 extraction": 950 * 120,
            "03 vocabulary": 900 * 100,
            "04 training": 900 * 120 * 3,
            "05 export": 0,
            "06 evaluation": 0,
        }
    )
    assert seconds(own)["01b generation"] == pytest.approx(1000 * 100 / 200)
    assert seconds(own)["02 extraction"] == pytest.approx(950 * 120 / 540)
    assert own.gpu_hours.likely == pytest.approx(8 * own.seconds.likely / 3600)


def test_one_pass_drops_the_second_load_and_the_prefill(tmp_path: Path) -> None:
    two, one = (seconds(projected(SMALL, tmp_path, 1, way)) for way in (TWO_PASSES, ONE_PASS))
    assert one["verifier load"] == 100
    assert "02 extraction" not in one
    assert one["01b generation"] == pytest.approx(1.2 * two["01b generation"])
    saved = sum(two.values()) - sum(one.values())
    assert saved == pytest.approx(100 + 20 - 0.2 * two["01b generation"])


def test_a_run_made_in_one_pass_is_planned_so_and_says_nothing_of_two(tmp_path: Path) -> None:
    taken_over = row("02_hidden", 9.0, samples=90, train=80, val=10, tokens=10_800, taken_over=90, extracted_tokens=0)
    timings(tmp_path, [taken_over if line["stage"] == "02_hidden" else line for line in SMALL])
    flags = ("--from", str(tmp_path), "--max-samples", "100", "--generation.capture", "one_pass")
    (options,) = make_plan(resolve(*flags)).options.values()
    assert [str(option.way) for option in options] == ["one pass, bfloat16, whole", "one pass, float8_e4m3, whole"]
    (generation,) = (cost for cost in options[0].costs if cost.stage == "01b generation")
    assert generation.basis == MEASURED
    with pytest.raises(PipelineError, match="02_hidden was never finished with work to do"):
        make_plan(resolve(*flags[:-1], "two_pass"))


def test_a_run_made_in_float8_is_planned_by_its_own_rate(tmp_path: Path) -> None:
    timings(tmp_path, SMALL)
    (tmp_path / "run.yaml").write_text("extraction: {storage_dtype: float8_e4m3}\n")
    flags = ("--from", str(tmp_path), "--max-samples", "100", "--extraction.storage_dtype", "float8_e4m3")
    (own, *_) = next(iter(make_plan(resolve(*flags)).options.values()))
    (extraction,) = (cost for cost in own.costs if cost.stage == "02 extraction")
    assert own.way.storage == planning.FP8
    assert extraction.basis == MEASURED
    assert extraction.seconds.low == extraction.seconds.high


def test_the_presets_own_way_comes_first() -> None:
    first = planning.ways(resolve("--generation.capture", "one_pass", "--extraction.storage_dtype", "float8_e4m3"))[0]
    assert first == Way(True, planning.FP8)


def test_the_attempt_that_did_the_most_gives_the_rate(tmp_path: Path) -> None:
    resumed = [*SMALL, row("01b_traces", 90.0, traces=100, output_tokens=10_000, asked_tokens=3, asked_seconds=2.0)]
    assert seconds(projected(resumed, tmp_path, 1))["01b generation"] == pytest.approx(50)


@pytest.mark.parametrize("outcome", ["Terminated", "MoreStates"])
def test_attempts_that_were_stopped_and_gone_on_from_count_and_failed_ones_do_not(tmp_path: Path, outcome: str) -> None:
    without_split = row("04_train", 60.0, steps=30)
    stopped = without_split | {"outcome": outcome, "seconds": 36.0}
    failed = without_split | {"outcome": "TypeError", "seconds": 1000.0}
    rows = [line for line in SMALL if line["stage"] != "04_train"]
    assert seconds(projected([*rows, failed, stopped, without_split], tmp_path, 1))["04 training"] == pytest.approx(96)


def test_a_stage_that_was_never_measured_is_named(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="01b_traces was never finished"):
        timings(tmp_path, [line for line in SMALL if line["stage"] != "01b_traces"])
        make_plan(resolve("--from", str(tmp_path), "--max-samples", "10"))


def test_a_run_of_another_verifier_says_nothing(tmp_path: Path) -> None:
    timings(tmp_path, SMALL)
    (tmp_path / "run.yaml").write_text("verifier: {path: tiny}\n")
    with pytest.raises(PipelineError, match="was made with the verifier tiny"):
        make_plan(resolve("--from", str(tmp_path), "--max-samples", "10"))


def test_a_run_of_four_times_the_size_took_what_was_predicted_from_the_smaller_one() -> None:
    predicted, took = plan_tiny_x4.prediction(
        plan_tiny_x4.kept(plan_tiny_x4.SMALL), plan_tiny_x4.kept(plan_tiny_x4.LARGE)
    )
    assert predicted["all"] == pytest.approx(took["all"], rel=plan_tiny_x4.TARGET)
    assert sum(predicted.values()) == pytest.approx(2 * predicted["all"])
    result = json.loads((plan_tiny_x4.RESULTS / "plan_tiny_x4.json").read_text())
    assert result["ours"]["predicted_seconds"] == pytest.approx(predicted, abs=0.01)
    assert result["peer"]["measured_seconds"] == pytest.approx(took, abs=0.01)


# Priors and labels --------------------------------------------------------------------------------------------------


def test_a_box_without_a_run_is_planned_by_its_published_figures() -> None:
    own = make_plan(resolve("--box", "rtx6000x8", "--max-samples", "50000")).options["rtx6000x8"][0]
    found = seconds(own)
    assert found["verifier load"] == 2 * 22.5 * 60
    assert found["01b generation"] == pytest.approx(50_000 * 3840 / 2000)
    assert found["02 extraction"] == pytest.approx(50_000 * 0.95 * 4096 / (7049 * 0.71**0.5))
    assert own.seconds.low < own.seconds.likely < own.seconds.high
    assert MEASURED not in own.basis


def test_a_stage_measured_on_the_box_takes_the_place_of_its_prior_and_each_row_says_which(tmp_path: Path) -> None:
    timings(tmp_path, PILOT)
    both = resolve("--box", "rtx6000x8", "--box", "b300x8", "--from", str(tmp_path), "--max-samples", "1000")
    options = make_plan(both).options
    labels = {cost.stage: cost.basis for cost in options["rtx6000x8"][0].costs}
    assert labels == {
        "01 prompts": ESTIMATE,
        "verifier load": "measured + prior",
        "01b generation": PRIOR,
        "02 extraction": MEASURED,
        "03 vocabulary": "measured + prior",
        "04 training": MEASURED,
        "05 export": MEASURED,
        "06 evaluation": MEASURED,
    }
    assert all(MEASURED not in cost.basis for cost in options["b300x8"][0].costs)


@pytest.mark.parametrize("box", BOXES)
def test_every_figure_of_a_box_has_a_basis_a_source_and_a_range_around_it(box: str) -> None:
    for speed in BOXES[box].speeds.values():
        for figure in filter(None, (speed.start_s, speed.tokens_per_s)):
            assert figure.basis in (PRIOR, ESTIMATE)
            assert figure.source
            assert 0 < figure.value.low <= figure.value.likely <= figure.value.high


def test_the_boxes_are_those_that_the_configuration_names() -> None:
    assert get_args(get_args(Plan.model_fields["box"].annotation)[0]) == tuple(BOXES)


def test_a_box_is_not_planned_for_the_embedded_verifier() -> None:
    with pytest.raises(PipelineError, match=r"verifier\.path is tiny"):
        make_plan(Config(plan={"box": ["b300x8"]}, prompts={"max_samples": 10}))  # type: ignore[arg-type]


def test_more_trainers_are_an_estimate_between_half_of_linear_and_linear() -> None:
    one, four = (
        make_plan(resolve("--box", "b300x8", "--max-samples", "50000", "--plan.train_gpus", str(gpus))).options[
            "b300x8"
        ][0]
        for gpus in (1, 4)
    )
    start = BOXES["b300x8"].speeds["04_train"].start_s.value
    (alone,), (shared,) = ([c for c in p.costs if c.stage == "04 training"] for p in (one, four))
    assert shared.seconds.low - start.low == pytest.approx((alone.seconds.low - start.low) / 4)
    assert shared.seconds.high - start.high == pytest.approx((alone.seconds.high - start.high) / 2)
    assert "not measured" in shared.sources[-1]


# Disk and waves -----------------------------------------------------------------------------------------------------


def test_a_token_of_kimi_takes_the_bytes_that_are_known() -> None:
    config = resolve()
    assert planning.token_bytes(config, "bfloat16") == 57_344
    assert planning.token_bytes(config, "float8_e4m3") == 28_676
    assert planning.token_bytes(config, "float32") == 114_688


def test_the_draft_has_the_parameters_that_were_counted() -> None:
    assert planning.draft_parameters(resolve()) == pytest.approx(0.83e9, rel=0.01)


# Of a thousand samples of 120 tokens, 900 are trained on and 50 validate, at 57,344 B a token.
TRAIN_GB, VAL_GB = 900 * 120 * 57_344 / 1e9, 50 * 120 * 57_344 / 1e9
# Traces at 17 B a token said, the data set at 16 B a token, four checkpoints of 829,423,616 parameters at 12 B.
FIXED_GB = (100_000 * 17 + 950 * 120 * 16 + 4 * 12 * 829_423_616) / 1e9


def small_plan(folder: Path, *flags: str) -> list[planning.Projection]:
    """The ways of a thousand samples for three epochs at the rates of the small run, the preset's own first."""
    timings(folder, SMALL)
    config = resolve("--from", str(folder), "--max-samples", "1000", "--training.epochs", "3", *flags)
    return make_plan(config).options[RTX_HARDWARE]


# Two gigabytes leave 1.655936 for training states, of which there are 6.193152 an epoch.
@pytest.mark.parametrize(
    ("epochs", "waves", "extracted", "at_once_gb"),
    [("again", 12, 50 * 120 + 3 * 900 * 120, 2 - VAL_GB), ("replay", 4, 950 * 120, TRAIN_GB / 4)],
)
def test_what_waves_cost_by_hand(
    tmp_path: Path, epochs: Literal["again", "replay"], waves: int, extracted: int, at_once_gb: float
) -> None:
    own = small_plan(tmp_path, "--extraction.disk_budget_gb", "2", "--extraction.wave_epochs", epochs)[0]
    assert own.way == Way(False, "bfloat16", epochs)
    assert own.waves.count == waves
    assert own.peak_bytes / 1e9 == pytest.approx(FIXED_GB + VAL_GB + at_once_gb)
    tokens = {cost.stage: cost.tokens for cost in own.costs}
    assert tokens["02 extraction"] == pytest.approx(extracted)
    assert tokens["04 training"] == pytest.approx(3 * 900 * 120)
    found = seconds(own)
    assert found["02 extraction"] == pytest.approx(extracted / 540)
    # One start for the answers and one a wave for the states, 100 s each; the trainer's are of 40 s.
    assert found["verifier load"] == pytest.approx(100 + waves * 100)
    assert found["04 training"] == pytest.approx(waves * 40 + 3 * 900 * 120 / 300)
    assert found["01b generation"] == pytest.approx(1000 * 100 / 200)


@pytest.mark.parametrize("share", [0.23, 0.45, 0.7])
@pytest.mark.parametrize("epochs", ["again", "replay"])
def test_the_plan_counts_the_waves_that_02_cuts(monkeypatch: pytest.MonkeyPatch, epochs: str, share: float) -> None:
    from eagle3_train import waves

    monkeypatch.setattr(waves, "token_bytes", lambda _config: 57_344)  # the verifier's files are not here
    train = [4096] * 1000
    budget = share * sum(train) * 57_344 / 1e9
    flags = ("--extraction.wave_epochs", epochs, "--extraction.disk_budget_gb", str(budget))
    config = resolve("--training.epochs", "2", *flags)
    drawn = waves.training_order(config, train, round(budget * 1e9))
    cut, first, made, held = 0, 0, 0, set[int]()
    while first < len(drawn.steps):
        last = waves._last_step(config, drawn, first, train, round(budget * 1e9))
        made += len(drawn.rows(first, last) - held)
        cut, first, held = cut + 1, last, drawn.rows(first, last)
    way = planning.ways(config)[0]
    planned = planning.waves(config, planning.Disk(0, 0, sum(train) * 57_344, 0), way)
    # Whole steps do not fill a wave to the last byte; what one wave leaves for the next is not made again.
    assert planned.count <= cut <= planned.count + 1
    assert made <= planned.passes * len(train)
    assert made == len(train) or epochs == "again"


def test_the_ways_in_waves_stand_beside_the_others(tmp_path: Path) -> None:
    beside = {str(option.way) for option in small_plan(tmp_path)}
    budgeted = small_plan(tmp_path, "--max-disk-gb", str(FIXED_GB + 2))
    assert {str(option.way) for option in budgeted} - beside == {
        "two passes, bfloat16, waves again",
        "two passes, bfloat16, waves replay",
        "two passes, float8_e4m3, waves again",
        "two passes, float8_e4m3, waves replay",
    }
    assert {option.way: option.waves.count for option in budgeted if option.way.storage == "bfloat16"} == {
        Way(False, "bfloat16"): 1,
        Way(True, "bfloat16"): 1,
        Way(False, "bfloat16", "again"): 12,
        Way(False, "bfloat16", "replay"): 4,
    }


def test_of_one_epoch_there_is_nothing_to_replay(tmp_path: Path) -> None:
    options = small_plan(tmp_path, "--max-disk-gb", str(FIXED_GB + 2), "--training.epochs", "1")
    (waved,) = (option for option in options if option.way.waves and option.way.storage == "bfloat16")
    assert (waved.way.waves, waved.waves.count) == ("again", 4)


@pytest.mark.parametrize("left_gb", [-1, 0, VAL_GB, VAL_GB + 0.1, VAL_GB + TRAIN_GB + 0.001])
def test_waves_are_offered_only_where_they_are_needed_and_have_room(tmp_path: Path, left_gb: float) -> None:
    options = small_plan(tmp_path, "--max-disk-gb", str(FIXED_GB + left_gb))
    assert [option.way for option in options if option.way.waves and option.way.storage == "bfloat16"] == []


def test_what_the_plan_says_to_set_is_planned_as_it_said(tmp_path: Path) -> None:
    flags = ("--max-disk-gb", str(FIXED_GB + 2))
    timings(tmp_path, SMALL)
    config = resolve("--from", str(tmp_path), "--max-samples", "1000", "--training.epochs", "3", *flags)
    for option in make_plan(config).options[RTX_HARDWARE]:
        own, *_ = small_plan(tmp_path, *flags, *planning.flags(config, option).split())
        assert own.way == option.way
        assert own.waves.count == option.waves.count
        assert own.seconds == option.seconds


def test_a_preset_in_waves_says_what_makes_it_whole(tmp_path: Path) -> None:
    timings(tmp_path, SMALL)
    config = resolve("--from", str(tmp_path), "--max-samples", "1000", "--extraction.disk_budget_gb", "2")
    own, *others = make_plan(config).options[RTX_HARDWARE]
    said = {option.way: planning.flags(config, option) for option in [own, *others]}
    assert said[own.way] == ""
    assert said[Way(False, "bfloat16")] == "--extraction.disk_budget_gb null"
    assert said[Way(True, "bfloat16")] == "--generation.capture one_pass --extraction.disk_budget_gb null"
    assert said[Way(False, "bfloat16", "replay")] == "--extraction.wave_epochs replay"


@pytest.mark.parametrize("epochs", ["again", "replay"])
def test_a_budget_that_holds_every_state_is_one_wave(tmp_path: Path, epochs: str) -> None:
    flags = ("--extraction.wave_epochs", epochs, "--extraction.disk_budget_gb")
    own, whole, *_ = small_plan(tmp_path, *flags, str(TRAIN_GB + VAL_GB + 0.001))
    assert (own.way.waves, whole.way.waves) == (epochs, None)
    assert (own.waves.count, own.seconds, own.peak_bytes) == (1, whole.seconds, whole.peak_bytes)
    assert small_plan(tmp_path, *flags, str(TRAIN_GB + VAL_GB - 0.001))[0].waves.count > 1


def test_a_budget_without_room_for_one_step_is_refused(tmp_path: Path) -> None:
    timings(tmp_path, SMALL)
    least = VAL_GB + 2 * 8192 * 57_344 / 1e9
    common = ("--from", str(tmp_path), "--max-samples", "1000", "--training.batch_size", "2")
    refused = planning.refusal(make_plan(resolve(*common, "--extraction.disk_budget_gb", str(least - 0.001)))) or ""
    assert f"--extraction.disk_budget_gb {least - 0.001:g}: {least:.3g} GB planned" in refused
    assert planning.refusal(make_plan(resolve(*common, "--extraction.disk_budget_gb", str(least + 0.001)))) is None
    for too_small in (VAL_GB, VAL_GB / 2):
        planned = make_plan(resolve(*common, "--extraction.disk_budget_gb", str(too_small)))
        assert "GB planned" in (planning.refusal(planned) or "")


def test_the_boxs_waves_within_three_terabytes_by_hand() -> None:
    planned = make_plan(resolve("--box", "rtx6000x8", "--max-samples", "50000", "--max-disk-gb", "3000"))
    waved = {p.way: p for p in planned.options["rtx6000x8"] if p.way.waves and p.way.storage == "bfloat16"}
    # 46.2 GB stay, 587.2 of validation states too: 2,366.6 are left for 10,569.6 of training states, three epochs.
    again, replay = waved[Way(False, "bfloat16", "again")], waved[Way(False, "bfloat16", "replay")]
    assert (again.waves.count, replay.waves.count) == (14, 5)
    assert again.peak_bytes == pytest.approx(3e12)
    assert replay.peak_bytes == pytest.approx(46.2e9 + 587.2e9 + 10_569.6e9 / 5, rel=1e-4)
    assert seconds(again)["verifier load"] == pytest.approx((1 + 14) * 22.5 * 60)
    (extraction,) = (cost for cost in again.costs if cost.stage == "02 extraction")
    assert extraction.tokens == pytest.approx(50_000 * 4096 * (0.05 + 3 * 0.9))
    (load,) = (cost for cost in again.costs if cost.stage == "verifier load")
    assert "14 starts for 14 waves, not measured" in load.sources[-1]


def test_ways_that_were_never_measured_are_estimates_and_say_so(tmp_path: Path) -> None:
    fp8 = projected(SMALL, tmp_path, 1, Way(False, planning.FP8))
    (extraction,) = (cost for cost in fp8.costs if cost.stage == "02 extraction")
    assert extraction.basis == f"{MEASURED} + {ESTIMATE}"
    assert "not measured" in extraction.sources[-1]
    (exact,) = (cost for cost in projected(SMALL, tmp_path, 1).costs if cost.stage == "02 extraction")
    assert extraction.seconds.low == pytest.approx(exact.seconds.low)
    assert extraction.seconds.high == pytest.approx(0.78 / 0.63 * exact.seconds.high)
    (generation,) = (cost for cost in projected(SMALL, tmp_path, 1, ONE_PASS).costs if cost.stage == "01b generation")
    assert generation.basis == f"{MEASURED} + {ESTIMATE}"
    assert "not measured" in generation.sources[-1]
    (alone,) = (cost for cost in projected(SMALL, tmp_path, 1).costs if cost.stage == "01b generation")
    assert generation.seconds.low == pytest.approx(alone.seconds.low)
    assert generation.seconds.high == pytest.approx(2.5 * alone.seconds.high)
    rows = plan_command.option_table([projected(SMALL, tmp_path, 1), fp8], Plan()).splitlines()
    assert ESTIMATE not in rows[2] and ESTIMATE in rows[3]


def test_fp8_halves_the_states() -> None:
    options = make_plan(resolve("--box", "b300x8", "--max-samples", "50000")).options["b300x8"]
    bf16, fp8 = (next(p for p in options if p.way == Way(False, storage)) for storage in ("bfloat16", planning.FP8))
    assert fp8.waves.states / bf16.waves.states == pytest.approx(28_676 / 57_344)
    assert fp8.seconds.low == bf16.seconds.low


# Price and budgets --------------------------------------------------------------------------------------------------


def test_a_price_is_for_the_whole_box_and_for_each_box_its_own() -> None:
    flags = ("--box", "rtx6000x8", "--box", "b300x8", "--max-samples", "1000", "--price", "0", "--price", "48")
    options = make_plan(resolve(*flags)).options
    free, paid = options["rtx6000x8"][0], options["b300x8"][0]
    assert free.usd == Range(0, 0, 0)
    assert paid.usd and paid.usd.likely == pytest.approx(48 * paid.seconds.likely / 3600)


def test_prices_that_belong_to_no_box_and_a_budget_without_a_price_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 prices for 2 boxes"):
        resolve("--box", "rtx6000x8", "--box", "b300x8", "--price", "1", "--price", "2", "--price", "3")
    with pytest.raises(ConfigError, match="max_usd needs price"):
        resolve("--max-usd", "10")


@pytest.mark.parametrize(
    ("budget", "flag"),
    [
        (("--max-hours", "5"), "--max-hours"),
        (("--max-usd", "200", "--price", "48"), "--max-usd"),
        (("--max-disk-gb", "1000"), "--max-disk-gb"),
        (("--max-hours", "5", "--extraction.disk_budget_gb", "500"), "--max-hours"),
        (("--max-disk-gb", "500", "--extraction.disk_budget_gb", "460"), "--max-disk-gb"),
        (("--extraction.disk_budget_gb", "500"), "--extraction.disk_budget_gb"),
    ],
)
def test_over_a_budget_the_plan_refuses_and_names_what_would_fit(budget: tuple[str, ...], flag: str) -> None:
    flags = ("--verifier.path", KIMI, "--box", "b300x8", *budget)
    refused = plan(*flags, "--max-samples", "50000")
    assert refused.returncode == 1
    assert re.search(rf"{flag} [\d,]+: [\d,.]+ \w+ planned, [\d,.]+ \w+ over", refused.stderr)
    most = int(re.search(r"MAX_SAMPLES=(\d+)", refused.stderr)[1])  # type: ignore[index]
    assert plan(*flags, "--max-samples", str(most), "--brief").returncode == 0
    assert plan(*flags, "--max-samples", str(most + 1), "--brief").returncode == 1


def test_when_the_starts_alone_are_too_much_no_size_is_offered() -> None:
    planned = make_plan(resolve("--box", "rtx6000x8", "--max-samples", "10", "--max-hours", "0.1"))
    assert "not even one sample fits" in (planning.refusal(planned) or "")


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 1000, 12_345])
def test_the_largest_size_that_fits_is_found(limit: int) -> None:
    assert most_samples(lambda samples: samples <= limit) == limit


def test_ways_that_would_fit_are_offered() -> None:
    planned = make_plan(resolve("--box", "b300x8", "--max-samples", "50000", "--max-disk-gb", "6000"))
    refused = planning.refusal(planned) or ""
    assert "all 50,000 would fit as two passes, float8_e4m3, whole: --extraction.storage_dtype float8_e4m3" in refused
    assert "all 50,000 would fit as one pass, bfloat16" not in refused


def test_ten_times_the_samples_are_shown() -> None:
    text = plan_command.shown(make_plan(resolve("--box", "b300x8", "--max-samples", "50000")))
    assert re.search(r"^\| 500,000 ", text, re.MULTILINE)


# The command --------------------------------------------------------------------------------------------------------


def test_the_pipelines_question_takes_one_line() -> None:
    done = plan("--preset", "presets/tiny.yaml", "--from", str(TINY_TIMINGS), "--brief")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1


def test_planning_imports_neither_torch_nor_vllm_nor_matplotlib() -> None:
    code = "import sys, eagle3_train.planning; print({'torch', 'vllm', 'matplotlib'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_without_rates_the_pipeline_goes_on_and_a_budget_refuses() -> None:
    flags = ("--preset", "presets/tiny.yaml", "--plan.from_run", "null", "--brief")
    unknown = plan(*flags)
    assert (unknown.returncode, unknown.stdout.split(":")[0]) == (0, "not estimated")
    refused = plan(*flags, "--max-hours", "1")
    assert refused.returncode == 1
    assert "no rates for this machine" in refused.stderr


def test_the_default_is_planned_from_what_it_took_here_and_another_verifier_is_not() -> None:
    own = plan("--preset", "presets/tiny.yaml", "--brief")
    assert own.returncode == 0
    assert re.match(r"400 samples on 2 x AMD EPYC, 24 GiB: [\d.]+ min, .*measured", own.stdout), own.stdout
    other = plan("--preset", "presets/tiny.yaml", "--verifier.path", KIMI, "--brief")
    assert other.returncode == 0
    assert "not estimated" in other.stdout and "was made with the verifier tiny" in other.stdout


def test_a_wrong_flag_is_a_wrong_argument() -> None:
    assert plan("--max-hour", "3").returncode == 2


def test_the_picture_shows_every_option(tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    done = plan("--verifier.path", KIMI, "--box", "b300x8", "--max-samples", "1000", "--picture", str(picture))
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    planned = make_plan(resolve("--box", "b300x8", "--max-samples", "1000"))
    assert all(len(hours) <= len(charts.PALETTE) for hours in plan_command.hours_by_stage(planned).values())


def test_run_pipeline_asks_the_plan_before_it_touches_the_verifier() -> None:
    done = subprocess.run(
        ["bash", "run_pipeline.sh", "--dry-run", "--max-hours", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    commands = [line.strip() for line in done.stdout.splitlines() if line.startswith("   ")]
    assert commands[0].startswith("python plan.py --run") and commands[0].endswith("--max-hours 3 --brief")
    assert "eagle3_train.verifier" in commands[1]


# The document -------------------------------------------------------------------------------------------------------


def marked(text: str) -> dict[str, str]:
    return dict(re.findall(r"<!-- plan: (\w+) -->\n(.*?)\n?<!-- /plan -->", text, re.DOTALL))


def test_the_playbooks_tables_are_fresh() -> None:
    config = parse(["--from", str(TINY_TIMINGS)], "", PlanArguments)[1]
    made = plan_command.document_tables(config, rates.read_run(TINY_TIMINGS, config.training.epochs))
    assert marked(PLAYBOOK.read_text()) == made, "python plan.py --update next-steps-eagle.md --from " + str(
        TINY_TIMINGS
    )


def test_every_number_of_the_measured_table_is_in_the_timings() -> None:
    kept = {}
    for line in TINY_TIMINGS.read_text().splitlines():
        values = json.loads(line)
        kept[values["stage"]] = {str(value) for value in values.values()} | {values["date"][:10], "-"}
    rows = marked(PLAYBOOK.read_text())["measured"].splitlines()[2:]
    assert len(rows) == len(kept)
    for line in rows:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert set(cells) <= kept[cells[0]], cells


def test_update_rewrites_only_what_stands_between_markers(tmp_path: Path) -> None:
    document = tmp_path / "notes.md"
    document.write_text("before\n<!-- plan: measured -->\nold\n<!-- /plan -->\nafter\n")
    timings(tmp_path, SMALL)
    config = resolve("--from", str(tmp_path))
    assert plan_command.update(document, config)
    text = document.read_text()
    assert text.startswith("before\n<!-- plan: measured -->\n| stage") and text.endswith("<!-- /plan -->\nafter\n")
    assert "old" not in text
    assert not plan_command.update(document, config)


@pytest.mark.parametrize("text", ["nothing", "<!-- plan: measurd -->\n<!-- /plan -->\n"])
def test_a_document_without_known_markers_is_left_alone(tmp_path: Path, text: str) -> None:
    document = tmp_path / "notes.md"
    document.write_text(text)
    timings(tmp_path, SMALL)
    with pytest.raises(PipelineError, match="the tables are measured, projections, waves, rates, plan_rtx6000x8"):
        plan_command.update(document, resolve("--from", str(tmp_path)))
    assert document.read_text() == text


def test_lengths_given_by_hand_are_labelled_so() -> None:
    found = planning.lengths(resolve("--plan.output_tokens", "9000"), None)
    assert found == Lengths(256, 9000, "given", "plan.prompt_tokens and plan.output_tokens")
