"""One look for every progress bar: rate and ETA, and quiet lines when the output is a file."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

_TERMINAL_INTERVAL_S = 0.5
_FILE_INTERVAL_S = 15.0


def bar(iterable: Iterable[Any] | None = None, **options: Any) -> tqdm:
    """A tqdm bar that redraws twice a second on a terminal and four times a minute in a log file."""
    interval = _TERMINAL_INTERVAL_S if sys.stderr.isatty() else _FILE_INTERVAL_S
    return tqdm(iterable, mininterval=interval, maxinterval=interval, dynamic_ncols=True, smoothing=0.1, **options)
