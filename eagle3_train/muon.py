"""Muon (Keller Jordan, 2024; arXiv 2502.16982), with about half the arithmetic of torch.optim.Muon's step.

The same update: momentum, five Newton-Schulz iterations with the same coefficients, decoupled weight decay. The
iterations are run on the Gram matrix G G^T [m, m], the smaller side, where every factor is symmetric and all of them
commute, so each product is computed below its diagonal alone (symmetric.py). In 16 bits a product of all factors
drifts, so the Gram matrix is taken anew once (`_RESTART`).

With `period` k above 1 a matrix is orthogonalised as a whole every k-th step, and in blocks of rows in between, at a
tenth of the price: MuonBP (arXiv 2510.16981).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from eagle3_train.symmetric import symmetric_product

_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_RESTART = 2
_EPS = 1e-7
_BLOCK_ROWS = 1024


def orthogonalised(gradient: Tensor) -> Tensor:
    """[m, n] -> bf16 [m, n] with singular values near one: torch.optim.Muon's quintic, five times."""
    rows = gradient.bfloat16()
    tall = rows.shape[0] > rows.shape[1]
    if tall:
        rows = rows.t().contiguous()
    rows = rows / rows.norm().clamp(min=_EPS)
    for first, last in ((0, _RESTART), (_RESTART, _ITERATIONS)):
        rows = _polynomial(rows, last - first) @ rows
    return rows.t() if tall else rows


def orthogonalised_by_block(gradient: Tensor) -> Tensor:
    """[m, n] -> bf16 [m, n], blocks of at most 1,024 of the smaller side's rows orthogonalised each on its own."""
    rows = gradient.bfloat16()
    tall = rows.shape[0] > rows.shape[1]
    if tall:
        rows = rows.t()
    blocks = torch.cat([orthogonalised(block) for block in rows.split(_BLOCK_ROWS)])
    return blocks.t() if tall else blocks


def _polynomial(rows: Tensor, iterations: int) -> Tensor:
    """The product [m, m] of the iterations' factors aI + b S + c S^2, S = rows @ rows.T as it changes."""
    gram = symmetric_product(rows, rows)
    product: Tensor | None = None
    for left in range(iterations, 0, -1):
        factor = symmetric_product(gram, gram, gram, alpha=_C, beta=_B)
        factor.diagonal().add_(_A)
        product = factor if product is None else symmetric_product(factor, product)
        if left > 1:
            gram = symmetric_product(symmetric_product(factor, gram), factor)
    assert product is not None
    return product


class Muon(torch.optim.Optimizer):
    """For matrices only.

    Args:
        params: 2D parameters, as torch.optim takes them.
        lr: scaled by 0.2 * sqrt(max(m, n)), so that an update is as large as AdamW's ("match_rms_adamw").
        period: orthogonalise whole matrices every so many steps.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, weight_decay: float = 0.1, momentum: float = 0.95, period: int = 1
    ):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "period": period})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            momentum, lr = group["momentum"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"momentum_buffer": torch.zeros_like(parameter), "step": 0}
                average = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
                whole = state["step"] % group["period"] == 0
                state["step"] += 1
                direction = parameter.grad.lerp(average, momentum)
                update = orthogonalised(direction) if whole else orthogonalised_by_block(direction)
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(update, alpha=-lr * 0.2 * math.sqrt(max(parameter.shape)))
