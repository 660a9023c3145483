"""The project's connector with a clock in it: what it takes in the engine's thread and in the writers'.

Loaded by vLLM through `kv_connector_module_path`. For each file two lines are appended to the file that `times` in
`kv_connector_extra_config` names: `submit_s` in the engine's thread, where the copy is started; then `wait_s` of a
writer for the copy, `write_s` for conversion, write, flush and rename, and the file's `tokens`; each with `ended`
[s of CLOCK_MONOTONIC].
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from eagle3_train.connector import Eagle3HiddenStatesConnector


class TimedConnector(Eagle3HiddenStatesConnector):
    """Eagle3HiddenStatesConnector that writes down what each file took."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        times = self._kv_transfer_config.get_from_extra_config("times", None)
        # Appended in one write each, so that the scheduler's instance and eight writers do not mix their lines.
        self._times = os.open(times, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def _submit_async_write(self, pending: Any) -> None:
        started = time.monotonic()
        super()._submit_async_write(pending)
        self._note(submit_s=time.monotonic() - started, ended=time.monotonic())

    def _write_tensors(self, tensors: Any, event: Any, filename: str, lock_fd: int | None) -> None:  # type: ignore[override]
        started = time.monotonic()
        event.synchronize()
        waited = time.monotonic() - started
        super()._write_tensors(tensors, event, filename, lock_fd)
        ended = time.monotonic()
        self._note(wait_s=waited, write_s=ended - started - waited, ended=ended, tokens=len(tensors["token_ids"]))

    def _note(self, **times: float) -> None:
        os.write(self._times, (json.dumps(times) + "\n").encode())
