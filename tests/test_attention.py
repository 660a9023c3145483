"""Contract of the training step's attention: a row sees its own document up to itself, and of later TTT steps its own
keys alone.

Compared with a softmax written out row by row in float64. The GPU's path is run with FlashAttention's two kernels
replaced by what their documentation says they return.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3_train import attention
from eagle3_train.attention import Documents, attend

ROWS, ACTIVE = [7, 3, 5, 1, 9], [4, 3, 0, 1, 2]
QUERY_HEADS, SIZE = 4, 8
DOCUMENTS = Documents(
    torch.tensor([0, *accumulate(ACTIVE)], dtype=torch.int32),
    torch.tensor([0, *accumulate(ROWS)], dtype=torch.int32),
    max(ACTIVE),
    max(ROWS),
)
shapes = pytest.mark.parametrize(
    ("kv_heads", "window", "steps"),
    [(4, None, 1), (4, None, 3), (2, None, 2), (1, None, 3), (4, 1, 2), (2, 3, 1), (2, 3, 3), (4, 100, 3)],
)


def tensors(kv_heads: int, steps: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Queries, and keys and values of every step, that record gradients."""
    torch.manual_seed(steps)
    lengths = [sum(ROWS)] + [sum(ACTIVE)] * (steps - 1)
    q, *past = (
        torch.randn(length, heads, SIZE, dtype=dtype).requires_grad_()
        for length, heads in [(sum(ACTIVE), QUERY_HEADS), *((length, kv_heads) for length in 2 * lengths)]
    )
    return q, past[:steps], past[steps:]


def visible(window: int | None) -> list[list[int]]:
    """For each active row, the rows of step 0 that it may see."""
    seen, start = [], 0
    for rows, active in zip(ROWS, ACTIVE, strict=True):
        for row in range(start + rows - active, start + rows):
            seen.append([other for other in range(start, row + 1) if window is None or row - other < window])
        start += rows
    return seen


def written_out(q: Tensor, keys: list[Tensor], values: list[Tensor], window: int | None) -> Tensor:
    """[R, Q, E], one softmax after the other."""
    group = q.shape[1] // keys[0].shape[1]
    rows = []
    for row, seen in enumerate(visible(window)):
        for head in range(q.shape[1]):
            shared = head // group
            k = torch.stack([keys[0][place, shared] for place in seen] + [key[row, shared] for key in keys[1:]])
            v = torch.stack([values[0][place, shared] for place in seen] + [value[row, shared] for value in values[1:]])
            rows.append(torch.softmax(k @ q[row, head] / q.shape[2] ** 0.5, dim=0) @ v)
    return torch.stack(rows).unflatten(0, (-1, q.shape[1]))


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return list(torch.autograd.grad((out * weight).sum(), inputs))


@shapes
def test_every_row_mixes_its_own_past_and_its_own_later_keys(kv_heads: int, window: int | None, steps: int) -> None:
    q, keys, values = tensors(kv_heads, steps, torch.float64)
    ours, expected = attend(q, keys, values, DOCUMENTS, window), written_out(q, keys, values, window)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    inputs = [q, *keys, *values]
    torch.testing.assert_close(gradients(ours, inputs), gradients(expected, inputs), rtol=1e-11, atol=1e-11)


def test_gradients_are_those_of_finite_differences() -> None:
    q, keys, values = tensors(2, 3, torch.float64)
    assert torch.autograd.gradcheck(
        lambda q, *past: attend(q, list(past[:3]), list(past[3:]), DOCUMENTS, 3), (q, *keys, *values), fast_mode=True
    )


@pytest.mark.parametrize("other", range(len(ROWS)))
@pytest.mark.parametrize("window", [None, 3])
def test_another_documents_rows_change_nothing(other: int, window: int | None) -> None:
    """Bit for bit, whichever document is filled with other numbers."""
    q, keys, values = tensors(2, 3, torch.float32)
    before = attend(q, keys, values, DOCUMENTS, window)
    active = slice(*DOCUMENTS.cu_active[other : other + 2].tolist())
    rows = slice(*DOCUMENTS.cu_rows[other : other + 2].tolist())
    with torch.no_grad():
        for part in (q, *keys[1:], *values[1:]):
            part[active] = torch.randn_like(part[active]) * 100
        for part in (keys[0], values[0]):
            part[rows] = torch.randn_like(part[rows]) * 100
    after = attend(q, keys, values, DOCUMENTS, window)
    same = torch.ones(len(q), dtype=torch.bool)
    same[active] = False
    assert torch.equal(before[same], after[same])
    assert not ACTIVE[other] or not torch.equal(before[active], after[active])


# ---- FlashAttention, joined with the later keys


def scores_of(q: Tensor, k: Tensor, scale: float, left: int | None) -> Tensor:
    """[Q, R, N], minus infinity where the kernel looks away."""
    scores = torch.einsum("rhe,nhe->hrn", q.float(), k.float()) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool)
    for row, seen in enumerate(visible(None if left is None else left + 1)):
        hidden[row, seen] = False
    return scores.masked_fill(hidden, float("-inf"))


def flash(q: Tensor, k: Tensor, v: Tensor, *borders: Any, scale: float, window_size_left: int | None) -> Any:
    """Output [R, Q, E] and log of the denominator [Q, R], as torch's varlen kernel returns them."""
    heads = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
    scores = scores_of(q, k, scale, window_size_left)
    out = torch.einsum("hrn,nhe->rhe", scores.softmax(-1), v.float()).to(q.dtype)
    return out, scores.logsumexp(-1), torch.empty(0), torch.empty(0), None


def flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, denominator: Tensor, *borders: Any,
    scale: float, window_size_left: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """FlashAttention-2's algorithm 2: from the output and the denominator it is given, nothing else."""
    kv_heads, heads = k.shape[1], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
    shares = torch.exp(scores_of(q, k, scale, window_size_left) - denominator[..., None])
    mean = (gradient * out).sum(-1).t()[..., None]
    of_scores = shares * (torch.einsum("rhe,nhe->hrn", gradient, v) - mean) * scale
    of_k, of_v = torch.einsum("hrn,rhe->nhe", of_scores, q), torch.einsum("hrn,rhe->nhe", shares, gradient)
    return (
        torch.einsum("hrn,nhe->rhe", of_scores, k),
        *(part.unflatten(1, (kv_heads, heads)).sum(2) for part in (of_k, of_v)),
    )


@shapes
def test_flash_attention_joined_with_the_later_keys_is_one_softmax(
    kv_heads: int, window: int | None, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_flash", flash)
    monkeypatch.setattr(attention, "_flash_backward", flash_backward)
    q, keys, values = tensors(kv_heads, steps, torch.float32)
    ours = attention._Joined.apply(DOCUMENTS, window, steps, q, *keys, *values)
    wide = [part.detach().double().requires_grad_() for part in (q, *keys, *values)]
    expected = written_out(wide[0], wide[1 : steps + 1], wide[steps + 1 :], window)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients(ours, [q, *keys, *values]), gradients(expected, wide), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
