"""Products known to be symmetric, at little more than half the arithmetic."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


def symmetric_product(
    left: Tensor, right: Tensor, add: Tensor | None = None, alpha: float = 1, beta: float = 0
) -> Tensor:
    """alpha * left @ right.T + beta * add, where the result is symmetric; `add` is [m, m] and symmetric.

    Args:
        left, right: [m, k] of one dtype. On a GPU only tiles on and below the diagonal are computed, and mirrored.
    """
    if not left.is_cuda:
        product = left @ right.t()
        return product * alpha if add is None else torch.add(beta * add, product, alpha=alpha)
    import triton

    m, k = left.shape
    left, right = left.contiguous(), right.contiguous()
    out = left.new_empty(m, m)

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(m, meta["BM"]) * triton.cdiv(m, meta["BN"]),)

    _kernel()[grid](
        left, right, out if add is None else add, out, m, k, left.stride(0), right.stride(0), alpha, beta,
        HAS_ADD=add is not None,
    )  # fmt: skip
    return out


@cache
def _kernel() -> Any:
    """Compiled on first use: a CPU environment need not have triton at all."""
    import triton
    import triton.language as tl

    tiles = [
        triton.Config({"BM": bm, "BN": bn, "BK": bk, "GROUP": 8}, num_warps=warps, num_stages=stages)
        for bm, bn, bk, warps, stages in (
            (128, 128, 64, 4, 4), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 128, 64, 8, 4),
        )
    ]  # fmt: skip

    @triton.autotune(configs=tiles, key=["m", "k", "HAS_ADD"])
    @triton.jit
    def product(  # type: ignore[no-untyped-def]
        left, right, add, out, m, k, left_stride, right_stride, alpha, beta,
        HAS_ADD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    ):  # fmt: skip
        place = tl.program_id(0)
        down, across = tl.cdiv(m, BM), tl.cdiv(m, BN)
        band = GROUP * across
        first = (place // band) * GROUP
        height = min(down - first, GROUP)
        i = first + (place % band) % height
        j = (place % band) // height
        if j * BN > i * BM + BM - 1:
            return
        rows = i * BM + tl.arange(0, BM)
        columns = j * BN + tl.arange(0, BN)
        inner = tl.arange(0, BK)
        a = left + (rows % m)[:, None].to(tl.int64) * left_stride + inner[None, :]
        b = right + (columns % m)[None, :].to(tl.int64) * right_stride + inner[:, None]
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for start in range(0, k, BK):
            within = inner < k - start
            total = tl.dot(
                tl.load(a, mask=within[None, :], other=0.0), tl.load(b, mask=within[:, None], other=0.0), total
            )
            a += BK
            b += BK
        total = total * alpha
        places = rows[:, None].to(tl.int64) * m + columns[None, :]
        # Each element is written by one program alone, so the result does not depend on their order.
        below = (rows[:, None] < m) & (columns[None, :] < m) & (columns[None, :] <= rows[:, None])
        if HAS_ADD:
            total += beta * tl.load(add + places, mask=below, other=0.0).to(tl.float32)
        values = total.to(out.dtype.element_ty)
        tl.store(out + places, values, mask=below)
        mirrored = columns[None, :].to(tl.int64) * m + rows[:, None]
        tl.store(out + mirrored, values, mask=below)

    return product
