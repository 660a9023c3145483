"""Small functions that a GPU runs as one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable)


def fused(function: Function) -> Function:
    """Compiled for any number of rows where there is a GPU; as it is on a CPU, where starting a compiler costs more."""
    return torch.compile(function, dynamic=True) if torch.cuda.is_available() else function
