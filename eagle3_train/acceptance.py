"""What vLLM's per-request record of each verifier step says about a draft: pure arithmetic, no server.

For one answer vLLM reports `per_step_accepted`: the number of draft tokens accepted in each verifier step, in order.
The first output token comes from the prompt's own forward pass; each step then yields its accepted tokens and one of
the verifier's own. Mean acceptance length = 1 + accepted / steps, as vLLM counts it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

GREEDY, SAMPLED = "greedy", "sampled"
THINKING, ANSWER = "thinking", "answer"
BOOTSTRAP_SAMPLES = 1000
CONTEXT_BUCKET = 1024
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Step:
    """One verifier step of one answer.

    Attributes:
        accepted: draft tokens accepted.
        drafted: draft tokens proposed.
        context: tokens before the ones this step yields, prompt included.
        section: thinking or answer, where its first token stands.
    """

    accepted: int
    drafted: int
    context: int
    section: str


@dataclass(frozen=True)
class Output:
    """One answer: token ids as the server says them, and vLLM's record of its steps (empty without a draft)."""

    prompt_ids: list[int]
    output_ids: list[int]
    accepted: list[int]
    drafted: list[int]

    def steps(self, think_end: int | None) -> list[Step]:
        """The verifier steps in order; `think_end` is the id of `</think>`, None when the verifier does not think."""
        closes = self.output_ids.index(think_end) if think_end in self.output_ids else len(self.output_ids)
        place, found = 1, []
        for accepted, drafted in zip(self.accepted, self.drafted, strict=True):
            section = THINKING if think_end is not None and place <= closes else ANSWER
            found.append(Step(accepted, drafted, len(self.prompt_ids) + place, section))
            place += accepted + 1
        return found


def summarise(steps: list[Step], draft_tokens: int) -> dict[str, Any]:
    """Acceptance over `steps`.

    Returns:
        mean_acceptance_length; steps; accepted_by_position (joint: the share of steps that accepted this position,
        and so all before it); conditional_by_position (given that all before were accepted);
        length_with_fewer (the mean acceptance length if only 1, 2, ... tokens were drafted: drafting is one chain, so
        the first k positions are the same).
    """
    count = len(steps)
    reached = [sum(step.accepted > position for step in steps) for position in range(draft_tokens)]
    before = [count, *reached[:-1]]
    shares = [number / count if count else 0.0 for number in reached]
    return {
        "mean_acceptance_length": 1 + sum(shares),
        "steps": count,
        "accepted_by_position": shares,
        "conditional_by_position": [n / b if b else 0.0 for n, b in zip(reached, before, strict=True)],
        "length_with_fewer": [1 + sum(shares[: k + 1]) for k in range(draft_tokens)],
    }


def by_section(steps: Iterable[Step], draft_tokens: int) -> dict[str, dict[str, Any]]:
    """`summarise` for thinking and answer apart; a section without steps is left out."""
    found = list(steps)
    parts = {name: [step for step in found if step.section == name] for name in (THINKING, ANSWER)}
    return {name: summarise(part, draft_tokens) for name, part in parts.items() if part}


def by_context(steps: Iterable[Step], draft_tokens: int, bucket: int) -> dict[int, dict[str, Any]]:
    """`summarise` by context position: the key is a bucket's first position, `bucket` tokens wide."""
    parts: dict[int, list[Step]] = {}
    for step in steps:
        parts.setdefault(step.context // bucket * bucket, []).append(step)
    return {start: summarise(parts[start], draft_tokens) for start in sorted(parts)}


def confidence_interval(answers: list[list[Step]], seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean acceptance length, by bootstrap over prompts (steps of one answer hang together)."""
    rng = random.Random(seed)
    totals = [(sum(step.accepted for step in steps), len(steps)) for steps in answers if steps]
    if not totals:
        return (1.0, 1.0)
    means = []
    for _ in range(BOOTSTRAP_SAMPLES):
        drawn = rng.choices(totals, k=len(totals))
        means.append(1 + sum(accepted for accepted, _ in drawn) / sum(count for _, count in drawn))
    means.sort()
    tail = (1 - _CONFIDENCE) / 2
    return means[int(tail * len(means))], means[int((1 - tail) * len(means)) - 1]


def bucket_width(answers: Iterable[Output]) -> int:
    """1,024 tokens, or a power of two that gives short outputs at least four buckets."""
    longest = max((len(answer.prompt_ids) + len(answer.output_ids) for answer in answers), default=CONTEXT_BUCKET)
    width = CONTEXT_BUCKET
    while width > 16 and longest < 4 * width:
        width //= 2
    return width
