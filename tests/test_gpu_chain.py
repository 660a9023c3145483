"""The judge of `benchmarks/gpu/` on made-up runs: what it must see, and what it must not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu.check import is_shifted, tokens
from benchmarks.gpu.results import MOST_DEVIATIONS

VOCAB, LENGTH = 32, 200


@pytest.fixture
def states() -> torch.Tensor:
    return torch.randn(40, 4, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("step", [1, -1])
def test_rows_that_are_the_neighbours_from_the_middle_on_are_seen(states: torch.Tensor, step: int) -> None:
    shifted = states.clone()
    shifted[20:39] = states[20 + step : 39 + step]
    assert is_shifted(shifted.bfloat16().float(), states)


def test_rounding_and_a_single_wrong_row_are_no_shift(states: torch.Tensor) -> None:
    rounded = states.bfloat16().float()
    assert not is_shifted(rounded, states)
    rounded[7] = states[6]
    assert not is_shifted(rounded, states)


class OneDistribution:
    """A verifier whose next token has the same distribution everywhere."""

    def __init__(self) -> None:
        self.logits_V = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        return self.logits_V.expand(len(token_ids), VOCAB)

    def traces(self, stated: float, true: float, count: int = 50) -> list[dict[str, Any]]:
        """Traces drawn at temperature `true` that say they were drawn at `stated`."""
        generator = torch.Generator().manual_seed(2)
        share = (self.logits_V / true).softmax(-1) if true else torch.eye(VOCAB)[self.logits_V.argmax()]
        return [
            {
                "sampling": {"temperature": stated},
                "prompt_token_ids": [0, 1, 2],
                "output_token_ids": torch.multinomial(share, LENGTH, True, generator=generator).tolist(),
            }
            for _ in range(count)
        ]


@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_samples_of_the_stated_temperature_score_near_zero(temperature: float) -> None:
    verifier = OneDistribution()
    found = tokens(verifier.traces(temperature, temperature), verifier)["sampled"][str(temperature)]
    assert found["tokens"] == 50 * LENGTH
    assert abs(found["standard_deviations"]) < MOST_DEVIATIONS


@pytest.mark.parametrize("true", [0.9, 1.1])
def test_samples_of_a_temperature_a_tenth_away_are_seen(true: float) -> None:
    verifier = OneDistribution()
    found = tokens(verifier.traces(1.0, true), verifier)["sampled"]["1.0"]
    assert abs(found["standard_deviations"]) > MOST_DEVIATIONS


def test_a_greedy_token_that_is_not_the_likeliest_is_counted_with_its_lead() -> None:
    verifier = OneDistribution()
    traces = verifier.traces(0.0, 0.0, count=2)
    worst = int(verifier.logits_V.argmin())
    traces[0]["output_token_ids"][5] = worst
    found = tokens(traces, verifier)["greedy"]
    assert (found["tokens"], found["not_the_likeliest"]) == (2 * LENGTH, 1)
    assert found["largest_lead"] == pytest.approx(float(verifier.logits_V.max() - verifier.logits_V.min()))
