"""Contract of packs: every token that is learnt is guessed from where a draft would start, in its own document alone;
shards are read into them as they lie on disk; and every rank knows every step's packs before the first one.

Packs are compared with a plain count over documents, rows and TTT steps.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import datasets
import pytest
import torch
from hs_connectors.fp8_utils import SCALES_KEY, quantize_tensor_to_fp8
from safetensors.torch import save_file
from torch import Tensor

from eagle3_train.errors import PipelineError
from eagle3_train.extraction import LINKS
from eagle3_train.packs import Order, Pack, lay_out, order, rows_kept
from eagle3_train.shards import Shards

LAYERS, HIDDEN = 4, 5
Sample = dict[str, Tensor]


def sample(number: int, mask: Sequence[int]) -> Sample:
    """A sample every token and state of which differs from every other's."""
    place = 100 * number + torch.arange(len(mask))
    states = place[:, None, None] + torch.arange(LAYERS * HIDDEN).unflatten(0, (LAYERS, HIDDEN)) / 100
    return {"ids": place + 1, "mask": torch.tensor(mask, dtype=torch.long), "states": states}


def samples_of(*masks: Sequence[int]) -> list[Sample]:
    return [sample(number, mask) for number, mask in enumerate(masks)]


def packed(samples: Sequence[Sample], tokens: int = 1000, steps: int = 3, whole: bool = False) -> Pack:
    ids, masks, states = ([item[name] for item in samples] for name in ("ids", "mask", "states"))
    kept = rows_kept([len(item) for item in ids], tokens)
    together = torch.cat([state[:rows] for state, rows in zip(states, kept, strict=True)])
    return lay_out(ids, masks, together, pack_tokens=tokens, ttt_steps=steps, whole=whole)


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
        (*place[pack.active[start]], tuple(pack.states[pack.learnt[target], -1].tolist()))
        for start, target in zip(pack.starts[step].tolist(), pack.targets[step].tolist(), strict=True)
    ]


def expected_guesses(samples: Sequence[Sample], tokens: int, step: int) -> list[tuple[int, int, tuple[float, ...]]]:
    """The same by the definition: row i has the state after token i and token i + 1; its guess `step` is what the
    verifier says after token i + step + 1, learnt where that token is the verifier's own and its state is there."""
    found, left = [], tokens
    for document, item in enumerate(samples):
        rows = min(len(item["ids"]), left)
        left -= rows
        for row in range(rows):
            after = row + step + 1
            if after < rows and item["mask"][after]:
                found.append((document, row, tuple(item["states"][after, -1].tolist())))
    return found


def drawn_samples(seed: int) -> list[Sample]:
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
        place = rows_of(pack)
        assert pack.tokens == len(pack.states) == min(tokens, sum(len(item["ids"]) for item in samples))
        assert len(pack.input_ids) == pack.tokens + steps - 1
        for at, (document, row) in enumerate(place):
            ids = samples[document]["ids"].tolist()
            assert pack.input_ids[at] == (ids[row + 1] if row + 1 < len(ids) else 0)
            assert torch.equal(pack.states[at], samples[document]["states"][row])
            assert pack.positions[at] == row + 1
        expected = {guess[:2] for guess in expected_guesses(samples, tokens, 0)}
        assert {place[row] for row in pack.active[pack.starts[0]].tolist()} == expected


def test_a_guess_reads_the_tokens_of_its_own_document() -> None:
    """In step k row i reads `input_ids[i + k]`, which has to be its document's token i + k + 1."""
    for seed in range(50):
        samples = drawn_samples(seed)
        pack = packed(samples, 10 + seed)
        place = rows_of(pack)
        for step in range(3):
            for start in pack.active[pack.starts[step]].tolist():
                document, row = place[start]
                assert pack.input_ids[start + step] == samples[document]["ids"][row + step + 1]


def test_active_rows_are_each_documents_tail_from_the_first_that_starts_a_guess() -> None:
    """Of a document with no guess, its last row: no kernel has to bear a document without any."""
    for seed in range(100):
        samples, tokens = drawn_samples(seed), 12 + seed % 20
        pack = packed(samples, tokens)
        place = rows_of(pack)
        starts = {guess[:2] for step in range(3) for guess in expected_guesses(samples, tokens, step)}
        expected, borders = [], [0]
        for document in range(len(samples)):
            rows = [at for at, (other, _) in enumerate(place) if other == document]
            first = min((at for at in rows if place[at] in starts), default=max(rows, default=0))
            expected += [at for at in rows if at >= first]
            borders.append(len(expected))
        assert pack.active.tolist() == expected
        assert pack.cu_active.tolist()[: len(borders)] == borders
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
    assert pack.active.tolist() == list(range(97, 110))
    assert [len(starts) for starts in pack.starts] == [10, 10, 10]


def test_guesses_do_not_cross_a_documents_first_row() -> None:
    """A document that is learnt from its first row on: no row before it guesses that row's target."""
    pack = packed(samples_of([0, 0, 0, 1, 1], [0, 1, 1, 1]))
    assert [len(guesses_of(pack, step)) for step in range(3)] == [5, 4, 3]
    assert {guess[:2] for guess in guesses_of(pack, 2) if guess[0] == 0} == {(0, 0), (0, 1)}


# ---- what does not fit, what is not there


def test_what_does_not_fit_is_cut() -> None:
    """The first document whole, seven tokens of the second, whose last state has no target, none of the third."""
    pack = packed(samples_of([0] * 4 + [1] * 6, [0] * 4 + [1] * 6, [0, 1, 1]), tokens=17)
    assert pack.cu_rows.tolist() == [0, 10, 17, 17]
    assert [len(guesses_of(pack, step)) for step in range(3)] == [6 + 3, 6 + 3, 6 + 3]


def test_a_sample_longer_than_a_pack_fills_it() -> None:
    pack = packed(samples_of([0] * 5 + [1] * 95), tokens=50)
    assert pack.tokens == 50
    assert len(pack.learnt) == 50 - 5


@pytest.mark.parametrize("masks", [([0] * 6,), ([0] * 6, [0, 0]), ([1],), ([0],), ([1], [0] * 4, [0])])
@pytest.mark.parametrize("whole", [False, True])
def test_documents_without_a_learnt_token_start_nothing(masks: tuple[list[int], ...], whole: bool) -> None:
    pack = packed(samples_of(*masks), whole=whole)
    assert pack.tokens == sum(len(mask) for mask in masks)
    assert [len(starts) for starts in pack.starts] == [len(targets) for targets in pack.targets] == [0, 0, 0]
    assert len(pack.learnt) == 0
    assert len(pack.active) == (pack.tokens if whole else len(masks))


def test_a_document_of_two_tokens_has_one_guess() -> None:
    pack = packed(samples_of([0, 1], [0], [0, 1]))
    assert pack.cu_rows.tolist() == [0, 2, 3, 5]
    assert [len(starts) for starts in pack.starts] == [2, 0, 0]


def test_every_tensor_is_moved() -> None:
    pack = packed(drawn_samples(3))
    tensors = [
        part for value in vars(pack.to("meta")).values() for part in (value if isinstance(value, tuple) else (value,))
    ]
    moved = [tensor.device.type for tensor in tensors if isinstance(tensor, Tensor)]
    assert moved == ["meta"] * (7 + 2 * 3)


# ---- from disk


def written(folder: Path, samples: Sequence[Sample], dtype: torch.dtype = torch.bfloat16) -> Path:
    """A data set as stage 02 leaves it; in fp8 with speculators' scales."""
    rows = [
        {"input_ids": s["ids"].tolist(), "loss_mask": s["mask"].tolist(), "seq_len": len(s["ids"])} for s in samples
    ]
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "data"))
    (folder / "data" / LINKS).mkdir()
    for number, item in enumerate(samples):
        tensors = {"token_ids": item["ids"]}
        if dtype == torch.float8_e4m3fn:
            tensors["hidden_states"], tensors[SCALES_KEY] = quantize_tensor_to_fp8(item["states"])
        else:
            tensors["hidden_states"] = item["states"].to(dtype)
        save_file(tensors, shard(folder, number), metadata={"layer_ids": "[1, 2, 3]"})
    return folder / "data"


def shard(folder: Path, number: int) -> Path:
    return folder / "data" / LINKS / f"hs_{number}.safetensors"


def read(data: Path, first: int, count: int, tokens: int = 1000) -> Shards:
    return Shards(data, first, count, pack_tokens=tokens, ttt_steps=3, whole=False, pinned=False)


def assert_alike(one: Pack, other: Pack) -> None:
    for name, value in vars(one).items():
        if isinstance(value, Tensor):
            assert value.dtype == getattr(other, name).dtype
            assert torch.equal(value, getattr(other, name)), name
        elif isinstance(value, tuple):
            assert all(torch.equal(a, b) for a, b in zip(value, getattr(other, name), strict=True)), name
        else:
            assert value == getattr(other, name), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_pack_holds_what_the_shards_do(dtype: torch.dtype, tmp_path: Path) -> None:
    samples = [{**item, "states": item["states"].to(dtype)} for item in drawn_samples(2) + drawn_samples(5)]
    shards = read(written(tmp_path, samples, dtype), 0, len(samples))
    assert shards.lengths == [len(item["ids"]) for item in samples]
    for rows in ([0], [3, 1], list(range(len(samples)))):
        assert_alike(shards.pack(rows), packed([samples[row] for row in rows]))


def test_states_in_fp8_come_with_their_scales(tmp_path: Path) -> None:
    samples = drawn_samples(2)
    pack = read(written(tmp_path, samples, torch.float8_e4m3fn), 0, len(samples)).pack(range(len(samples)))
    assert (pack.states.dtype, pack.scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    states, scales = quantize_tensor_to_fp8(torch.cat([item["states"] for item in samples]))
    assert torch.equal(pack.states.view(torch.uint8), states.view(torch.uint8))
    assert torch.equal(pack.scales, scales)


def test_a_long_sample_is_read_up_to_the_packs_end(tmp_path: Path) -> None:
    samples = samples_of([0] * 5 + [1] * 95)
    assert_alike(read(written(tmp_path, samples, torch.float32), 0, 1, tokens=50).pack([0]), packed(samples, tokens=50))


def test_a_split_counts_its_rows_from_its_own_first(tmp_path: Path) -> None:
    samples = samples_of([0, 1, 1], [0, 1], [0, 0, 1, 1], [0, 1, 1])
    validation = read(written(tmp_path, samples, torch.float32), 2, 2)
    assert validation.lengths == [4, 3]
    assert_alike(validation.pack([1, 0]), packed([samples[3], samples[2]]))


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_ten_thousand_short_samples_are_read_in_order(threads: int, tmp_path: Path) -> None:
    """Each once an epoch, however many threads read ahead. A few shards stand for all: reading them is tested above."""
    data = written(tmp_path, samples_of(*[[0] * 12 + [1] * 8] * 5), torch.float32)
    planned = order([20] * 10_000, 4096, 1, 1, seed=1, most=None)
    packs, _ = planned.of_rank(0, 1, 0)
    assert {len(pack) for pack in packs[:-1]} == {204}
    assert sorted(row for pack in packs for row in pack) == list(range(10_000))
    few = [[row % 5 for row in pack[:7]] for pack in packs]
    for pack, rows in zip(read(data, 0, 5).packs(few, threads), few, strict=True):
        assert [int(first) // 100 for first in pack.input_ids[pack.cu_rows[:-1]]] == rows
        assert [len(starts) for starts in pack.starts] == [8 * len(rows)] * 3


def test_reading_threads_end_with_the_trainer(tmp_path: Path) -> None:
    data = written(tmp_path, samples_of([0, 1, 1]), torch.float32)
    packs = read(data, 0, 1).packs([[0]] * 100, 3)
    next(packs)
    assert any(thread.name.startswith("shards") for thread in threading.enumerate())
    packs.close()
    assert not any(thread.name.startswith("shards") for thread in threading.enumerate())


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(Path.unlink, id="gone"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-4]), id="cut short"),
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(lambda path: save_file({"token_ids": torch.ones(3)}, path), id="no states"),
        pytest.param(
            lambda path: save_file({"hidden_states": torch.ones(2, LAYERS, HIDDEN), "more": torch.ones(99)}, path),
            id="a token fewer",
        ),
        pytest.param(
            lambda path: save_file(
                {"hidden_states": torch.ones(3, LAYERS, HIDDEN).half(), "more": torch.ones(99).half()}, path
            ),
            id="another type",
        ),
        pytest.param(lambda path: save_file({"hidden_states": torch.ones(3, 2, HIDDEN)}, path), id="fewer layers"),
        pytest.param(lambda path: save_file({"hidden_states": torch.ones(3, 6, HIDDEN)}, path), id="more layers"),
    ],
)
@pytest.mark.parametrize("threads", [0, 2])
def test_a_shard_that_changed_while_training_is_named(
    spoil: Callable[[Path], None], threads: int, tmp_path: Path
) -> None:
    shards = read(written(tmp_path, samples_of([0, 1, 1], [0, 1, 1]), torch.float32), 0, 2)
    spoil(shard(tmp_path, 1))
    with pytest.raises(PipelineError, match=r"hs_1\.safetensors: this shard changed while training"):
        list(shards.packs([[0, 1]], threads))


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
