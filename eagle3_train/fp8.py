"""Matrix products of a training step in fp8: every row of both factors scaled on its own (e4m3 throughout).

The arithmetic of torchao's "rowwise" recipe (DeepSeek-V3, arXiv 2412.19437, uses finer scales), with the weights
quantised once for all TTT steps of a pack. Master weights and gradients stay in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eagle3_train.fusing import fused

_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
_GRANULE = 16  # the hardware's: the summed dimension must be a multiple


def _scale(values: Tensor, dim: int) -> Tensor:
    return values.abs().amax(dim, keepdim=True).float().clamp(min=1e-12) / _LARGEST


@fused
def by_row(values: Tensor) -> tuple[Tensor, Tensor]:
    """[n, m] -> fp8 [n, m] and its scales fp32 [n, 1]."""
    scale = _scale(values, 1)
    return (values.float() / scale).to(_FP8), scale


@fused
def by_column(values: Tensor) -> tuple[Tensor, Tensor]:
    """[n, m] -> its transpose in fp8 [m, n], n padded with zeros to a multiple of 16, and scales fp32 [m, 1]."""
    scale = _scale(values, 0)
    scaled = nn.functional.pad((values.float() / scale).to(_FP8).t(), (0, -values.shape[0] % _GRANULE))
    return scaled.contiguous(), scale.flatten()[:, None]


def _product(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Tensor:
    """[n, k] and [m, k], both by row -> bf16 [n, m]."""
    return torch._scaled_mm(
        left[0],
        right[0].t(),
        scale_a=left[1],
        scale_b=right[1].t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


@dataclass(frozen=True)
class Weight:
    """One weight [out, in] in both layouts that a step needs.

    Attributes:
        plain: bf16 [out, in], what the gradient is returned for.
    """

    plain: Tensor
    forward: tuple[Tensor, Tensor]
    backward: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, plain: Tensor) -> Weight:
        """Quantise a bf16 weight [out, in]."""
        with torch.no_grad():
            return cls(plain, by_row(plain), by_column(plain))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, plain: Tensor, weight: Weight) -> Tensor:
        ctx.weight, ctx.needed = weight, rows.requires_grad
        ctx.columns = by_column(rows) if plain.requires_grad else None
        return _product(by_row(rows), weight.forward)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        gradient = gradients[0].contiguous()
        of_rows = _product(by_row(gradient), ctx.weight.backward) if ctx.needed else None
        of_weight = _product(by_column(gradient), ctx.columns) if ctx.columns is not None else None
        return of_rows, of_weight, None


def linear(rows: Tensor, weight: Weight) -> Tensor:
    """bf16 [n, in] times a weight [out, in] -> bf16 [n, out]."""
    return _Linear.apply(rows, weight.plain, weight)
