"""Every picture the pipeline draws; matplotlib, no display needed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

INK, BLUE, ORANGE, GREEN = "#333333", "#2b6cb0", "#dd6b20", "#2f855a"
COLOURS = (BLUE, ORANGE, GREEN)
PALETTE = ("#a0aec0", BLUE, ORANGE, "#805ad5", GREEN, "#d69e2e", "#c53030", "#319795")
_OFFSET: dict[str, Any] = {"textcoords": "offset points", "color": INK}


def prompts(path: Path, lengths: list[int], languages: Counter[str], sources: Counter[str]) -> None:
    """Histogram of question lengths, and the share of each language and source."""
    figure = Figure(figsize=(11, 3.8))
    left, middle, right = figure.subplots(1, 3)
    left.hist(lengths, bins=40, color=BLUE)
    _label(left, "Length of the questions", "tokens", "prompts")
    for axes, title, counted in ((middle, "Languages", languages), (right, "Sources", sources)):
        shown = counted.most_common(10)[::-1]
        bars = axes.barh([name[-24:] for name, _ in shown], [count for _, count in shown], color=GREEN)
        axes.bar_label(bars, [f"{count / sum(counted.values()):.0%}" for _, count in shown], padding=2, fontsize=8)
        axes.margins(x=0.15)
        _label(axes, title, "prompts", "")
    _save(figure, path)


def lengths(path: Path, thinking: list[int], answers: list[int]) -> None:
    """Histogram of what the verifier said: thinking and answer, in tokens."""
    figure = Figure(figsize=(6, 3.8))
    axes = figure.subplots()
    longest = max([*thinking, *answers, 1])
    edges = [longest * place / 40 for place in range(41)]
    axes.hist([thinking, answers], bins=edges, color=[BLUE, ORANGE], label=["thinking", "answer"])
    axes.legend(frameon=False)
    _label(axes, "Length of the traces", "tokens", "traces")
    _save(figure, path)


def coverage(path: Path, cumulative: list[float], chosen: int, covered: float) -> None:
    """Share of supervised tokens covered by the k most frequent ones, with the chosen size marked."""
    figure = Figure(figsize=(6, 3.8))
    axes = figure.subplots()
    axes.plot(range(1, len(cumulative) + 1), [100 * share for share in cumulative], color=BLUE)
    axes.axvline(chosen, color=ORANGE, linestyle="--")
    axes.annotate(f"{chosen} tokens: {covered:.2%}", (chosen, 100 * covered), (-8, -24), ha="right", **_OFFSET)
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


def by_position(path: Path, measured: dict[str, dict[str, Any]], draft_tokens: int) -> None:
    """Mean acceptance length of each way of decoding, and the share of steps that accepted each position."""
    figure = Figure(figsize=(10, 3.8))
    left, right = figure.subplots(1, 2, width_ratios=(1, 2))
    lengths = [values["mean_acceptance_length"] for values in measured.values()]
    errors = [[abs(v["mean_acceptance_length"] - v["interval"][side]) for v in measured.values()] for side in (0, 1)]
    bars = left.bar(list(measured), lengths, yerr=errors, color=COLOURS[: len(measured)], width=0.6, ecolor=INK)
    left.bar_label(bars, [f"{length:.2f}" for length in lengths], label_type="center", color="white")
    left.axhline(1, color=INK, linestyle=":", linewidth=1)
    left.set_ylim(0, 1.15 + draft_tokens)
    _label(left, "Mean acceptance length", "1 = no draft", "tokens per verifier step")
    width = 0.8 / len(measured)
    for number, (way, values) in enumerate(measured.items()):
        places = [place + 1 + (number - (len(measured) - 1) / 2) * width for place in range(draft_tokens)]
        shares = [100 * share for share in values["accepted_by_position"]]
        bars = right.bar(places, shares, width=width, color=COLOURS[number % len(COLOURS)], label=way)
        right.bar_label(bars, [f"{share:.0f}" for share in shares], fontsize=8)
    right.set_xticks(range(1, draft_tokens + 1))
    right.set_ylim(0, 115)
    right.legend(frameon=False, loc="upper right", ncols=len(measured))
    _label(right, "Accepted by position", "draft token", "steps in which it was accepted [%]")
    _save(figure, path)


def by_context(path: Path, measured: dict[str, dict[int, dict[str, Any]]], bucket: int, draft_tokens: int) -> None:
    """Mean acceptance length against the position in the context, a line for each way of decoding."""
    figure = Figure(figsize=(6, 3.8))
    axes = figure.subplots()
    for colour, (way, parts) in zip(COLOURS, measured.items(), strict=False):
        places = [start + bucket / 2 for start in parts]
        axes.plot(places, [v["mean_acceptance_length"] for v in parts.values()], marker="o", color=colour, label=way)
    axes.axhline(1, color=INK, linestyle=":", linewidth=1)
    axes.set_ylim(0.9, 1.1 + draft_tokens)
    axes.legend(frameon=False)
    _label(axes, "Acceptance along the context", f"context position [tokens], buckets of {bucket}", "tokens per step")
    _save(figure, path)


def speed_up(path: Path, load: dict[str, dict[str, dict[str, float]]]) -> None:
    """Output tokens a second with and without the draft, and their ratio, by requests in flight."""
    figure = Figure(figsize=(6, 3.8))
    axes = figure.subplots()
    concurrency = [number for number in load["with draft"] if number in load["alone"]]
    for number, (name, colour) in enumerate((("alone", ORANGE), ("with draft", BLUE))):
        places = [place + (number - 0.5) * 0.38 for place in range(len(concurrency))]
        axes.bar(places, [load[name][c]["output_throughput"] for c in concurrency], 0.38, color=colour, label=name)
    for place, c in enumerate(concurrency):
        ours, theirs = (load[name][c]["output_throughput"] for name in ("with draft", "alone"))
        axes.annotate(f"{ours / theirs:.2f}x", (place, max(ours, theirs)), (0, 4), ha="center", **_OFFSET)
    axes.set_xticks(range(len(concurrency)), concurrency)
    axes.margins(y=0.15)
    axes.legend(frameon=False)
    _label(axes, "Speed under load", "requests in flight", "output tokens a second")
    _save(figure, path)


def plan(path: Path, options: dict[str, dict[str, float]]) -> None:
    """Likely hours of every option as one bar, stage after stage."""
    figure = Figure(figsize=(10, 1.4 + 0.42 * len(options)))
    axes = figure.subplots()
    stages = list(dict.fromkeys(stage for hours in options.values() for stage in hours))
    left = dict.fromkeys(options, 0.0)
    for stage, colour in zip(stages, PALETTE, strict=False):
        widths = [hours.get(stage, 0.0) for hours in options.values()]
        axes.barh(list(options), widths, left=list(left.values()), color=colour, height=0.6, label=stage)
        left = {option: left[option] + width for option, width in zip(left, widths, strict=True)}
    for place, total in enumerate(left.values()):
        axes.annotate(f"{total:.3g} h", (total, place), (4, 0), va="center", fontsize=8, **_OFFSET)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.legend(frameon=False, ncols=4, fontsize=8, loc="upper center", bbox_to_anchor=(0.4, -1.3 / len(options)))
    _label(axes, "Likely hours by stage", "hours", "")
    _save(figure, path)


def over_seeds(path: Path, sides: dict[str, dict[str, dict[int, list[float]]]], label: str) -> None:
    """Two or more trainings of several seeds each: mean by step, with a band from the lowest to the highest seed.

    Args:
        sides: for each title, a panel; for each side in it, the values of all seeds by step.
        label: what is measured.
    """
    figure = Figure(figsize=(10, 3.8))
    for axes, (title, panel) in zip(figure.subplots(1, len(sides), sharey=True), sides.items(), strict=True):
        # Dashed, so that a side that lies on another does not hide it.
        for colour, style, (side, by_step) in zip(COLOURS, ("-", "--", ":"), panel.items(), strict=False):
            values = list(by_step.values())
            axes.fill_between(list(by_step), [*map(min, values)], [*map(max, values)], color=colour, alpha=0.2, lw=0)
            means = [sum(of_seeds) / len(of_seeds) for of_seeds in values]
            axes.plot(list(by_step), means, color=colour, linestyle=style, marker="o", markersize=3, label=side)
        axes.legend(frameon=False, loc="lower right")
        _label(axes, title, "step", label)
    _save(figure, path)


def disk(path: Path, seen: dict[str, list[tuple[float, int]]], budget: float) -> None:
    """Bytes on disk over time.

    Args:
        seen: for each way, seconds since its start and bytes then.
        budget: bytes, drawn as a line.
    """
    figure = Figure(figsize=(10, 3.8))
    axes = figure.subplots()
    for colour, (way, values) in zip(COLOURS, seen.items(), strict=False):
        times, sizes = zip(*values, strict=True)
        axes.plot([time / 60 for time in times], [size / 1e6 for size in sizes], color=colour, lw=1, label=way)
    axes.axhline(budget / 1e6, color=INK, linestyle="--", lw=1, label="budget")
    axes.legend(frameon=False)
    _label(axes, "Hidden states on disk", "minutes", "MB")
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
