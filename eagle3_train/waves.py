"""Hidden states on a bounded disk (`extraction.disk_budget_gb`): 02 and 04 take turns, a wave at a time.

    02_hidden/wave.json   the steps of the training that the states on disk are for

What every step of a training reads is known before the first one (packs.py), and how many steps are made is what the
newest whole checkpoint says. So 02 makes the states of the coming steps, as many as there is room for beside those of
the validation split, which stay; 04 trains to the end of them; and 02 deletes them where it makes the next wave. A
state is deleted only when a checkpoint that has learnt it is whole on disk, or when no training will read it.

`extraction.wave_epochs: again` takes the steps of an unlimited disk. `replay` cuts the training rows into parts that
have room, and trains all epochs on one before the next.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path

from eagle3_train import parity
from eagle3_train.capture import token_bytes
from eagle3_train.checkpoints import Checkpoints
from eagle3_train.config import Config, result_fields
from eagle3_train.errors import MoreStates, PipelineError
from eagle3_train.packs import Order, order
from eagle3_train.run import HIDDEN, TRAIN, Run, Stage, differences, write_text
from eagle3_train.training import CHECKPOINTS

LEDGER = "wave.json"
_OWN = ("draft.", "training.")  # the settings of 04 alone
_GB = 1e9
# A shard's header and its row in the index.
_SHARD_OVERHEAD_BYTES = 2048
_ID_BYTES = 8


@dataclass(frozen=True)
class Wave:
    """What the states on disk are for.

    Attributes:
        number: from 1.
        first_step, last_step: it holds what the steps from the first to before the last one take.
        steps: of the whole training.
        order: digest of what those steps take.
        samples: digest of all samples of the run.
        room: for the training rows of a wave [bytes].
        published: the data set of these samples is there.
        whole: every state of it is made.
        left_out: training rows of it without sound states.
    """

    number: int
    first_step: int
    last_step: int
    steps: int
    order: str
    samples: str
    room: int
    published: bool = False
    whole: bool = False
    left_out: list[int] = field(default_factory=list)

    def is_for(self, drawn: Order, step: int) -> bool:
        """Whether a training of this order that has made `step` steps takes its next one from this wave."""
        taken = drawn.steps[self.first_step : self.last_step]
        return self.first_step <= step < self.last_step and self.order == _digest(taken)


def current(hidden: Path) -> Wave | None:
    """The wave that stage 02's folder holds."""
    path = hidden / LEDGER
    return Wave(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def keep(hidden: Path, wave: Wave) -> None:
    """Write the wave into stage 02's folder."""
    write_text(hidden / LEDGER, json.dumps(asdict(wave)) + "\n")


def training_order(config: Config, train: Sequence[int], room: int | None) -> Order:
    """What every step of stage 04 takes.

    Args:
        train: tokens of each training row.
        room: of the run's waves [bytes]; None where there are none.
    """
    settings, parts = config.training, None
    if room is not None and config.extraction.wave_epochs == "replay":
        parts = _parts([_shard_bytes(config, tokens) for tokens in train], room, settings.seed)
    return order(
        train, settings.pack_tokens, settings.batch_size, settings.epochs, settings.seed, settings.max_steps, parts
    )


def coming(run: Run, train: Sequence[int], val: Sequence[int], samples: str) -> tuple[Wave | None, set[int]]:
    """The wave that stage 02 shall hold now, and its training rows: the one it holds while that is trained on.

    Args:
        train, val: tokens of the training and the validation rows.
        samples: digest of all samples.

    Returns:
        None and no rows when every step is made.

    Raises:
        PipelineError: the budget is too small.
    """
    config = run.config
    held = current(run.folder(HIDDEN.folder))
    if held is not None and held.samples != samples:
        held = None  # 04 begins again
    made = made_steps(run) if held is not None else 0
    room = held.room if held is not None else _room(config, train, val)
    drawn = training_order(config, train, room)
    if made >= len(drawn.steps):
        return None, set()
    if held is None or not held.is_for(drawn, made):
        last = _last_step(config, drawn, made, train, room)
        held = Wave(
            number=held.number + 1 if held is not None else 1,
            first_step=made,
            last_step=last,
            steps=len(drawn.steps),
            order=_digest(drawn.steps[made:last]),
            samples=samples,
            room=room,
            published=held is not None and held.published,
        )
    return held, drawn.rows(held.first_step, held.last_step)


def of_training(stage: Stage, train: Sequence[int]) -> tuple[Wave, set[int]]:
    """The wave that stage 04 trains on now, and those of its training rows that have states.

    Args:
        train: tokens of each training row.

    Raises:
        MoreStates: the next step's states are not on disk.
    """
    wave = current(stage.run.folder(HIDDEN.folder))
    made = made_steps(stage.run)
    if wave is not None:
        drawn = training_order(stage.config, train, wave.room)
        if made >= len(drawn.steps):  # killed after its last step: nothing more is read
            return replace(wave, first_step=made, last_step=made), set()
        if wave.whole and wave.is_for(drawn, made):
            return wave, drawn.rows(wave.first_step, wave.last_step).difference(wave.left_out)
    raise more_states(stage.run, made)


def more_states(run: Run, made: int) -> MoreStates:
    """What stage 04 ends with where the states on disk do."""
    return MoreStates(
        f"{made} steps are made, and the states of the next ones are not on disk (extraction.disk_budget_gb).\n"
        f"Run python {HIDDEN.script} --run {run.path}, then this again; run_pipeline.sh does both in turn"
    )


def trained_otherwise(run: Run) -> bool:
    """Whether 04 is there with other settings than now: it will not go on before it is begun again."""
    manifest = Stage(run, TRAIN).manifest
    if manifest is None:
        return False
    now = {name: value for name, value in result_fields(run.config, TRAIN.sections).items() if name.startswith(_OWN)}
    return bool(differences({name: manifest["config"].get(name) for name in now}, now))


def made_steps(run: Run) -> int:
    """Optimizer steps in stage 04's newest whole checkpoint; none where it must be begun again."""
    if trained_otherwise(run):
        return 0
    whole = Checkpoints(run.folder(TRAIN.folder) / CHECKPOINTS, keep=1).whole()
    return whole[-1].step if whole else 0


def digest_of_samples(digests: Iterable[tuple[str, str]]) -> str:
    """Of every sample's id and token ids."""
    return _digest(list(digests))


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


# Room ----------------------------------------------------------------------------------------------------------------


def _shard_bytes(config: Config, tokens: int) -> int:
    return tokens * (token_bytes(config) + _ID_BYTES) + _SHARD_OVERHEAD_BYTES


def _room(config: Config, train: Sequence[int], val: Sequence[int]) -> int:
    """Bytes for training rows, beside the validation rows and what the parity gate makes for a moment.

    Raises:
        PipelineError: not enough for what training takes at a time.
    """
    budget = config.extraction.disk_budget_gb
    assert budget is not None
    kept = sum(_shard_bytes(config, tokens) for tokens in val)
    gate = parity.most_tokens(config, max(*train, *val)) * token_bytes(config)
    room = int(budget * _GB) - kept - gate
    steps = [[row] for row in range(len(train))]
    if config.extraction.wave_epochs == "again":
        drawn = training_order(config, train, None)
        steps = [list(drawn.rows(step, step + 1)) for step in range(len(drawn.steps))]
    least = max(_rows_bytes(config, train, rows) for rows in steps)
    if room < least:
        enough = math.ceil((kept + gate + least) / _GB * 1000) / 1000
        raise PipelineError(
            f"extraction.disk_budget_gb {budget:g} is too small: validation rows take {kept / _GB:.3g} GB for good, "
            f"the parity gate {gate / _GB:.3g} GB, and what training takes at a time {least / _GB:.3g} GB. It must be "
            f"{enough:g} or more; a smaller --batch-size or prompts.val_fraction needs less"
        )
    return room


def _rows_bytes(config: Config, train: Sequence[int], rows: Iterable[int]) -> int:
    return sum(_shard_bytes(config, train[row]) for row in rows)


def _last_step(config: Config, drawn: Order, first: int, train: Sequence[int], room: int) -> int:
    """The step before which a wave that begins with step `first` ends."""
    if config.extraction.wave_epochs == "replay":
        return next(end for end in drawn.epoch_ends if end > first)
    held: set[int] = set()
    for step in range(first, len(drawn.steps)):
        more = drawn.rows(step, step + 1) - held
        room -= _rows_bytes(config, train, more)
        if room < 0:
            return step
        held |= more
    return len(drawn.steps)


def _parts(sizes: Sequence[int], room: int, seed: int) -> list[list[int]]:
    """The rows in a random order, cut into as few parts of nearly one size as have room."""
    rows = list(range(len(sizes)))
    random.Random(seed).shuffle(rows)
    total = sum(sizes)
    for count in range(math.ceil(total / room), len(rows) + 1):
        parts: list[list[int]] = [[] for _ in range(count)]
        before = accumulate((sizes[row] for row in rows), initial=0)
        for row, start in zip(rows, before, strict=False):
            parts[start * count // total].append(row)
        if all(sum(sizes[row] for row in part) <= room for part in parts):
            return [part for part in parts if part]
    return [[row] for row in rows]
