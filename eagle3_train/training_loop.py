"""The loop of stage 04: packs in, optimizer steps, validations, checkpoints; on one process or on all of a group.

One process is started for each GPU (`training.processes`); under torchrun, which may span several nodes, this process
is one of them already. Weights, gradients and optimizer are fp32 on every process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from eagle3_train import distributed, verifier
from eagle3_train.checkpoints import OPTIMIZER, Checkpoints, Saved, load_weights
from eagle3_train.cli import exit_with
from eagle3_train.config import Config, parse
from eagle3_train.distributed import Place
from eagle3_train.draft import build_draft
from eagle3_train.errors import PipelineError, Terminated
from eagle3_train.expected import names_of_sums, summarise
from eagle3_train.muon import Muon
from eagle3_train.packs import Order, Pack, order
from eagle3_train.progress import bar
from eagle3_train.run import TRAIN, JsonlLog, Run, Stage
from eagle3_train.shards import Shards
from eagle3_train.step import TrainingStep
from eagle3_train.training import CHECKPOINTS, METRICS, Data, draft_vocabulary, draw_curves
from eagle3_train.waves import Wave, training_order

if TYPE_CHECKING:
    from tqdm import tqdm

_CLIP = 1.0
# Reading a loss waits for the GPU.
_LOG_EVERY_STEPS_ON_GPU = 10
_METRICS_LOGGER = "speculators.metrics"  # its trackers listen there
_DATA = "EAGLE3_TRAIN_DATA"  # what the stage found, told to the processes it starts


def run(stage: Stage, data: Data) -> tuple[int, dict[str, float]]:
    """Train to the end, in this process or in as many as there are GPUs.

    Returns:
        All optimizer steps, and this attempt's seconds and trained tokens.
    """
    settings = stage.config.training
    wanted = settings.processes or min(torch.cuda.device_count() or 1, settings.batch_size)
    whole = Checkpoints(stage.folder / CHECKPOINTS, settings.keep_checkpoints).whole()
    made = whole[-1].step if whole else 0
    lengths, drawn = _lengths_and_order(stage.config, data)
    started = time.monotonic()
    if wanted == 1 or distributed.under_torchrun():
        with distributed.place() as place:
            timing = _Loop(stage, place.told(data), place, drawn).run()
    else:
        command = [sys.executable, "-m", "eagle3_train.training_loop", "--run", str(stage.run.path)]
        told = json.dumps({**asdict(data), "path": str(data.path)})
        distributed.start(command, wanted, stage.folder, {_DATA: told})
        timing = {"training_seconds": round(time.monotonic() - started, 2)}
    rows = [row for step in drawn.steps[made : _until(data, drawn)] for pack in step for row in pack]
    return len(drawn.steps), {**timing, "trained_tokens": sum(min(lengths[row], settings.pack_tokens) for row in rows)}


def _lengths_and_order(config: Config, data: Data) -> tuple[list[int], Order]:
    """Tokens of each training row, and which packs every step takes."""
    lengths = _shards(config, data, "train").lengths
    if data.wave is None:
        return lengths, training_order(config, lengths, None)
    return lengths, training_order(config, lengths, data.wave.room).without(data.wave.left_out)


def _until(data: Data, drawn: Order) -> int:
    """Steps made when the states on disk are used up, or all."""
    return len(drawn.steps) if data.wave is None else data.wave.last_step


def _shards(config: Config, data: Data, split: str) -> Shards:
    first, count = (0, data.train) if split == "train" else (data.train, data.val)
    return Shards(
        data.path,
        first,
        count,
        pack_tokens=config.training.pack_tokens,
        ttt_steps=config.training.ttt_steps,
        whole=config.draft.num_layers > 1,
        pinned=torch.cuda.is_available(),
    )


@dataclass
class _Progress:
    """Since the last logged step.

    Attributes:
        tokens: of this process.
        losses: this process's share of the loss of each step; not finite where the gradient is not.
    """

    since: float
    tokens: int = 0
    losses: list[torch.Tensor] = field(default_factory=list)


class _Loop:
    """One process's part of a training."""

    def __init__(self, stage: Stage, data: Data, place: Place, drawn: Order):
        self.stage, self.place, self.settings = stage, place, stage.config.training
        _quiet_libraries()
        torch.manual_seed(self.settings.seed)
        draft = build_draft(stage.config, draft_vocabulary(stage, data))
        self.checkpoints = Checkpoints(stage.folder / CHECKPOINTS, self.settings.keep_checkpoints)
        place.wait()
        self.resumed = self._last_checkpoint()
        if self.resumed is not None:
            load_weights(self.resumed.path, draft)
        elif stage.config.draft.init_from is not None and place.first:
            from eagle3_train import warm_start

            layers = verifier.text_config(stage.config.verifier).num_hidden_layers
            taken_over = warm_start.load_into(draft, stage.config.draft.init_from, layers)
            with JsonlLog(stage.folder / METRICS) as log:
                log.append({"warm_start": taken_over})
        self.draft = draft
        self.step: nn.Module = _make_step(draft.to(place.device), stage.config, place)
        self.optimizers = _optimizers(draft, stage.config)
        self.order = drawn
        self.schedules = [_schedule(optimizer, stage.config, len(self.order.steps)) for optimizer in self.optimizers]
        self.made = 0
        if self.resumed is not None:
            self.made = self.resumed.step
            self._load_state(self.resumed.path / OPTIMIZER)
        best = self.checkpoints.best()
        self._best = best.expected_acceptance_length if best else None
        self.until = _until(data, drawn)
        packs, self.weights = self.order.of_rank(place.rank, place.ranks, self.made, self.until)
        self.packs = _shards(stage.config, data, "train").packs(packs, self.settings.data_workers)
        self.validation_shards = _shards(stage.config, data, "val")
        validation = order(self.validation_shards.lengths, self.settings.pack_tokens, 1, 1, 0, None)
        self.validation = [step[0] for step in validation.steps]

    def run(self) -> dict[str, float]:
        """Train from where it stands to the end."""
        total = len(self.order.steps)
        if self.resumed is not None and self.place.first:
            print(f"going on after step {self.made} of {total}")
        started = time.monotonic()
        progress = bar(total=total, initial=self.made, desc="04 training", unit="step", disable=not self.place.first)
        packs = _on_device(self.packs, self.place.device)
        logged = _metrics_log(self.stage) if self.place.first else contextlib.nullcontext()
        # Obeyed between two steps, where weights and optimizer agree.
        with progress, logged, distributed.stop_requests() as stop:
            interval = _Progress(time.monotonic())
            for weights in self.weights:
                self._optimize(packs, weights, interval)
                stopping = self.place.any(bool(stop))
                validating = self.made == total or self._validates()
                saving = validating or stopping or self._saves()
                if saving or self._is_logged():
                    self._log(interval, progress)
                progress.update()
                if saving:
                    self._save(self._validate() if validating else None)
                    interval.since = time.monotonic()
                if stopping:
                    break
            if self.place.any(bool(stop)):
                raise stop[0] if stop else Terminated()
        return {"training_seconds": round(time.monotonic() - started, 2)}

    def _optimize(self, packs: Iterator[Pack], weights: list[float], interval: _Progress) -> None:
        """One optimizer step."""
        total = torch.zeros((), device=self.place.device)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for place, weight in enumerate(weights):
            pack = next(packs)
            last = place + 1 == len(weights)
            together = contextlib.nullcontext() if last or self.place.ranks == 1 else self.step.no_sync()
            with together:  # type: ignore[attr-defined]
                loss, _ = self.step(pack)
                # Gradients are averaged over the processes; the mean is over the step's packs.
                (loss * (weight * self.place.ranks)).backward()
            total += loss.detach() * weight
            interval.tokens += pack.tokens if weight else 0
        norm = nn.utils.clip_grad_norm_(self.draft.parameters(), _CLIP)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
        self.made += 1
        interval.losses.append(torch.where(norm.isfinite(), total, norm))

    def _is_logged(self) -> bool:
        return self.place.device.type != "cuda" or self.made == 1 or self.made % _LOG_EVERY_STEPS_ON_GPU == 0

    def _log(self, interval: _Progress, progress: tqdm) -> None:
        """Tell the metrics since the last time; always before weights are saved.

        Raises:
            PipelineError: a loss or gradient is not finite, with the rows it came from.
        """
        first = self.made - len(interval.losses)
        shares = {str(step): loss for step, loss in enumerate(interval.losses, first)}
        tokens = torch.tensor(float(interval.tokens), device=self.place.device)
        found = self.place.total({"tokens": tokens, **shares})
        for step in range(first, self.made):
            if not math.isfinite(found[str(step)]):
                raise PipelineError(
                    f"step {step + 1}: the loss or its gradient is not finite. Rows of its packs: "
                    f"{self.order.steps[step]}. Look at those shards (rerun 02_extract_hidden.py), or lower training.lr"
                )
        loss = found[str(self.made - 1)]
        now = time.monotonic()
        seconds = now - interval.since
        rate, steps_per_s = found["tokens"] / seconds, len(interval.losses) / seconds
        interval.since, interval.tokens, interval.losses = now, 0, []
        epoch = self.order.epoch(self.made - 1)
        self._tell(
            {
                "train": {"loss": loss},
                "lr": self.schedules[-1].get_last_lr()[0],
                "tokens_per_s": round(rate, 1),
                "steps_per_s": round(steps_per_s, 4),
                **self._when(),
            }
        )
        progress.set_postfix_str(
            f"epoch {epoch + 1}/{len(self.order.epoch_ends)}, loss {loss:.3f}, {rate:,.0f} tok/s"
            + (f", acceptance {self._best:.2f}" if self._best else ""),
            refresh=False,
        )

    def _when(self) -> dict[str, int]:
        return {"step": self.made, "of": len(self.order.steps), "epoch": self.order.epoch(self.made - 1)}

    def _tell(self, row: dict[str, Any]) -> None:
        if self.place.first:
            logging.getLogger(_METRICS_LOGGER).info(row, extra={"step": self.made})

    def _saves(self) -> bool:
        return self.made == self.until or self.made % self.settings.checkpoint_steps == 0

    def _validates(self) -> bool:
        every = self.settings.validation_steps
        return self.made % every == 0 if every else self.made in self.order.epoch_ends

    @torch.no_grad()
    def _validate(self) -> dict[str, float]:
        """Metrics of the validation packs, of all processes."""
        step = self.step.module if isinstance(self.step, nn.parallel.DistributedDataParallel) else self.step
        sums: dict[str, torch.Tensor] = {}
        own = self.validation[self.place.rank :: self.place.ranks]
        for pack in _on_device(self.validation_shards.packs(own, self.settings.data_workers), self.place.device):
            for name, value in step(pack, measure=True)[1].items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + value
        if not sums:  # fewer packs than processes
            sums = self._no_sums()
        metrics = summarise(self.place.total(dict(sorted(sums.items()))), len(self.validation), self.settings.ttt_steps)
        if not math.isfinite(metrics["loss"]):
            raise PipelineError(
                f"step {self.made}: the validation loss is not finite, though the training loss is. Look at the shards "
                "of the validation rows (rerun 02_extract_hidden.py)"
            )
        self._tell({"val": metrics, **self._when()})
        self._best = max(metrics["expected_acceptance_length"], self._best or 0)
        if self.place.first:
            draw_curves(self.stage.folder, self.settings.ttt_steps)
        return metrics

    def _no_sums(self) -> dict[str, torch.Tensor]:
        of_loss = ("loss", *(f"loss_{step}" for step in range(self.settings.ttt_steps)))
        names = (*of_loss, *names_of_sums(self.settings.ttt_steps))
        return {name: torch.zeros((), device=self.place.device) for name in names}

    def _save(self, metrics: dict[str, float] | None) -> None:
        expected = None if metrics is None else metrics["expected_acceptance_length"]
        if self.place.first:
            training = {
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "schedules": [schedule.state_dict() for schedule in self.schedules],
                "rng": torch.get_rng_state(),
            }
            self.checkpoints.save(self.draft, training, self.made, self.order.epoch(self.made - 1), metrics, expected)
        self.place.wait()

    def _last_checkpoint(self) -> Saved | None:
        if self.place.first:
            self.checkpoints.folder.mkdir(exist_ok=True)
            for torn in self.checkpoints.put_aside_torn():
                print(f"warning: {torn.name} is not a whole checkpoint; going on from an earlier one")
            self.checkpoints.tidy()
        self.place.wait()
        whole = self.checkpoints.whole()
        return whole[-1] if whole else None

    def _load_state(self, path: Path) -> None:
        saved = torch.load(path, weights_only=True, map_location="cpu")
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        for schedule, state in zip(self.schedules, saved["schedules"], strict=True):
            schedule.load_state_dict(state)
        torch.set_rng_state(saved["rng"])


def _make_step(draft: Any, config: Config, place: Place) -> nn.Module:
    from speculators.losses import resolve_loss_config

    settings = config.training
    step = TrainingStep(
        draft,
        ttt_steps=settings.ttt_steps,
        loss_config=resolve_loss_config(settings.loss, "fused" if place.device.type == "cuda" else "eager"),
        loss_decay=settings.ttt_step_loss_decay,
        dtype=getattr(torch, settings.dtype),
        use_fp8=settings.fp8,
        recompute=settings.recompute,
    )
    if place.ranks == 1:
        return step
    wrapped = nn.parallel.DistributedDataParallel(
        step, device_ids=[place.device] if place.device.type == "cuda" else None, gradient_as_bucket_view=True
    )
    if settings.gradients == "bfloat16":
        # DDP reads a hook's annotations and does not know them as text.
        wrapped.register_comm_hook(None, lambda _state, bucket: _mean_in_bfloat16(bucket))
    return wrapped


def _mean_in_bfloat16(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's bf16_compress_hook, which refuses to run on a CPU."""
    gradients = bucket.buffer()
    sent = gradients.bfloat16().div_(dist.get_world_size())
    summed = dist.all_reduce(sent, async_op=True).get_future()  # type: ignore[union-attr]
    return summed.then(lambda done: gradients.copy_(done.value()[0]))


def _optimizers(draft: Any, config: Config) -> list[torch.optim.Optimizer]:
    """AdamW over every trained parameter, or muon over the matrices and AdamW over the rest, split as speculators."""
    from speculators.train.optimizers import split_named_params_for_muon

    settings = config.training
    rest = [(name, parameter) for name, parameter in draft.named_parameters() if parameter.requires_grad]
    made: list[torch.optim.Optimizer] = []
    if settings.optimizer == "muon":
        matrices, rest = split_named_params_for_muon(draft)  # type: ignore[assignment]
        made.append(Muon([parameter for _, parameter in matrices], settings.muon_lr, period=settings.muon_period))
    made.append(
        torch.optim.AdamW(
            [parameter for _, parameter in rest], lr=settings.lr, weight_decay=settings.weight_decay, fused=True
        )
    )
    return made


def _schedule(optimizer: torch.optim.Optimizer, config: Config, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    from transformers import get_scheduler

    settings = config.training
    name = "constant_with_warmup" if settings.scheduler == "none" else settings.scheduler
    return get_scheduler(name, optimizer, num_warmup_steps=int(steps * settings.warmup_ratio), num_training_steps=steps)


def _on_device(packs: Iterable[Pack], device: torch.device) -> Iterator[Pack]:
    """Packs on the device, each copied there while the one before it is computed."""
    if device.type != "cuda":
        yield from packs
        return
    copying = torch.cuda.Stream()
    ready: Pack | None = None
    for pack in chain(packs, [None]):
        with torch.cuda.stream(copying):
            moved = pack.to(device) if pack is not None else None
        if ready is not None:
            yield ready
        torch.cuda.current_stream().wait_stream(copying)
        if moved is not None:
            moved.record_stream(torch.cuda.current_stream())
        ready = moved


@contextmanager
def _metrics_log(stage: Stage) -> Iterator[None]:
    """Metrics go to metrics.jsonl and, by speculators' own handlers, to the trackers that are installed.

    A tracker that fails (no login, no network, no space) is left out from then on: it must not end a training.
    """
    from speculators.train.logger import setup_metric_logger

    here: list[str] = []
    missing: list[str] = []
    for tracker in stage.config.training.trackers:
        (here if importlib.util.find_spec(tracker) else missing).append(tracker)
    if missing:
        print(f"warning: not installed, so left out: {', '.join(missing)}")
    logger = logging.getLogger(_METRICS_LOGGER)
    setup_metric_logger(here, stage.run.path.name, str(stage.folder / "trackers"))
    trackers, logger.handlers = logger.handlers, []

    def attempt(tracker: logging.Handler, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # each has errors of its own
            trackers.remove(tracker)
            reason = str(error).strip().partition("\n")[0]
            print(f"warning: {tracker.name} failed and is left out from here on ({type(error).__name__}: {reason})")
            with contextlib.suppress(Exception):
                tracker.close()

    class Writer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            log.append(dict(record.msg))  # type: ignore[arg-type]
            for listening in list(trackers):
                attempt(listening, partial(listening.handle, record))

    with JsonlLog(stage.folder / METRICS) as log:
        handler = Writer()
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(handler)
            for listening in list(trackers):
                attempt(listening, listening.close)


def _quiet_libraries() -> None:
    """Keep the screen for our own bar and messages."""
    from loguru import logger
    from transformers.utils import logging as transformers_logging

    logger.disable("speculators")
    transformers_logging.disable_progress_bar()


def lead(stage_main: Callable[[], NoReturn]) -> NoReturn:
    """The first process of torchrun, which alone keeps the stage's books."""
    with distributed.place() as place:
        try:
            stage_main()
        finally:
            if not place.told_so_far:  # done already, or refused: the others must not wait
                place.told(None)


def _loop_of_rank(stage: Stage, data: Data, place: Place) -> _Loop:
    return _Loop(stage, data, place, _lengths_and_order(stage.config, data)[1])


def follow() -> int:
    """Every other process of torchrun."""
    arguments, config = parse(None, __doc__ or "")
    with distributed.place() as place:
        data = place.told(None)
        if data is not None:  # otherwise there is nothing to do, and the first process says so
            _loop_of_rank(Stage(Run(arguments.run, config), TRAIN), data, place).run()
    return 0


def _worker() -> int:
    """One of several processes, started by `run`."""
    arguments, config = parse(None, __doc__ or "")
    told = json.loads(os.environ[_DATA])
    with distributed.place() as place:
        wave = Wave(**told["wave"]) if told["wave"] else None
        data = Data(**{**told, "path": Path(told["path"]), "wave": wave})
        _loop_of_rank(Stage(Run(arguments.run, config), TRAIN), data, place).run()
    return 0


if __name__ == "__main__":
    exit_with("04_train.py", _worker)
