"""plan.py: the plan as people read it, the document's tables that are drawn from it, and the command."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from eagle3_train import planning, rates, tables
from eagle3_train.config import PRESETS, Config, Plan, parse
from eagle3_train.errors import ConfigError, PipelineError
from eagle3_train.planning import FP8, LOAD, PRIOR_LENGTHS, Cost, Machine, Planned, Projection, Way, make_plan, project
from eagle3_train.rates import BOXES, ESTIMATE, MEASURED, PRIOR, MeasuredRun, Range
from eagle3_train.run import EVALUATE, HIDDEN, STAGES, TRACES, TRAIN, VOCAB, write_text
from eagle3_train.tables import duration, size


class PlanArguments(Config):
    """plan.py's command line: any field of the configuration, and what to do with the plan."""

    run: Path | None = None
    """Run whose run.yaml is planned; not needed with a preset."""
    preset: Path | None = None
    """Preset to plan."""
    brief: bool = False
    """One line when the budgets allow the run, as run_pipeline.sh asks."""
    picture: Path | None = None
    """Draw the hours by stage of every option into this PNG."""
    update: Path | None = None
    """Rewrite the tables of this document that stand between plan markers."""


# The plan ------------------------------------------------------------------------------------------------------------


def shown(planned: Planned) -> str:
    """The whole plan as Markdown."""
    length, config = planned.length, planned.config
    parts = [
        f"{planned.samples:,} samples of {length.prompt + length.output:,.0f} tokens "
        f"({length.prompt:,.0f} asked, {length.output:,.0f} said; {length.basis}: {length.source}), "
        f"{config.training.epochs} epochs"
    ]
    for machine, projections in planned.options.items():
        own = projections[0]
        parts += [
            f"## {machine}\n\n{own.way}, as the preset says:",
            stage_table(own),
            _disk_line(config, own),
            "Where the figures come from:\n" + "\n".join(_sources(own)),
            f"{machine} in every way, and ten times the samples:",
            option_table([*projections, planned.again(own, 10 * planned.samples)], config.plan),
            *_settings(config, projections[1:]),
            _ASSUMED,
        ]
    return "\n\n".join(parts)


def stage_table(projection: Projection) -> str:
    """A row a stage, and their sum."""
    price, gpus = projection.machine.usd_an_hour, projection.machine.gpus
    rows = []
    for cost in [*projection.costs, Cost("all", 0, projection.seconds, "", ())]:
        usd = "" if price is None else _usd(cost.seconds.likely * price / 3600)
        gpu_hours = f"{cost.seconds.likely * gpus / 3600:,.1f}"
        rows.append([cost.stage, _count(cost.tokens), *_range(cost.seconds), gpu_hours, usd, cost.basis])
    return tables.table(["stage", "tokens", "likely", "low to high", "GPU-hours", "USD", "basis"], rows)


def option_table(projections: list[Projection], plan: Plan) -> str:
    """A row for each way or size of a run."""
    rows = []
    for projection in projections:
        usd = projection.usd
        broken = planning.broken_budgets(projection, plan)
        waves = projection.waves
        rows.append(
            [
                f"{projection.samples:,.0f}",
                str(projection.way),
                *_range(projection.seconds),
                _usd(usd.likely) if usd else "",
                size(projection.peak_bytes),
                f"{waves.count} of {size(waves.states)}" if waves.count > 1 else "-",
                " + ".join(basis for basis in (MEASURED, PRIOR, ESTIMATE) if basis in projection.basis),
                f"over {', '.join(broken)}" if broken else "yes" if planning.has_budgets(plan) else "-",
            ]
        )
    return tables.table(
        ["samples", "way", "likely", "low to high", "USD", "peak disk", "waves", "basis", "within budgets"], rows
    )


def _disk_line(config: Config, own: Projection) -> str:
    a_token = planning.token_bytes(config, own.way.storage)
    return (
        f"Peak on disk {size(own.peak_bytes)} ({own.peak_bytes / 2**30:,.1f} GiB): {a_token:,} bytes of states a "
        "token, traces, data set and checkpoints; counted, and as right as the tokens are."
    )


def _sources(projection: Projection) -> Iterator[str]:
    for cost in projection.costs:
        yield f"- {cost.stage}: {cost.basis}; {'; '.join(cost.sources)}"


def _settings(config: Config, others: list[Projection]) -> Iterator[str]:
    if others:
        lines = [f"- {other.way}: {planning.flags(config, other)}" for other in others]
        yield "\n".join(["What makes it go another way:", *lines])


def brief(planned: Planned) -> str:
    """One line for each machine: the preset's own way."""
    lines = []
    for machine, projections in planned.options.items():
        own = projections[0]
        usd = f", {_usd(own.usd.likely)} USD" if own.usd else ""
        likely, spread = _range(own.seconds)
        took = likely if spread == "-" else f"{likely} ({spread})"
        lines.append(
            f"{own.samples:,.0f} samples on {machine}: {took}{usd}, {size(own.peak_bytes)} on disk; {own.basis}"
        )
    return "\n".join(lines)


def _range(seconds: Range) -> tuple[str, str]:
    spread = "-" if seconds.low == seconds.high else f"{duration(seconds.low)} to {duration(seconds.high)}"
    return duration(seconds.likely), spread


def _usd(amount: float) -> str:
    return f"{amount:.2f}" if 0 < amount < 10 else f"{amount:,.0f}"


def _count(tokens: float) -> str:
    if not tokens:
        return "-"
    return f"{tokens / 1e6:,.1f} M" if tokens >= 1e6 else f"{tokens:,.0f}"


_ASSUMED = (
    "Assumed of the ways that were never measured at this size: answering lasts 1 to 2.5 times as long, likely 1.2, "
    "with states saved meanwhile (one pass; 1.9 to 2.5 was measured with 2.6 B parameters on an H200, where a step "
    "is mostly fixed cost), 02 lasts 1 to 1.24 times as long with states in float8 (as many tokens a second were "
    "measured there, but 0.63 of prefill's rate beside 0.78), and each wave starts server and trainer anew."
)


# The document's tables ----------------------------------------------------------------------------------------------

_MARKED = re.compile(r"(<!-- plan: (\w+) -->\n).*?(<!-- /plan -->)", re.DOTALL)
_PROJECTED_SAMPLES = (50_000, 100_000)
_FACTORS = (1, 4, 10)
_WAVES_BUDGET_GB = 3_000
_WAYS_OF_WAVES: tuple[Literal["again", "replay"] | None, ...] = (None, "replay", "again")
# The flags of the document's command for each box, beside its preset and the number of samples.
_DOCUMENTED = {"rtx6000x8": (), "b300x8": ("--price", "48")}
# The figures of a row of timings.jsonl that the measured table shows, in the order in which a row may have them.
_WORK = {
    TRACES.folder: ("traces", "asked_tokens", "asked_seconds"),
    HIDDEN.folder: ("samples", "extracted_tokens", "extraction_seconds"),
    VOCAB.folder: (None, "train_tokens", None),
    TRAIN.folder: ("samples", "trained_tokens", "training_seconds"),
    EVALUATE.folder: ("prompts", None, None),
}


def document_tables(config: Config, run: MeasuredRun) -> dict[str, str]:
    """The text between each pair of markers, by its name; the same for the same timings and configuration."""
    return {
        "measured": measured_table(run),
        "projections": projections_table(config, run),
        "waves": waves_table(),
        "rates": rates_table(),
        **{f"plan_{name}": f"```\n{box_plan(name)}\n```" for name in BOXES},
    }


def box_plan(name: str) -> str:
    """What plan.py says of the box's preset, as the document's command above it asks."""
    return shown(make_plan(_box_preset(name, _PROJECTED_SAMPLES[0], *_DOCUMENTED[name])))


def _box_preset(name: str, samples: int, *flags: str) -> Config:
    preset = PRESETS / f"kimi-k2.5-{name}.yaml"
    return parse(["--preset", str(preset), "--max-samples", str(samples), *flags], "", PlanArguments)[1]


def measured_table(run: MeasuredRun) -> str:
    """The last finished attempt of every stage, in the very figures of timings.jsonl."""
    rows = []
    for stage in STAGES:
        row = run.last(stage)
        if row is None:
            continue
        work = [str(row.get(name, "-")) if name else "-" for name in _WORK.get(stage, (None, None, None))]
        rows.append([stage, str(row["seconds"]), *work, row["date"][:10], row["hardware"]])
    return tables.table(["stage", "seconds", "rows", "tokens worked", "seconds of that work", "date", "hardware"], rows)


def projections_table(config: Config, run: MeasuredRun) -> str:
    """The measured run some times as large on its own machine; then the boxes with Kimi-K2.5, in two ways."""
    projected: list[tuple[str, Projection]] = []
    here = Machine(run.hardware, run.gpus, run.speeds, None, run.one_pass, run.float8)
    own_way = Way(run.one_pass, config.extraction.storage_dtype)
    for factor in _FACTORS:
        projected.append(
            (
                f"{run.hardware}: {run.name} x {factor}",
                project(config, here, planning.repeated(run, factor, config.training.epochs), own_way),
            )
        )
    for name, samples in itertools.product(BOXES, _PROJECTED_SAMPLES):
        preset = _box_preset(name, samples)
        (box,) = planning.machines(preset, None)
        work = planning.workload(preset, samples, planning.lengths(preset, None))
        for way in (Way(False, "bfloat16"), Way(True, FP8)):
            projected.append((name, project(preset, box, work, way)))
    header = ["where", "samples", "way", *_STAGE_COLUMNS, "all", "low to high", "disk", "GPU-hours", "basis"]
    rows = []
    for where, projection in projected:
        by_stage = {cost.stage: duration(cost.seconds.likely) for cost in projection.costs}
        rows.append(
            [
                where,
                f"{projection.samples:,.0f}",
                str(projection.way),
                *(by_stage.get(stage, "-") for stage in _STAGE_COLUMNS),
                *_range(projection.seconds),
                "-" if where.startswith(run.hardware) else size(projection.peak_bytes),
                f"{projection.gpu_hours.likely:,.0f}",
                projection.basis,
            ]
        )
    return tables.table(header, rows) + f"\n\nBoxes: by their presets; {PRIOR_LENGTHS}."


def waves_table() -> str:
    """The boxes' presets whole and within a budget, in bf16 and float8, by priors and estimates alone."""
    header = ["where", "way", "waves", LOAD, "02 extraction", "04 training", "all", "low to high", "disk"]
    rows = []
    for name in BOXES:
        preset = _box_preset(name, _PROJECTED_SAMPLES[0], "--extraction.disk_budget_gb", str(_WAVES_BUDGET_GB))
        (box,) = planning.machines(preset, None)
        work = planning.workload(preset, _PROJECTED_SAMPLES[0], planning.lengths(preset, None))
        for storage, epochs in itertools.product(("bfloat16", FP8), _WAYS_OF_WAVES):
            projection = project(preset, box, work, Way(False, storage, epochs))
            waves, by_stage = projection.waves, {cost.stage: cost.seconds.likely for cost in projection.costs}
            rows.append(
                [
                    name,
                    str(projection.way),
                    f"{waves.count} of {size(waves.states)}" if waves.count > 1 else "-",
                    *(duration(by_stage[stage]) for stage in header[3:6]),
                    *_range(projection.seconds),
                    size(projection.peak_bytes),
                ]
            )
    return tables.table(header, rows)


_STAGE_COLUMNS = (
    "01 prompts",
    LOAD,
    "01b generation",
    "02 extraction",
    "03 vocabulary",
    "04 training",
    "05 export",
    "06 evaluation",
)


def rates_table() -> str:
    """Every prior and estimate with its range and source."""
    rows = []
    for box in BOXES.values():
        for folder, speed in box.speeds.items():
            for what, figure in (("start [s]", speed.start_s), ("tokens/s", speed.tokens_per_s)):
                if figure:
                    value = figure.value
                    ends = f"{value.low:,.0f} to {value.high:,.0f}"
                    rows.append([box.name, folder, what, f"{value.likely:,.0f}", ends, figure.basis, figure.source])
    return tables.table(["box", "stage", "what", "likely", "low to high", "basis", "source"], rows)


def update(document: Path, config: Config) -> bool:
    """Rewrite the document's marked tables; returns whether anything changed.

    Raises:
        PipelineError: no --from, no marker, or one that no table belongs to.
    """
    if config.plan.from_run is None:
        raise PipelineError("--update draws its tables from a run: name one with --from")
    made = document_tables(config, rates.read_run(Path(config.plan.from_run), config.training.epochs))
    text = document.read_text(encoding="utf-8")
    names = [match[2] for match in _MARKED.finditer(text)]
    if not names or (unknown := sorted(set(names) - set(made))):
        found = f"unknown markers {', '.join(unknown)}" if names else "no pair <!-- plan: NAME --> ... <!-- /plan -->"
        raise PipelineError(f"{document}: {found}; the tables are {', '.join(made)}")
    new = _MARKED.sub(lambda match: f"{match[1]}{made[match[2]]}\n{match[3]}", text)
    if new != text:
        write_text(document, new)
    return new != text


# The command --------------------------------------------------------------------------------------------------------


def main(description: str | None, argv: list[str] | None = None) -> int:
    """plan.py: show the plan, or one line of it, or keep a document's tables; returns the exit code."""
    try:
        arguments, config = parse(argv, description or "", PlanArguments)
        if arguments.update is not None:
            changed = update(arguments.update, config)
            print(f"{arguments.update}: {'rewritten' if changed else 'up to date'}")
            return 0
        return _plan(arguments, config)
    except PipelineError as error:
        print(f"\nplan.py: {error}", file=sys.stderr)
        return error.exit_code


def _plan(arguments: PlanArguments, config: Config) -> int:
    try:
        planned = make_plan(config)
    except ConfigError:
        raise
    except PipelineError as unknown:
        if arguments.brief and not planning.has_budgets(config.plan):
            print(f"not estimated: {unknown}")
            return 0
        raise
    print(brief(planned) if arguments.brief else shown(planned))
    if arguments.picture is not None:
        from eagle3_train import charts

        charts.plan(arguments.picture, hours_by_stage(planned))
    if refused := planning.refusal(planned):
        raise PipelineError(refused)
    return 0


def hours_by_stage(planned: Planned) -> dict[str, dict[str, float]]:
    """Option -> stage -> likely hours."""
    return {
        f"{machine}: {projection.way}": {cost.stage: cost.seconds.likely / 3600 for cost in projection.costs}
        for machine, projections in planned.options.items()
        for projection in projections
    }
