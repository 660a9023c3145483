"""Several training processes, one a GPU: started here, or by torchrun (also on several nodes)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from eagle3_train.errors import PipelineError, Terminated
from eagle3_train.server import choose_port

# The signals after which a training saves and ends.
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAVING_S = 600.0  # patience with processes that save after a signal
_ENDING_S = 10.0  # and with the others once one of them has ended
_POLL_S = 0.1
_SAID = 3000  # characters of a failed process's log that are shown
_PR_SET_PDEATHSIG = 1
_joined: list[Place] = []


@dataclass(frozen=True)
class Place:
    """This process among all of a training.

    Attributes:
        host: a group for messages between hosts, so that asking whether to stop does not wait for a GPU.
        told_so_far: what was told.
    """

    rank: int
    ranks: int
    device: torch.device
    host: Any = None
    told_so_far: list[Any] = field(default_factory=list)

    @property
    def first(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any process; all must ask together."""
        if self.ranks == 1:
            return flag
        votes = torch.tensor([float(flag)])
        dist.all_reduce(votes, group=self.host)
        return bool(votes.item())

    def total(self, sums: dict[str, torch.Tensor]) -> dict[str, float]:
        """Each value summed over all processes."""
        if not sums:
            return {}
        stacked = torch.stack([value.detach().double() for value in sums.values()])
        if self.ranks > 1:
            dist.all_reduce(stacked)
        return dict(zip(sums, stacked.tolist(), strict=True))

    def told(self, message: Any) -> Any:
        """What the first process says, on every process."""
        box = [message]
        if self.ranks > 1:
            dist.broadcast_object_list(box, src=0, group=self.host)
        self.told_so_far.append(box[0])
        return box[0]

    def wait(self) -> None:
        """Until every process is here."""
        if self.ranks > 1:
            dist.barrier(group=self.host)


def under_torchrun() -> bool:
    """Whether this process is one of several already."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def place() -> Iterator[Place]:
    """Join the group that the environment names, or stand alone; inside another such block, the same place."""
    if _joined:
        yield _joined[0]
        return
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if ranks == 1:
        yield Place(rank, ranks, device)
        return
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    _joined.append(Place(rank, ranks, device, dist.new_group(backend="gloo")))
    try:
        yield _joined[0]
    finally:
        _joined.clear()
        # A process that fails must not wait for the others, which its end ends as well.
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


@contextmanager
def stop_requests(pass_on: Callable[[], None] | None = None) -> Iterator[list[BaseException]]:
    """Collects Ctrl-C, SIGTERM and SIGHUP instead of ending by them; each is also passed on, where asked for."""
    asked: list[BaseException] = []

    def note(number: int, _frame: object) -> None:
        asked.append(KeyboardInterrupt() if number == signal.SIGINT else Terminated())
        if pass_on is not None:
            pass_on()

    before = {number: signal.signal(number, note) for number in _STOP_SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start(command: Sequence[str], processes: int, log_folder: Path, variables: dict[str, str]) -> None:
    """Run `processes` copies of `command` as one group, with these environment variables, and wait for their end.

    A signal to this process is passed on; they save, then this raises it again. The end of one in error ends all, and
    so does the end of this process.

    Raises:
        PipelineError: one failed; with the end of what it said.
    """
    port = choose_port(None)
    logs = [log_folder / f"process_{rank}.log" for rank in range(processes)]
    running: list[subprocess.Popen] = []

    def end_all() -> None:
        for process in running:
            process.terminate()

    with stop_requests(end_all) as asked, _none_left(running):
        for rank, log in enumerate(logs):
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            environment = os.environ | variables | {name: str(value) for name, value in world.items()}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            # The first one speaks; a session of their own keeps Ctrl-C for this process, which passes it on.
            with log.open("wb") as errors:
                running.append(
                    subprocess.Popen(
                        command, env=environment, start_new_session=True, preexec_fn=_die_with_parent,  # noqa: PLW1509
                        stdout=None if rank == 0 else subprocess.DEVNULL, stderr=None if rank == 0 else errors,
                    )
                )  # fmt: skip
        if asked:  # while they were being started
            end_all()
        failed = _wait(running, asked)
    if asked:
        raise asked[0]
    if failed:
        raise PipelineError("\n".join(_failure(rank, running[rank].returncode, logs[rank]) for rank in failed))
    for log in logs:
        log.unlink()


@contextmanager
def _none_left(running: list[subprocess.Popen]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def _wait(running: list[subprocess.Popen], asked: list[BaseException]) -> list[int]:
    """Until all have ended, one has failed, or they take too long to save.

    Returns:
        Those that failed, the ones ended by a signal first: the others fail because they miss it.
    """
    deadline = float("inf")
    while any(process.poll() is None for process in running):
        ended = [process for process in running if process.poll()]
        if ended and not asked:
            break
        if asked:
            deadline = min(deadline, time.monotonic() + (_ENDING_S if ended else _SAVING_S))
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    failed = [rank for rank, process in enumerate(running) if process.poll()]
    return sorted(failed, key=lambda rank: running[rank].returncode > 0)


def _failure(rank: int, code: int, log: Path) -> str:
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    said = log.read_text(encoding="utf-8", errors="replace")[-_SAID:] if rank else "(what it said is above)"
    return f"training process {rank} {how}\n{said}".rstrip()


def _die_with_parent() -> None:
    # After kill -9 of the stage its rerun must be alone with the checkpoints.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
