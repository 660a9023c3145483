"""Contract of the parity gate: states that are not the verifier's own stop the run, and sound ones never do.

Sound states come from two places: a stand-in whose head is known (fault_server), and, with a real engine, the tiny
verifier (test_engine.py). Each way of breaking them that was seen in the field is done to them here, and must be
caught with numbers, before any sample is captured.

Shapes: T tokens, L captured layers, D hidden size.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hs_connectors.fp8_utils import dequantize_fp8_tensor, quantize_tensor_to_fp8

from eagle3_train import parity
from eagle3_train import server as vllm
from eagle3_train.asking import SetAside
from eagle3_train.config import Verifier
from eagle3_train.errors import PipelineError
from tests.fault_server import (
    END_OF_TURN,
    HIDDEN_SIZE,
    LAYERS,
    Engine,
    FaultServer,
    heads,
    log_probs_of,
    states_of,
    write_verifier,
)
from tests.test_extraction import TRAIN, VAL, asked, capture, new_run, shard

FINAL, TOKEN = parity.allowed_gaps("bfloat16")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> parity.Head:
    return parity.Head(Verifier(path=str(write_verifier(tmp_path_factory.mktemp("verifier")))))


def canary(number: int, length: int = 60) -> list[int]:
    """Token ids, each canary others."""
    return [20 + (7 * number + 13 * place * place) % 400 for place in range(length)]


def in_float8(states_TLD: torch.Tensor) -> torch.Tensor:
    return dequantize_fp8_tensor(*quantize_tensor_to_fp8(states_TLD), torch.float32)


# ---- the last layer against the server's own log-probs


@pytest.mark.parametrize("number", range(8))
def test_sound_states_give_the_servers_log_probs(head: parity.Head, number: int) -> None:
    ids = canary(number)
    server = torch.tensor(log_probs_of(ids))
    assert parity.check_final_layer(head, states_of(ids), ids, server, FINAL, "canary") < 1e-4


def test_sound_states_in_float8_pass_its_own_bound(head: parity.Head) -> None:
    allowed, _ = parity.allowed_gaps("float8_e4m3")
    for number in range(8):
        ids = canary(number)
        gap = parity.check_final_layer(
            head, in_float8(states_of(ids)), ids, torch.tensor(log_probs_of(ids)), allowed, "canary"
        )
        assert gap > 0, "float8 rounds, so this is not what was tested"


def one_layer_early(states: torch.Tensor) -> torch.Tensor:
    states[:, -1] = states[:, -2]
    return states


def shifted_from_the_middle(states: torch.Tensor) -> torch.Tensor:
    middle = len(states) // 2
    states[middle:] = states[middle:].roll(1, 0)
    return states


def of_another_sample(states: torch.Tensor) -> torch.Tensor:
    return states_of(canary(5, len(states)))


@pytest.mark.parametrize(
    "spoil", [one_layer_early, shifted_from_the_middle, of_another_sample, lambda s: s.roll(-1, 0), lambda s: 0 * s + 1]
)
def test_states_that_are_not_the_verifiers_own_are_refused_with_numbers(
    head: parity.Head, spoil: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    ids = canary(1)
    with pytest.raises(PipelineError, match=r"log-probs \d+\.\d+ away from the server's own .*allowed are 0\.15"):
        parity.check_final_layer(head, spoil(states_of(ids)), ids, torch.tensor(log_probs_of(ids)), FINAL, "canary 1")


def test_a_shift_in_the_second_half_is_found_at_its_row(head: parity.Head) -> None:
    ids = canary(2)
    states = shifted_from_the_middle(states_of(ids))
    with pytest.raises(PipelineError, match=r"first at row 3[0-2]\b"):
        parity.check_final_layer(head, states, ids, torch.tensor(log_probs_of(ids)), FINAL, "canary")


def test_another_final_norm_is_refused(head: parity.Head, tmp_path: Path) -> None:
    """As when a missing `model.norm` is quietly replaced by some other norm."""
    from safetensors.torch import save_file

    folder = write_verifier(tmp_path / "verifier")
    save_file(heads() | {"language_model.model.norm.weight": torch.ones(HIDDEN_SIZE)}, folder / "model.safetensors")
    other = parity.Head(Verifier(path=str(folder)))
    ids = canary(3)
    with pytest.raises(PipelineError, match="the norm"):
        parity.check_final_layer(other, states_of(ids), ids, torch.tensor(log_probs_of(ids)), FINAL, "canary")


# ---- the same tokens, alone and in company; the layers


def test_the_same_states_pass_and_a_row_moved_by_a_tie_passes_too() -> None:
    states = states_of(canary(0))
    assert parity.check_same(states, states, "canary", "alone") == 0
    tie = states.clone()
    tie[7] = -tie[7]
    parity.check_same(tie, states, "canary", "alone")


def two_rows_exchanged(states: torch.Tensor) -> torch.Tensor:
    states[[20, 21]] = states[[21, 20]]
    return states


@pytest.mark.parametrize(
    "spoil", [shifted_from_the_middle, of_another_sample, two_rows_exchanged, lambda s: s[:, [0, 2, 1, 3]]]
)
def test_states_that_depend_on_their_batch_are_refused_with_layer_and_row(
    spoil: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    sound = states_of(canary(0))
    with pytest.raises(PipelineError, match=r"layer number \d of 4, \d+ of 60 rows .* first row \d+"):
        parity.check_same(spoil(sound.clone()), sound, "canary 0", "alone")


def test_layers_in_depths_order_pass(head: parity.Head) -> None:
    ids = [canary(number) for number in range(4)]
    found = parity.check_depth(head, [states_of(one) for one in ids], ids, LAYERS)
    assert found["to_last"] == sorted(found["to_last"])


@pytest.mark.parametrize("order", [[1, 0, 2, 3], [0, 2, 1, 3], [2, 1, 0, 3], [3, 2, 1, 0], [1, 2, 0, 3]])
def test_layers_in_another_order_are_refused(head: parity.Head, order: list[int]) -> None:
    ids = [canary(number) for number in range(4)]
    with pytest.raises(PipelineError, match=r"layers \[2, 4, 5, 8\] are not in this order"):
        parity.check_depth(head, [states_of(one)[:, order] for one in ids], ids, LAYERS)


# ---- what was sampled


def answer(length: int, doubled_at: int) -> list[int]:
    """Prompt of 10 tokens and an output in which one token comes twice in a row."""
    ids = canary(4, length)
    ids[doubled_at + 1] = ids[doubled_at]
    return [*ids, END_OF_TURN]


def test_a_token_after_a_doubled_one_is_always_checked() -> None:
    for doubled_at in range(10, 58):
        ids = answer(60, doubled_at)
        assert doubled_at + 2 in parity.checked_places(ids, 10)
    assert len(parity.checked_places(canary(4, 500), 10)) == 8
    assert parity.checked_places([1, 2, 3], 2) == [2]


@pytest.mark.parametrize("doubled_at", [12, 30, 56])
def test_states_one_row_off_after_a_doubled_token_are_refused(head: parity.Head, doubled_at: int) -> None:
    """What a GPU does with asynchronous scheduling, measured: every later state is that of the row before."""
    ids = answer(60, doubled_at)
    last = states_of(ids[:-1])[:, -1]
    said = log_probs_of(ids)[9:]
    assert parity.check_sampled(head, last, ids, 10, said, TOKEN) < 1e-3
    shifted = last.clone()
    shifted[doubled_at + 1 :] = last[doubled_at:-1]
    with pytest.raises(SetAside, match="not those that its tokens were sampled from"):
        parity.check_sampled(head, shifted, ids, 10, said, TOKEN)


def drawn(head: parity.Head, temperature: float, top_p: float, seed: int, *, asked: float | None = None) -> Any:
    """A sample whose output was drawn from flat states at `temperature`, in the form of `sampling_z`."""
    generator = torch.Generator().manual_seed(seed)
    last = 0.05 * torch.randn(120, HIDDEN_SIZE, generator=generator) + 0.1 * states_of(canary(seed, 120))[:, -1].float()
    last = last / last.norm(dim=-1, keepdim=True) * 0.001  # RMSNorm's epsilon then flattens the distribution
    probabilities = (head.logits(last)[9:] / temperature).softmax(-1)
    likely, order = probabilities.sort(-1, descending=True)
    likely[likely.cumsum(-1) - likely >= top_p] = 0
    output = order.gather(-1, likely.multinomial(1, generator=generator))[:, 0].tolist()
    return last, [*canary(seed, 10), *output], 10, asked or temperature, top_p


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 1.0), (1.0, 0.95), (1.0, 0.5), (2.0, 0.9)])
def test_true_samples_score_like_a_standard_normal(head: parity.Head, temperature: float, top_p: float) -> None:
    scores = [
        parity.sampling_z(head, [drawn(head, temperature, top_p, 10 * run + seed) for seed in range(8)])
        for run in range(12)
    ]
    assert all(abs(score) < 4 for score in scores)
    assert 0.3 < torch.tensor(scores).std() < 2
    for score in scores:
        parity.check_sampling(score, None)


@pytest.mark.parametrize(("drawn_at", "asked"), [(4.0, 1.0), (0.2, 1.0)])
def test_samples_of_another_temperature_are_refused(head: parity.Head, drawn_at: float, asked: float) -> None:
    score = parity.sampling_z(head, [drawn(head, drawn_at, 1.0, seed, asked=asked) for seed in range(8)])
    with pytest.raises(PipelineError, match="less likely" if drawn_at > asked else "more likely"):
        parity.check_sampling(score, None)


def test_greedy_output_that_is_not_greedy_is_refused(head: parity.Head) -> None:
    last, ids, prompt, _, _ = drawn(head, 2.0, 1.0, 3)
    best = head.logits(last[prompt - 1 :]).argmax(-1).tolist()
    parity.check_sampling(None, parity.greedy_gap(head, last, ids[:prompt] + best, prompt))
    with pytest.raises(PipelineError, match="not greedy"):
        parity.check_sampling(None, parity.greedy_gap(head, last, ids, prompt))


# ---- the gate, before a stage captures anything


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    with FaultServer() as server, contextlib.closing(Engine(server)) as running:
        monkeypatch.setattr(vllm, "serve", running.serve)
        yield running


def only_in_a_batch(states: torch.Tensor, request: dict[str, Any]) -> torch.Tensor:
    return of_another_sample(states) if "batch" in request["request_id"] else states


def only_canary_3(states: torch.Tensor, request: dict[str, Any]) -> torch.Tensor:
    return of_another_sample(states) if request["request_id"].startswith("canary-3") else states


def with_nan(states: torch.Tensor, _request: dict[str, Any]) -> torch.Tensor:
    states[0, 0, 0] = float("nan")
    return states


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda s, _: one_layer_early(s), "not sound: layers 5 and 8 hold the same"),
        (lambda s, _: s[:, [0, 1, 3, 2]], "canary 0: the head over the last state"),
        (lambda s, _: shifted_from_the_middle(s), "canary 0: the head over the last state"),
        (only_canary_3, "canary 3: the head over the last state"),
        (only_in_a_batch, "canary 0: its states are not those of the same tokens alone"),
        (lambda s, _: s[:, [1, 0, 2, 3]], "are not in this order"),
        (with_nan, "NaN or infinity in layer 2"),
    ],
)
def test_a_gate_that_is_not_passed_stops_the_stage_before_any_sample(
    tmp_path: Path, engine: Engine, spoil: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor], said: str
) -> None:
    engine.on_canaries = spoil
    run = new_run(tmp_path)
    with pytest.raises(PipelineError, match="parity gate is not passed") as refused:
        capture(run)
    assert said in str(refused.value)
    assert asked(engine) == {}
    assert not any((run.folder("02_hidden") / "shards").iterdir())
    engine.on_canaries = lambda states, _request: states
    capture(run)
    assert shard(run, TRAIN[0]).exists()


def test_every_gate_leaves_its_numbers_and_the_canaries_stay_the_same(tmp_path: Path, engine: Engine) -> None:
    run = new_run(tmp_path)
    capture(run)
    folder = run.folder("02_hidden")
    canaries = (folder / parity.CANARIES).read_bytes()
    assert len(json.loads(canaries)) == len([*TRAIN, *VAL])
    shard(run, TRAIN[0]).unlink()
    capture(run)
    assert (folder / parity.CANARIES).read_bytes() == canaries
    first, second = (json.loads(line) for line in (folder / parity.LOG).read_text().splitlines())
    assert first["passed"]
    assert first["final_gap"] < 0.01
    assert first["reference_distance"] is None
    assert second["reference_distance"] < 0.01


def test_states_that_differ_from_those_the_run_began_with_stop_it(tmp_path: Path, engine: Engine) -> None:
    """Other auxiliary layers, for one, that the last layer says nothing about."""
    run = new_run(tmp_path)
    capture(run)
    shard(run, TRAIN[0]).unlink()

    def another_layer(states: torch.Tensor, _request: dict[str, Any]) -> torch.Tensor:
        states[:, 1] = (0.75 * states[:, 0].float() + 0.25 * states[:, 2].float()).to(states.dtype)
        return states

    engine.on_canaries = another_layer
    with pytest.raises(PipelineError, match="when this run began: in captured layer number 2 of 4"):
        capture(run)
    last = json.loads((run.folder("02_hidden") / parity.LOG).read_text().splitlines()[-1])
    assert not last["passed"]
    assert "captured layer number 2" in last["error"]
