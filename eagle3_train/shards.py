"""Reads captured states from disk straight into the memory of a pack, in a few threads ahead of the trainer.

A token of Kimi-K2.5 is 57 KB, so a GPU at 40,000 tokens a second asks for 2.3 GB/s: each byte is moved once, from the
file into (pinned) memory, and once more to the GPU.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eagle3_train.errors import PipelineError
from eagle3_train.extraction import LINKS
from eagle3_train.packs import Pack, lay_out, rows_kept

STATES = "hidden_states"
PACKS_AHEAD = 2  # besides the one that each thread is reading
# https://github.com/huggingface/safetensors: 8 bytes length, a JSON header, then the data.
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class _Stored:
    """A tensor in a safetensors file."""

    dtype: torch.dtype
    shape: list[int]
    start: int


class Shards:
    """The rows `first` to `first + count` of a data set in speculators' format, read as packs.

    Args:
        whole: see `lay_out`.
        pinned: read into pinned memory, from which copies to a GPU run beside its work.
    """

    def __init__(
        self, dataset: Path, first: int, count: int, *, pack_tokens: int, ttt_steps: int, whole: bool, pinned: bool
    ):
        import datasets

        table = datasets.load_from_disk(str(dataset)).with_format(None)
        self._rows = table.select(range(first, first + count))
        self._dataset, self._first, self._pinned = dataset, first, pinned
        self._pack_tokens = pack_tokens
        self._lay_out = partial(lay_out, pack_tokens=pack_tokens, ttt_steps=ttt_steps, whole=whole)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return list(self._rows["seq_len"])

    def pack(self, rows: Sequence[int]) -> Pack:
        """The pack of these rows.

        Raises:
            PipelineError: a shard is not what it was when the stage began, or of another type than its neighbours.
        """
        from hs_connectors.fp8_utils import SCALES_KEY

        samples = self._rows.select_columns(["input_ids", "loss_mask"])[list(rows)]
        ids = [torch.tensor(sample) for sample in samples["input_ids"]]
        masks = [torch.tensor(mask) for mask in samples["loss_mask"]]
        kept = rows_kept([len(sample) for sample in ids], self._pack_tokens)
        states: torch.Tensor | None = None
        scales: torch.Tensor | None = None
        place = 0
        for row, length in zip(rows, kept, strict=True):
            path = self._dataset / LINKS / f"hs_{self._first + row}.safetensors"
            try:
                with path.open("rb", buffering=0) as file:
                    stored = _header(file)
                    found = stored[STATES]
                    if states is None:
                        shape = (sum(kept), *found.shape[1:])
                        states = torch.empty(shape, dtype=found.dtype, pin_memory=self._pinned)
                        if SCALES_KEY in stored:
                            scales = torch.empty(sum(kept), 1, 1, pin_memory=self._pinned)
                    if (
                        found.dtype != states.dtype
                        or found.shape[0] < length
                        or found.shape[1:] != list(states.shape[1:])
                    ):
                        raise ValueError(f"{found.dtype} {found.shape}")
                    _read(file, found, states[place : place + length])
                    if scales is not None:
                        _read(file, stored[SCALES_KEY], scales[place : place + length])
            except (OSError, ValueError, KeyError) as error:
                raise PipelineError(f"{path.resolve()}: this shard changed while training ({error})") from None
            place += length
        assert states is not None
        return self._lay_out(ids, masks, states, scales)

    def packs(self, order: Sequence[Sequence[int]], threads: int) -> Iterator[Pack]:
        """Every pack of `order`, in order, read ahead by so many threads; 0 reads when asked."""
        if not threads:
            yield from map(self.pack, order)
            return
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        pool = ThreadPoolExecutor(threads, "shards", initializer=_use_device, initargs=(device,))
        waiting: deque[Future[Pack]] = deque()
        try:
            for rows in order:
                waiting.append(pool.submit(self.pack, rows))
                if len(waiting) >= threads + PACKS_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _use_device(device: int | None) -> None:
    # A new thread would pin its memory through GPU 0.
    if device is not None:
        torch.cuda.set_device(device)


def _header(file: Any) -> dict[str, _Stored]:
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
    return {
        name: _Stored(_DTYPES[entry["dtype"]], entry["shape"], 8 + size + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] in _DTYPES
    }


def _read(file: Any, stored: _Stored, into: torch.Tensor) -> None:
    """The first rows of a stored tensor, as many as `into` has."""
    room = memoryview(into.view(torch.uint8).numpy()).cast("B")
    start = stored.start
    while room:
        count = os.preadv(file.fileno(), [room], start)
        if not count:
            raise ValueError("cut short")
        room, start = room[count:], start + count
