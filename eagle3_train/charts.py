"""Every picture the pipeline draws; matplotlib, no display needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

INK, BLUE, ORANGE, GREEN = "#333333", "#2b6cb0", "#dd6b20", "#2f855a"


def coverage(path: Path, cumulative: list[float], chosen: int, covered: float) -> None:
    """Share of supervised tokens covered by the k most frequent ones, with the chosen size marked."""
    figure = Figure(figsize=(6, 3.8))
    axes = figure.subplots()
    axes.plot(range(1, len(cumulative) + 1), [100 * share for share in cumulative], color=BLUE)
    axes.axvline(chosen, color=ORANGE, linestyle="--")
    axes.annotate(f"{chosen} tokens: {covered:.2%}", (chosen, 100 * covered), (-8, -24), color=ORANGE, ha="right")
    _label(
        axes,
        "Draft vocabulary coverage",
        "tokens in the draft vocabulary, most frequent first",
        "supervised tokens [%]",
    )
    _save(figure, path)


def training(
    path: Path, train: dict[int, float], val: dict[int, float], expected: dict[int, float], ttt_steps: int
) -> None:
    """Training and validation loss, and the expected acceptance length, each by step."""
    figure = Figure(figsize=(10, 3.8))
    left, right = figure.subplots(1, 2)
    left.plot(list(train), list(train.values()), color=BLUE, linewidth=0.8, label="train")
    left.plot(list(val), list(val.values()), color=ORANGE, marker="o", label="validation")
    left.legend(frameon=False)
    _label(left, "Loss", "step", f"sum over {ttt_steps} TTT steps")
    right.plot(list(expected), list(expected.values()), color=GREEN, marker="o")
    right.axhline(1 + ttt_steps, color=INK, linestyle=":", linewidth=1)
    right.set_ylim(1, 1.1 + ttt_steps)
    _label(right, "Expected acceptance length (validation)", "step", "tokens per verifier step")
    _save(figure, path)


def acceptance(path: Path, measured: dict[str, dict[str, Any]], draft_tokens: int) -> None:
    """Mean acceptance length of each way of decoding, and the share of drafts accepted up to each position."""
    figure = Figure(figsize=(10, 3.8))
    left, right = figure.subplots(1, 2, width_ratios=(1, 2))
    names = list(measured)
    lengths = [values["mean_acceptance_length"] for values in measured.values()]
    bars = left.bar(names, lengths, color=[BLUE, ORANGE, GREEN][: len(names)], width=0.6)
    left.bar_label(bars, [f"{length:.2f}" for length in lengths])
    left.axhline(1, color=INK, linestyle=":", linewidth=1)
    left.set_ylim(0, 1.15 + draft_tokens)
    _label(left, "Mean acceptance length", "1 = no draft", "tokens per verifier step")
    width = 0.8 / len(names)
    for number, (name, values) in enumerate(zip(names, measured.values(), strict=True)):
        places = [position + 1 + (number - (len(names) - 1) / 2) * width for position in range(draft_tokens)]
        shares = [100 * share for share in values["accepted_by_position"]]
        bars = right.bar(places, shares, width=width, color=(BLUE, ORANGE, GREEN)[number % 3], label=name)
        right.bar_label(bars, [f"{share:.0f}" for share in shares], fontsize=8)
    right.set_xticks(range(1, draft_tokens + 1))
    right.set_ylim(0, 105)
    right.legend(frameon=False)
    _label(right, "Accepted by position", "draft token", "steps in which it was accepted [%]")
    _save(figure, path)


def _label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=11, loc="left", color=INK)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, path: Path) -> None:
    staging = path.with_name(f".{path.name}")
    figure.tight_layout()
    figure.savefig(staging, dpi=130, format="png")
    staging.replace(path)
