"""From a preset, a number of samples and rates: what every stage of a run takes, and whether the budgets allow it.

The work is counted in tokens (`Workload`), divided by the rates of a box or of a measured run (`rates.py`), and
shown for each way of making it: two passes or one, states in bf16 or fp8, whole or in waves.

How the ways are reckoned:
- two passes: 01b generates, 02 loads the verifier again and prefills every token;
- one pass: the states are saved while generating, so the second load and the prefill are not needed;
- waves: train a part's epochs, delete its states, go on with the next; a start of server and trainer for each wave.
Not counted: pre-flight, the validation while training where the rate is not measured, and the moving of a rented
box's data.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from eagle3_train import rates, tables
from eagle3_train.config import PRESETS, Config, Plan, parse
from eagle3_train.errors import ConfigError, PipelineError
from eagle3_train.rates import BOXES, ESTIMATE, MEASURED, PRIOR, Figure, MeasuredRun, Range, Speed
from eagle3_train.run import EVALUATE, EXPORT, HIDDEN, PROMPTS, STAGES, TRACES, TRAIN, VOCAB, write_text
from eagle3_train.tables import duration, size
from eagle3_train.verifier import TINY_DIRECTORY

LOAD, GIVEN, FP8 = "verifier load", "given", "float8_e4m3"
KIMI = "moonshotai/Kimi-K2.5"
_KIMI_HIDDEN_SIZE = 7168
_PRIOR_LENGTHS = "assumed: 4,096 tokens a sample; the pilot's raw answers had 505, a published run's traces 10,000"
PRIOR_PROMPT_TOKENS, PRIOR_OUTPUT_TOKENS = 256, 3840
_AUX_LAYERS = 3
# Of traces.jsonl by output token (question, ids and text; measured on the tiny run); of the Arrow data set by token.
TRACE_BYTES, _DATASET_BYTES = 17, 16
# fp32 weights and AdamW's two moments.
_CHECKPOINT_BYTES = 12
# Decoding speeds up with requests in flight as their number to this power: from 88 tok/s at 1 to 2,000 at 128.
_CONCURRENCY_GAIN = math.log(2_000 / 88) / math.log(128)
# Two trainers or more: from half of linear to linear, as long as it is not measured here.
_SCALING = Range(0.5, math.sqrt(0.5), 1.0)
_MOST_SAMPLES = 10**9


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


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of a sample, and how they are known."""

    prompt: float
    output: float
    basis: str
    source: str


@dataclass(frozen=True)
class Workload:
    """A run counted in tokens.

    Attributes:
        generated: output tokens of 01b.
        extracted: prompt and output of the training and validation samples.
        kept: the validation part of `extracted`, whose states waves never delete.
        counted: supervised tokens of the training split.
        trained: tokens of the training split, times epochs.
        evaluated: 06's output tokens, as if decoded one request at a time (see `_evaluated_tokens`).
        servers: servers that 06 starts.
    """

    samples: float
    generated: float
    extracted: float
    kept: float
    counted: float
    trained: float
    evaluated: float
    servers: int


@dataclass(frozen=True)
class Way:
    """One way of making the run."""

    one_pass: bool
    storage: str
    waves: bool

    def __str__(self) -> str:
        passes = "one pass" if self.one_pass else "two passes"
        return f"{passes}, {self.storage}, {'waves' if self.waves else 'whole'}"


@dataclass(frozen=True)
class Cost:
    """What one stage takes: tokens of work, seconds, and where the figures come from."""

    stage: str
    tokens: float
    seconds: Range
    basis: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Machine:
    """Where the run is planned: a box by its priors, a measured machine, or both.

    Attributes:
        one_pass: its generation was measured with the states saved meanwhile.
    """

    name: str
    gpus: int
    speeds: dict[str, Speed]
    usd_an_hour: float | None
    one_pass: bool = False


@dataclass(frozen=True)
class Disk:
    """Bytes on the run's disk: what stays, the states that never go, and the states that waves divide."""

    fixed: float
    kept_states: float
    train_states: float

    @property
    def whole(self) -> float:
        return self.fixed + self.kept_states + self.train_states


@dataclass(frozen=True)
class Projection:
    """A run on a machine in one way."""

    machine: Machine
    way: Way
    samples: float
    costs: list[Cost]
    waves: int
    wave_bytes: float
    peak_bytes: float

    @property
    def seconds(self) -> Range:
        return sum((cost.seconds for cost in self.costs), Range.exactly(0))

    @property
    def usd(self) -> Range | None:
        """The whole box, for as long as the run takes."""
        price = self.machine.usd_an_hour
        return None if price is None else self.seconds * (price / 3600)

    @property
    def gpu_hours(self) -> Range:
        return self.seconds * (self.machine.gpus / 3600)

    @property
    def basis(self) -> str:
        """`measured`, or every basis with the stages it holds for."""
        bases = _distinct(cost.basis for cost in self.costs)
        held = {basis: [cost.stage for cost in self.costs if cost.basis == basis] for basis in bases}
        return next(iter(held)) if len(held) == 1 else "; ".join(f"{b}: {', '.join(s)}" for b, s in held.items())


# From the configuration to tokens and bytes -------------------------------------------------------------------------


def lengths(config: Config, run: MeasuredRun | None) -> Lengths:
    """Mean tokens of a sample: as given, else of the run's traces, else the prior (at most generation.max_tokens)."""
    given = config.plan
    traces, hidden = (run.last(TRACES.folder), run.last(HIDDEN.folder)) if run else (None, None)
    if traces and hidden and run:
        output = traces["output_tokens"] / traces["traces"]
        measured = Lengths(hidden["tokens"] / hidden["samples"] - output, output, MEASURED, f"traces of {run.name}")
    else:
        output = min(PRIOR_OUTPUT_TOKENS, config.generation.max_tokens)
        measured = Lengths(PRIOR_PROMPT_TOKENS, output, PRIOR, _PRIOR_LENGTHS)
    if given.prompt_tokens is None and given.output_tokens is None:
        return measured
    return Lengths(
        given.prompt_tokens or measured.prompt,
        given.output_tokens or measured.output,
        GIVEN,
        "plan.prompt_tokens and plan.output_tokens",
    )


def workload(config: Config, samples: float, length: Lengths) -> Workload:
    """The tokens of every stage for so many samples of this length."""
    sample = length.prompt + length.output
    train = samples * (1 - config.prompts.val_fraction - config.prompts.eval_fraction)
    kept = samples * config.prompts.val_fraction * sample
    return Workload(
        samples=samples,
        generated=samples * length.output,
        extracted=train * sample + kept,
        kept=kept,
        counted=train * length.output,
        trained=train * sample * config.training.epochs,
        evaluated=_evaluated_tokens(config, samples, length),
        servers=2 + len(_swept(config)),
    )


def repeated(run: MeasuredRun, factor: float, epochs: int) -> Workload:
    """The same run, `factor` times as large, its evaluation as it was.

    Raises:
        PipelineError: 02 or 04 of the run has not finished, so its tokens are not known.
    """
    hidden, traces, vocab, train = (run.last(spec.folder) for spec in (HIDDEN, TRACES, VOCAB, TRAIN))
    if hidden is None or train is None:
        raise PipelineError(f"{run.name}: 02 or 04 has not finished, so its tokens are not known")
    return Workload(
        samples=(traces["traces"] if traces else hidden["samples"]) * factor,
        generated=traces["output_tokens"] * factor if traces else 0,
        extracted=hidden["tokens"] * factor,
        kept=hidden["tokens"] * hidden["val"] / hidden["samples"] * factor,
        counted=vocab["train_tokens"] * factor if vocab else 0,
        trained=rates.trained_tokens(hidden, train, run.epochs or epochs) * factor,
        evaluated=0,
        servers=0,
    )


def _swept(config: Config) -> list[int]:
    return [count for count in config.evaluation.sweep if count != config.evaluation.draft_tokens]


def _evaluated_tokens(config: Config, samples: float, length: Lengths) -> float:
    """Tokens that 06 decodes, each divided by what its concurrency gains over one request at a time.

    With and without the draft, greedily and sampled, every set's prompts; then the load tests at max_tokens each. What
    the draft speeds up is not counted.
    """
    settings = config.evaluation
    asked = (
        min(settings.max_prompts, samples * config.prompts.eval_fraction)
        if settings.prompt_sets == ["eval"]
        else (settings.max_prompts * len(settings.prompt_sets))
    )
    output = asked * min(length.output, settings.max_tokens) / settings.concurrency**_CONCURRENCY_GAIN
    load = [settings.load_prompts * settings.max_tokens / c**_CONCURRENCY_GAIN for c in settings.load_concurrency]
    return 4 * output + 2 * sum(load) + len(_swept(config)) * (output + sum(load[:1]))


def token_bytes(config: Config, storage: str) -> int:
    """Bytes of one token's states: every captured layer, and in float8 one float32 scale."""
    layers = len(config.verifier.aux_layer_ids or range(_AUX_LAYERS)) + 1
    values = layers * hidden_size(config)
    return {"bfloat16": 2 * values, "float32": 4 * values, FP8: values + 4}[storage]


def hidden_size(config: Config) -> int:
    """From the verifier's config.json where it is on this machine, else Kimi-K2.5's."""
    folder = TINY_DIRECTORY if config.verifier.path == "tiny" else Path(config.verifier.path)
    path = folder / "config.json"
    if not path.exists():
        return _KIMI_HIDDEN_SIZE
    whole = json.loads(path.read_text(encoding="utf-8"))
    return whole.get("text_config", whole)["hidden_size"]


def draft_parameters(config: Config) -> int:
    """Trained parameters of the draft: fc, attention on [embedding, state], MLP; norms are too small to count."""
    draft, hidden = config.draft, hidden_size(config)
    queries, keys = draft.num_attention_heads * draft.head_dim, draft.num_key_value_heads * draft.head_dim
    attention = (queries + 2 * keys) * 2 * hidden + queries * hidden
    return 3 * hidden * hidden + draft.num_layers * (attention + 3 * draft.intermediate_size * hidden)


def checkpoints(config: Config) -> int:
    """Checkpoints on disk at most: the newest ones, the best, and the one being written."""
    return config.training.keep_checkpoints + 2


def disk(config: Config, work: Workload, storage: str) -> Disk:
    """Bytes on disk once everything is there."""
    traces = work.generated * TRACE_BYTES
    fixed = (
        traces + work.extracted * _DATASET_BYTES + checkpoints(config) * _CHECKPOINT_BYTES * draft_parameters(config)
    )
    states = token_bytes(config, storage)
    return Disk(fixed, work.kept * states, (work.extracted - work.kept) * states)


# From tokens to hours -----------------------------------------------------------------------------------------------


def machines(config: Config, run: MeasuredRun | None) -> list[Machine]:
    """The boxes asked for, a measured run's rates in place of the priors of its own; without a box, the run's machine.

    Raises:
        PipelineError: nothing is known about any machine, or the priors are of another verifier.
    """
    plan = config.plan
    prices: list[float | None] = list(plan.price) or [None]
    if not plan.box:
        if run is None:
            raise PipelineError(
                "no rates for this machine: name a run that was made on it (--from runs/x), or a box "
                f"(--box {' | '.join(BOXES)})"
            )
        return [Machine(run.hardware, run.gpus, run.speeds, prices[0], run.one_pass)]
    if config.verifier.path == "tiny":
        raise PipelineError(
            "the priors of a box are Kimi-K2.5's, but verifier.path is tiny; name a preset of the real verifier, or "
            f"--verifier.path {KIMI}"
        )
    found = []
    for name, price in zip(plan.box, itertools.cycle(prices)):
        box = BOXES[name]
        here = run is not None and run.was_on(box)
        own = run.speeds if run and here else {}
        found.append(Machine(name, box.gpus, box.speeds | own, price, bool(run and here and run.one_pass)))
    return found


def project(config: Config, machine: Machine, work: Workload, way: Way) -> Projection:
    """What every stage takes for this work, on this machine, in this way.

    Raises:
        PipelineError: a stage has no rate.
    """
    on_disk = disk(config, work, way.storage)
    waves, wave_bytes, peak = 1, on_disk.train_states, on_disk.whole
    if way.waves and config.plan.max_disk_gb:
        room = config.plan.max_disk_gb * 1e9 - on_disk.fixed - on_disk.kept_states
        if 0 < room < on_disk.train_states:
            waves = math.ceil(on_disk.train_states / room)
            wave_bytes = on_disk.train_states / waves
            peak = on_disk.fixed + on_disk.kept_states + wave_bytes
    return Projection(
        machine, way, work.samples, list(_costs(config, machine, work, way, waves)), waves, wave_bytes, peak
    )


def _costs(config: Config, machine: Machine, work: Workload, way: Way, waves: int) -> Iterator[Cost]:
    if PROMPTS.folder in machine.speeds:
        yield _cost("01 prompts", 0, [_start(machine.speeds[PROMPTS.folder])])
    loads, work_on_server = [], []
    if work.generated:
        generating = _speed(machine, TRACES.folder)
        note = "; saving states while generating is not measured" if way.one_pass and not machine.one_pass else ""
        loads.append(_start(generating, waves if way.one_pass else 1))
        work_on_server.append(_cost("01b generation", work.generated, [_work(generating, work.generated)], note))
    if not way.one_pass:
        extracting = _speed(machine, HIDDEN.folder)
        note = "; float8 states taken to be as fast as bfloat16, not measured" if way.storage == FP8 else ""
        loads.append(_start(extracting, waves))
        work_on_server.append(_cost("02 extraction", work.extracted, [_work(extracting, work.extracted)], note))
    yield _cost(LOAD, 0, loads, _waves_note(waves))
    yield from work_on_server
    counting = _speed(machine, VOCAB.folder)
    yield _cost("03 vocabulary", work.counted, [_start(counting), _work(counting, work.counted)])
    training = _speed(machine, TRAIN.folder)
    start, (rate, seconds) = _start(training, waves), _work(training, work.trained)
    gpus = config.plan.train_gpus
    scaling = Range.exactly(1)
    note = _waves_note(waves)
    if rate.basis != MEASURED and gpus > 1:
        scaling = _SCALING * gpus
        note += f"; {gpus} GPUs at half of linear to linear, not measured"
    shared = Range(seconds.low / scaling.high, seconds.likely / scaling.likely, seconds.high / scaling.low)
    yield _cost("04 training", work.trained, [start, (rate, shared)], note)
    yield _cost("05 export", 0, [_start(_speed(machine, EXPORT.folder))])
    evaluating = _speed(machine, EVALUATE.folder)
    if evaluating.tokens_per_s is None:
        yield _cost("06 evaluation", 0, [_start(evaluating)])
    else:
        parts = [_start(evaluating, work.servers), _work(evaluating, work.evaluated)]
        note = "; fewer requests at once decode slower by a power law"
        yield _cost("06 evaluation", work.evaluated, parts, note)


def _speed(machine: Machine, folder: str) -> Speed:
    if folder not in machine.speeds:
        raise PipelineError(
            f"{folder} was never finished with work to do on {machine.name}, so it has no rate; finish it once, "
            f"or name a box whose priors stand in (--box {' | '.join(BOXES)})"
        )
    return machine.speeds[folder]


def _start(speed: Speed, times: int = 1) -> tuple[Figure, Range]:
    return speed.start_s, speed.start_s.value * times


def _work(speed: Speed, tokens: float) -> tuple[Figure, Range]:
    return speed.tokens_per_s or speed.start_s, speed.working(tokens)


def _waves_note(waves: int) -> str:
    return f"; {waves} starts for {waves} waves, not measured" if waves > 1 else ""


def _cost(stage: str, tokens: float, parts: list[tuple[Figure, Range]], assumed: str = "") -> Cost:
    """One row: its bases joined by `+` where they differ, estimate among them where something is `assumed`."""
    held = {figure.basis for figure, _ in parts} | ({ESTIMATE} if assumed else set())
    bases = [basis for basis in (MEASURED, PRIOR, ESTIMATE) if basis in held]
    sources = _distinct(figure.source for figure, _ in parts)
    if assumed:
        sources = [*sources, assumed.removeprefix("; ")]
    seconds = sum((seconds for _, seconds in parts), Range.exactly(0))
    return Cost(stage, tokens, seconds, " + ".join(bases), tuple(sources))


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def ways(config: Config) -> list[Way]:
    """The preset's own way first, then the others: one pass or two, its storage or float8, waves in a disk budget."""
    own = config.generation.capture == "one_pass"
    storages = _distinct([config.extraction.storage_dtype, FP8])
    waves = [False, True] if config.plan.max_disk_gb else [False]
    return [
        Way(one_pass, storage, in_waves) for in_waves in waves for one_pass in (own, not own) for storage in storages
    ]


# Budgets ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Overrun:
    """A budget that a projection breaks."""

    flag: str
    planned: float
    allowed: float
    unit: str

    def __str__(self) -> str:
        return (
            f"{self.flag} {self.allowed:g}: {_amount(self.planned)} {self.unit} planned, "
            f"{_amount(self.planned - self.allowed)} {self.unit} over"
        )


def overruns(projection: Projection, plan: Plan) -> list[Overrun]:
    """The budgets that the likely figures break."""
    usd = projection.usd
    checked = (
        ("--max-hours", projection.seconds.likely / 3600, plan.max_hours, "h"),
        ("--max-usd", usd.likely if usd else 0, plan.max_usd, "USD"),
        ("--max-disk-gb", projection.peak_bytes / 1e9, plan.max_disk_gb, "GB"),
    )
    return [Overrun(flag, is_, allowed, unit) for flag, is_, allowed, unit in checked if allowed and is_ > allowed]


def _has_budgets(plan: Plan) -> bool:
    return any((plan.max_hours, plan.max_usd, plan.max_disk_gb))


def most_samples(fits: Callable[[int], bool]) -> int:
    """The largest number of samples that fits; what a run takes only grows with it."""
    low, high = 0, 1
    while high < _MOST_SAMPLES and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def refusal(planned: Planned) -> str | None:
    """Which budgets the preset's own way breaks on each machine, by how much, and what would fit."""
    plan, lines = planned.config.plan, []
    for machine, projections in planned.options.items():
        own = projections[0]
        broken = overruns(own, plan)
        if not broken:
            continue
        lines.append(f"over budget on {machine}, {own.samples:,.0f} samples, {own.way}:")
        lines += [f"  {budget}; {_fitting(_most_samples(planned, own, budget.flag))}" for budget in broken]
        most = _most_samples(planned, own)
        lines.append(f"  within all budgets: {_fitting(most)}" + (f" (MAX_SAMPLES={most})" if most else ""))
        if others := [str(option.way) for option in projections[1:] if not overruns(option, plan)]:
            lines.append(f"  all {own.samples:,.0f} would fit as: {' | '.join(others)}")
    return "\n".join(lines) or None


def _most_samples(planned: Planned, like: Projection, flag: str | None = None) -> int:
    def fits(samples: int) -> bool:
        broken = _flags(planned.again(like, samples), planned.config.plan)
        return flag not in broken if flag else not broken

    return most_samples(fits)


def _flags(projection: Projection, plan: Plan) -> list[str]:
    return [overrun.flag for overrun in overruns(projection, plan)]


def _fitting(samples: int) -> str:
    return f"at most {samples:,} samples fit" if samples else "not even one sample fits: what is fixed is too much"


# The plan -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A whole plan: every way on every machine, the preset's own way first."""

    config: Config
    length: Lengths
    samples: int
    options: dict[str, list[Projection]]

    def again(self, like: Projection, samples: float) -> Projection:
        """The same machine and way with another number of samples."""
        return project(self.config, like.machine, workload(self.config, samples, self.length), like.way)


def make_plan(config: Config) -> Planned:
    """Plan every way on every machine.

    Raises:
        PipelineError: the number of samples or the rates are not known, or the run measured another verifier.
    """
    run = rates.read_run(Path(config.plan.from_run), config.training.epochs) if config.plan.from_run else None
    if run and run.verifier and _name(run.verifier) != _name(config.verifier.path):
        raise PipelineError(
            f"{run.name} was made with the verifier {run.verifier}, this plan is for {config.verifier.path}: "
            "the rates of one say nothing about the other"
        )
    places = machines(config, run)
    samples = number_of_samples(config)
    length = lengths(config, run)
    work = workload(config, samples, length)
    options = {}
    for place in places:
        own, *others = ways(config)
        # A run in one pass has measured no extraction, so it cannot say what two would take.
        possible = [own, *(way for way in others if way.one_pass or HIDDEN.folder in place.speeds)]
        projections = [project(config, place, work, way) for way in possible]
        # Where everything fits at once, a plan in waves is the whole one.
        options[place.name] = [option for option in projections if option.waves > 1 or not option.way.waves]
    return Planned(config, length, samples, options)


def _name(verifier: str) -> str:
    return Path(verifier).name.lower()


def number_of_samples(config: Config) -> int:
    """prompts.max_samples, but no more than a local file of questions holds.

    Raises:
        PipelineError: neither is known.
    """
    source = Path(config.prompts.source)
    held = None
    if source.suffix == ".jsonl" and source.is_file():
        with source.open("rb") as file:
            held = sum(1 for line in file if line.strip())
    known = [count for count in (config.prompts.max_samples, held) if count]
    if not known:
        raise PipelineError("how many samples? Say --max-samples; a data set from the hub is not counted beforehand")
    return min(known)


# What is shown ------------------------------------------------------------------------------------------------------


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
        broken = _flags(projection, plan)
        waves = f"{projection.waves} of {size(projection.wave_bytes)}" if projection.waves > 1 else "-"
        rows.append(
            [
                f"{projection.samples:,.0f}",
                str(projection.way),
                *_range(projection.seconds),
                _usd(usd.likely) if usd else "",
                size(projection.peak_bytes),
                waves,
                " + ".join(basis for basis in (MEASURED, PRIOR, ESTIMATE) if basis in projection.basis),
                f"over {', '.join(broken)}" if broken else "yes" if _has_budgets(plan) else "-",
            ]
        )
    return tables.table(
        ["samples", "way", "likely", "low to high", "USD", "peak disk", "waves", "basis", "within budgets"], rows
    )


def _disk_line(config: Config, own: Projection) -> str:
    a_token = token_bytes(config, own.way.storage)
    return (
        f"Peak on disk {size(own.peak_bytes)} ({own.peak_bytes / 2**30:,.1f} GiB): {a_token:,} bytes of states a "
        "token, traces, data set and checkpoints; counted, and as right as the tokens are."
    )


def _sources(projection: Projection) -> Iterator[str]:
    for cost in projection.costs:
        yield f"- {cost.stage}: {cost.basis}; {'; '.join(cost.sources)}"


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


def _amount(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.3g}"


def _count(tokens: float) -> str:
    if not tokens:
        return "-"
    return f"{tokens / 1e6:,.1f} M" if tokens >= 1e6 else f"{tokens:,.0f}"


_ASSUMED = (
    "Assumed of the ways that were never measured: saving states slows no answer (one pass), float8 states are saved "
    "and read as fast as bfloat16, and each wave starts server and trainer anew."
)


# The document's tables ----------------------------------------------------------------------------------------------

_MARKED = re.compile(r"(<!-- plan: (\w+) -->\n).*?(<!-- /plan -->)", re.DOTALL)
_PROJECTED_SAMPLES = (50_000, 100_000)
_FACTORS = (1, 4, 10)
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
    here = Machine(run.hardware, run.gpus, run.speeds, None, run.one_pass)
    own_way = Way(run.one_pass, config.extraction.storage_dtype, False)
    for factor in _FACTORS:
        projected.append(
            (
                f"{run.hardware}: {run.name} x {factor}",
                project(config, here, repeated(run, factor, config.training.epochs), own_way),
            )
        )
    for name, samples in itertools.product(BOXES, _PROJECTED_SAMPLES):
        preset = _box_preset(name, samples)
        (box,) = machines(preset, None)
        work = workload(preset, samples, lengths(preset, None))
        for way in (Way(False, "bfloat16", False), Way(True, FP8, False)):
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
    return tables.table(header, rows) + f"\n\nBoxes: by their presets; {_PRIOR_LENGTHS}."


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
        if arguments.brief and not _has_budgets(config.plan):
            print(f"not estimated: {unknown}")
            return 0
        raise
    print(brief(planned) if arguments.brief else shown(planned))
    if arguments.picture is not None:
        from eagle3_train import charts

        charts.plan(arguments.picture, hours_by_stage(planned))
    if refused := refusal(planned):
        raise PipelineError(refused)
    return 0


def hours_by_stage(planned: Planned) -> dict[str, dict[str, float]]:
    """Option -> stage -> likely hours."""
    return {
        f"{machine}: {projection.way}": {cost.stage: cost.seconds.likely / 3600 for cost in projection.costs}
        for machine, projections in planned.options.items()
        for projection in projections
    }
