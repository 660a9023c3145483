"""The training step: EAGLE-3's training-time test (arXiv 2503.01840) over speculators' Eagle3DraftModel.

The same function of the same parameters as speculators' forward, with less arithmetic:

- nothing is computed for rows whose output no loss reads (the prompts), and no row is padding;
- the token embedding's half of the first layer's q, k and v is one product for all TTT steps, which shift it;
- an RMSNorm in front of a frozen input (the embedding, the captured states) is folded into the matrix behind it: the
  gradient of its weight then comes out of the matrix's own, without another product;
- a row of step k sees its document up to itself, and of each later step only its own key: FlashAttention over the
  document, joined with k single scores by their softmax denominators;
- weights are cast (or quantised, `fp8`) once for all TTT steps.

Legend of shapes: N, R, M, T, A as in packs.py; H hidden size, Q query heads, K key/value heads, E head size, V draft
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from eagle3_train import fp8
from eagle3_train.attention import Documents, attend
from eagle3_train.expected import Chain, Metrics
from eagle3_train.fusing import fused
from eagle3_train.packs import Pack

if TYPE_CHECKING:
    from speculators import Eagle3DraftModel
    from speculators.losses import LossConfig


def _norm_rows(rows: Tensor, eps: float) -> Tensor:
    wide = rows.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


@fused
def _scaled_rows(rows: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm without its weight: [n, H] -> `dtype` [n, H]."""
    return _norm_rows(rows, eps).to(dtype)


@fused
def _rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As transformers' LlamaRMSNorm, in the dtype of `rows`."""
    return (weight * _norm_rows(rows, eps)).to(rows.dtype)


@fused
def _add_rms_norm(rows: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum, and its RMSNorm."""
    total = rows + more
    return total, (weight * _norm_rows(total, eps)).to(rows.dtype)


@fused
def _gated(both: Tensor) -> Tensor:
    """silu(gate) * up, from [n, 2 * I]."""
    gate, up = both.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


@fused
def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [n, heads, E] with cos, sin [n, E], as transformers' apply_rotary_pos_emb."""
    half = heads.shape[-1] // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return heads * cos[:, None] + turned * sin[:, None]


class _Scaled(torch.autograd.Function):
    """Several weights [o, c * H] one above the other, cut to columns [first, last) and scaled by column.

    Its backward gives the scale's gradient as the column sums of gradient times weight: no product with the input.
    """

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, columns: tuple[int, int], scale: Tensor | None, *weights: Tensor
    ) -> Tensor:
        ctx.columns = columns
        ctx.save_for_backward(scale, *weights)
        cut = torch.cat([weight[:, columns[0] : columns[1]] for weight in weights])
        return (cut if scale is None else cut * scale).to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scale, *weights = ctx.saved_tensors
        first, last = ctx.columns
        parts = gradients[0].split([len(weight) for weight in weights])
        of_scale = None
        if scale is not None:
            of_scale = sum(
                (part.float() * weight[:, first:last]).sum(0) for part, weight in zip(parts, weights, strict=True)
            )
        of_weights = []
        for part, weight in zip(parts, weights, strict=True):
            whole = torch.zeros_like(weight) if (first, last) != (0, weight.shape[1]) else torch.empty_like(weight)
            torch.mul(part, 1 if scale is None else scale, out=whole[:, first:last])
            of_weights.append(whole)
        return (None, None, of_scale, *of_weights)


@dataclass
class _Layer:
    """One decoder layer's weights as the products use them, and its keys and values so far.

    Attributes:
        embedded: [N + T - 1, (Q + 2K) * E], the embeddings' share of q, k, v; None after the first layer.
        keys: of TTT step 0 [N, K, E], then of each later step [R, K, E]; values alike.
    """

    module: nn.Module
    qkv: Any
    o: Any
    gate_up: Any
    down: Any
    embedded: Tensor | None = None
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class TrainingStep(nn.Module):
    """Loss and metrics of one pack.

    Args:
        draft: the model; its frozen embedding and heads are cast to `dtype`, which is what they are stored in anyway.
        loss_config: from speculators' `resolve_loss_config`.
        loss_decay: weight of TTT step k is `loss_decay ** k`.
        dtype: of activations and products.
        use_fp8: matrix products of the trained weights in fp8 (heads stay in `dtype`).
        recompute: keep each TTT step's input alone and compute it again for the gradient.
    """

    def __init__(
        self,
        draft: Eagle3DraftModel,
        *,
        ttt_steps: int,
        loss_config: LossConfig,
        loss_decay: float,
        dtype: torch.dtype,
        use_fp8: bool = False,
        recompute: bool = False,
    ):
        super().__init__()
        shape = draft.config.transformer_layer_config
        biased = [name for name, _ in draft.named_parameters() if name.endswith("proj.bias")]
        if biased or shape.hidden_act != "silu" or shape.model_type != "llama":
            raise ValueError(f"a Llama draft with SiLU and no biases is expected; got {shape.model_type}, {biased}")
        for frozen in (draft.embed_tokens, draft.lm_head, draft.verifier_lm_head):
            if not frozen.weight.requires_grad:
                frozen.to(dtype)
        self.draft = draft
        self.ttt_steps = ttt_steps
        self.heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
        window = getattr(shape, "sliding_window", None)
        self.windows = [window if kind == "sliding_attention" else None for kind in shape.layer_types]
        self._loss_config, self._loss_decay = loss_config, loss_decay
        self._dtype, self._use_fp8, self._recompute = dtype, use_fp8, recompute

    def forward(self, pack: Pack, measure: bool = False) -> tuple[Tensor, Metrics]:
        """The mean loss over TTT steps of their means, and sums for `expected.summarise`.

        Args:
            measure: also count right guesses and acceptance, at the price of a pass over the logits.
        """
        draft = self.draft
        layers = self._layers(pack)
        documents = Documents(pack.cu_active, pack.cu_rows, pack.longest_active, pack.longest)
        states = self._states(pack)
        with torch.no_grad():
            normed = _rms_norm(
                states[:, -1][pack.learnt].to(self._dtype),
                draft.verifier_norm.weight,
                draft.verifier_norm.variance_epsilon,
            )
            targets = nn.functional.linear(normed, draft.verifier_lm_head.weight)
        rows = self._projected(states[:, :-1].flatten(1))
        chain = Chain(pack, targets) if measure else None
        total = rows.new_zeros((), dtype=torch.float32)
        metrics: Metrics = {}
        for step in range(self.ttt_steps):
            if self._recompute and torch.is_grad_enabled():
                rows, logits = checkpoint(self._ttt_step, rows, step, layers, pack, documents, use_reentrant=False)
            else:
                rows, logits = self._ttt_step(rows, step, layers, pack, documents)
            loss = self._loss(logits, targets, pack.targets[step], step)
            total = total + loss
            metrics[f"loss_{step}"] = loss.detach()
            if chain is not None:
                chain.follow(step, logits.detach())
        if chain is not None:
            metrics |= chain.sums()
        metrics["loss"] = total.detach()
        return total, metrics

    def _weight(self, scale: Tensor | None, columns: tuple[int, int], *weights: Tensor) -> Any:
        plain = _Scaled.apply(self._dtype, columns, scale, *weights)
        return fp8.Weight.of(plain) if self._use_fp8 else plain

    def _layers(self, pack: Pack) -> list[_Layer]:
        """Every layer's weights, ready for all TTT steps of this pack."""
        hidden = self.draft.hidden_size
        layers = []
        for place, module in enumerate(self.draft.layers):
            attention, mlp = module.self_attn, module.mlp
            qkv = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
            wide = (mlp.gate_proj.weight, mlp.up_proj.weight)
            layer = _Layer(
                module,
                # The first layer reads embedding and state side by side: this is the state's half.
                qkv=self._weight(None, (0, hidden) if place else (hidden, 2 * hidden), *qkv),
                o=self._weight(None, (0, attention.o_proj.in_features), attention.o_proj.weight),
                gate_up=self._weight(None, (0, hidden), *wide),
                down=self._weight(None, (0, mlp.down_proj.in_features), mlp.down_proj.weight),
            )
            if not place:
                norm = module.input_layernorm
                embeddings = _scaled_rows(
                    nn.functional.embedding(pack.input_ids, self.draft.embed_tokens.weight),
                    norm.variance_epsilon,
                    self._dtype,
                )
                layer.embedded = _times(embeddings, self._weight(norm.weight, (0, hidden), *qkv))
            layers.append(layer)
        return layers

    def _states(self, pack: Pack) -> Tensor:
        """[N, A + 1, H], out of fp8 where they are stored so."""
        if pack.scales is None:
            return pack.states
        from hs_connectors.fp8_utils import dequantize_fp8_tensor

        return dequantize_fp8_tensor(pack.states, pack.scales, self._dtype)

    def _projected(self, states: Tensor) -> Tensor:
        """The captured states [N, A * H] through the draft's fc -> [N, H]."""
        draft, scale = self.draft, None
        if draft.input_norm is not None:
            states = _scaled_rows(states, draft.input_norm.variance_epsilon, self._dtype)
            scale = draft.input_norm.weight
        elif draft.fc_norm is not None:
            each = states.unflatten(1, (len(draft.fc_norm), -1))
            states = _scaled_rows(each, draft.fc_norm[0].variance_epsilon, self._dtype).flatten(1)
            scale = torch.cat([norm.weight for norm in draft.fc_norm])
        return _times(states.to(self._dtype), self._weight(scale, (0, draft.fc.in_features), draft.fc.weight))

    def _ttt_step(
        self, rows: Tensor, step: int, layers: list[_Layer], pack: Pack, documents: Documents
    ) -> tuple[Tensor, Tensor]:
        """[N, H] (step 0) or [R, H] -> what the next step reads [R, H], and logits [n_step, V]."""
        draft = self.draft
        positions = pack.positions if step == 0 else pack.positions[pack.active] + step
        cos, sin = (part[0].to(self._dtype) for part in draft.rotary_emb(rows[None], positions[None]))
        for layer, window in zip(layers, self.windows, strict=True):
            rows = self._decode(rows, step, layer, pack, documents, (cos, sin), window)
        norm = draft.norm
        normed = _rms_norm(rows, norm.weight, norm.variance_epsilon)
        logits = nn.functional.linear(normed[pack.starts[step]], draft.lm_head.weight.to(self._dtype))
        return (normed if draft.config.norm_output else rows), logits

    def _decode(
        self,
        rows: Tensor,
        step: int,
        layer: _Layer,
        pack: Pack,
        documents: Documents,
        turn: tuple[Tensor, Tensor],
        window: int | None,
    ) -> Tensor:
        module: Any = layer.module
        first = layer.embedded is not None
        norm = module.hidden_norm if first else module.input_layernorm
        normed = _rms_norm(rows, norm.weight, norm.variance_epsilon)
        residual = normed if first and module.norm_before_residual else rows
        qkv = _times(normed, layer.qkv)
        if layer.embedded is not None:
            qkv = qkv + (layer.embedded[: len(rows)] if step == 0 else layer.embedded[pack.active + step])
        queries, keys, size = self.heads
        q, k, v = qkv.unflatten(-1, (-1, size)).split([queries, keys, keys], dim=1)
        k = _rotated(k, *turn)
        if step == 0 and len(pack.active) < len(rows):
            q, residual, turn = q[pack.active], residual[pack.active], (turn[0][pack.active], turn[1][pack.active])
        q = _rotated(q, *turn)
        # Not in place: a recomputed step must find what it found the first time.
        past_keys, past_values = [*layer.keys[:step], k], [*layer.values[:step], v]
        layer.keys, layer.values = past_keys, past_values
        mixed = attend(q, past_keys, past_values, documents, window)
        attended = _times(mixed.flatten(1), layer.o)
        norm = module.post_attention_layernorm
        rows, normed = _add_rms_norm(residual, attended, norm.weight, norm.variance_epsilon)
        return rows + _times(_gated(_times(normed, layer.gate_up)), layer.down)

    def _loss(self, logits: Tensor, targets: Tensor, chosen: Tensor, step: int) -> Tensor:
        from speculators.losses import compound_loss

        if not len(chosen):
            return logits.float().sum()
        if len(chosen) < len(targets):
            targets = targets[chosen]
        everywhere = torch.ones(1, len(logits), device=logits.device)
        loss, _ = compound_loss(logits[None], targets[None], everywhere, everywhere, loss_config=self._loss_config)
        return loss * self._loss_decay**step


def _times(rows: Tensor, weight: Any) -> Tensor:
    return fp8.linear(rows, weight) if isinstance(weight, fp8.Weight) else nn.functional.linear(rows, weight)
