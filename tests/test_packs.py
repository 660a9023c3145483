"""Contract of packs: every token that is learnt is guessed from where a draft would start, in its own document alone;
and every rank knows every step's packs before the first one.

Packs are compared with a plain count over documents, rows and TTT steps.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from eagle3_train.packs import GivenOrder, Order, Pack, Packer, order

AUX, HIDDEN = 3, 4
# (length, mask) of each sample
Drawn = list[tuple[int, list[int]]]


def sample(number: int, mask: Sequence[int]) -> dict[str, Tensor]:
    """A sample every row of which differs from every row of every other."""
    place = 1000 * number + torch.arange(len(mask))
    return {
        "input_ids": place + 1,
        "hidden_states": place[:, None] + torch.arange(AUX * HIDDEN) / 100,
        "verifier_last_hidden_states": -place[:, None] - torch.arange(HIDDEN) / 100,
        "loss_mask": torch.tensor(mask, dtype=torch.long),
    }


def samples_of(*masks: Sequence[int]) -> list[dict[str, Tensor]]:
    return [sample(number, mask) for number, mask in enumerate(masks)]


def packed(samples: Sequence[dict[str, Tensor]], tokens: int = 1000, steps: int = 3, whole: bool = False) -> Pack:
    return Packer(tokens, steps, torch.float32, whole)(samples)


def rows_of(pack: Pack) -> list[tuple[int, int]]:
    """(document, row in it) of each of the pack's rows."""
    return [
        (document, row)
        for document, (start, end) in enumerate(pairwise(pack.cu_rows.tolist()))
        for row in range(end - start)
    ]


def guesses_of(pack: Pack, step: int) -> list[tuple[int, int, tuple[float, ...]]]:
    """(document, row that starts it, the state whose say it is compared with) of each of a step's guesses."""
    place = rows_of(pack)
    return [
        (*place[pack.active[start]], tuple(pack.last_states[target].tolist()))
        for start, target in zip(pack.starts[step].tolist(), pack.targets[step].tolist(), strict=True)
    ]


def expected_guesses(samples: Sequence[dict[str, Tensor]], tokens: int, step: int) -> list[tuple[int, int, tuple]]:
    """The same by the definition: row i has the state after token i and token i + 1; its guess `step` is what the
    verifier says after token i + step + 1, and is learnt where the mask says that token is the verifier's own."""
    found, left = [], tokens
    for document, item in enumerate(samples):
        rows = max(0, min(len(item["input_ids"]) - 1, left))
        left -= rows
        for row in range(rows - step):
            after = row + step + 1
            if item["loss_mask"][after]:
                found.append((document, row, tuple(item["verifier_last_hidden_states"][after].tolist())))
    return found


def drawn_samples(seed: int) -> list[dict[str, Tensor]]:
    """Of several turns; some of one or two tokens, some with nothing learnt, some learnt from their first token."""
    draw = random.Random(seed)
    masks = []
    for _ in range(draw.randint(1, 6)):
        turns = [[draw.randint(0, 1)] * draw.randint(1, 6) for _ in range(draw.randint(1, 4))]
        masks.append([token for turn in turns for token in turn])
    return samples_of(*masks)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_guesses_are_those_of_a_plain_count(steps: int, whole: bool) -> None:
    learnt = 0
    for seed in range(100):
        samples, tokens = drawn_samples(seed), 10 + seed % 30
        pack = packed(samples, tokens, steps, whole)
        for step in range(steps):
            guesses = guesses_of(pack, step)
            assert sorted(guesses) == sorted(expected_guesses(samples, tokens, step))
            learnt += len(guesses)
    assert learnt > 500


@pytest.mark.parametrize("whole", [False, True])
def test_every_row_keeps_its_own_token_states_and_position(whole: bool) -> None:
    for seed in range(50):
        samples, tokens, steps = drawn_samples(seed), 10 + seed, 3
        pack = packed(samples, tokens, steps, whole)
        assert pack.tokens <= tokens
        assert len(pack.input_ids) == pack.tokens + steps - 1
        for place, (document, row) in enumerate(rows_of(pack)):
            assert pack.input_ids[place] == samples[document]["input_ids"][row + 1]
            assert torch.equal(pack.aux_states[place], samples[document]["hidden_states"][row])
            assert pack.positions[place] == row + 1
        for place, row in enumerate(pack.active.tolist()):
            document, inside = rows_of(pack)[row]
            assert bool(pack.begun[place]) == bool(samples[document]["loss_mask"][inside + 1])


def test_a_guess_reads_the_tokens_of_its_own_document() -> None:
    """In step k row i reads `input_ids[i + k]`, which has to be its document's token i + k + 1."""
    for seed in range(50):
        samples = drawn_samples(seed)
        pack = packed(samples)
        place = rows_of(pack)
        for step in range(3):
            for start in pack.active[pack.starts[step]].tolist():
                document, row = place[start]
                assert pack.input_ids[start + step] == samples[document]["input_ids"][row + step + 1]


def test_active_rows_are_each_documents_tail_from_the_first_that_starts_a_guess() -> None:
    for seed in range(100):
        samples, tokens = drawn_samples(seed), 12 + seed % 20
        pack = packed(samples, tokens)
        place = rows_of(pack)
        starts = {guess[:2] for step in range(3) for guess in expected_guesses(samples, tokens, step)}
        expected, borders = [], [0]
        for document in range(len(samples)):
            first = min((row for other, row in starts if other == document), default=len(place))
            tail = [other for other, (number, row) in enumerate(place) if number == document and row >= first]
            expected += tail
            borders.append(len(expected))
        assert pack.active.tolist() == expected
        assert pack.cu_active.tolist() == borders
        assert pack.longest_active == max(b - a for a, b in pairwise(borders))
        assert pack.longest == max(b - a for a, b in pairwise(pack.cu_rows.tolist()))


def test_a_whole_pack_computes_every_row() -> None:
    pack = packed(samples_of([0] * 8 + [1] * 3, [0] * 5, [1, 1]), whole=True)
    assert pack.active.tolist() == list(range(pack.tokens))
    assert pack.cu_active.tolist() == pack.cu_rows.tolist()
    assert pack.longest_active == pack.longest


def test_a_long_prompt_is_not_computed() -> None:
    """Of 100 prompt tokens, the last three rows start guesses of the answer's first token."""
    pack = packed(samples_of([0] * 100 + [1] * 10))
    assert pack.active.tolist() == list(range(97, 109))
    assert [len(starts) for starts in pack.starts] == [10, 10, 10]


def test_guesses_do_not_cross_a_documents_first_row() -> None:
    """A document that is learnt from its first row on: no row before it guesses that row's target."""
    pack = packed(samples_of([0, 0, 0, 1, 1], [0, 1, 1, 1]))
    assert [len(guesses_of(pack, step)) for step in range(3)] == [5, 4, 3]
    assert {guess[:2] for guess in guesses_of(pack, 2) if guess[0] == 0} == {(0, 0), (0, 1)}


# ---- what does not fit, what is not there


def test_what_does_not_fit_is_cut() -> None:
    samples = samples_of([0] * 4 + [1] * 6, [0] * 4 + [1] * 6, [0, 1, 1])
    pack = packed(samples, tokens=15)
    assert pack.cu_rows.tolist() == [0, 9, 15, 15]
    assert pack.tokens == 15
    assert [len(guesses_of(pack, step)) for step in range(3)] == [6 + 3, 6 + 3, 6 + 3]


def test_a_sample_longer_than_a_pack_fills_it() -> None:
    pack = packed(samples_of([0] * 5 + [1] * 95), tokens=50)
    assert pack.tokens == 50
    assert len(pack.last_states) == 50 - 4


@pytest.mark.parametrize("masks", [([0] * 6,), ([0] * 6, [0, 0]), ([1],), ([0],), ([1], [0] * 4, [0])])
@pytest.mark.parametrize("whole", [False, True])
def test_documents_without_a_learnt_token_start_nothing(masks: tuple[list[int], ...], whole: bool) -> None:
    pack = packed(samples_of(*masks), whole=whole)
    assert pack.tokens == sum(len(mask) - 1 for mask in masks)
    assert [len(starts) for starts in pack.starts] == [len(targets) for targets in pack.targets] == [0, 0, 0]
    assert pack.last_states.shape == (0, HIDDEN)
    assert len(pack.active) == (pack.tokens if whole else 0)


def test_a_document_of_two_tokens_has_one_row_and_one_guess() -> None:
    pack = packed(samples_of([0, 1], [0], [0, 1]))
    assert pack.cu_rows.tolist() == [0, 1, 1, 2]
    assert [len(starts) for starts in pack.starts] == [2, 0, 0]


def test_an_empty_sample_takes_no_row() -> None:
    pack = packed(samples_of([], [0, 1, 1]))
    assert pack.cu_rows.tolist() == [0, 0, 2]


def test_states_are_cast_to_the_trainings_dtype() -> None:
    pack = Packer(100, 3, torch.bfloat16)(samples_of([0, 1, 1]))
    assert pack.aux_states.dtype == pack.last_states.dtype == torch.bfloat16
    assert pack.input_ids.dtype == pack.active.dtype == torch.int64
    assert pack.cu_active.dtype == pack.cu_rows.dtype == torch.int32


# ---- moving


def tensors_of(pack: Pack) -> list[Tensor]:
    found = []
    for value in vars(pack).values():
        found += list(value) if isinstance(value, tuple) else [value] if isinstance(value, Tensor) else []
    return found


def test_every_tensor_is_moved_and_none_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = packed(drawn_samples(3))
    assert len(tensors_of(pack)) == 8 + 2 * 3
    assert {tensor.device.type for tensor in tensors_of(pack.to("meta"))} == {"meta"}
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor.clone())  # needs a GPU
    for moved in (pack.to("cpu"), pack.pin_memory(), pickle.loads(pickle.dumps(pack))):
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(moved), tensors_of(pack), strict=True))
        assert (moved.longest, moved.longest_active) == (pack.longest, pack.longest_active)
    assert not {tensor.data_ptr() for tensor in tensors_of(pack.pin_memory()) if tensor.numel()} & {
        tensor.data_ptr() for tensor in tensors_of(pack)
    }


def test_many_short_samples_go_through_a_loader_as_ordered() -> None:
    samples = [sample(number, [0] * 12 + [1] * 8) for number in range(10_000)]
    planned = order([20] * len(samples), 4096, 1, 1, seed=1, most=None)
    packs, _ = planned.of_rank(0, 1, 0)
    assert {len(pack) for pack in packs[:-1]} == {204}
    packer = pickle.loads(pickle.dumps(Packer(4096, 3, torch.bfloat16)))
    seen: list[int] = []
    loader = DataLoader(samples, batch_sampler=GivenOrder(packs), collate_fn=packer)
    assert len(loader) == len(packs)
    for pack, rows in zip(loader, packs, strict=True):
        assert pack.tokens == 19 * len(rows)
        assert [len(starts) for starts in pack.starts] == [8 * len(rows)] * 3
        seen += [(int(first) - 2) // 1000 for first in pack.input_ids[pack.cu_rows[:-1]]]
    assert seen == [row for pack in packs for row in pack]
    assert sorted(seen) == list(range(10_000))


# ---- the order of a training

LENGTHS = [random.Random(4).randint(2, 60) for _ in range(300)]


def test_every_row_comes_once_an_epoch_in_packs_that_fit() -> None:
    planned = order(LENGTHS, 128, 3, epochs=2, seed=5, most=None)
    assert len(planned.epoch_ends) == 2
    for start, end in pairwise([0, *planned.epoch_ends]):
        packs = [pack for step in planned.steps[start:end] for pack in step]
        assert Counter(row for pack in packs for row in pack) == Counter(range(len(LENGTHS)))
        assert max(sum(LENGTHS[row] for row in pack) for pack in packs) <= 128
        assert sum(LENGTHS) / len(packs) > 0.8 * 128


@pytest.mark.filterwarnings("ignore:.*longer than batch_max_length")
def test_a_row_longer_than_a_pack_has_one_to_itself() -> None:
    planned = order([500, 20, 20, 500], 100, 1, 1, seed=0, most=None)
    packs = sorted(sorted(pack) for (pack,) in planned.steps)
    assert packs in ([[0], [1, 2], [3]], [[0], [1], [2], [3]])


def test_an_optimizer_step_takes_batch_size_packs_but_for_an_epochs_last() -> None:
    planned = order(LENGTHS, 128, 4, epochs=3, seed=5, most=None)
    single = order(LENGTHS, 128, 1, epochs=3, seed=5, most=None)
    assert [pack for step in planned.steps for pack in step] == [pack for (pack,) in single.steps]
    last = {end - 1 for end in planned.epoch_ends}
    for number, step in enumerate(planned.steps):
        assert len(step) == 4 or (number in last and 1 <= len(step) < 4)


def test_the_seed_alone_decides_the_order() -> None:
    assert order(LENGTHS, 128, 2, 2, 5, None) == order(LENGTHS, 128, 2, 2, 5, None)
    assert order(LENGTHS, 128, 2, 2, 5, None).steps != order(LENGTHS, 128, 2, 2, 6, None).steps


def test_each_epoch_has_an_order_of_its_own() -> None:
    planned = order(LENGTHS, 128, 2, 2, 5, None)
    first = planned.epoch_ends[0]
    assert planned.steps[:first] != planned.steps[first:]


def test_more_epochs_begin_with_the_same_steps() -> None:
    short, long = order(LENGTHS, 128, 2, 1, 5, None), order(LENGTHS, 128, 2, 3, 5, None)
    assert long.steps[: len(short.steps)] == short.steps


@pytest.mark.parametrize("most", [1, 7, 21, 1000])
def test_a_training_ends_after_the_most_steps_it_may_make(most: int) -> None:
    endless = order(LENGTHS, 128, 2, epochs=3, seed=5, most=None)
    cut = order(LENGTHS, 128, 2, epochs=3, seed=5, most=most)
    assert cut.steps == endless.steps[:most]
    assert cut.epoch_ends[-1] == len(cut.steps)
    assert cut.epoch_ends[:-1] == [end for end in endless.epoch_ends if end < len(cut.steps)]


def test_a_most_that_is_an_epochs_end_adds_no_empty_epoch() -> None:
    endless = order(LENGTHS, 128, 2, epochs=3, seed=5, most=None)
    cut = order(LENGTHS, 128, 2, epochs=3, seed=5, most=endless.epoch_ends[1])
    assert cut.epoch_ends == endless.epoch_ends[:2]


def test_the_epoch_of_each_step() -> None:
    planned = Order([[[0]]] * 7, [3, 5, 7])
    assert [planned.epoch(step) for step in range(7)] == [0, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("batch_size", [1, 2, 4, 5])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("first_step", [0, 3])
def test_ranks_share_every_step_and_keep_in_time(ranks: int, batch_size: int, first_step: int) -> None:
    planned = order(LENGTHS, 128, batch_size, 1, seed=2, most=None)
    shares = [planned.of_rank(rank, ranks, first_step) for rank in range(ranks)]
    read = [iter(packs) for packs, _ in shares]
    for step, weights in zip(planned.steps[first_step:], zip(*(each for _, each in shares), strict=True), strict=True):
        assert len({len(rounds) for rounds in weights}) == 1, "a rank would wait for another for ever"
        taken, total = [], 0.0
        for rank, rounds in enumerate(weights):
            for weight in rounds:
                pack = next(read[rank])
                assert pack in step
                total += weight
                if weight:
                    taken.append(pack)
                    assert weight == 1 / len(step)
        assert sorted(taken) == sorted(step)
        assert total == pytest.approx(1)
    assert [next(packs, None) for packs in read] == [None] * ranks
