"""Stage 03: which tokens the draft may propose, from what the verifier really says.

    token_freq.pt   {token id: count} over the supervised tokens of the training split
    d2t.npy         int64 [draft], OFFSETS: target id = draft id + d2t[draft id]
    t2d.npy         bool [target], True for the tokens in the draft vocabulary
    coverage.json, coverage.png

The maps are speculators' own (`build_vocab_mappings_from_distribution`). With `vocabulary.draft_size: null` the
draft keeps the whole vocabulary and there is nothing to map: no d2t, no t2d.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_train import charts, verifier
from eagle3_train.config import Config
from eagle3_train.errors import PipelineError
from eagle3_train.extraction import DATASET
from eagle3_train.progress import bar
from eagle3_train.run import Result, Stage, atomic, write_text

if TYPE_CHECKING:
    import torch

FREQUENCIES, D2T, T2D, COVERAGE, PICTURE = "token_freq.pt", "d2t.npy", "t2d.npy", "coverage.json", "coverage.png"


@dataclass(frozen=True)
class VocabMap:
    """The draft vocabulary: d2t int64 [draft] offsets and t2d bool [target], or None twice for the whole one."""

    size: int
    d2t: torch.Tensor | None
    t2d: torch.Tensor | None


def build(stage: Stage) -> Result:
    """Count, choose, map, and report how much of what the verifier says the draft can say."""
    import numpy as np
    import torch

    target_size = verifier.text_config(stage.config.verifier).vocab_size
    draft_size = stage.config.vocabulary.draft_size or target_size
    if draft_size > target_size:
        raise PipelineError(f"vocabulary.draft_size {draft_size} is larger than the verifier's {target_size}")
    if draft_size % 64:
        print(f"vocabulary.draft_size {draft_size} is no multiple of 64: matrix kernels will be slower")
    counts = count_supervised(stage.input("02_hidden") / DATASET, target_size)
    total = {split: sum(of_split.values()) for split, of_split in counts.items()}
    with atomic(stage.folder / FREQUENCIES, "wb") as file:
        torch.save(dict(counts["train"]), file)
    ranked = (count / total["train"] for _, count in counts["train"].most_common())
    cumulative = list(itertools.accumulate(ranked))
    outputs = [FREQUENCIES, COVERAGE, PICTURE]
    vocab = choose(counts["train"], stage.config)
    chosen = set(range(target_size))
    if vocab.d2t is not None and vocab.t2d is not None:
        chosen = set(vocab.t2d.nonzero().flatten().tolist())
        for name, tensor in ((D2T, vocab.d2t), (T2D, vocab.t2d)):
            with atomic(stage.folder / name, "wb") as file:
                np.save(file, tensor.numpy())
        outputs += [D2T, T2D]
    covered = {
        split: sum(count for token, count in of_split.items() if token in chosen) / max(total[split], 1)
        for split, of_split in counts.items()
    }
    summary = {
        "draft_size": draft_size,
        "target_size": target_size,
        "distinct_supervised": len(counts["train"]),
        "train_tokens": total["train"],
        "train_coverage": round(covered["train"], 6),
        "val_coverage": round(covered["val"], 6),
    }
    write_text(stage.folder / COVERAGE, json.dumps(summary, indent=1) + "\n")
    charts.coverage(stage.folder / PICTURE, cumulative, draft_size, covered["train"])
    line = (
        f"{draft_size} of {target_size} tokens cover {covered['train']:.2%} of the training and "
        f"{covered['val']:.2%} of the validation tokens; {len(counts['train'])} distinct ones were said"
    )
    return Result(outputs, summary, [line])


def count_supervised(dataset: Path, target_size: int) -> dict[str, Counter[int]]:
    """Supervised tokens of each split; all are training tokens in a data set without splits.

    Raises:
        PipelineError: a token id beyond the verifier's vocabulary, naming the trace.
    """
    import datasets

    counts: dict[str, Counter[int]] = {"train": Counter(), "val": Counter()}
    rows = datasets.load_from_disk(str(dataset)).with_format(None)
    for number, row in enumerate(bar(rows, desc="03 vocabulary", unit="sample")):
        said = [token for token, supervised in zip(row["input_ids"], row["loss_mask"], strict=True) if supervised]
        lowest, highest = min(row["input_ids"]), max(row["input_ids"])
        if lowest < 0 or highest >= target_size:
            wrong = lowest if lowest < 0 else highest
            raise PipelineError(
                f"trace {row.get('id', number)} holds token id {wrong}, but the verifier's vocabulary is 0 to "
                f"{target_size - 1}; was it made by another verifier?"
            )
        counts[row.get("split", "train")].update(said)
    return counts


def choose(said: Counter[int], config: Config) -> VocabMap:
    """The draft vocabulary: the verifier's special tokens, and then what it says most often.

    Raises:
        PipelineError: the special tokens alone are more than `vocabulary.draft_size`.
    """
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    target_size = verifier.text_config(config.verifier).vocab_size
    draft_size = config.vocabulary.draft_size or target_size
    if draft_size == target_size:
        return VocabMap(target_size, None, None)
    forced = verifier.special_token_ids(config.verifier)
    if len(forced) > draft_size:
        raise PipelineError(
            f"vocabulary.draft_size {draft_size} cannot hold the verifier's {len(forced)} special tokens"
        )
    # Think tags, turn ends and tool tokens may be rare in a small sample, yet no trace ends without them.
    top = max(said.values(), default=0) + 1
    boosted = dict(said) | dict.fromkeys(forced, top)
    d2t, t2d = build_vocab_mappings_from_distribution(boosted, draft_size, target_size)
    return VocabMap(draft_size, d2t, t2d)


def load(folder: Path, target_size: int) -> VocabMap:
    """Read the maps of a finished stage 03 and check that they belong together.

    Raises:
        PipelineError: the two maps disagree.
    """
    import numpy as np
    import torch

    size = json.loads((folder / COVERAGE).read_text(encoding="utf-8"))["draft_size"]
    if size == target_size:
        return VocabMap(size, None, None)
    d2t = torch.from_numpy(np.load(folder / D2T, allow_pickle=False))
    t2d = torch.from_numpy(np.load(folder / T2D, allow_pickle=False))
    targets = torch.arange(len(d2t)) + d2t
    if len(d2t) != size or len(t2d) != target_size or not torch.equal(targets, t2d.nonzero().flatten()):
        raise PipelineError(f"{folder / D2T} and {folder / T2D} do not belong together; remove {folder} and rerun 03")
    return VocabMap(size, d2t, t2d)
