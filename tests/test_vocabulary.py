"""Contract of stage 03: the draft's vocabulary is what the verifier says most, and speculators reads the maps.

Guarded: counts and coverage against sums worked out by hand; the special tokens always in; d2t as OFFSETS (target id =
draft id + d2t[draft id]), which read as absolute ids would serve a draft that is never accepted; ids beyond the
verifier's vocabulary refused by trace; and maps that do not belong together refused before anything is trained.

The tiny verifier has 512 tokens, of which 0 to 11 are special.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3_train import verifier, vocabulary
from eagle3_train.config import Config, Draft, Training, Verifier, Vocabulary
from eagle3_train.draft import build_draft
from eagle3_train.errors import PipelineError
from eagle3_train.extraction import Sample
from eagle3_train.run import HIDDEN, PROMPTS, TRACES, VOCAB, Result, Run
from eagle3_train.tiny import SPECIAL_TOKENS
from eagle3_train.vocabulary import COVERAGE, D2T, FREQUENCIES, T2D, VocabMap, load
from tests.fault_server import finish_stage, no_work, write_hidden

TARGET_SIZE = 512
SPECIAL = list(range(12))
# Token t is said t - 99 times: 100 once, 199 a hundred times, 5,050 in all.
SAID = [token for token in range(100, 200) for _ in range(token - 99)]
# A draft of 64: the 12 special tokens and the 52 most frequent, 148 to 199.
CHOSEN = [*SPECIAL, *range(148, 200)]
SAMPLES = [
    Sample("train-0", "train", [300] * 200, SAID[:3000]),
    Sample("train-1", "train", [301] * 200, SAID[3000:]),
    Sample("val-0", "val", [100] * 9, [199, 199, 100, 101]),
]


def new_run(folder: Path, samples: list[Sample], draft_size: int | None) -> Run:
    """A run with the tiny verifier whose stage 02 is done; the states themselves do not matter here."""
    config = Config(
        verifier=Verifier(path="tiny"),
        vocabulary=Vocabulary(draft_size=draft_size),
        draft=Draft(num_attention_heads=4, num_key_value_heads=4, head_dim=32, intermediate_size=64),
        training=Training(dtype="float32"),
    )
    run = Run(folder / "run", config)
    finish_stage(run, PROMPTS, no_work)
    finish_stage(run, TRACES, no_work)
    capture(run, samples)
    return run


def capture(run: Run, samples: list[Sample]) -> None:
    finish_stage(
        run,
        HIDDEN,
        lambda stage: write_hidden(stage, samples, lambda s: torch.zeros(len(s.token_ids), 1, 1), [2, 4, 5, 8]),
    )


def build(run: Run) -> Result:
    return finish_stage(run, VOCAB, vocabulary.build)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Result]:
    run = new_run(tmp_path_factory.mktemp("vocabulary"), SAMPLES, 64)
    return run, build(run)


def test_the_supervised_tokens_of_the_training_split_alone_are_counted(built: tuple[Run, Result]) -> None:
    run, result = built
    frequencies = torch.load(run.folder("03_vocab") / FREQUENCIES, weights_only=True)
    assert frequencies == {token: token - 99 for token in range(100, 200)}
    assert (result.summary["train_tokens"], result.summary["distinct_supervised"]) == (5050, 100)


def test_coverage_is_the_share_of_what_was_said(built: tuple[Run, Result]) -> None:
    run, result = built
    coverage = json.loads((run.folder("03_vocab") / COVERAGE).read_text())
    # 49 + 50 + ... + 100 = 3874 of 5050; of the validation tokens 199 and 199, but not 100 and 101.
    assert coverage["train_coverage"] == pytest.approx(3874 / 5050, abs=1e-6)
    assert coverage["val_coverage"] == 0.5
    assert coverage["draft_size"] == 64
    assert coverage.items() <= result.summary.items()


def test_the_maps_hold_the_special_and_the_most_frequent_tokens_as_offsets(built: tuple[Run, Result]) -> None:
    folder = built[0].folder("03_vocab")
    d2t, t2d = np.load(folder / D2T), np.load(folder / T2D)
    assert (d2t.dtype, d2t.shape) == (np.int64, (64,))
    assert (t2d.dtype, t2d.shape) == (np.bool_, (TARGET_SIZE,))
    assert [draft_id + int(offset) for draft_id, offset in enumerate(d2t)] == CHOSEN
    assert [token for token in range(TARGET_SIZE) if t2d[token]] == CHOSEN


def test_think_and_turn_tokens_are_in_the_draft_though_nobody_said_them(built: tuple[Run, Result]) -> None:
    config = built[0].config
    names = ("<think>", "</think>", "<|im_end|>", "[EOS]", "<|im_assistant|>")
    ids = verifier.tokenizer(config.verifier).convert_tokens_to_ids(list(names))
    assert ids == [SPECIAL_TOKENS.index(name) for name in names], "the fixture's special tokens have moved"
    t2d = np.load(built[0].folder("03_vocab") / T2D)
    assert all(t2d[token] for token in ids)


def test_speculators_loads_the_maps_and_takes_the_right_rows_of_the_head(built: tuple[Run, Result]) -> None:
    from speculators.train.cli import _load_mappings

    run, _ = built
    folder = run.folder("03_vocab")
    d2t, t2d, size = _load_mappings(folder / D2T, folder / T2D, 64)
    assert size == 64
    model = build_draft(run.config, vocabulary.load(folder, TARGET_SIZE))
    model.load_vocab_mappings(t2d, d2t)
    assert torch.equal(model.d2t, d2t)
    assert torch.equal(model.t2d, t2d)
    head = verifier.head_weights(run.config.verifier)[verifier.LM_HEAD].float()
    assert torch.equal(model.lm_head.weight.float(), head[CHOSEN])


def test_the_maps_load_as_they_were_built(built: tuple[Run, Result]) -> None:
    maps = load(built[0].folder("03_vocab"), TARGET_SIZE)
    assert maps.size == 64
    assert maps.d2t is not None
    assert (torch.arange(64) + maps.d2t).tolist() == CHOSEN


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda d2t, t2d: (np.arange(64) + d2t, t2d), id="absolute ids"),
        pytest.param(lambda d2t, t2d: (d2t, np.roll(t2d, 1)), id="t2d of another map"),
        pytest.param(lambda d2t, t2d: (d2t[:-1], t2d), id="d2t too short"),
        pytest.param(lambda d2t, t2d: (d2t, t2d[:-1]), id="t2d of a smaller verifier"),
        pytest.param(lambda d2t, t2d: (d2t[::-1].copy(), t2d), id="d2t in another order"),
    ],
)
def test_maps_that_do_not_belong_together_are_refused(
    built: tuple[Run, Result], tmp_path: Path, spoil: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
) -> None:
    folder = built[0].folder("03_vocab")
    (tmp_path / COVERAGE).write_bytes((folder / COVERAGE).read_bytes())
    d2t, t2d = spoil(np.load(folder / D2T), np.load(folder / T2D))
    np.save(tmp_path / D2T, d2t)
    np.save(tmp_path / T2D, t2d)
    with pytest.raises(PipelineError, match="do not belong together"):
        load(tmp_path, TARGET_SIZE)


@pytest.mark.parametrize("draft_size", [None, TARGET_SIZE])
def test_the_whole_vocabulary_needs_no_maps(tmp_path: Path, draft_size: int | None) -> None:
    run = new_run(tmp_path, SAMPLES, draft_size)
    result = build(run)
    folder = run.folder("03_vocab")
    assert not (folder / D2T).exists()
    assert not (folder / T2D).exists()
    assert (result.summary["train_coverage"], result.summary["val_coverage"]) == (1, 1)
    assert load(folder, TARGET_SIZE) == VocabMap(TARGET_SIZE, None, None)


def test_a_draft_vocabulary_larger_than_the_verifiers_is_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path, SAMPLES, 576)
    with pytest.raises(PipelineError, match="576 is larger than the verifier's 512"):
        build(run)


def test_special_tokens_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "special_token_ids", lambda _settings: list(range(65)))
    run = new_run(tmp_path, SAMPLES, 64)
    with pytest.raises(PipelineError, match="cannot hold the verifier's 65 special tokens"):
        build(run)


def test_a_size_the_kernels_dislike_is_said_and_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = new_run(tmp_path, SAMPLES, 100)
    build(run)
    assert "100 is no multiple of 64" in capsys.readouterr().out
    assert len(np.load(run.folder("03_vocab") / D2T)) == 100


def test_fewer_tokens_than_places_are_filled_up_without_a_repeat(tmp_path: Path) -> None:
    few = [Sample("train-0", "train", [300], [400, 401, 402]), Sample("val-0", "val", [300], [400])]
    run = new_run(tmp_path, few, 64)
    build(run)
    d2t = np.load(run.folder("03_vocab") / D2T)
    targets = [draft_id + int(offset) for draft_id, offset in enumerate(d2t)]
    assert len(set(targets)) == 64
    assert {*SPECIAL, 400, 401, 402} <= set(targets)
    assert all(0 <= token < TARGET_SIZE for token in targets)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(Sample("the-bad-one", "train", [300], [150, 512]), id="said"),
        pytest.param(Sample("the-bad-one", "val", [300], [163_839, 150]), id="said in validation"),
        pytest.param(Sample("the-bad-one", "train", [512], [150, 151]), id="in a prompt"),
    ],
)
def test_a_token_id_beyond_the_vocabulary_is_refused_naming_the_trace(tmp_path: Path, bad: Sample) -> None:
    run = new_run(tmp_path, [*SAMPLES, bad], 64)
    with pytest.raises(PipelineError, match="the-bad-one") as refused:
        build(run)
    assert str(max(bad.token_ids)) in str(refused.value)
    assert not (run.folder("03_vocab") / D2T).exists()


def test_frequencies_of_earlier_data_are_never_used_again(tmp_path: Path) -> None:
    run = new_run(tmp_path, SAMPLES, 64)
    build(run)
    capture_again = [Sample("train-0", "train", [300], [450] * 7), Sample("val-0", "val", [300], [450])]
    run.folder("02_hidden").rename(tmp_path / "earlier")
    capture(run, capture_again)
    result = build(run)
    assert torch.load(run.folder("03_vocab") / FREQUENCIES, weights_only=True) == {450: 7}
    assert result.summary["train_coverage"] == 1
