"""The draft: speculators' Eagle3DraftModel on the verifier's frozen embedding, head and final norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagle3_train import verifier
from eagle3_train.config import Config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from eagle3_train.vocabulary import VocabMap


def build_draft(config: Config, vocab: VocabMap) -> Any:
    """A fresh Eagle3DraftModel on the verifier's frozen embedding, head and final norm.

    Raises:
        PipelineError: one of the verifier's three tensors is missing, packed or of another shape.
    """
    import torch
    from speculators import Eagle3DraftModel

    verifier.head_weights(config.verifier)
    draft = config.draft
    model = Eagle3DraftModel.from_training_args(
        draft_layer_config(config),
        t2d=vocab.t2d,
        d2t=vocab.d2t,
        draft_vocab_size=vocab.size,
        norm_before_residual=draft.norm_before_residual,
        norm_before_fc=draft.norm_before_fc,
        fc_norm=draft.fc_norm,
        norm_output=draft.norm_output,
        ttt_steps=config.training.ttt_steps,
        verifier_name_or_path=verifier.location(config.verifier),
        draft_attn_impl="simple_flex_attention" if torch.cuda.is_available() else "sdpa",
        target_layer_ids=verifier.aux_layer_ids(config.verifier),
        trust_remote_code=config.verifier.trust_remote_code,
    )
    # Its weights are loaded; what is kept must name no path of this machine.
    model.config.speculators_config.verifier.name_or_path = verifier.hub_name(
        config.verifier, config.export.verifier_name
    )
    return model


def draft_layer_config(config: Config) -> PretrainedConfig:
    """The draft's Llama layer: sizes, rope (with its scaling) and context from the verifier, shape from the preset."""
    from speculators.train.cli import create_transformer_layer_config

    draft = config.draft
    layers = list(range(draft.num_layers))
    layer = create_transformer_layer_config(
        verifier.location(config.verifier),
        num_layers=draft.num_layers,
        draft_arch="llama",
        hidden_act=None,
        sliding_window=draft.sliding_window or verifier.text_config(config.verifier).max_position_embeddings,
        full_attention_indices=layers if draft.sliding_window is None else [],
        trust_remote_code=config.verifier.trust_remote_code,
    )
    # speculators takes these from the verifier, where under MLA they mean something else.
    layer.num_attention_heads = draft.num_attention_heads
    layer.num_key_value_heads = draft.num_key_value_heads
    layer.head_dim = draft.head_dim
    layer.intermediate_size = draft.intermediate_size
    return layer
