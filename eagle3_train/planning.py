"""From a preset, a number of samples and rates: what every stage of a run takes, and whether the budgets allow it.

The work is counted in tokens (`Workload`), divided by the rates of a box or of a measured run (`rates.py`), and
reckoned for each way of making it: two passes or one, states in bf16 or fp8, whole or in waves.

How the ways are reckoned:
- two passes: 01b generates, 02 loads the verifier again and prefills every token;
- one pass: the states are saved while generating, so the second load and the prefill are not needed;
- waves (two passes): the validation states stay, those that are trained on share the rest of the budget. `again`
  prefills the training tokens for every epoch, as if none of their states were still there; `replay` once. Each wave
  starts the verifier and the trainer once more.
Not counted: pre-flight, the validation while training where the rate is not measured, and the moving of a rented
box's data.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eagle3_train import rates
from eagle3_train.config import FLOAT8, Config, Plan
from eagle3_train.errors import PipelineError
from eagle3_train.rates import BOXES, ESTIMATE, MEASURED, PRIOR, Figure, MeasuredRun, Range, Speed
from eagle3_train.run import EVALUATE, EXPORT, HIDDEN, PROMPTS, TRACES, TRAIN, VOCAB
from eagle3_train.verifier import TINY_DIRECTORY

LOAD, GIVEN, FP8 = "verifier load", "given", FLOAT8
KIMI = "moonshotai/Kimi-K2.5"
_KIMI_HIDDEN_SIZE = 7168
PRIOR_LENGTHS = "assumed: 4,096 tokens a sample; the pilot's raw answers had 505, a published run's traces 10,000"
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
# How many times as long answering takes with states saved meanwhile, where the run has not measured it. The high end
# was measured with 2.6 B parameters on an H200 (benchmarks/results/gpu_larger_one_pass.json: 9 ms more a step of 64
# streams, beside 6). As much beside a large verifier's 30 to 60 ms is the likely value, an estimate.
_SAVING = Range(1.0, 1.2, 2.5)
# How many times as long as bfloat16 states float8 ones take, where the run has not measured it: as many tokens a second
# were measured on an H200, and of prefill's rate in the same run 0.63 beside 0.78
# (benchmarks/results/gpu_larger_float8.json, gpu_larger_extraction.json).
_FLOAT8 = Range(1.0, math.sqrt(0.78 / 0.63), 0.78 / 0.63)
_MOST_SAMPLES = 10**9


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
    """One way of making the run; `waves` is extraction.wave_epochs, None with every state on disk at once."""

    one_pass: bool
    storage: str
    waves: Literal["again", "replay"] | None = None

    def __str__(self) -> str:
        passes = "one pass" if self.one_pass else "two passes"
        return f"{passes}, {self.storage}, {f'waves {self.waves}' if self.waves else 'whole'}"


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
        float8: its extraction was measured with states in float8.
    """

    name: str
    gpus: int
    speeds: dict[str, Speed]
    usd_an_hour: float | None
    one_pass: bool = False
    float8: bool = False


@dataclass(frozen=True)
class Disk:
    """Bytes on the run's disk.

    Attributes:
        fixed: everything but states.
        kept_states: of the validation split, which never go.
        train_states: of the training split, once.
        step_states: of one optimizer step, the least that a wave must hold.
    """

    fixed: float
    kept_states: float
    train_states: float
    step_states: float


@dataclass(frozen=True)
class Waves:
    """How the states that are trained on share the disk.

    Attributes:
        count: of waves; 1 where all of them are there at once.
        states: of one wave [bytes].
        passes: times that every training token is prefilled.
        budget: all states together [bytes]; None where they have no limit.
        needed: the least that the budget must be [bytes].
    """

    count: int
    states: float
    passes: int = 1
    budget: float | None = None
    needed: float = 0


@dataclass(frozen=True)
class Projection:
    """A run on a machine in one way."""

    machine: Machine
    way: Way
    samples: float
    costs: list[Cost]
    waves: Waves
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
        measured = Lengths(PRIOR_PROMPT_TOKENS, output, PRIOR, PRIOR_LENGTHS)
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
    states, settings = token_bytes(config, storage), config.training
    step = settings.batch_size * settings.pack_tokens
    return Disk(fixed, work.kept * states, (work.extracted - work.kept) * states, step * states)


def waves(config: Config, on_disk: Disk, way: Way) -> Waves:
    """Into how many waves the budget cuts the run: extraction's own, else what plan.max_disk_gb leaves for states."""
    given, most, train = config.extraction.disk_budget_gb, config.plan.max_disk_gb, on_disk.train_states
    if way.waves is None or (given is None and most is None):
        return Waves(1, train)
    budget = given * 1e9 if given is not None else (most or 0) * 1e9 - on_disk.fixed
    needed = on_disk.kept_states + min(on_disk.step_states, train)
    room = budget - on_disk.kept_states
    if budget < needed or room >= train:
        return Waves(1, train, 1, budget, needed)
    if way.waves == "replay":
        count = math.ceil(train / room)
        return Waves(count, train / count, 1, budget, needed)
    epochs = config.training.epochs
    return Waves(math.ceil(epochs * train / room), room, epochs, budget, needed)


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
        return [Machine(run.hardware, run.gpus, run.speeds, prices[0], run.one_pass, run.float8)]
    if config.verifier.path == "tiny":
        raise PipelineError(
            "the priors of a box are Kimi-K2.5's, but verifier.path is tiny; name a preset of the real verifier, or "
            f"--verifier.path {KIMI}"
        )
    found = []
    for name, price in zip(plan.box, itertools.cycle(prices)):
        box = BOXES[name]
        if run is not None and run.was_on(box):
            speeds = box.speeds | run.speeds
            found.append(Machine(name, box.gpus, speeds, price, run.one_pass, run.float8))
        else:
            found.append(Machine(name, box.gpus, box.speeds, price))
    return found


def project(config: Config, machine: Machine, work: Workload, way: Way) -> Projection:
    """What every stage takes for this work, on this machine, in this way.

    Raises:
        PipelineError: a stage has no rate.
    """
    on_disk = disk(config, work, way.storage)
    cut = waves(config, on_disk, way)
    peak = on_disk.fixed + on_disk.kept_states + cut.states
    return Projection(machine, way, work.samples, list(_costs(config, machine, work, way, cut)), cut, peak)


def _costs(config: Config, machine: Machine, work: Workload, way: Way, cut: Waves) -> Iterator[Cost]:
    if PROMPTS.folder in machine.speeds:
        yield _cost("01 prompts", 0, [_start(machine.speeds[PROMPTS.folder])])
    loads, work_on_server = [], []
    if work.generated:
        generating = _speed(machine, TRACES.folder)
        figure, seconds = _work(generating, work.generated)
        note = ""
        if way.one_pass and not machine.one_pass:
            note = f"; saving states while generating, not measured, taken to last {_SAVING.likely:g} times as long"
            seconds *= _SAVING
        loads.append(_start(generating))
        work_on_server.append(_cost("01b generation", work.generated, [(figure, seconds)], note))
    if not way.one_pass:
        extracting = _speed(machine, HIDDEN.folder)
        tokens = work.kept + cut.passes * (work.extracted - work.kept)
        figure, seconds = _work(extracting, tokens)
        note = ""
        if way.storage == FP8 and not machine.float8:
            note = f"; float8 states, not measured, taken to last {_FLOAT8.likely:.2g} times as long as bfloat16"
            seconds *= _FLOAT8
        loads.append(_start(extracting, cut.count))
        work_on_server.append(_cost("02 extraction", tokens, [(figure, seconds)], note))
    yield _cost(LOAD, 0, loads, _waves_note(cut.count))
    yield from work_on_server
    counting = _speed(machine, VOCAB.folder)
    yield _cost("03 vocabulary", work.counted, [_start(counting), _work(counting, work.counted)])
    training = _speed(machine, TRAIN.folder)
    start, (rate, seconds) = _start(training, cut.count), _work(training, work.trained)
    gpus = config.plan.train_gpus
    scaling = Range.exactly(1)
    note = _waves_note(cut.count)
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


def _waves_note(count: int) -> str:
    return f"; {count} starts for {count} waves, not measured" if count > 1 else ""


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
    """The preset's own way first, then the others: one pass or two, its storage or float8, whole or in waves."""
    one_pass = config.generation.capture == "one_pass"
    storages = _distinct([config.extraction.storage_dtype, FP8])
    own = Way(one_pass, storages[0], config.extraction.wave_epochs if config.in_waves else None)
    found = [own, *(Way(capture, storage) for capture in (one_pass, not one_pass) for storage in storages)]
    if config.in_waves or config.plan.max_disk_gb:
        found += [Way(False, storage, "again") for storage in storages]
        # Of one epoch both make the states once, and `again` keeps the order of an unlimited disk.
        found += [Way(False, storage, "replay") for storage in storages if config.training.epochs > 1]
    return list(dict.fromkeys(found))


def flags(config: Config, projection: Projection) -> str:
    """What makes the run be made in this way, where that is not the preset's own."""
    way, own = projection.way, config.extraction
    left = math.floor((projection.waves.budget or 0) / 1e6) / 1e3
    wanted = {
        "generation.capture": ("one_pass" if way.one_pass else "two_pass", config.generation.capture),
        "extraction.storage_dtype": (way.storage, own.storage_dtype),
        "extraction.disk_budget_gb": ((own.disk_budget_gb or left) if way.waves else None, own.disk_budget_gb),
        "extraction.wave_epochs": (way.waves or own.wave_epochs, own.wave_epochs),
    }
    return " ".join(f"--{name} {_flag(value)}" for name, (value, now) in wanted.items() if value != now)


def _flag(value: str | float | None) -> str:
    return "null" if value is None else value if isinstance(value, str) else f"{value:.10g}"


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
        ("--extraction.disk_budget_gb", projection.waves.needed / 1e9, (projection.waves.budget or 0) / 1e9, "GB"),
    )
    return [Overrun(flag, is_, allowed, unit) for flag, is_, allowed, unit in checked if allowed and is_ > allowed]


def has_budgets(plan: Plan) -> bool:
    """Whether the plan is held to anything."""
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
        lines += [
            f"  all {own.samples:,.0f} would fit as {option.way}: {flags(planned.config, option)}"
            for option in projections[1:]
            if not overruns(option, plan)
        ]
    return "\n".join(lines) or None


def _most_samples(planned: Planned, like: Projection, flag: str | None = None) -> int:
    def fits(samples: int) -> bool:
        broken = broken_budgets(planned.again(like, samples), planned.config.plan)
        return flag not in broken if flag else not broken

    return most_samples(fits)


def broken_budgets(projection: Projection, plan: Plan) -> list[str]:
    """The flags of the budgets that the likely figures break."""
    return [overrun.flag for overrun in overruns(projection, plan)]


def _amount(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.3g}"


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
        first, *rest = (project(config, place, work, way) for way in possible)
        # Where everything fits at once, a plan in waves is the whole one.
        options[place.name] = [first, *(option for option in rest if option.waves.count > 1 or not option.way.waves)]
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
