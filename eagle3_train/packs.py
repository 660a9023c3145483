"""What one training step reads: several samples laid end to end, without padding, and which of their tokens count.

Legend of shapes: N tokens of the pack, R active rows (from each document's first use to its end), M tokens that are
learnt, T training-time-test (TTT) steps, A captured auxiliary layers, H hidden size, D documents.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain, pairwise
from typing import Any

import torch


@dataclass(frozen=True)
class Pack:
    """Aligned so that row i holds the state after token i and the id of token i + 1.

    A draft started at row i guesses in TTT step k the token that the verifier says after row i + k; that guess is
    learnt when token i + k + 1 is the verifier's own and of the same document.

    Attributes:
        input_ids: [N + T - 1] int64; row i of step k reads `input_ids[i + k]`. Zero where no token follows.
        states: [N, A + 1, H] as stored: inputs of the captured layers, then the last layer's output.
        scales: [N, 1, 1] fp32 of states stored in fp8, else None.
        positions: [N] int64, from 1 in each document.
        active: [R] int64, ascending rows of which anything is computed.
        learnt: [M] int64, rows whose last state says what is learnt.
        starts: for each TTT step, [n_k] int64 places in `active` where its guesses start; those of step 0 are the rows
            that are learnt themselves, and a draft starts nowhere else when it serves.
        targets: for each TTT step, [n_k] int64 places in `learnt` of what they are compared with.
        cu_active: [D + 1] int32 borders of the documents in `active`.
        cu_rows: [D + 1] int32 borders of the documents in the N rows.
        longest_active: most active rows of a document.
        longest: most rows of a document.
    """

    input_ids: torch.Tensor
    states: torch.Tensor
    scales: torch.Tensor | None
    positions: torch.Tensor
    active: torch.Tensor
    learnt: torch.Tensor
    starts: tuple[torch.Tensor, ...]
    targets: tuple[torch.Tensor, ...]
    cu_active: torch.Tensor
    cu_rows: torch.Tensor
    longest_active: int
    longest: int

    @property
    def tokens(self) -> int:
        """N."""
        return len(self.positions)

    def _map(self, change: Any) -> Pack:
        changed: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, torch.Tensor):
                changed[item.name] = change(value)
            elif isinstance(value, tuple):
                changed[item.name] = tuple(change(part) for part in value)
        return replace(self, **changed)

    def to(self, device: torch.device | str) -> Pack:
        """Every tensor on `device`; the copy may still be under way."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell the allocator that `stream` uses what another stream copied here."""
        self._map(lambda tensor: tensor.record_stream(stream))


def rows_kept(lengths: Sequence[int], pack_tokens: int) -> list[int]:
    """How many rows of each sample fit into a pack; what does not fit is cut."""
    kept: list[int] = []
    for length in lengths:
        kept.append(min(length, pack_tokens - sum(kept)))
    return kept


def lay_out(
    ids: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    states: torch.Tensor,
    scales: torch.Tensor | None = None,
    *,
    pack_tokens: int,
    ttt_steps: int,
    whole: bool = False,
) -> Pack:
    """The pack of some samples whose states lie end to end already.

    Args:
        ids: of each sample [L] int64.
        masks: of each sample [L], nonzero where the token is the verifier's own.
        states: [N, A + 1, H], the first `rows_kept` rows of each sample.
        scales: [N, 1, 1] of fp8 states.
        pack_tokens: most rows.
        ttt_steps: T.
        whole: compute every row (needed when a second layer attends to the first one's output).
    """
    lengths = rows_kept([len(sample) for sample in ids], pack_tokens)
    following = torch.zeros(sum(lengths) + ttt_steps - 1, dtype=torch.long)
    active, learnt, positions = [], [], []
    starts: list[list[torch.Tensor]] = [[] for _ in range(ttt_steps)]
    targets: list[list[torch.Tensor]] = [[] for _ in range(ttt_steps)]
    active_borders, learnt_rows = [0], 0
    for sample, mask, length, row in zip(ids, masks, lengths, accumulate(lengths, initial=0), strict=False):
        known = min(length, len(sample) - 1)
        following[row : row + known] = sample[1 : known + 1]
        positions.append(torch.arange(1, length + 1))
        own = torch.zeros(length, dtype=torch.bool)  # whether the token after a row is learnt: its state must be here
        own[:-1] = mask[1:length] != 0
        places = own.nonzero().flatten()
        first = max(0, length - 1)
        if len(places):
            first = max(0, int(places[0]) - ttt_steps + 1)
        if whole:
            first = 0
        for step in range(ttt_steps):
            inside = places >= step
            starts[step].append(places[inside] - step - first + active_borders[-1])
            targets[step].append(inside.nonzero().flatten() + learnt_rows)
        active.append(torch.arange(first, length) + row)
        learnt.append(places + 1 + row)
        learnt_rows += len(places)
        active_borders.append(active_borders[-1] + length - first)
    borders = list(accumulate(lengths, initial=0))
    return Pack(
        input_ids=following,
        states=states,
        scales=scales,
        positions=torch.cat(positions),
        active=torch.cat(active),
        learnt=torch.cat(learnt),
        starts=tuple(torch.cat(parts) for parts in starts),
        targets=tuple(torch.cat(parts) for parts in targets),
        cu_active=torch.tensor(active_borders, dtype=torch.int32),
        cu_rows=torch.tensor(borders, dtype=torch.int32),
        longest_active=max(b - a for a, b in pairwise(active_borders)),
        longest=max(lengths),
    )


@dataclass(frozen=True)
class Order:
    """Which packs every optimizer step of a training takes, known before the first one and the same on every rank.

    Attributes:
        steps: for each optimizer step, its packs, each a list of dataset rows.
        epoch_ends: number of steps made when each epoch ends; of several parts, when each part does.
    """

    steps: list[list[list[int]]]
    epoch_ends: list[int]

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that step number `step` (from 0) belongs to."""
        return sum(end <= step for end in self.epoch_ends)

    def rows(self, first_step: int, last_step: int) -> set[int]:
        """Every row that the steps from `first_step` to before `last_step` take."""
        return {row for step in self.steps[first_step:last_step] for pack in step for row in pack}

    def without(self, rows: Collection[int]) -> Order:
        """The same steps with these rows left out; a step that is left with none takes the packs of one beside it."""
        if not rows:
            return self
        kept = [[[row for row in pack if row not in rows] for pack in step] for step in self.steps]
        steps = [[pack for pack in step if pack] for step in kept]
        for number, step in enumerate(steps):
            if not step:
                beside = chain(reversed(steps[:number]), steps[number + 1 :])
                steps[number] = next(other for other in beside if other)
        return Order(steps, self.epoch_ends)

    def of_rank(
        self, rank: int, ranks: int, first_step: int, last_step: int | None = None
    ) -> tuple[list[list[int]], list[list[float]]]:
        """What one rank reads from `first_step` on, up to `last_step` or to the end.

        Returns:
            packs, in order, and for each step the weights of this rank's packs in the mean over the step's packs. A
            rank without a pack of its own left in a step repeats one at weight 0, so that all ranks keep in step.
        """
        packs, weights = [], []
        for step in self.steps[first_step:last_step]:
            own = step[rank::ranks]
            rounds = -(-len(step) // ranks)
            weights.append([1 / len(step)] * len(own) + [0.0] * (rounds - len(own)))
            packs += [*own, *([step[0]] * (rounds - len(own)))]
        return packs, weights


def order(
    lengths: Sequence[int],
    pack_tokens: int,
    batch_size: int,
    epochs: int,
    seed: int,
    most: int | None,
    parts: Sequence[Sequence[int]] | None = None,
) -> Order:
    """The order of a training: speculators' multipack sampler, drawn anew each epoch.

    Args:
        lengths: tokens of each row.
        batch_size: packs an optimizer step, over all ranks together.
        most: optimizer steps after which the training ends, or None.
        parts: rows that are trained on for all epochs before the next part is; None is all rows in one.
    """
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

    warnings.filterwarnings("ignore", message=".*longer than batch_max_length")  # counted by stage 04
    steps: list[list[list[int]]] = []
    ends: list[int] = []
    for number, part in enumerate([range(len(lengths))] if parts is None else parts):
        sampler = MultipackDistributedBatchSamplerV2(
            pack_tokens, [lengths[row] for row in part], num_replicas=1, rank=0, seed=seed
        )
        for epoch in range(epochs):
            sampler.set_epoch(number * epochs + epoch)
            packs = [[int(part[place]) for place in pack] for pack in sampler]
            steps += [packs[first : first + batch_size] for first in range(0, len(packs), batch_size)]
            if parts is None or epoch + 1 == epochs:
                ends.append(len(steps))
            if most is not None and len(steps) >= most:
                return Order(steps[:most], [*(end for end in ends if end < most), most])
    return Order(steps, ends)
