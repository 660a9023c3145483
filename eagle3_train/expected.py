"""The acceptance that a draft may expect, counted over the verifier steps that vLLM would take on the same answers.

vLLM begins a step where the one before it ended, not at every token: a stretch that is guessed right is crossed in
few steps, a hard one token by token, so a mean over all tokens says too much. Here step follows step, by the chance of
each end; `tests/test_engine.py` holds them against vLLM's own record, step by step.

Legend of shapes: R, T, V as in step.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3_train.acceptance import GREEDY, SAMPLED
from eagle3_train.packs import Pack

Metrics = dict[str, Tensor]
_ROWS_AT_ONCE = 1024  # of a softmax over the vocabulary, in fp32


def names_of_sums(ttt_steps: int) -> list[str]:
    """What `Chain.sums` returns, for processes that had no pack to measure."""
    each = ("drafts", "drafts_right_before", "drafts_right", *(f"{kind}_accepted" for kind in (GREEDY, SAMPLED)))
    return [
        *(f"{kind}_steps" for kind in (GREEDY, SAMPLED)),
        *(f"{name}_{step}" for step in range(ttt_steps) for name in each),
    ]


class Chain:
    """Follows the drafts that a pack's rows could start, TTT step by TTT step.

    A draft starts at a row that is the verifier's own. Its guess k counts where all rows up to it are the verifier's.
    Greedily guesses 0..k are accepted if all are the verifier's first choice; at temperature 1 by rejection sampling,
    with the product of the overlaps sum_v min(p_v, q_v) as chance (Leviathan et al., arXiv 2211.17192).
    """

    def __init__(self, pack: Pack, targets: Tensor):
        self._pack, self._targets = pack, targets
        self._best = targets.argmax(-1)
        # Of each active row, before the first guess; step 0 leaves those alone where a draft starts.
        self._started = torch.ones_like(pack.active, dtype=torch.bool)
        self._right, self._chance = [self._started], [self._started.float()]
        self._sums: Metrics = {}

    @torch.no_grad()
    def follow(self, step: int, logits: Tensor) -> None:
        """Take in TTT step `step`, logits [n_step, V]."""
        starts, chosen = self._pack.starts[step], self._pack.targets[step]
        here, guessed = torch.zeros_like(self._started), torch.zeros_like(self._started)
        here[starts] = True
        guessed[starts] = logits.argmax(-1) == self._best[chosen]
        overlaps = torch.zeros_like(self._chance[-1])
        for at, part, rows in zip(*(of.split(_ROWS_AT_ONCE) for of in (starts, logits, chosen)), strict=True):
            overlaps[at] = torch.minimum(part.float().softmax(-1), self._targets[rows].float().softmax(-1)).sum(-1)
        before = self._right[-1] & here
        self._started = self._started & here
        self._right.append(before & guessed)
        self._chance.append(self._chance[-1] * overlaps)
        self._sums |= {
            f"drafts_{step}": self._started.sum().float(),
            f"drafts_right_before_{step}": before.sum().float(),
            f"drafts_right_{step}": self._right[-1].sum().float(),
        }

    @torch.no_grad()
    def sums(self) -> Metrics:
        """Sums over the pack, for `summarise`, when every TTT step was followed."""
        for kind, chances in ((GREEDY, self._right), (SAMPLED, self._chance)):
            accepted = torch.stack(chances[1:]).float()
            begins = steps_begun(self._pack, accepted)
            self._sums[f"{kind}_steps"] = begins.sum()
            self._sums |= {f"{kind}_accepted_{step}": (begins * row).sum() for step, row in enumerate(accepted)}
        return self._sums


def steps_begun(pack: Pack, accepted: Tensor) -> Tensor:
    """The chance that a verifier step begins at each active row.

    One begins at the first row of an answer. One that begins at row i and whose first a guesses are accepted ends in a
    token of the verifier's own, and the next begins at row i + a + 1. Arrivals of a row are so a linear function of
    those of the T + 1 rows before it; all of them are found in log2(R) products of small matrices (a prefix scan).

    Args:
        accepted: [T, R], the chance that guesses 0..k of a draft from this row are all accepted.

    Returns:
        [R] fp32.
    """
    ttt_steps, rows = accepted.shape
    accepted = accepted.double()  # errors of the products would add up
    own = torch.zeros(rows, dtype=torch.bool, device=accepted.device)
    own[pack.starts[0]] = True
    first = own.clone()
    first[1:] &= ~own[:-1]
    borders = pack.cu_active[:-1].long()
    first[borders[borders < rows]] |= own[borders[borders < rows]]
    sure = accepted.new_ones(1, rows)
    exactly = torch.cat((sure, accepted)) - torch.cat((accepted, torch.zeros_like(sure)))
    # What row i passes to i + 1: [arrivals of i, those of i + 1 that are known by then, ..., 1].
    size = ttt_steps + 2
    passing = accepted.new_zeros(rows, size, size)
    passing[:, -1, -1] = 1
    within = own & ~first
    passing[within, : size - 2, 1 : size - 1] = torch.eye(size - 2).to(accepted)
    passing[within, : size - 1, 0] = exactly.roll(1, dims=1).t()[within]
    passing[first, 0, -1] = 1
    reach = 1
    while reach < rows:
        passing = torch.cat((passing[:reach], passing[reach:] @ passing[:-reach]))
        reach *= 2
    return passing[:, 0, -1].float()


def summarise(sums: dict[str, float], packs: float, ttt_steps: int) -> dict[str, float]:
    """What a set of packs shows.

    `full_acc_k`: share of drafts, one from every token, whose guesses 0..k are all the verifier's greedy choice.
    `cond_acc_k`: of those right before. `greedy_acc_k` and `sampled_acc_k`: share of verifier steps whose guesses 0..k
    are all accepted, decoding greedily and at temperature 1, as vLLM counts them by position.
    `expected_acceptance_length`: tokens a verifier step yields if vLLM drafts `ttt_steps` tokens: 1 (its own) + the sum
    of greedy_acc_k; `expected_sampled_acceptance_length` alike. The verifier's distribution is taken over the draft's
    vocabulary, so all are a little high where that leaves tokens out; an answer's last step is taken to end with it.
    """
    found = {name: sums[name] / packs for name in ("loss", *(f"loss_{step}" for step in range(ttt_steps)))}
    lengths = dict.fromkeys((GREEDY, SAMPLED), 1.0)
    for step in range(ttt_steps):
        right = sums[f"drafts_right_{step}"]
        found[f"full_acc_{step}"] = right / max(sums[f"drafts_{step}"], 1.0)
        found[f"cond_acc_{step}"] = right / max(sums[f"drafts_right_before_{step}"], 1.0)
        for kind in lengths:
            share = sums[f"{kind}_accepted_{step}"] / max(sums[f"{kind}_steps"], 1.0)
            found[f"{kind}_acc_{step}"] = share
            lengths[kind] += share
    return found | {
        "expected_acceptance_length": lengths[GREEDY],
        "expected_sampled_acceptance_length": lengths[SAMPLED],
    }
