"""Attention of a training-time-test step over packed documents.

Row i of TTT step k attends to the keys of step 0 in its own document up to row i (or the last `window` of them), and
to the keys that row i itself had in steps 1..k. The first part is ordinary causal attention; the second is k scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3_train.fusing import fused

_flash = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward


@dataclass(frozen=True)
class Documents:
    """Borders of a pack's documents, as in packs.py: active rows are the tail of each document's rows."""

    cu_active: Tensor
    cu_rows: Tensor
    longest_active: int
    longest: int


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor], documents: Documents, window: int | None) -> Tensor:
    """Args: q [R, Q, E], rotated. keys, values: of step 0 [N, K, E], then [R, K, E] of each later step.

    Returns:
        [R, Q, E].
    """
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        return _Joined.apply(documents, window, len(keys), q, *keys, *values)
    return _by_document(q, keys, values, documents, window)


@fused
def _own_scores(q: Tensor, key: Tensor, scale: float) -> Tensor:
    """[R, Q, E] and [R, K, E] -> fp32 [R, Q]."""
    grouped = q.unflatten(1, (key.shape[1], -1)).float()
    return (grouped * key[:, :, None].float()).sum(-1).flatten(1) * scale


@fused
def _add_own(out: Tensor, value: Tensor, share: Tensor) -> Tensor:
    """out [R, Q, E] + share [R, Q] * value [R, K, E]."""
    grouped = out.unflatten(1, (value.shape[1], -1)).float()
    return (grouped + share.unflatten(1, (value.shape[1], -1))[..., None] * value[:, :, None]).flatten(1, 2)


@fused
def _rescaled(out: Tensor, share: Tensor) -> Tensor:
    return out.float() * share[..., None]


@fused
def _own_gradients(
    gradient: Tensor, out: Tensor, q: Tensor, key: Tensor, value: Tensor, share: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for q [R, Q, E], key and value [R, K, E] through one row's own score."""
    heads = (key.shape[1], -1)
    g = gradient.unflatten(1, heads).float()
    p = share.unflatten(1, heads)
    mean = (gradient.float() * out.float()).sum(-1).unflatten(1, heads)
    of_score = p * ((g * value[:, :, None].float()).sum(-1) - mean) * scale
    of_q = (of_score[..., None] * key[:, :, None].float()).flatten(1, 2)
    of_key = (of_score[..., None] * q.unflatten(1, heads).float()).sum(2)
    of_value = (p[..., None] * g).sum(2)
    return of_q, of_key.to(key.dtype), of_value.to(value.dtype)


class _Joined(torch.autograd.Function):
    """FlashAttention over the documents, joined with each row's own later keys.

    The kernel's backward needs the output and the log of the softmax denominator only; given those of the joined
    softmax it returns the joined gradients (as ring attention does, arXiv 2310.01889).
    """

    @staticmethod
    def forward(ctx: Any, documents: Documents, window: int | None, steps: int, q: Tensor, *past: Tensor) -> Tensor:
        keys, values = past[:steps], past[steps:]
        q, k, v = q.contiguous(), keys[0].contiguous(), values[0].contiguous()
        scale = q.shape[-1] ** -0.5
        left = None if window is None else window - 1
        borders = (documents.cu_active, documents.cu_rows, documents.longest_active, documents.longest)
        out, denominator, state, unused, _ = _flash(
            q, k, v, *borders, 0.0, True, False, scale=scale, window_size_left=left
        )
        if steps > 1:
            scores = [_own_scores(q, key, scale) for key in keys[1:]]
            joined = torch.logsumexp(torch.stack([denominator.t(), *scores]), dim=0)
            wide = _rescaled(out, torch.exp(denominator.t() - joined))
            for score, value in zip(scores, values[1:], strict=True):
                wide = _add_own(wide, value, torch.exp(score - joined))
            out, denominator = wide.to(q.dtype), joined.t().contiguous()
        ctx.save_for_backward(q, k, v, out, denominator, state, unused, *keys[1:], *values[1:])
        ctx.borders, ctx.scale, ctx.left, ctx.steps = borders, scale, left, steps
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        gradient = gradients[0].contiguous()
        q, k, v, out, denominator, state, unused, *later = ctx.saved_tensors
        of_q, of_k, of_v = _flash_backward(
            gradient, q, k, v, out, denominator, *ctx.borders, 0.0, True, state, unused,
            scale=ctx.scale, window_size_left=ctx.left,
        )  # fmt: skip
        of_keys, of_values = [of_k], [of_v]
        for key, value in zip(later[: ctx.steps - 1], later[ctx.steps - 1 :], strict=True):
            share = torch.exp(_own_scores(q, key, ctx.scale) - denominator.t())
            more, of_key, of_value = _own_gradients(gradient, out, q, key, value, share, ctx.scale)
            of_q = of_q + more.to(of_q.dtype)
            of_keys.append(of_key)
            of_values.append(of_value)
        return (None, None, None, of_q, *of_keys, *of_values)


def _by_document(
    q: Tensor, keys: list[Tensor], values: list[Tensor], documents: Documents, window: int | None
) -> Tensor:
    """The same in plain operations, one document after the other."""
    scale, group = q.shape[-1] ** -0.5, q.shape[1] // keys[0].shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = ([part.repeat_interleave(group, 1) for part in parts] for parts in (keys, values))
    own = [(q * key).sum(-1) * scale for key in keys[1:]]
    mixed = []
    active, rows = documents.cu_active.tolist(), documents.cu_rows.tolist()
    for document in range(len(rows) - 1):
        here, all_rows = slice(*active[document : document + 2]), slice(*rows[document : document + 2])
        scores = torch.einsum("rqe,nqe->qrn", q[here], keys[0][all_rows]) * scale
        age = _age(scores.shape[1], scores.shape[2], q.device)
        hidden = age < 0 if window is None else (age < 0) | (age >= window)
        scores = scores.masked_fill(hidden, float("-inf"))
        later = [score[here].t()[..., None] for score in own]
        shares = torch.cat([scores, *later], dim=-1).softmax(-1, dtype=wide).to(q.dtype)
        out = torch.einsum("qrn,nqe->rqe", shares[..., : scores.shape[2]], values[0][all_rows])
        for place, value in enumerate(values[1:]):
            out = out + shares[..., scores.shape[2] + place].t()[..., None] * value[here]
        mixed.append(out)
    return torch.cat(mixed)


def _age(active: int, rows: int, device: torch.device) -> Tensor:
    """How many rows before the query each key is: [active, rows]; the queries are the last rows."""
    return torch.arange(rows - active, rows, device=device)[:, None] - torch.arange(rows, device=device)
