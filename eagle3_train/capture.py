"""A sample's states, from a server with our connector to a checked file: what stages 01b and 02 share.

A server writes into a staging folder and names the file in its answer. The file is waited for (its `.lock`), checked,
and moved to where it belongs; only then is there a row of it in an index.

Shapes: T tokens, L captured layers, D hidden size.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_train import server as vllm
from eagle3_train import verifier
from eagle3_train.asking import SetAside, post, session
from eagle3_train.config import FLOAT8, Config
from eagle3_train.errors import PipelineError

if TYPE_CHECKING:
    import torch

STAGING = "staging"
# Room left on the disk for everything else.
DISK_RESERVE_BYTES = 1 << 30
_BYTES = {"bfloat16": 2, "float32": 4, FLOAT8: 1}
_SCALE_BYTES = {FLOAT8: 4}
_LONGEST_LOCK_POLL_S = 0.02
_DISK_FULL = ("No space left", "os error 28", "Errno 28", "StorageFull", "quota")
# The typical size of a token's state (root of the mean square). Below the root of RMSNorm's epsilon the norm no longer
# normalises, which no trained network lives on; above 1e4 two neighbouring bf16 values are 64 apart, and what a layer
# adds to the residual stream would be lost. Single tokens (the first, delimiters) go far beyond, so the median counts.
_LARGEST_RMS = 1e4
_VALUES_AT_ONCE = 1 << 22


class DiskFull(PipelineError):
    """The disk has no room for the next sample; what is whole is kept."""


@dataclass(frozen=True)
class Sample:
    """One trace as it is trained on: prompt and output ids, the output alone supervised."""

    id: str
    split: str
    prompt_ids: list[int]
    output_ids: list[int]

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    @property
    def loss_mask(self) -> list[int]:
        return [0] * len(self.prompt_ids) + [1] * len(self.output_ids)

    @property
    def digest(self) -> str:
        """Of the token ids: a shard belongs to these and no others."""
        return digest_of(self.token_ids)


def sample_of(trace: dict[str, Any], split: str) -> Sample:
    """A trace as it is trained on: without its last token, of which a server that generates has no state."""
    return Sample(trace["id"], split, trace["prompt_token_ids"], trace["output_token_ids"][:-1])


def digest_of(token_ids: list[int]) -> str:
    """Sixteen characters that tell token ids apart."""
    return hashlib.sha256(json.dumps(token_ids).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Expected:
    """What every file of a run must be.

    Attributes:
        layer_ids: ascending, the last layer's output among them.
        hidden_size: of one layer's state.
        storage_dtype: `extraction.storage_dtype`.
        verifier: its fingerprint; empty when it is not on this machine.
        smallest_rms: typical size below which a layer's states are no states.
    """

    layer_ids: list[int]
    hidden_size: int
    storage_dtype: str
    verifier: str
    smallest_rms: float

    @classmethod
    def of(cls, config: Config) -> Expected:
        """As the configuration and the verifier's files say."""
        sizes = verifier.text_config(config.verifier)
        return cls(
            verifier.captured_layer_ids(config.verifier),
            sizes.hidden_size,
            config.extraction.storage_dtype,
            verifier.fingerprint(config.verifier) or "",
            math.sqrt(sizes.rms_norm_eps),
        )

    @property
    def token_bytes(self) -> int:
        """Bytes on disk for one token."""
        return _token_bytes(len(self.layer_ids) * self.hidden_size, self.storage_dtype)


def token_bytes(config: Config) -> int:
    """Bytes on disk for one token of a run's states: every captured layer in the storage type, and its scale."""
    layers = len(verifier.captured_layer_ids(config.verifier))
    return _token_bytes(layers * verifier.text_config(config.verifier).hidden_size, config.extraction.storage_dtype)


def _token_bytes(values: int, storage_dtype: str) -> int:
    return values * _BYTES[storage_dtype] + _SCALE_BYTES.get(storage_dtype, 0)


# The disk ------------------------------------------------------------------------------------------------------------


class Room:
    """The space on the disk of `folder`, asked for before each sample is."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._promised = 0

    def check(self, nbytes: int) -> None:
        """Whether `nbytes` more fit beside what is promised already.

        Raises:
            DiskFull: they do not.
        """
        free = shutil.disk_usage(self._folder).free
        need = self._promised + nbytes + DISK_RESERVE_BYTES
        if need > free:
            raise DiskFull(
                f"{self._folder} has {free / 2**30:.2f} GiB free, and what comes next needs {need / 2**30:.2f} GiB "
                f"({DISK_RESERVE_BYTES / 2**30:.0f} GiB of it kept for everything else). What is whole is kept; make "
                "room, then run the same command again"
            )

    @contextlib.contextmanager
    def promised(self, nbytes: int) -> Iterator[None]:
        """Keep `nbytes` for a file that is being made."""
        self.check(nbytes)
        self._promised += nbytes
        try:
            yield
        finally:
            self._promised -= nbytes


@contextlib.contextmanager
def disk_full_is_no_crash(folder: Path) -> Iterator[None]:
    """Turn an ENOSPC of our own writing into a message; what was appended or written half is cut off at the next start.

    Raises:
        DiskFull: in place of the OSError.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull(
            f"{folder}: {error.strerror}. What is whole is kept; make room, then run the same command again"
        ) from None


def fresh_staging(folder: Path, target: Path) -> Path:
    """An empty staging folder in `folder`, from which files are renamed into `target`; what was left there is gone.

    Raises:
        PipelineError: the two lie on different file systems, where a file would be copied, not renamed.
    """
    staging = folder / STAGING
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(exist_ok=True)
    target.mkdir(exist_ok=True)
    check_same_file_system(staging, target)
    return staging.resolve()


def check_same_file_system(source: Path, target: Path) -> None:
    """Refuse to move files where a rename cannot.

    Raises:
        PipelineError: the two folders lie on different file systems.
    """
    if source.stat().st_dev != target.stat().st_dev:
        raise PipelineError(
            f"{source} and {target} lie on different file systems, so a file would not appear at once and whole; "
            "put the whole run on one"
        )


# One file ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StatesFile:
    """What a file of states holds.

    Attributes:
        states: [T, L, D] in the type they are kept in.
        scales: [T, 1, 1] float32, of float8 states alone.
        token_ids: [T] int64.
        header: the file's.
    """

    states: torch.Tensor
    scales: torch.Tensor | None
    token_ids: torch.Tensor
    header: dict[str, str]

    @property
    def kept_in(self) -> str:
        """The states' type, as `extraction.storage_dtype` names it."""
        return str(self.states.dtype).removeprefix("torch.").removesuffix("fn")

    def restored(self) -> torch.Tensor:
        """The states [T, L, D]; float8 ones with their scales applied, in float32."""
        return self._scaled(self.states, self.scales)

    def last_layer(self) -> torch.Tensor:
        """The last layer's states [T, D], as `restored`."""
        return self._scaled(self.states[:, -1:], self.scales)[:, 0]

    def sizes(self) -> torch.Tensor:
        """[T, L] float32: the root of the mean square of each state."""
        import torch

        # Some rows at a time: in float32 a whole sample is gigabytes, and several are checked at once. Not few, for
        # each step waits for the interpreter's lock.
        _, layers, hidden_size = self.states.shape
        rows = max(1, _VALUES_AT_ONCE // (layers * hidden_size))
        parts = [torch.linalg.vector_norm(part.float(), dim=-1) for part in self.states.split(rows)]
        sizes_TL = torch.cat(parts) / math.sqrt(hidden_size)
        return sizes_TL if self.scales is None else sizes_TL * self.scales[:, :, 0]

    @staticmethod
    def _scaled(states: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        import torch
        from hs_connectors.fp8_utils import dequantize_fp8_tensor

        return states if scales is None else dequantize_fp8_tensor(states, scales, torch.float32)


def read_states(path: Path) -> StatesFile:
    """A file of states as it was written.

    Raises:
        SetAside: not a whole file of states.
    """
    from hs_connectors.fp8_utils import SCALES_KEY
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as tensors:
            states = tensors.get_tensor("hidden_states")
            scales = tensors.get_tensor(SCALES_KEY) if states.itemsize == 1 else None
            return StatesFile(states, scales, tensors.get_tensor("token_ids"), tensors.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise SetAside("not a whole safetensors file", str(error)) from None


def check_header(header: dict[str, str], expected: Expected) -> None:
    """Whether a file is of this verifier, these layers and this type.

    Raises:
        PipelineError: it is not, and no other file of that server will be.
    """
    layers = json.loads(header.get("layer_ids", "[]"))
    if layers != expected.layer_ids:
        raise PipelineError(f"the server captured layers {layers}, asked were {expected.layer_ids}")
    for name, wanted in (("dtype", expected.storage_dtype), ("verifier", expected.verifier)):
        if header.get(name) != wanted:
            raise PipelineError(f"the server's files are of {name} {header.get(name)}, asked was {wanted}")


def check_file(
    captured: Path, token_ids: list[int], expected: Expected, further: Callable[[StatesFile], None] | None = None
) -> str:
    """SHA-256 of a captured file, after every check, and a `further` one.

    Raises:
        SetAside: not written, cut short, or not sound.
        DiskFull: not written for want of space.
        PipelineError: captured from other layers, of another verifier or in another type than asked.
    """
    failed = captured.with_name(captured.name + ".error")
    if failed.exists() or not captured.exists():
        raise _not_written(captured, failed, len(token_ids) * expected.token_bytes)
    held = read_states(captured)
    check_header(held.header, expected)
    if held.kept_in != expected.storage_dtype:
        raise SetAside(f"states kept in {held.kept_in}, and the header says {expected.storage_dtype}")
    if held.states.ndim == 3 and held.states.shape[1] != len(expected.layer_ids):
        raise PipelineError(
            f"{held.states.shape[1]} layers where {len(expected.layer_ids)} were asked: this vLLM is too old for this "
            "verifier"
        )
    check_states(held, token_ids, expected)
    if further is not None:
        further(held)
    with captured.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _not_written(captured: Path, failed: Path, nbytes: int) -> SetAside | DiskFull:
    words = failed.read_text(encoding="utf-8", errors="replace") if failed.exists() else ""
    free = shutil.disk_usage(captured.parent).free
    # On a full disk the reason itself may not have found room.
    if any(sign in words for sign in _DISK_FULL) or free < nbytes:
        return DiskFull(
            f"the server could not write {captured.name}: {words[:300] or 'no space left'} ({free / 2**30:.2f} GiB "
            f"are free in {captured.parent}). What is whole is kept; make room, then run the same command again"
        )
    if failed.exists():
        return SetAside("the server could not write the file", words[:300])
    return SetAside("the server released the lock without a file")


def check_states(held: StatesFile, token_ids: list[int], expected: Expected) -> None:
    """What must hold of one sample's states before it counts as done.

    Raises:
        SetAside: naming the layer.
    """
    import torch

    layer_ids, states = expected.layer_ids, held.states
    if held.token_ids.tolist() != token_ids:
        raise SetAside("the states are of other token ids")
    shape = [len(token_ids), len(layer_ids), expected.hidden_size]
    if list(states.shape) != shape:
        raise SetAside(f"states of shape {list(states.shape)}, expected {shape}")
    if held.scales is not None:
        if list(held.scales.shape) != [len(token_ids), 1, 1]:
            raise SetAside(f"scales of shape {list(held.scales.shape)}, expected {[len(token_ids), 1, 1]}")
        states = states.view(torch.uint8)  # torch compares no float8; a token's scale holds for all its layers
    for position, (layer, size_T) in enumerate(zip(layer_ids, held.sizes().unbind(1), strict=True)):
        if not size_T.isfinite().all():
            raise SetAside(f"a NaN or infinity in layer {layer}")
        if (size_T == 0).any():
            raise SetAside(f"a token whose state is all zero in layer {layer}")
        if not expected.smallest_rms <= (typical := size_T.median().item()) <= _LARGEST_RMS:
            raise SetAside(
                f"states of an implausible size in layer {layer}: {typical:.3g} (root mean square of the median "
                f"token), expected {expected.smallest_rms:.3g} to {_LARGEST_RMS:.0e}"
            )
        if position and torch.equal(states[:, position], states[:, position - 1]):
            raise SetAside(f"layers {layer_ids[position - 1]} and {layer} hold the same states")
        if len(set(token_ids)) > 1 and torch.equal(states[1:, position], states[:-1, position]):
            raise SetAside(f"every token has the same state in layer {layer}")


async def wait_for_writer(captured: Path, timeout_s: float) -> None:
    """Until the connector has released the file's lock.

    Raises:
        SetAside: it never did, or there is no lock.
    """
    deadline, pause = time.monotonic() + timeout_s, 0.001
    try:
        lock = os.open(captured.with_name(captured.name + ".lock"), os.O_RDONLY)
    except FileNotFoundError:
        raise SetAside("the server made no lock for the file it named", captured.name) from None
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SetAside(f"the file was not written within {timeout_s:.0f} s") from None
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_LOCK_POLL_S)
    finally:
        os.close(lock)


# One server ----------------------------------------------------------------------------------------------------------


def _one_torch_thread() -> None:
    import torch

    torch.set_num_threads(1)


@dataclass(frozen=True)
class Captured:
    """States that were looked at and not kept.

    Attributes:
        states: [T, L, D] as stored (float8 already with its scales, in float32).
        log_probs: [T - 1] float32, the server's own of each token after the first; None when not asked for.
        header: the file's.
    """

    states: torch.Tensor
    log_probs: torch.Tensor | None
    header: dict[str, str]


class Capturer:
    """Asks one server for states and takes its files over; used inside `async with`.

    Args:
        server: started with `server.extraction_args`.
        staging: where it writes, resolved.
        expected: what its files must be.
        timeout_s: patience with a request, and with its file.
    """

    def __init__(self, server: vllm.Server, staging: Path, expected: Expected, timeout_s: float):
        self.expected = expected
        self._server, self._staging, self._timeout_s = server, staging, timeout_s
        # Reading and hashing release the interpreter's lock; the event loop only asks and waits.
        # Each of its threads is one of torch's: more of them would take the cores from each other and from the engine.
        self._pool = ThreadPoolExecutor(min(16, os.cpu_count() or 1), "states", _one_torch_thread)

    async def __aenter__(self) -> Capturer:
        self._client = session(self._server, connect_timeout_s=10)
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._client.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def prefill(self, token_ids: list[int], name: str, *, log_probs: bool = False) -> dict[str, Any]:
        """The server's answer to `token_ids`, whose states it saves; `name` is the request's in the server's log.

        Raises:
            SetAside: no answer.
        """
        import aiohttp

        body = {"model": self._server.model, "prompt": token_ids, "max_tokens": 1, "temperature": 0, "request_id": name}
        if log_probs:
            body["prompt_logprobs"] = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                status, _, content = await post(self._client, f"{self._server.base_url}/completions", body)
            answer = json.loads(content)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            self._server.check_alive()
            raise SetAside("no answer from the server", str(error)[:500] or type(error).__name__) from None
        if status != 200:
            raise SetAside(f"HTTP {status}", content.decode("utf-8", "replace")[:500])
        return dict(answer)

    def named(self, answer: dict[str, Any]) -> Path:
        """The file that an answer names.

        Raises:
            PipelineError: none, or one outside the staging folder.
        """
        named = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
        if named is None:
            raise PipelineError("the server saves no hidden states; its connector did not load. See the server's log")
        captured = Path(named)
        if captured.parent != self._staging:
            raise PipelineError(f"the server names {captured}, outside its staging folder {self._staging}")
        return captured

    async def keep(
        self,
        answer: dict[str, Any],
        sample: Sample,
        folder: Path,
        further: Callable[[StatesFile], None] | None = None,
    ) -> dict[str, Any]:
        """Move the file of an answer to `folder` once it is checked; returns its row for an index.

        Raises:
            SetAside, DiskFull, PipelineError: as `check_file`; the file stays in staging.
        """
        captured = self.named(answer)
        await wait_for_writer(captured, self._timeout_s)
        return dict(await self._in_thread(self._check_and_move, captured, sample, folder, further))

    def _check_and_move(self, captured: Path, sample: Sample, folder: Path, further: Any) -> dict[str, Any]:
        token_ids = sample.token_ids
        digest = check_file(captured, token_ids, self.expected, further)
        size = captured.stat().st_size
        os.replace(captured, folder / f"{sample.id}.safetensors")
        captured.with_name(captured.name + ".lock").unlink(missing_ok=True)
        return {"id": sample.id, "ids": digest_of(token_ids), "tokens": len(token_ids), "bytes": size, "sha256": digest}

    async def look(self, answer: dict[str, Any], token_ids: list[int]) -> Captured:
        """The checked states of an answer, whose file is removed.

        Raises:
            SetAside, DiskFull, PipelineError: as `check_file`.
        """
        captured = self.named(answer)
        await wait_for_writer(captured, self._timeout_s)
        await self._in_thread(check_file, captured, token_ids, self.expected)
        held = await self._in_thread(read_states, captured)
        self._remove(captured)
        return Captured(held.restored(), _prompt_log_probs(answer, token_ids), held.header)

    async def discard(self, answer: dict[str, Any]) -> None:
        """Remove the file of an answer that nobody needs."""
        captured = self.named(answer)
        with contextlib.suppress(SetAside):
            await wait_for_writer(captured, self._timeout_s)
        self._remove(captured)

    @staticmethod
    def _remove(captured: Path) -> None:
        for suffix in ("", ".lock", ".error"):
            captured.with_name(captured.name + suffix).unlink(missing_ok=True)

    async def _in_thread(self, work: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)


def _prompt_log_probs(answer: dict[str, Any], token_ids: list[int]) -> torch.Tensor | None:
    import torch

    listed = answer["choices"][0].get("prompt_logprobs")
    if not listed:
        return None
    said = [listed[place][str(token_ids[place])]["logprob"] for place in range(1, len(token_ids))]
    return torch.tensor(said)
