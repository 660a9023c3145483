"""Stage 04 at a size that trains in a second: states that can be learnt, and processes that can be killed.

The verifier is the tiny one, the arithmetic float32 on one thread, so two trainings can be compared bit for bit. Each
last state is the verifier's head's own row of the token that follows, which is what a draft learns to foresee.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle3_train import verifier, vocabulary
from eagle3_train.checkpoints import Checkpoints
from eagle3_train.config import Config, Draft, Training, Verifier, Vocabulary
from eagle3_train.extraction import SHARDS, Sample
from eagle3_train.run import HIDDEN, PROMPTS, TRACES, VOCAB, Result, Run
from eagle3_train.training import CHECKPOINTS, METRICS, spec, train
from tests.fault_server import ROOT, finish_stage, no_work, rows_of, write_hidden

LAYERS = [2, 4, 5, 8]
HIDDEN_SIZE = 128
PACK_TOKENS = 48
_processes = multiprocessing.get_context("forkserver")


def sentence(start: int, count: int) -> list[int]:
    """Tokens 20 to 59, each followed by the same one every time."""
    return [20 + (start + 7 * place) % 40 for place in range(count)]


def samples() -> list[Sample]:
    """Lengths that no pack divides evenly, and one sample longer than a pack."""
    train_rows = [Sample(f"train-{n:02}", "train", [4, 9], sentence(n, 17 + n % 5)) for n in range(23)]
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


def new_run(folder: Path) -> Run:
    """A run that is done up to stage 03: about 13 packs an epoch, two of validation."""
    config = Config(
        verifier=Verifier(path="tiny", dtype="float32"),
        vocabulary=Vocabulary(draft_size=64),
        draft=Draft(
            num_attention_heads=4, num_key_value_heads=4, head_dim=32, intermediate_size=64, sliding_window=None
        ),
        training=Training(
            epochs=3, lr=4e-3, pack_tokens=PACK_TOKENS, dtype="float32", data_workers=0, ttt_steps=2, trackers=[]
        ),
    )
    run = Run(folder / "run", config)
    finish_stage(run, PROMPTS, no_work)
    finish_stage(run, TRACES, no_work)
    finish_stage(run, HIDDEN, lambda stage: write_hidden(stage, samples(), state_of, LAYERS))
    finish_stage(run, VOCAB, vocabulary.build)
    run.keep_config()
    return run


def copy_of(run: Run, folder: Path, draft: dict[str, Any] | None = None, **training: Any) -> Run:
    """A run directory of its own, with other settings where given."""
    shutil.copytree(run.path, folder / "run", symlinks=True)
    settings = run.config.training.model_copy(update=training)
    shape = run.config.draft.model_copy(update=draft or {})
    copy = Run(folder / "run", run.config.model_copy(update={"training": settings, "draft": shape}))
    copy.keep_config()
    return copy


def trained(run: Run) -> Result:
    """Stage 04 in this process, to its end."""
    return finish_stage(run, spec(run.config), train)


def shard(run: Run, name: str) -> Path:
    return run.folder("02_hidden") / SHARDS / f"{name}.safetensors"


def change_states(path: Path, change: Callable[[torch.Tensor], torch.Tensor | dict[str, torch.Tensor]]) -> None:
    """Write the shard again with other states."""
    tensors = load_file(path)
    changed = change(tensors["hidden_states"])
    tensors |= changed if isinstance(changed, dict) else {"hidden_states": changed}
    save_file(tensors, path, metadata={"layer_ids": json.dumps(LAYERS)})


# What a training left


def checkpoints_of(run: Run) -> Checkpoints:
    return Checkpoints(run.folder("04_train") / CHECKPOINTS, run.config.training.keep_checkpoints)


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    """Of the last checkpoint."""
    return load_file(checkpoints_of(run).whole()[-1].path / "model.safetensors")


def steps_of(run: Run) -> dict[int, tuple[float, float]]:
    """Step -> (loss, learning rate), the last time it was made."""
    rows = rows_of(run.folder("04_train") / METRICS)
    return {row["step"]: (row["train"]["loss"], row["lr"]) for row in rows if "train" in row}


def losses_of(run: Run) -> list[float]:
    return [loss for _, (loss, _) in sorted(steps_of(run).items())]


def validations_of(run: Run) -> dict[int, dict[str, float]]:
    return {row["step"]: row["val"] for row in rows_of(run.folder("04_train") / METRICS) if "val" in row}


def assert_ends_alike(run: Run, undisturbed: Run) -> None:
    """The same steps with the same losses, the same validations, and the same final weights, bit for bit."""
    assert steps_of(run) == steps_of(undisturbed)
    assert validations_of(run) == validations_of(undisturbed)
    ours, theirs = weights_of(run), weights_of(undisturbed)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    best, expected = checkpoints_of(run).best(), checkpoints_of(undisturbed).best()
    assert best is not None
    assert best.path.name == expected.path.name


# Processes


def _script(arguments: list[str], log: Path) -> None:
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    sys.argv = ["04_train.py", *arguments]
    runpy.run_path(str(ROOT / "04_train.py"), run_name="__main__")


@contextmanager
def script(run: Run, *arguments: str) -> Iterator[BaseProcess]:
    """04_train.py in a process of its own; started from one that has imported the libraries already.

    What it says goes to `output_of(run)`.
    """
    _processes.set_forkserver_preload(["eagle3_train.training_loop", "speculators.train.cli", "tests.small_training"])
    process = _processes.Process(target=_script, args=(["--run", str(run.path), *arguments], run.path / "output.log"))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def output_of(run: Run) -> str:
    return (run.path / "output.log").read_text()


def wait_for_steps(run: Run, process: BaseProcess, count: int, timeout_s: float = 120) -> None:
    """Until step `count` is in the metrics, however often it was made before."""
    metrics = run.folder("04_train") / METRICS
    wanted = f'"step": {count},'.encode()
    deadline = time.monotonic() + timeout_s
    while not metrics.exists() or wanted not in metrics.read_bytes():
        assert process.is_alive(), output_of(run)
        assert time.monotonic() < deadline, f"step {count} not made within {timeout_s} s"
        time.sleep(0.002)


def ended(process: BaseProcess, timeout_s: float = 60) -> int:
    """The exit code, negative for a signal."""
    process.join(timeout_s)
    assert process.exitcode is not None, f"still running after {timeout_s} s"
    return process.exitcode
