"""Contract of stage 04: however it is stopped, training ends with the weights it would have had; the best checkpoint is
chosen by expected acceptance; a shard that will not do is refused before the first step; and after every step loss
and weights are those of speculators' own trainer on the same data.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_train import charts, status, verifier, vocabulary
from eagle3_train.checkpoints import STATE
from eagle3_train.config import Config, Draft, Verifier
from eagle3_train.draft import build_draft, draft_layer_config
from eagle3_train.errors import PipelineError
from eagle3_train.extraction import DATASET, LINKS
from eagle3_train.packs import Pack, lay_out, order, rows_kept
from eagle3_train.run import MANIFEST, Result, Run
from eagle3_train.step import TrainingStep
from eagle3_train.training import CURVES, Data, check_dataset
from tests.fault_server import ROOT, rows_of
from tests.small_training import (
    HIDDEN_SIZE,
    LAYERS,
    PACK_TOKENS,
    assert_ends_alike,
    change_states,
    checkpoints_of,
    copy_of,
    ended,
    losses_of,
    new_run,
    output_of,
    samples,
    script,
    shard,
    state_of,
    steps_of,
    trained,
    validations_of,
    wait_for_steps,
    weights_of,
)

TRAIN_ROWS, VAL_ROWS = 24, 4
STEPS = 39
# One sample is meant to be.
pytestmark = pytest.mark.filterwarnings("ignore:.*longer than batch_max_length")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The order of sums, and with it the last bit, depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that is done up to stage 03."""
    return new_run(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def undisturbed(data: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Result]:
    """A training that nothing stopped."""
    run = copy_of(data, tmp_path_factory.mktemp("undisturbed"), trackers=["tensorboard"])
    return run, trained(run)


def as_if_killed(run: Run) -> None:
    """What kill -9 leaves of a manifest."""
    path = run.folder("04_train") / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"state": "running", "outputs": {}}))


# ---- which checkpoint is best, and what is told


def test_a_training_ends_with_its_best_checkpoint_linked_and_reported(undisturbed: tuple[Run, Result]) -> None:
    run, result = undisturbed
    estimates = {step: 1 + val["greedy_acc_0"] + val["greedy_acc_1"] for step, val in validations_of(run).items()}
    assert len(estimates) == run.config.training.epochs
    best = max(estimates, key=lambda step: estimates[step])
    link = checkpoints_of(run).folder / "checkpoint_best"
    assert link.readlink() == Path(f"step_{best:06d}")
    assert json.loads((link / STATE).read_text())["expected_acceptance_length"] == pytest.approx(estimates[best])
    assert result.summary["best_step"] == best
    assert result.summary["expected_acceptance_length"] == pytest.approx(estimates[best], abs=1e-3)
    assert estimates[best] > 1.5, "nothing was learnt, so the tests below would compare noise"


def test_a_row_is_kept_of_every_step_and_every_validation(undisturbed: tuple[Run, Result]) -> None:
    run, result = undisturbed
    rows = rows_of(run.folder("04_train") / "metrics.jsonl")
    training = [row for row in rows if "train" in row]
    assert [row["step"] for row in training] == list(range(1, STEPS + 1))
    assert {row["of"] for row in rows} == {STEPS} == {result.summary["steps"]}
    assert [row["epoch"] for row in training] == [epoch for epoch in range(3) for _ in range(STEPS // 3)]
    assert all(row["tokens_per_s"] > 0 and row["steps_per_s"] > 0 and row["lr"] >= 0 for row in training)
    assert [row["step"] for row in rows if "val" in row] == [STEPS // 3, 2 * STEPS // 3, STEPS]
    # Every row of the data set once an epoch, the long one cut to a pack.
    lengths = [min(len(sample.token_ids), PACK_TOKENS) for sample in samples() if sample.split == "train"]
    assert result.summary["trained_tokens"] == 3 * sum(lengths)


def test_tensorboard_shows_what_the_metrics_say(undisturbed: tuple[Run, Result]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, _ = undisturbed
    (folder,) = {path.parent for path in (run.folder("04_train") / "trackers").rglob("events.*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("train/loss")}
    assert shown == pytest.approx({step: loss for step, (loss, _) in steps_of(run).items()})
    accepted = {event.step: event.value for event in events.Scalars("val/expected_acceptance_length")}
    assert accepted == pytest.approx(
        {step: val["expected_acceptance_length"] for step, val in validations_of(run).items()}
    )


def test_a_tracker_that_is_not_installed_is_left_out_with_a_warning(
    data: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    run = copy_of(data, tmp_path, max_steps=2, trackers=["trackio", "tensorboard", "wandb"])
    trained(run)
    assert "warning: not installed, so left out: trackio, tensorboard, wandb" in capsys.readouterr().out
    assert len(losses_of(run)) == 2
    assert not (run.folder("04_train") / "trackers").exists()


def test_checkpoints_are_whole_in_float32_and_name_no_path_of_this_machine(undisturbed: tuple[Run, Result]) -> None:
    run, _ = undisturbed
    saved = checkpoints_of(run).whole()
    assert len(saved) == run.config.training.keep_checkpoints
    for checkpoint in saved:
        weights = load_file(checkpoint.path / "model.safetensors")
        assert {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()} == {torch.float32}
        assert json.loads((checkpoint.path / "config.json").read_text())["dtype"] == "float32"
    for path in run.folder("04_train").rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert str(ROOT).encode() not in content, f"{path} names the project's directory"
            assert str(run.path).encode() not in content, f"{path} names the run's directory"


def test_every_so_many_steps_is_validated_saved_and_drawn(
    data: Run, undisturbed: tuple[Run, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[list[int]] = []
    draw = charts.training
    monkeypatch.setattr(
        charts, "training", lambda path, train, val, *rest: (drawn.append(list(val)), draw(path, train, val, *rest))
    )
    run = copy_of(data, tmp_path, validation_steps=16, keep_checkpoints=9)
    trained(run)
    assert list(validations_of(run)) == [16, 32, STEPS]
    assert [saved.step for saved in checkpoints_of(run).whole()] == [16, 32, STEPS]
    assert drawn[:3] == [[16], [16, 32], [16, 32, STEPS]]
    assert (run.folder("04_train") / CURVES).read_bytes().startswith(b"\x89PNG")
    # Looking changes nothing.
    assert losses_of(run) == losses_of(undisturbed[0])


# ---- stopped at any moment


def test_killed_at_any_step_the_rerun_ends_with_the_same_losses_and_weights(
    data: Run, undisturbed: tuple[Run, Result], tmp_path: Path
) -> None:
    run = copy_of(data, tmp_path, checkpoint_steps=3)
    chance = random.Random(0)
    reached = 0
    for _ in range(5):
        with script(run) as process:
            reached = min(reached + chance.randint(1, 9), STEPS - 2)
            wait_for_steps(run, process, reached)
            time.sleep(chance.random() / 20)
            process.kill()
            assert ended(process) == -signal.SIGKILL
    assert reached > STEPS // 2
    trained(run)
    assert_ends_alike(run, undisturbed[0])


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)])
def test_a_stop_saves_and_the_rerun_goes_on_at_that_very_step(
    data: Run,
    undisturbed: tuple[Run, Result],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sent: signal.Signals,
    code: int,
) -> None:
    run = copy_of(data, tmp_path)
    with script(run) as process:
        wait_for_steps(run, process, 5)
        found = next(stage for stage in status.read(run.path).stages if stage.folder == "04_train")
        assert process.pid is not None
        os.kill(process.pid, sent)
        assert ended(process) == code, output_of(run)
    assert found.state == f"running (pid {process.pid})"
    assert found.count is not None
    assert (found.count.total, found.count.about) == (STEPS, False)
    assert found.count.done >= 5
    assert found.rate is not None
    assert found.rate > 0
    assert "the same command goes on" in output_of(run)
    made = len(steps_of(run))
    assert 5 <= made < STEPS
    saved = checkpoints_of(run).whole()[-1]
    assert saved.step == made, "steps were made that the checkpoint does not hold"
    trained(run)
    assert f"going on after step {made} of {STEPS}" in capsys.readouterr().out
    assert_ends_alike(run, undisturbed[0])
    rows = [row["step"] for row in rows_of(run.folder("04_train") / "metrics.jsonl") if "train" in row]
    assert rows == sorted(set(rows)), "a step was made twice"


def test_killed_after_the_last_step_the_rerun_completes_without_another(
    undisturbed: tuple[Run, Result], tmp_path: Path
) -> None:
    run = copy_of(undisturbed[0], tmp_path)
    (checkpoints_of(run).folder / "checkpoint_best").unlink()
    as_if_killed(run)
    result = trained(run)
    assert result.summary["trained_tokens"] == 0
    assert_ends_alike(run, undisturbed[0])


# ---- checkpoints that cannot be trusted


@pytest.mark.parametrize("step", [STEPS, 77])
@pytest.mark.parametrize("left", [["config.json"], []])
def test_a_torn_checkpoint_is_put_aside_and_training_goes_on_from_the_good_one(
    undisturbed: tuple[Run, Result], tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int, left: list[str]
) -> None:
    run = copy_of(undisturbed[0], tmp_path)
    folder = checkpoints_of(run).folder
    torn = folder / f"step_{step:06d}"
    kept = {name: (folder / f"step_{STEPS:06d}" / name).read_bytes() for name in left}
    shutil.rmtree(torn, ignore_errors=True)
    torn.mkdir()
    for name, content in kept.items():
        (torn / name).write_bytes(content)
    as_if_killed(run)
    trained(run)
    said = capsys.readouterr().out
    assert f"warning: torn-{torn.name}" in said
    assert f"going on after step {2 * STEPS // 3 if step == STEPS else STEPS} of {STEPS}" in said
    assert len(list(folder.glob(f"torn-{torn.name}-*"))) == 1
    assert_ends_alike(run, undisturbed[0])


def test_a_checkpoint_of_another_model_is_refused(undisturbed: tuple[Run, Result], tmp_path: Path) -> None:
    run = copy_of(undisturbed[0], tmp_path)
    folder = checkpoints_of(run).whole()[-1].path
    weights = load_file(folder / "model.safetensors")
    for name in ("gate_proj", "up_proj"):
        key = f"layers.0.mlp.{name}.weight"
        weights[key] = weights[key].repeat(2, 1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    state = json.loads((folder / STATE).read_text())
    state["files"]["model.safetensors"] = (folder / "model.safetensors").stat().st_size
    (folder / STATE).write_text(json.dumps(state))
    as_if_killed(run)
    with pytest.raises(PipelineError, match=rf"{folder.name}: a checkpoint of another model \(layers\.0\.mlp\.gate"):
        trained(run)


# ---- how long, and how many packs a step


@pytest.mark.parametrize("scheduler", ["cosine", "linear"])
@pytest.mark.parametrize("most", [5, STEPS // 3, 20, 1000])
def test_max_steps_means_exactly_that_and_the_schedule_ends_there(
    data: Run, tmp_path: Path, most: int, scheduler: str
) -> None:
    run = copy_of(data, tmp_path, max_steps=most, scheduler=scheduler, warmup_ratio=0.2)
    result = trained(run)
    made = min(most, STEPS)
    assert result.summary["steps"] == made
    steps = steps_of(run)
    assert list(steps) == list(range(1, made + 1))
    # After each step; warmed up over a fifth of them.
    rates = [rate for _, rate in steps.values()]
    assert max(rates) == rates[made // 5 - 1] == run.config.training.lr
    assert rates[-1] == pytest.approx(0, abs=1e-12)
    assert checkpoints_of(run).whole()[-1].step == made
    assert max(validations_of(run)) == made
    lengths = {sample.id: min(len(sample.token_ids), PACK_TOKENS) for sample in samples() if sample.split == "train"}
    assert result.summary["trained_tokens"] <= 3 * sum(lengths.values()) * made / STEPS + PACK_TOKENS * 2


def assert_a_kill_changes_nothing(data: Run, tmp_path: Path, *, after: int, **settings: Any) -> Run:
    """A training killed with -9 after so many steps ends as one that nothing stopped, which is returned."""
    whole = copy_of(data, tmp_path / "whole", **settings)
    trained(whole)
    run = copy_of(data, tmp_path / "killed", **settings, checkpoint_steps=4)
    with script(run) as process:
        wait_for_steps(run, process, after)
        process.kill()
        ended(process)
    trained(run)
    assert_ends_alike(run, whole)
    return whole


def test_max_steps_hold_over_a_kill(data: Run, tmp_path: Path) -> None:
    assert_a_kill_changes_nothing(data, tmp_path, after=15, max_steps=17)


def plainly(config: Config, folder: Path, dataset: Path, batch_size: int) -> tuple[list[float], float]:
    """The shortest loop that could be meant: mean over the step's packs, clip, AdamW, cosine.

    Returns:
        The loss of every step, and the validation loss at the end, of which two samples fill a pack.
    """
    from speculators.losses import resolve_loss_config
    from transformers import get_cosine_schedule_with_warmup

    settings = config.training
    torch.manual_seed(settings.seed)
    draft = build_draft(config, vocabulary.load(folder, 512))
    step = TrainingStep(
        draft, ttt_steps=2, loss_config=resolve_loss_config("kl_div", "eager"), loss_decay=1, dtype=torch.float32
    )
    table = datasets.load_from_disk(str(dataset)).with_format(None)
    lengths = table["seq_len"][:TRAIN_ROWS]
    taken = order(lengths, PACK_TOKENS, batch_size, settings.epochs, settings.seed, None).steps
    optimizer = torch.optim.AdamW(
        [p for p in draft.parameters() if p.requires_grad], lr=settings.lr, weight_decay=settings.weight_decay
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, int(len(taken) * settings.warmup_ratio), len(taken))
    losses = []
    for packs in taken:
        optimizer.zero_grad()
        loss = torch.stack([step(pack_of(dataset, table, pack))[0] for pack in packs]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    validation = [step(pack_of(dataset, table, rows))[0] for rows in ([24, 25], [26, 27])]
    return losses, float(torch.stack(validation).mean().detach())


def pack_of(dataset: Path, table: datasets.Dataset, rows: list[int]) -> Pack:
    """The shards of these rows end to end."""
    shards = [load_file(dataset / LINKS / f"hs_{row}.safetensors") for row in rows]
    kept = rows_kept([len(shard["token_ids"]) for shard in shards], PACK_TOKENS)
    states = torch.cat([shard["hidden_states"][:length] for shard, length in zip(shards, kept, strict=True)])
    masks = [torch.tensor(table[row]["loss_mask"]) for row in rows]
    return lay_out([shard["token_ids"] for shard in shards], masks, states, pack_tokens=PACK_TOKENS, ttt_steps=2)


def test_a_step_of_several_packs_is_the_mean_over_them(data: Run, tmp_path: Path) -> None:
    run = copy_of(data, tmp_path, batch_size=3)
    trained(run)
    # 13 packs an epoch: four steps of three, and one of the pack that is left.
    losses = losses_of(run)
    assert len(losses) == 3 * 5
    plain, validation = plainly(run.config, run.folder("03_vocab"), run.folder("02_hidden") / DATASET, 3)
    assert losses == pytest.approx(plain, rel=1e-4)
    assert validations_of(run)[len(losses)]["loss"] == pytest.approx(validation, rel=1e-4)


def test_threads_that_read_ahead_change_nothing(data: Run, undisturbed: tuple[Run, Result], tmp_path: Path) -> None:
    run = copy_of(data, tmp_path, data_workers=3)
    trained(run)
    assert_ends_alike(run, undisturbed[0])


def test_muon_learns_and_resumes_bit_for_bit(data: Run, tmp_path: Path) -> None:
    settings = {"optimizer": "muon", "muon_period": 3, "max_steps": 20}
    losses = losses_of(assert_a_kill_changes_nothing(data, tmp_path, after=10, **settings))
    assert losses[-1] < losses[0] / 2


def test_a_draft_of_two_layers_learns(data: Run, tmp_path: Path) -> None:
    run = copy_of(data, tmp_path, draft={"num_layers": 2})
    result = trained(run)
    assert result.summary["expected_acceptance_length"] > 1.5
    assert any(name.startswith("layers.1.") for name in weights_of(run))


# ---- beside speculators' own trainer


def peer(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[dict], list[dict]]:
    """speculators' Trainer, loaders, optimizer and schedule on the run's data; its rows of training and validation.

    Its Trainer asks torch for an accelerator in three places, which a machine without one must answer.
    """
    from speculators.models.eagle3.data import shift_batch
    from speculators.train import checkpointer, trainer
    from speculators.train.dataloader import create_train_val_loaders

    class HostTimer(trainer._StepTimer):
        def mark(self, name: str) -> None:
            self._marks[name] = time.perf_counter()

        def now(self) -> float:
            return time.perf_counter()

    class HostTrainer(trainer.Trainer):
        def setup_trainer(self) -> None:
            self.local_rank = self.device_type = "cpu"  # type: ignore[assignment]
            super().setup_trainer()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            rows.append(record.msg)  # type: ignore[arg-type]

    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # else the loaders set them for good
    monkeypatch.setattr(trainer, "_StepTimer", HostTimer)
    monkeypatch.setattr(trainer, "tqdm", lambda loader, **_bar: loader)
    monkeypatch.setattr(checkpointer, "get_current_device", lambda: "cpu")
    settings = run.config.training
    loaders = create_train_val_loaders(
        data_path=str(run.folder("02_hidden") / DATASET), total_seq_len=settings.pack_tokens,
        hidden_states_dtype=torch.float32, vllm_endpoint="", on_missing="raise", verifier_name_or_path="",
        request_timeout=None, max_retries=0, generation_validation_retries=0, max_consecutive_generation_failures=1,
        hidden_size=HIDDEN_SIZE, num_target_layers=len(LAYERS) - 1, num_workers=0, prefetch_factor=1,
        preprocess=shift_batch, train_data_ratio=(TRAIN_ROWS + 0.5) / (TRAIN_ROWS + VAL_ROWS), seed=settings.seed,
    )  # fmt: skip
    torch.manual_seed(settings.seed)
    draft = build_draft(run.config, vocabulary.load(run.folder("03_vocab"), 512))
    train_kwargs, val_kwargs = type(draft).get_trainer_kwargs(
        loss_fn=settings.loss, loss_implementation="eager", ttt_steps=2, ttt_step_loss_decay=1.0
    )
    config = trainer.TrainerConfig(
        lr=settings.lr, num_epochs=settings.epochs, save_path=str(folder), train_call_kwargs=train_kwargs,
        val_call_kwargs=val_kwargs, optimizer="adamw", weight_decay=settings.weight_decay, scheduler_type="cosine",
        # Its default takes every epoch for as long as the first; packs differ by epoch.
        scheduler_total_steps=len(losses_of(run)), scheduler_warmup_ratio=settings.warmup_ratio,
        hidden_states_dtype=torch.float32,
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    logger, handler = logging.getLogger("speculators.metrics"), Told()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        HostTrainer(draft, config, *loaders).run_training()
    finally:
        logger.removeHandler(handler)
    return [row for row in rows if "train" in row], [row["val"] for row in rows if "val" in row]


@pytest.mark.filterwarnings("ignore:.*autocast")
@pytest.mark.filterwarnings("ignore:.*pin_memory")  # of its loaders, which have no GPU
def test_every_step_and_validation_is_that_of_speculators_own_trainer(
    data: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy_of(data, tmp_path, pack_tokens=96)  # nothing is cut, where the two differ by a row
    trained(run)
    theirs, validated = peer(run, tmp_path / "peer", monkeypatch)
    assert losses_of(run) == pytest.approx([row["train"]["loss"] for row in theirs], rel=1e-5)
    assert losses_of(run)[-1] < losses_of(run)[0] / 2
    for ours, val in zip(validations_of(run).values(), validated, strict=True):
        assert ours["loss"] == pytest.approx(val["loss_epoch"], rel=1e-5)
        assert ours["full_acc_0"] == pytest.approx(val["full_acc_0_epoch"])
        # 20 rows of a sample are learnt; the one before them starts no draft, yet speculators counts it as a wrong one.
        assert ours["full_acc_1"] * 19 == pytest.approx(val["full_acc_1_epoch"] * 20)


# ---- from another draft


def test_a_training_starts_from_a_given_draft_and_keeps_what_was_taken_over(
    undisturbed: tuple[Run, Result], data: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = checkpoints_of(undisturbed[0]).folder / "checkpoint_best"
    # The first step of a warm-up changes nothing, so what is validated after it is what was loaded.
    run = copy_of(data, tmp_path, draft={"init_from": str(given)}, max_steps=1, warmup_ratio=1.0)
    trained(run)
    (found,) = validations_of(run).values()
    known = json.loads((given / STATE).read_text())["metrics"]
    assert {name: found[name] for name in known} == known
    taken_over = {"format": "speculators", "tensors": 12, "layer_numbering": "vllm", "head": "verifier"}
    told = rows_of(run.folder("04_train") / "metrics.jsonl")[0]
    assert told == {"warm_start": taken_over | {"shared_tokens": 64, "new_tokens": 0}}
    assert f"starting from {given}: 12 tensors" in capsys.readouterr().out


def test_a_draft_that_does_not_fit_is_refused_with_both_sides(
    undisturbed: tuple[Run, Result], data: Run, tmp_path: Path
) -> None:
    given = checkpoints_of(undisturbed[0]).folder / "checkpoint_best"
    run = copy_of(data, tmp_path, draft={"init_from": str(given), "intermediate_size": 96})
    with pytest.raises(PipelineError, match=r"not a draft of this shape(.|\n)*intermediate_size\D+64\D+96"):
        trained(run)


# ---- data prepared elsewhere


def prepared(folder: Path, rows: int = 28, **columns: Any) -> Path:
    """What `speculators prepare-data` and `generate-offline-data` leave: no ids, no splits, bare shards."""
    chosen = [sample for sample in samples() if sample.id != "train-long"][:rows]
    table = datasets.Dataset.from_dict(
        {
            "input_ids": [sample.token_ids for sample in chosen],
            "loss_mask": [sample.loss_mask for sample in chosen],
            "seq_len": [len(sample.token_ids) for sample in chosen],
            **columns,
        }
    )
    table.set_format("torch")
    table.save_to_disk(folder)
    (folder / "hidden_states").mkdir()
    for number, sample in enumerate(chosen):
        tensors = {"hidden_states": state_of(sample).bfloat16(), "token_ids": torch.tensor(sample.token_ids)}
        save_file(tensors, folder / "hidden_states" / f"hs_{number}.safetensors")
    return folder


def on_prepared(data: Run, folder: Path, prepared_data: Path, **training: Any) -> Run:
    """A new run that has nothing but its configuration."""
    settings = data.config.training.model_copy(update={"prepared_data": str(prepared_data)} | training)
    run = Run(folder / "run", data.config.model_copy(update={"training": settings}))
    run.keep_config()
    return run


def test_prepared_data_are_trained_on_without_the_stages_before(data: Run, tmp_path: Path) -> None:
    run = on_prepared(data, tmp_path, prepared(tmp_path / "prepared"))
    with script(run) as process:
        assert ended(process, 120) == 0, output_of(run)
    assert sorted(path.name for path in run.path.iterdir() if path.is_dir()) == [".locks", "04_train"]
    manifest = json.loads((run.folder("04_train") / MANIFEST).read_text())
    assert manifest["summary"]["samples"] == int(27 * 0.9)  # speculators' own share
    assert manifest["summary"]["expected_acceptance_length"] > 1.4
    with script(run) as process:
        assert ended(process) == 0
    assert "04_train: done already" in output_of(run)


def test_prepared_data_that_changed_are_noticed(data: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = prepared(tmp_path / "prepared")
    run = on_prepared(data, tmp_path, folder, max_steps=2)
    trained(run)
    shutil.rmtree(folder)
    prepared(folder, rows=20)
    result = trained(run)
    assert "prepared data changed, so 04_train is made again; set aside" in capsys.readouterr().out
    assert result.summary["samples"] == 18


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (shutil.rmtree, "no data set in speculators' format"),
        (lambda folder: (folder / "state.json").unlink(), "no data set in speculators' format"),
        (lambda folder: (folder / LINKS / "hs_3.safetensors").unlink(), r"hs_3\.safetensors: not a whole shard"),
        (
            lambda folder: shutil.copy(folder / LINKS / "hs_4.safetensors", folder / LINKS / "hs_9.safetensors"),
            r"hs_9\.safetensors: a shard of other tokens",
        ),
    ],
)
def test_prepared_data_that_will_not_do_are_refused_by_name(
    data: Run, tmp_path: Path, spoil: Callable[[Path], Any], said: str
) -> None:
    folder = prepared(tmp_path / "prepared")
    spoil(folder)
    with pytest.raises(PipelineError, match=rf"prepared.*{said}"):
        trained(on_prepared(data, tmp_path, folder))


def test_data_of_another_form_are_refused_by_name(tmp_path: Path) -> None:
    def refused(table: Any) -> str:
        shutil.rmtree(tmp_path / "foreign", ignore_errors=True)
        table.save_to_disk(tmp_path / "foreign")
        with pytest.raises(PipelineError, match=r"foreign.*do this") as error:
            check_dataset(tmp_path / "foreign", LAYERS, HIDDEN_SIZE, PACK_TOKENS, "do this")
        return str(error.value)

    columns = {"input_ids": [[1, 2]] * 4, "loss_mask": [[0, 1]] * 4, "seq_len": [2] * 4}
    whole = datasets.Dataset.from_dict(columns)
    assert "loss_mask" in refused(whole.remove_columns("loss_mask"))
    assert "loss_mask" in refused(datasets.DatasetDict(train=whole, validation=whole))
    for splits in (["val", "train", "train", "train"], ["train", "test", "test", "test"]):
        assert "splits" in refused(whole.add_column("split", splits).with_format("torch"))
    for splits in (["train"] * 4, ["val"] * 4):
        assert "leave none" in refused(whole.add_column("split", splits).with_format("torch"))


# ---- shards that will not do


def cut_100_bytes(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def rewrite(
    path: Path, *, tokens: int | None = None, layers: list[int] = LAYERS, shift: int = 0, width: int | None = None
) -> None:
    """The shard with fewer tokens, of other layers, of other token ids, or of a narrower verifier."""
    tensors = {name: tensor[:tokens].contiguous() for name, tensor in load_file(path).items()}
    tensors["token_ids"] = tensors["token_ids"] + shift
    tensors["hidden_states"] = tensors["hidden_states"][:, :, :width].contiguous()
    save_file(tensors, path, metadata={"layer_ids": json.dumps(layers), "dtype": "bfloat16"})


def checked(run: Run) -> Data:
    return check_dataset(run.folder("02_hidden") / DATASET, LAYERS, HIDDEN_SIZE, PACK_TOKENS, "rerun 02")


def test_sound_shards_are_counted_by_split_and_those_longer_than_a_pack(data: Run) -> None:
    assert checked(data) == Data(data.folder("02_hidden") / DATASET, TRAIN_ROWS, VAL_ROWS, cut=1)


def test_a_sample_longer_than_a_pack_is_trained_on_and_counted(
    undisturbed: tuple[Run, Result], data: Run, tmp_path: Path
) -> None:
    assert undisturbed[1].summary["cut"] == 1
    run = copy_of(data, tmp_path)
    change_states(shard(run, "train-long"), lambda states: states.index_fill(0, torch.arange(48, 92), float("nan")))
    trained(run)
    assert losses_of(run) == losses_of(undisturbed[0])
    change_states(shard(run, "train-long"), lambda states: states.index_fill(0, torch.tensor([47]), float("nan")))
    as_if_killed(run)
    shutil.rmtree(checkpoints_of(run).folder)
    with pytest.raises(PipelineError, match="not finite"):
        trained(run)


@pytest.mark.parametrize("name", ["train-03", "val-1"])
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(Path.unlink, id="missing"),
        pytest.param(cut_100_bytes, id="cut short"),
        pytest.param(empty, id="empty"),
        pytest.param(lambda path: rewrite(path, tokens=-1), id="a token fewer"),
        pytest.param(lambda path: rewrite(path, layers=[1, 3, 4, 8]), id="other layers"),
        pytest.param(lambda path: rewrite(path, layers=[2, 30, 58, 61]), id="another verifier's layers"),
        pytest.param(lambda path: rewrite(path, width=64), id="a narrower verifier's"),
        pytest.param(lambda path: rewrite(path, shift=1), id="other tokens"),
    ],
)
def test_a_shard_that_will_not_do_is_refused_by_name(
    data: Run, tmp_path: Path, name: str, spoil: Callable[[Path], None]
) -> None:
    run = copy_of(data, tmp_path)
    spoil(shard(run, name))
    with pytest.raises(PipelineError, match=rf"{name}\.safetensors") as refused:
        trained(run)
    assert "rerun 02_extract_hidden.py" in str(refused.value)
    assert not checkpoints_of(run).folder.exists(), "steps were made before the data were looked at"


def test_a_nan_in_a_shard_stops_with_step_and_rows_and_the_mended_run_ends_as_it_would_have(
    data: Run, undisturbed: tuple[Run, Result], tmp_path: Path
) -> None:
    run = copy_of(data, tmp_path, checkpoint_steps=2)
    spoilt = shard(run, "train-07")
    sound = spoilt.read_bytes()
    change_states(spoilt, lambda states: states.index_fill(0, torch.tensor([9]), float("nan")))
    lengths = [len(sample.token_ids) for sample in samples() if sample.split == "train"]
    steps = order(lengths, PACK_TOKENS, 1, 1, 0, None).steps
    step = next(number for number, packs in enumerate(steps, 1) if 7 in packs[0])
    with pytest.raises(PipelineError) as refused:
        trained(run)
    assert f"step {step}: the loss or its gradient is not finite" in str(refused.value)
    assert str(steps[step - 1]) in str(refused.value)
    assert checkpoints_of(run).whole()[-1].step == (step - 1) // 2 * 2
    spoilt.write_bytes(sound)
    trained(run)
    assert_ends_alike(run, undisturbed[0])


def test_a_nan_in_a_validation_shard_is_not_taken_for_a_loss(data: Run, tmp_path: Path) -> None:
    run = copy_of(data, tmp_path, validation_steps=3)
    change_states(shard(run, "val-2"), lambda states: states.index_fill(0, torch.tensor([9]), float("nan")))
    with pytest.raises(PipelineError, match="step 3: the validation loss is not finite"):
        trained(run)
    assert checkpoints_of(run).best() is None


def test_float8_shards_are_read_with_their_scales(data: Run, tmp_path: Path) -> None:
    from hs_connectors.fp8_utils import SCALES_KEY, dequantize_fp8_tensor, quantize_tensor_to_fp8

    # Where the residual is normed as well, a token's scale makes no difference at all.
    settings: dict[str, Any] = {"draft": {"norm_before_residual": False}, "max_steps": 3}
    stored, known = copy_of(data, tmp_path / "stored", **settings), copy_of(data, tmp_path / "known", **settings)
    for sample in samples():
        change_states(
            shard(stored, sample.id),
            lambda states: dict(zip(("hidden_states", SCALES_KEY), quantize_tensor_to_fp8(states), strict=True)),
        )
        change_states(
            shard(known, sample.id),
            lambda states: dequantize_fp8_tensor(*quantize_tensor_to_fp8(states), torch.float32),
        )
    trained(stored)
    trained(known)
    assert losses_of(stored) == losses_of(known)


# ---- the draft's layer

YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 64.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}


def kimi_sized(folder: Path, rope: dict[str, Any]) -> Verifier:
    """Kimi-K2.5's config.json in the sizes that a draft takes from it, without weights."""
    config = json.loads(verifier.file(Verifier(path="tiny"), "config.json").read_text())
    text = config["text_config"]
    del text["rope_parameters"]
    text |= {
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "vocab_size": 163840,
        "max_position_embeddings": 262144,
        **rope,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return Verifier(path=str(folder))


@pytest.mark.parametrize(
    "rope",
    [
        pytest.param({"rope_theta": 50000.0, "rope_scaling": {"type": "yarn", **YARN}}, id="as Kimi-K2.5 writes it"),
        pytest.param(
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 50000.0, **YARN}}, id="as transformers 5 does"
        ),
    ],
)
def test_the_draft_keeps_the_verifiers_rope_scaling_and_context(tmp_path: Path, rope: dict[str, Any]) -> None:
    layer = draft_layer_config(Config(verifier=kimi_sized(tmp_path, rope))).to_dict()
    assert layer["rope_parameters"] == {"rope_type": "yarn", "rope_theta": 50000.0, **YARN} | {
        name: value for name, value in layer["rope_parameters"].items() if name == "type"
    }
    assert layer["max_position_embeddings"] == 262144
    assert (layer["hidden_size"], layer["vocab_size"], layer["rms_norm_eps"]) == (7168, 163840, 1e-6)


def test_the_drafts_shape_comes_from_the_preset_not_from_the_verifiers_mla(tmp_path: Path) -> None:
    verifier_settings = kimi_sized(tmp_path, {"rope_theta": 50000.0})
    layer = draft_layer_config(Config(verifier=verifier_settings))
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (64, 64, 128)
    assert (layer.intermediate_size, layer.num_hidden_layers, layer.model_type) == (12288, 1, "llama")
    assert (layer.layer_types, layer.sliding_window) == (["sliding_attention"], 2048)
    draft = Draft(num_attention_heads=32, num_key_value_heads=8, head_dim=64, intermediate_size=96, sliding_window=None)
    layer = draft_layer_config(Config(verifier=verifier_settings, draft=draft))
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (32, 8, 64)
    assert (layer.intermediate_size, layer.layer_types) == (96, ["full_attention"])
