"""What one training step reads: several samples laid end to end, without padding, and which of their tokens count.

Legend of shapes: N tokens of the pack, R active rows (from each document's first use to its end), M tokens that are
learnt, T training-time-test (TTT) steps, A captured auxiliary layers, H hidden size, D documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import Sampler


@dataclass(frozen=True)
class Pack:
    """Aligned so that row i holds the state after token i and the id of token i + 1.

    A draft started at row i guesses in TTT step k the token that the verifier says after row i + k; that guess is
    learnt when token i + k + 1 is the verifier's own and of the same document.

    Attributes:
        input_ids: [N + T - 1] int64; zeros at the end, so that row i of step k reads `input_ids[i + k]`.
        aux_states: [N, A * H], inputs of the captured layers.
        last_states: [M, H], last layer before the final norm, of the learnt rows alone.
        positions: [N] int64, from 1 in each document.
        active: [R] int64, ascending rows of which anything is computed.
        starts: for each TTT step, [n_k] int64 places in `active` where its guesses start.
        targets: for each TTT step, [n_k] int64 places in `last_states` of what they are compared with.
        begun: [R] bool, whether the row itself is learnt: a draft starts nowhere else when it serves.
        cu_active: [D + 1] int32 borders of the documents in `active`.
        cu_rows: [D + 1] int32 borders of the documents in the N rows.
        longest_active: most active rows of a document.
        longest: most rows of a document.
    """

    input_ids: torch.Tensor
    aux_states: torch.Tensor
    last_states: torch.Tensor
    positions: torch.Tensor
    active: torch.Tensor
    starts: tuple[torch.Tensor, ...]
    targets: tuple[torch.Tensor, ...]
    begun: torch.Tensor
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

    def pin_memory(self) -> Pack:
        """Called by torch's DataLoader."""
        return self._map(lambda tensor: tensor.pin_memory())


@dataclass(frozen=True)
class Packer:
    """Lays samples end to end; picklable, so that reading processes can do it.

    Args:
        pack_tokens: most tokens N; what does not fit is cut.
        ttt_steps: T.
        dtype: of the states.
        whole: compute every row (needed when a second layer attends to the first one's output).
    """

    pack_tokens: int
    ttt_steps: int
    dtype: torch.dtype
    whole: bool = False

    def __call__(self, samples: Sequence[dict[str, torch.Tensor]]) -> Pack:
        """Args: samples with `input_ids` [L], `hidden_states` [L, A*H], `verifier_last_hidden_states` [L, H] and
        `loss_mask` [L], as speculators' ArrowDataset yields them."""
        first = samples[0]
        lengths: list[int] = []
        for sample in samples:
            lengths.append(max(0, min(len(sample["input_ids"]) - 1, self.pack_tokens - sum(lengths))))
        tokens = sum(lengths)
        ids = torch.zeros(tokens + self.ttt_steps - 1, dtype=torch.long)
        states = torch.empty(tokens, first["hidden_states"].shape[1], dtype=self.dtype)
        last, masks, positions = [], [], []
        row = 0
        for sample, length in zip(samples, lengths, strict=True):
            ids[row : row + length] = sample["input_ids"][1 : length + 1]
            states[row : row + length] = sample["hidden_states"][:length]
            mask = sample["loss_mask"][1 : length + 1].bool()
            last.append(sample["verifier_last_hidden_states"][1 : length + 1][mask].to(self.dtype))
            masks.append(mask)
            positions.append(torch.arange(1, length + 1))
            row += length
        return Pack(
            input_ids=ids,
            aux_states=states,
            last_states=torch.cat(last),
            positions=torch.cat(positions),
            **self._rows(masks, lengths),
        )

    def _rows(self, masks: list[torch.Tensor], lengths: list[int]) -> dict[str, Any]:
        """Which rows are active, and where each step's guesses start and what they are compared with."""
        active: list[torch.Tensor] = []
        starts: list[list[torch.Tensor]] = [[] for _ in range(self.ttt_steps)]
        targets: list[list[torch.Tensor]] = [[] for _ in range(self.ttt_steps)]
        active_rows = learnt_rows = 0
        borders = [0]
        for mask, length in zip(masks, lengths, strict=True):
            learnt = mask.nonzero().flatten()
            offset = sum(lengths[: len(active)])
            first = 0 if self.whole else length
            if len(learnt) and not self.whole:
                first = max(0, int(learnt[0]) - self.ttt_steps + 1)
            for step in range(self.ttt_steps):
                inside = learnt >= step
                starts[step].append(learnt[inside] - step - first + active_rows)
                targets[step].append(inside.nonzero().flatten() + learnt_rows)
            active.append(torch.arange(first, length) + offset)
            active_rows += length - first
            learnt_rows += len(learnt)
            borders.append(active_rows)
        rows = torch.cat(active)
        return {
            "active": rows,
            "starts": tuple(torch.cat(parts) for parts in starts),
            "targets": tuple(torch.cat(parts) for parts in targets),
            "begun": torch.cat(masks)[rows],
            "cu_active": torch.tensor(borders, dtype=torch.int32),
            "cu_rows": torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
            "longest_active": max(b - a for a, b in pairwise(borders)),
            "longest": max(lengths),
        }


class GivenOrder(Sampler[list[int]]):
    """A batch sampler that yields exactly the packs it is given."""

    def __init__(self, packs: Sequence[Sequence[int]]):
        self._packs = packs

    def __iter__(self) -> Iterator[list[int]]:
        return ([int(row) for row in pack] for pack in self._packs)

    def __len__(self) -> int:
        return len(self._packs)


@dataclass(frozen=True)
class Order:
    """Which packs every optimizer step of a training takes, known before the first one and the same on every rank.

    Attributes:
        steps: for each optimizer step, its packs, each a list of dataset rows.
        epoch_ends: number of steps made when each epoch ends.
    """

    steps: list[list[list[int]]]
    epoch_ends: list[int]

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that step number `step` (from 0) belongs to."""
        return sum(end <= step for end in self.epoch_ends)

    def of_rank(self, rank: int, ranks: int, first_step: int) -> tuple[list[list[int]], list[list[float]]]:
        """What one rank reads from `first_step` on.

        Returns:
            packs, in order, and for each step the weights of this rank's packs in the mean over the step's packs. A
            rank without a pack of its own left in a step repeats one at weight 0, so that all ranks keep in step.
        """
        packs, weights = [], []
        for step in self.steps[first_step:]:
            own = step[rank::ranks]
            rounds = -(-len(step) // ranks)
            weights.append([1 / len(step)] * len(own) + [0.0] * (rounds - len(own)))
            packs += [*own, *([step[0]] * (rounds - len(own)))]
        return packs, weights


def order(lengths: Sequence[int], pack_tokens: int, batch_size: int, epochs: int, seed: int, most: int | None) -> Order:
    """The order of a training: speculators' multipack sampler, drawn anew each epoch.

    Args:
        lengths: tokens of each row.
        batch_size: packs an optimizer step, over all ranks together.
        most: optimizer steps after which the training ends, or None.
    """
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

    steps: list[list[list[int]]] = []
    ends: list[int] = []
    for epoch in range(epochs):
        sampler = MultipackDistributedBatchSamplerV2(pack_tokens, lengths, num_replicas=1, rank=0, seed=seed)
        sampler.set_epoch(epoch)
        packs = [[int(row) for row in pack] for pack in sampler]
        steps += [packs[first : first + batch_size] for first in range(0, len(packs), batch_size)]
        ends.append(len(steps))
        if most is not None and len(steps) >= most:
            return Order(steps[:most], [*ends[:-1], most])
    return Order(steps, ends)
