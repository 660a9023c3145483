"""Contract of several training processes: the loss curve of one, however many they are, and no more left than one.

Real processes over gloo, each with the libraries to import: the cases are few and long.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle3_train import training_loop
from eagle3_train.distributed import start, under_torchrun
from eagle3_train.errors import PipelineError, Terminated
from eagle3_train.packs import Order
from eagle3_train.run import MANIFEST, Run
from eagle3_train.server import choose_port
from tests.fault_server import ROOT
from tests.small_training import (
    checkpoints_of,
    copy_of,
    ended,
    losses_of,
    new_run,
    output_of,
    script,
    trained,
    validations_of,
    wait_for_steps,
)

# 13 packs an epoch: two steps of five and one of three, so that of 2 and of 4 processes some have none of their own.
BATCH, STEPS = 5, 9
pytestmark = pytest.mark.filterwarnings("ignore:.*longer than batch_max_length")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = new_run(tmp_path_factory.mktemp("data"))
    return copy_of(run, tmp_path_factory.mktemp("batches"), batch_size=BATCH, checkpoint_steps=2)


@pytest.fixture(scope="module")
def alone(data: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What one process makes of it."""
    run = copy_of(data, tmp_path_factory.mktemp("alone"), processes=1)
    trained(run)
    assert len(losses_of(run)) == STEPS
    return run


def assert_same_curve(run: Run, alone: Run, tolerance: float = 1e-5) -> None:
    assert losses_of(run) == pytest.approx(losses_of(alone), rel=tolerance)
    ours, theirs = validations_of(run), validations_of(alone)
    assert list(ours) == list(theirs)
    for step, metrics in ours.items():
        assert metrics == pytest.approx(theirs[step], rel=tolerance)


def again_with(run: Run, processes: int) -> Run:
    """The same run directory, gone on with by another number of processes."""
    training = run.config.training.model_copy(update={"processes": processes})
    again = Run(run.path, run.config.model_copy(update={"training": training}))
    again.keep_config()
    return again


def workers_of(process_id: int | None) -> list[int]:
    """Process ids of its training processes, by rank."""
    children = Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()
    ranks = {}
    for child in children:
        if rank := re.search(rb"\0RANK=(\d+)\0", Path(f"/proc/{child}/environ").read_bytes()):
            ranks[int(rank[1])] = int(child)
    return [ranks[rank] for rank in sorted(ranks)]


def test_two_processes_make_the_curve_of_one_and_a_stop_is_gone_on_from_by_four(
    data: Run, alone: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = copy_of(data, tmp_path, processes=2)
    with script(run) as process:
        wait_for_steps(run, process, 3)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        assert ended(process) == 143, output_of(run)
    made = len(losses_of(run))
    assert 3 <= made < STEPS
    assert checkpoints_of(run).whole()[-1].step == made
    assert losses_of(run) == pytest.approx(losses_of(alone)[:made], rel=1e-5)
    # Two packs validate, so two of the four have none.
    trained(again_with(run, 4))
    assert f"going on after step {made} of {STEPS}" in capfd.readouterr().out
    assert_same_curve(run, alone)
    assert list(run.folder("04_train").glob("process_*.log")) == []


def test_kill_9_of_the_stage_leaves_no_process_behind(data: Run, tmp_path: Path) -> None:
    """Else its rerun would write the same checkpoints as they do."""
    run = copy_of(data, tmp_path, processes=2, epochs=400)
    with script(run) as process:
        wait_for_steps(run, process, 3)
        workers = workers_of(process.pid)
        assert len(workers) == 2
        process.kill()
        ended(process)
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "a training process outlived its stage"
        time.sleep(0.05)


def test_a_process_that_is_killed_ends_all_and_is_named(data: Run, tmp_path: Path) -> None:
    run = copy_of(data, tmp_path, processes=2, epochs=60)
    with script(run) as process:
        wait_for_steps(run, process, 2)
        workers = workers_of(process.pid)
        os.kill(workers[1], signal.SIGKILL)
        assert ended(process) == 1
    said = output_of(run)
    assert "04_train.py: training process 1 was ended by SIGKILL" in said
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def test_torchrun_makes_the_curve_of_one_and_says_so_the_second_time(data: Run, alone: Run, tmp_path: Path) -> None:
    run = copy_of(data, tmp_path)

    def torchrun() -> str:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-port", str(choose_port(None)), "--", "04_train.py", "--run", str(run.path)),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    assert f"{STEPS} steps; best at step" in torchrun()
    assert_same_curve(run, alone)
    before = (run.folder("04_train") / MANIFEST).read_bytes()
    assert "04_train: done already" in torchrun()
    assert (run.folder("04_train") / MANIFEST).read_bytes() == before


def test_gradients_exchanged_in_bfloat16_give_nearly_the_same(data: Run, alone: Run, tmp_path: Path) -> None:
    run = copy_of(data, tmp_path, processes=2, gradients="bfloat16")
    trained(run)
    assert losses_of(run)[0] == pytest.approx(losses_of(alone)[0], rel=1e-5)  # nothing exchanged yet
    assert losses_of(run) == pytest.approx(losses_of(alone), rel=0.02)
    assert losses_of(run) != pytest.approx(losses_of(alone), rel=1e-5)


def test_gradients_are_averaged_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of a gradient is nothing that AdamW shows."""
    sent: list[torch.dtype] = []

    def beside_an_equal(tensor: torch.Tensor, async_op: bool) -> SimpleNamespace:
        sent.append(tensor.dtype)
        done: torch.futures.Future = torch.futures.Future()
        done.set_result([tensor.mul_(2)])
        return SimpleNamespace(get_future=lambda: done)

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", beside_an_equal)
    gradients = torch.tensor([1.0, -3.5, 0.001, 1e-30])
    bucket: Any = SimpleNamespace(buffer=lambda: gradients)
    averaged = training_loop._mean_in_bfloat16(bucket).wait()
    assert averaged is gradients
    assert sent == [torch.bfloat16]
    assert gradients.tolist() == pytest.approx([1.0, -3.5, 0.001, 1e-30], rel=2**-8)


# ---- who takes which packs


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("first_step", [0, 2])
def test_all_ranks_together_take_every_pack_of_a_step_once_at_its_share(ranks: int, first_step: int) -> None:
    sizes = [5, 5, 3, 1, 4]
    numbers = iter(range(100))
    steps = [[[next(numbers)] for _ in range(size)] for size in sizes]
    plan = Order(steps, [len(steps)])
    taken = [plan.of_rank(rank, ranks, first_step) for rank in range(ranks)]
    for place, packs in enumerate(steps[first_step:]):
        shares: dict[int, float] = {}
        for own, weights in taken:
            rounds = len(weights[place])
            assert rounds == -(-len(packs) // ranks), "the ranks would wait for each other"
            start = sum(len(of_step) for of_step in weights[:place])
            for (row,), weight in zip(own[start : start + rounds], weights[place], strict=True):
                shares[row] = shares.get(row, 0) + weight
        assert shares == pytest.approx({row: 1 / len(packs) for (row,) in packs})


# ---- processes of any kind


def ranks(folder: Path, code: str, processes: int = 2) -> None:
    """Start copies of a script that knows its rank."""
    start([sys.executable, "-c", f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{code}"],
          processes, folder, {"TOLD": "this"})  # fmt: skip


def test_each_process_knows_its_place_and_what_it_was_told(tmp_path: Path) -> None:
    code = (
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'TOLD')\n"
        f"open(f'{tmp_path}/place_{{rank}}', 'w').write(' '.join(os.environ[n] for n in names))"
    )
    ranks(tmp_path, code, 3)
    found = sorted(path.read_text() for path in tmp_path.glob("place_*"))
    assert found == [f"{rank} {rank} 3 3 127.0.0.1 this" for rank in range(3)]
    assert list(tmp_path.glob("*.log")) == []
    assert not under_torchrun()


def test_one_that_fails_is_named_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"training process 1 failed with exit code 1\nno such GPU"):
        ranks(tmp_path, "sys.exit('no such GPU') if rank else time.sleep(600)")


def test_the_one_that_was_killed_is_named_before_those_that_missed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3_train.distributed._POLL_S", 2.0)  # both have ended by the second look
    with pytest.raises(PipelineError, match=r"^training process 1 was ended by SIGKILL\ntraining process 0 failed"):
        ranks(
            tmp_path,
            "time.sleep(0.5)\nos.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(0.5)\n"
            "sys.exit('connection lost')",
        )


@pytest.mark.parametrize(("sent", "raised"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_is_passed_on_and_they_may_save(
    tmp_path: Path, sent: signal.Signals, raised: type[BaseException]
) -> None:
    code = (
        f"signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), open(f'{tmp_path}/saved_{{rank}}', 'w'), "
        "sys.exit(143)))\n"
        "os.kill(os.getppid(), %d) if rank else None\ntime.sleep(600)" % sent
    )
    with pytest.raises(raised):
        ranks(tmp_path, code)
    assert (tmp_path / "saved_0").exists()
    assert (tmp_path / "saved_1").exists()


def test_one_that_cannot_end_does_not_keep_the_others_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process that waits in a library for one that was stopped before it came so far."""
    monkeypatch.setattr("eagle3_train.distributed._ENDING_S", 1.0)
    code = (
        "signal.signal(signal.SIGTERM, signal.SIG_DFL if rank else signal.SIG_IGN)\n"
        "time.sleep(1); os.kill(os.getppid(), signal.SIGTERM) if rank else None\ntime.sleep(600)"
    )
    started = time.monotonic()
    with pytest.raises(Terminated):
        ranks(tmp_path, code)
    assert time.monotonic() - started < 60
