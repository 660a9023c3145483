"""Contract of stage 04: however it is stopped, training ends with the weights it would have had; the best epoch is
chosen by expected acceptance; and a shard that will not do is refused before the first step.

The model, the trainer, the loaders and the checkpoints are speculators' own, in float32 on a CPU with the tiny
verifier. The shards are synthetic and can be learnt: each last state is the head's own row of the token that follows.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_train import verifier, vocabulary
from eagle3_train.config import Config, Draft, Training, Verifier, Vocabulary
from eagle3_train.errors import PipelineError
from eagle3_train.extraction import DATASET, LINKS, SHARDS, Sample
from eagle3_train.run import HIDDEN, MANIFEST, PROMPTS, TRACES, TRAIN, VOCAB, Result, Run
from eagle3_train.speculators_patch import CHECKPOINT_FILES, DraftTrainer, put_aside_torn_checkpoints
from eagle3_train.training import (
    BEST,
    CHECKPOINTS,
    METRICS,
    check_dataset,
    draft_layer_config,
    expected_acceptance_length,
    train,
)
from tests.fault_server import ROOT, finish_stage, no_work, rows_of, write_hidden

LAYERS = [2, 4, 5, 8]
EPOCHS = 3
LAST = str(EPOCHS - 1)
# Of the tests' loaders, which have no GPU and one sample that is meant to be too long.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
    pytest.mark.filterwarnings("ignore:.*longer than batch_max_length"),
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The order of sums, and with it the last bit, depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sentence(start: int, count: int) -> list[int]:
    """Tokens 20 to 59, each followed by the same one every time."""
    return [20 + (start + 7 * place) % 40 for place in range(count)]


def samples() -> list[Sample]:
    """Lengths that no pack divides evenly, and one sample longer than a pack."""
    train_rows = [Sample(f"train-{n:02}", "train", [4, 9], sentence(n, 17 + n % 5)) for n in range(45)]
    train_rows.append(Sample("train-long", "train", [4, 9], sentence(3, 90)))
    return [*train_rows, *(Sample(f"val-{n}", "val", [4, 9], sentence(11 * n, 20)) for n in range(4))]


def state_of(sample: Sample) -> torch.Tensor:
    """States [tokens, layers, hidden] after which the tiny verifier's head says the sample's next token."""
    head = verifier.head_weights(Verifier(path="tiny"))[verifier.LM_HEAD].float()
    ids = torch.tensor(sample.token_ids)
    generator = torch.Generator().manual_seed(len(ids) + int(ids.sum()))
    states = torch.randn(len(ids), len(LAYERS), head.shape[1], generator=generator)
    states[:, -1] = head[ids.roll(-1)]
    return states


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that is done up to stage 03."""
    config = Config(
        verifier=Verifier(path="tiny", dtype="float32"),
        vocabulary=Vocabulary(draft_size=64),
        draft=Draft(
            num_attention_heads=4, num_key_value_heads=4, head_dim=32, intermediate_size=64, sliding_window=None
        ),
        training=Training(epochs=EPOCHS, lr=2e-3, pack_tokens=48, dtype="float32", data_workers=0, ttt_steps=2),
    )
    run = Run(tmp_path_factory.mktemp("data") / "run", config)
    finish_stage(run, PROMPTS, no_work)
    finish_stage(run, TRACES, no_work)
    finish_stage(run, HIDDEN, lambda stage: write_hidden(stage, samples(), state_of, LAYERS))
    finish_stage(run, VOCAB, vocabulary.build)
    return run


@pytest.fixture(scope="module")
def undisturbed(data: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Result]:
    """A training that nothing stopped."""
    run = copy_of(data, tmp_path_factory.mktemp("undisturbed"))
    return run, finish_stage(run, TRAIN, train)


def copy_of(run: Run, folder: Path, **training: Any) -> Run:
    """A run directory of its own, with other settings of the training where asked."""
    shutil.copytree(run.path, folder / "run", symlinks=True)
    config = run.config.model_copy(update={"training": run.config.training.model_copy(update=training)})
    copy = Run(folder / "run", config)
    copy.keep_config()
    return copy


def checkpoints_of(run: Run) -> Path:
    return run.folder("04_train") / CHECKPOINTS


def steps_of(run: Run) -> dict[int, tuple[float, float]]:
    """Step -> (loss, learning rate), the last time it was made."""
    rows = rows_of(run.folder("04_train") / METRICS)
    return {row["global_step"]: (row["train"]["loss"], row["lr"]) for row in rows if "train" in row}


def assert_ends_alike(run: Run, undisturbed: Run) -> None:
    """The same steps with the same losses, and the same final weights, bit for bit."""
    assert steps_of(run) == steps_of(undisturbed)
    ours, theirs = (load_file(checkpoints_of(r) / LAST / "model.safetensors") for r in (run, undisturbed))
    assert ours.keys() == theirs.keys()
    far = {name: float((ours[name].float() - theirs[name].float()).abs().max()) for name in ours}
    assert {name: distance for name, distance in far.items() if distance} == {}
    assert (checkpoints_of(run) / BEST).readlink() == (checkpoints_of(undisturbed) / BEST).readlink()


def start_script(run: Run) -> subprocess.Popen[str]:
    """The real script, as a user runs it, in another process."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "04_train.py"), "--run", str(run.path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def wait_for_steps(run: Run, process: subprocess.Popen[str], count: int, timeout_s: float = 90) -> None:
    """Until the process has made `count` training steps."""
    metrics = run.folder("04_train") / METRICS
    deadline = time.monotonic() + timeout_s
    while not metrics.exists() or metrics.read_bytes().count(b'"global_step"') < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"no {count} steps within {timeout_s} s"
        time.sleep(0.002)


def as_if_killed(run: Run) -> None:
    """What kill -9 leaves of a manifest."""
    path = run.folder("04_train") / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"state": "running", "outputs": {}}))


# ---- which epoch is best


def test_expected_acceptance_length_is_one_and_the_chance_of_each_unbroken_chain() -> None:
    # The published validation figures of a Kimi draft: 0.80, 0.52 and 0.31 of the chains right.
    metrics = {"full_acc_0_epoch": 0.80, "full_acc_1_epoch": 0.52, "full_acc_2_epoch": 0.31, "loss_epoch": 9.0}
    assert expected_acceptance_length(metrics, 3) == pytest.approx(2.63)
    assert expected_acceptance_length(metrics, 1) == pytest.approx(1.80)
    assert expected_acceptance_length(dict.fromkeys(metrics, 1.0), 3) == pytest.approx(4.0)  # the ceiling
    assert expected_acceptance_length(dict.fromkeys(metrics, 0.0), 3) == 1.0


@pytest.mark.parametrize(
    ("accuracies", "best"), [([0.2, 0.6, 0.4], 1), ([0.6, 0.4, 0.2], 0), ([0.2, 0.4, 0.6], 2), ([0.5, 0.5, 0.5], 0)]
)
def test_the_best_checkpoint_is_the_one_with_the_highest_estimate_not_the_lowest_loss(
    tmp_path: Path, accuracies: list[float], best: int
) -> None:
    from speculators.train.checkpointer import SingleGPUCheckpointer

    trainer = DraftTrainer.__new__(DraftTrainer)
    trainer._estimate = lambda metrics: expected_acceptance_length(metrics, 1)
    for epoch, accuracy in enumerate(accuracies):
        (tmp_path / str(epoch)).mkdir()
        trainer.checkpointer = SingleGPUCheckpointer(tmp_path)  # a new process each epoch: nothing is remembered
        trainer.maybe_update_best(epoch, {"full_acc_0_epoch": accuracy, "loss_epoch": accuracy})
    assert (tmp_path / BEST).readlink() == Path(str(best))


def test_a_training_ends_with_its_best_epoch_linked_and_reported(undisturbed: tuple[Run, Result]) -> None:
    run, result = undisturbed
    estimates = {}
    for epoch in range(EPOCHS):
        metrics = json.loads((checkpoints_of(run) / str(epoch) / "val_metrics.json").read_text())
        estimates[epoch] = 1 + metrics["full_acc_0_epoch"] + metrics["full_acc_1_epoch"]
    best = max(estimates, key=lambda epoch: estimates[epoch])
    assert (checkpoints_of(run) / BEST).readlink() == Path(str(best))
    assert result.summary["best_epoch"] == best + 1
    assert result.summary["expected_acceptance_length"] == pytest.approx(estimates[best], abs=1e-3)
    assert estimates[best] > 1.2, "nothing was learnt, so the tests below would compare noise"
    assert sorted(steps_of(run)) == list(range(result.summary["steps"]))


def test_checkpoints_are_whole_in_float32_and_name_no_path_of_this_machine(undisturbed: tuple[Run, Result]) -> None:
    run, _ = undisturbed
    for epoch in range(EPOCHS):
        folder = checkpoints_of(run) / str(epoch)
        assert all((folder / name).is_file() for name in CHECKPOINT_FILES)
        weights = load_file(folder / "model.safetensors")
        assert {t.dtype for t in weights.values() if t.is_floating_point()} == {torch.float32}
    assert not (checkpoints_of(run) / BEST).readlink().is_absolute()
    for path in run.folder("04_train").rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert str(ROOT).encode() not in content, f"{path} names the project's directory"
            assert str(run.path).encode() not in content, f"{path} names the run's directory"


# ---- stopped at any moment


def test_sigterm_saves_and_the_rerun_ends_with_the_same_weights(
    data: Run, undisturbed: tuple[Run, Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_of(data, tmp_path)
    process = start_script(run)
    wait_for_steps(run, process, 5)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "the same command goes on" in err
    made = len(steps_of(run))
    assert 5 <= made < undisturbed[1].summary["steps"]
    saved = max(int(path.name) for path in checkpoints_of(run).iterdir() if path.name.isdigit())
    state = json.loads((checkpoints_of(run) / str(saved) / "training_state.json").read_text())
    assert state["global_step"] == made, "steps were made that the checkpoint does not hold"
    assert state["local_step"] > 0, "the signal came at the end of an epoch, which proves nothing"
    finish_stage(run, TRAIN, train)
    assert f"going on after step {made} of" in capsys.readouterr().out
    assert_ends_alike(run, undisturbed[0])
    rows = [row["global_step"] for row in rows_of(run.folder("04_train") / METRICS) if "train" in row]
    assert rows == sorted(set(rows)), "a step was made twice"


def test_kill_9_costs_at_most_the_epoch_and_the_rerun_ends_with_the_same_weights(
    data: Run, undisturbed: tuple[Run, Result], tmp_path: Path
) -> None:
    run = copy_of(data, tmp_path)
    process = start_script(run)
    first_epoch = undisturbed[1].summary["steps"] // EPOCHS
    wait_for_steps(run, process, first_epoch + 3)
    process.kill()
    process.communicate()
    finish_stage(run, TRAIN, train)
    assert_ends_alike(run, undisturbed[0])


def test_killed_while_the_last_epoch_is_validated_the_rerun_still_judges_it(
    undisturbed: tuple[Run, Result], tmp_path: Path
) -> None:
    run = copy_of(undisturbed[0], tmp_path)
    checkpoints = checkpoints_of(run)
    (checkpoints / LAST / "val_metrics.json").unlink()
    (checkpoints / BEST).unlink()
    (checkpoints / BEST).symlink_to("0")
    as_if_killed(run)
    finish_stage(run, TRAIN, train)
    assert (checkpoints / LAST / "val_metrics.json").exists()
    assert_ends_alike(run, undisturbed[0])


def test_killed_while_the_only_epoch_is_validated_the_rerun_completes(data: Run, tmp_path: Path) -> None:
    run = copy_of(data, tmp_path, epochs=1)
    finish_stage(run, TRAIN, train)
    (checkpoints_of(run) / "0" / "val_metrics.json").unlink()
    (checkpoints_of(run) / BEST).unlink()
    as_if_killed(run)
    result = finish_stage(run, TRAIN, train)
    assert result.summary["best_epoch"] == 1
    assert (checkpoints_of(run) / BEST).readlink() == Path("0")


def test_killed_while_the_best_is_linked_the_rerun_links_it_again(
    undisturbed: tuple[Run, Result], tmp_path: Path
) -> None:
    """speculators removes the old link before it makes the new one."""
    run = copy_of(undisturbed[0], tmp_path)
    (checkpoints_of(run) / BEST).unlink()
    as_if_killed(run)
    finish_stage(run, TRAIN, train)
    assert_ends_alike(run, undisturbed[0])


# ---- checkpoints that cannot be trusted


@pytest.mark.parametrize("epoch", [EPOCHS - 1, 7])
def test_a_torn_checkpoint_is_put_aside_and_training_goes_on_from_the_good_one(
    undisturbed: tuple[Run, Result], tmp_path: Path, capsys: pytest.CaptureFixture[str], epoch: int
) -> None:
    run = copy_of(undisturbed[0], tmp_path)
    torn = checkpoints_of(run) / str(epoch)
    config = (checkpoints_of(run) / "0" / "config.json").read_bytes()
    shutil.rmtree(torn, ignore_errors=True)
    torn.mkdir()
    (torn / "config.json").write_bytes(config)
    as_if_killed(run)
    finish_stage(run, TRAIN, train)
    assert "not a whole checkpoint" in capsys.readouterr().out
    assert len(list(checkpoints_of(run).glob(f"torn-{epoch}-*"))) == 1
    assert_ends_alike(run, undisturbed[0])


def cut_100_bytes(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("spoil", [Path.unlink, empty, cut_100_bytes])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer_state_dict.pt"])
def test_a_checkpoint_with_a_file_missing_or_cut_short_is_put_aside(
    undisturbed: tuple[Run, Result], tmp_path: Path, name: str, spoil: Callable[[Path], None]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(checkpoints_of(undisturbed[0]), checkpoints, symlinks=True)
    assert put_aside_torn_checkpoints(checkpoints) == []
    spoil(checkpoints / LAST / name)
    (aside,) = put_aside_torn_checkpoints(checkpoints)
    assert aside.name.startswith(f"torn-{LAST}-")
    assert not (checkpoints / LAST).exists()
    assert (checkpoints / "0" / name).exists()


@pytest.mark.parametrize("finished", [True, False])
def test_a_checkpoint_being_replaced_when_killed_is_there_again(
    undisturbed: tuple[Run, Result], tmp_path: Path, finished: bool
) -> None:
    """Killed after the new one was renamed into place, or between the two renames."""
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(checkpoints_of(undisturbed[0]), checkpoints, symlinks=True)
    if finished:
        shutil.copytree(checkpoints / LAST, checkpoints / f".replaced-{LAST}")
    else:
        (checkpoints / LAST).rename(checkpoints / f".replaced-{LAST}")
    (checkpoints / ".saving" / LAST).mkdir(parents=True)
    assert put_aside_torn_checkpoints(checkpoints) == []
    assert sorted(path.name for path in checkpoints.iterdir()) == [*map(str, range(EPOCHS)), BEST]
    assert all((checkpoints / LAST / name).is_file() for name in CHECKPOINT_FILES)


def test_a_checkpoint_of_another_model_is_refused(undisturbed: tuple[Run, Result], tmp_path: Path) -> None:
    run = copy_of(undisturbed[0], tmp_path)
    path = checkpoints_of(run) / LAST / "model.safetensors"
    weights = load_file(path)
    for name in ("gate_proj", "up_proj"):
        key = f"layers.0.mlp.{name}.weight"
        weights[key] = weights[key].repeat(2, 1)
    save_file(weights, path, metadata={"format": "pt"})
    as_if_killed(run)
    with pytest.raises(PipelineError):
        finish_stage(run, TRAIN, train)


# ---- shards that will not do


def shard(run: Run, name: str) -> Path:
    return run.folder("02_hidden") / SHARDS / f"{name}.safetensors"


def rewrite(path: Path, *, tokens: int | None = None, layers: list[int] = LAYERS, shift: int = 0) -> None:
    """The shard with fewer tokens, of other layers, or of other token ids."""
    tensors = {name: tensor[:tokens].contiguous() for name, tensor in load_file(path).items()}
    tensors["token_ids"] = tensors["token_ids"] + shift
    save_file(tensors, path, metadata={"layer_ids": json.dumps(layers), "dtype": "bfloat16"})


def test_sound_shards_are_counted_by_split(data: Run) -> None:
    rows = datasets.load_from_disk(str(data.folder("02_hidden") / DATASET)).with_format(None)
    tokens = sum(len(row["input_ids"]) for row in rows if row["split"] == "train")
    found = check_dataset(data.folder("02_hidden") / DATASET, LAYERS)
    assert found == {"train": 46, "val": 4, "train_tokens": tokens}


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
    ],
)
def test_a_shard_that_will_not_do_is_refused_by_name(
    data: Run, tmp_path: Path, name: str, spoil: Callable[[Path], None]
) -> None:
    run = copy_of(data, tmp_path)
    spoil(shard(run, name))
    with pytest.raises(PipelineError, match=rf"{name}\.safetensors") as refused:
        check_dataset(run.folder("02_hidden") / DATASET, LAYERS)
    assert "02_extract_hidden.py" in str(refused.value)


def test_a_bad_shard_stops_the_stage_before_the_first_step(data: Run, tmp_path: Path) -> None:
    run = copy_of(data, tmp_path)
    for link in (run.folder("02_hidden") / DATASET / LINKS).iterdir():
        link.unlink()
    with pytest.raises(PipelineError, match="hs_0"):
        finish_stage(run, TRAIN, train)
    assert not checkpoints_of(run).exists()


@pytest.mark.filterwarnings("ignore:Loaded token ids")
@pytest.mark.parametrize("name", ["train-03", "val-1"])
def test_a_shard_of_other_token_ids_is_never_left_out_in_silence(data: Run, tmp_path: Path, name: str) -> None:
    run = copy_of(data, tmp_path, epochs=1)
    rewrite(shard(run, name), shift=1)
    with pytest.raises(PipelineError, match="shard"):
        finish_stage(run, TRAIN, train)


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
