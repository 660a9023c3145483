"""A verifier of Kimi-K2.5's shape with random weights, and a draft for it of the published drafts' proportions.

The nested config, MLA with its true head sizes, a routed MoE with a shared expert: what vLLM runs is the real thing,
only narrower and shallower. Tokenizer and chat template are those of the tiny verifier, whose folder must be there.

Weights are scaled so that the states look like a trained network's: every layer adds a quarter of the embedding's size
to the residual stream (routed experts less), so each layer resembles the last one more than the one before it did.

Only plain text is ever said: component 0 of the residual stream is 1 in every token and no layer writes to it, and the
head takes from it `FORBIDDEN` for special tokens and broken UTF-8. So answers have the length that was asked for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_train import export, verifier
from eagle3_train.config import Verifier

if TYPE_CHECKING:
    import torch

FORBIDDEN = -25.0  # times the normed component 0, about 0.6
ADDED = 0.25  # of the embedding's size, by each attention and each MLP
# A random router has no favourites: rounding makes many ties between experts fall the other way in another batch, so
# what the routed experts add is kept small. They are computed all the same.
ROUTED = 0.2  # of ADDED
LOGIT_STD = 2.5
PREFIX = "language_model."


@dataclass(frozen=True)
class Shape:
    """Sizes of the verifier, named as in its config, and of the draft's layer."""

    hidden_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    intermediate_size: int = 5120
    moe_intermediate_size: int = 384
    n_routed_experts: int = 64
    num_experts_per_tok: int = 8
    q_lora_rank: int = 1536
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    max_position_embeddings: int = 8192
    draft_heads: int = 16
    draft_head_dim: int = 128
    draft_intermediate_size: int = 3584

    def text_config(self) -> dict[str, Any]:
        """What differs from the tiny verifier's own text config."""
        own = {name: value for name, value in vars(self).items() if not name.startswith("draft_")}
        return own | {
            "num_key_value_heads": self.num_attention_heads,
            "qk_head_dim": self.qk_nope_head_dim + self.qk_rope_head_dim,
            "routed_scaling_factor": 2.827,  # Kimi's
        }


# For a dry run on a CPU, whose attention takes no heads of 128 + 64.
TINY = Shape(
    hidden_size=128,
    num_hidden_layers=8,
    num_attention_heads=4,
    intermediate_size=256,
    moe_intermediate_size=64,
    n_routed_experts=8,
    num_experts_per_tok=2,
    q_lora_rank=64,
    qk_nope_head_dim=32,
    v_head_dim=32,
    max_position_embeddings=2048,
    draft_heads=4,
    draft_head_dim=32,
    draft_intermediate_size=256,
)


def build_verifier(folder: Path, tokenizer_of: Path, shape: Shape) -> dict[str, Any]:
    """Write the verifier to a new `folder`; returns its sizes and how many parameters it has.

    Raises:
        FileNotFoundError: `tokenizer_of`, the tiny verifier, is not there.
    """
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    for source in tokenizer_of.iterdir():
        if source.suffix != ".safetensors":
            shutil.copy2(source, folder / source.name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["text_config"] |= shape.text_config()
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    said = text_ids(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    made = {PREFIX + name: tensor.cpu() for name, tensor in _weights(shape, config["text_config"], said, device)}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    if device == "cuda":
        torch.cuda.empty_cache()
    experts = sum(tensor.numel() for name, tensor in made.items() if ".experts." in name)
    parameters = sum(tensor.numel() for tensor in made.values())
    active = parameters - experts + experts * shape.num_experts_per_tok // shape.n_routed_experts
    return vars(shape) | {"parameters": parameters, "active_parameters": active}


def text_ids(folder: Path) -> list[int]:
    """The tokens that are plain ASCII text: ids below the vocabulary's size, rising."""
    tokenizer = verifier.tokenizer(Verifier(path=str(folder)))
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    pieces = ((token, tokenizer.decode([token])) for token in range(len(tokenizer)) if token not in special)
    return [token for token, text in pieces if text and text.isascii() and text.isprintable()]


def _weights(shape: Shape, config: dict[str, Any], said: list[int], device: str) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        return torch.randn(rows, columns, device=device).mul_(std).to(torch.bfloat16)

    def linear(rows: int, columns: int) -> torch.Tensor:
        """Input of size 1, output of size 1."""
        return normal(rows, columns, columns**-0.5)

    def writing(columns: int, entering: float) -> torch.Tensor:
        """Onto the residual stream, `ADDED` for an input of size `entering`; component 0 stays as it is."""
        weight = normal(hidden, columns, ADDED / entering * columns**-0.5)
        weight[0] = 0
        return weight

    def mlp(prefix: str, wide: int, summed: float = 1.0) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{prefix}.gate_proj.weight", linear(wide, hidden)
        yield f"{prefix}.up_proj.weight", linear(wide, hidden)
        # silu(a) b of two standard normals is 0.6 in size; `summed` of several MLPs' weighted sum.
        yield f"{prefix}.down_proj.weight", writing(wide, 0.6 * summed)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    hidden, vocabulary = shape.hidden_size, config["vocab_size"]
    heads, nope, rope = shape.num_attention_heads, shape.qk_nope_head_dim, shape.qk_rope_head_dim
    embedding = normal(vocabulary, hidden, 1.0)
    embedding[:, 0] = 1
    yield "model.embed_tokens.weight", embedding
    yield "model.norm.weight", ones(hidden)
    head = normal(vocabulary, hidden, LOGIT_STD * hidden**-0.5)
    head[:, 0] = FORBIDDEN
    head[said, 0] = 0
    yield "lm_head.weight", head
    routed = config["routed_scaling_factor"] * shape.num_experts_per_tok**-0.5 / ROUTED
    for layer in range(shape.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", ones(hidden)
        yield f"{prefix}.post_attention_layernorm.weight", ones(hidden)
        yield f"{prefix}.self_attn.q_a_proj.weight", linear(shape.q_lora_rank, hidden)
        yield f"{prefix}.self_attn.q_a_layernorm.weight", ones(shape.q_lora_rank)
        yield f"{prefix}.self_attn.q_b_proj.weight", linear(heads * (nope + rope), shape.q_lora_rank)
        yield f"{prefix}.self_attn.kv_a_proj_with_mqa.weight", linear(shape.kv_lora_rank + rope, hidden)
        yield f"{prefix}.self_attn.kv_a_layernorm.weight", ones(shape.kv_lora_rank)
        yield f"{prefix}.self_attn.kv_b_proj.weight", linear(heads * (nope + shape.v_head_dim), shape.kv_lora_rank)
        yield f"{prefix}.self_attn.o_proj.weight", writing(heads * shape.v_head_dim, 1.0)
        if layer < config["first_k_dense_replace"]:
            yield from mlp(f"{prefix}.mlp", shape.intermediate_size)
            continue
        yield f"{prefix}.mlp.gate.weight", linear(shape.n_routed_experts, hidden)
        bias = torch.zeros(shape.n_routed_experts, dtype=torch.bfloat16)
        yield f"{prefix}.mlp.gate.e_score_correction_bias", bias
        yield from mlp(f"{prefix}.mlp.shared_experts", shape.moe_intermediate_size)
        for expert in range(shape.n_routed_experts):
            yield from mlp(f"{prefix}.mlp.experts.{expert}", shape.moe_intermediate_size, routed)


def build_draft(folder: Path, verifier_folder: Path, shape: Shape) -> dict[str, Any]:
    """Write an EAGLE-3 draft with random weights in the flat format to a new `folder`; returns its sizes."""
    import torch
    from safetensors.torch import save_file

    settings = Verifier(path=str(verifier_folder))
    sizes = verifier.text_config(settings)
    said = text_ids(verifier_folder)
    targets = said[: sizes.vocab_size // 5]  # as 32,000 of Kimi's 163,840
    layer = {
        "hidden_size": sizes.hidden_size,
        "intermediate_size": shape.draft_intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.draft_heads,
        "num_key_value_heads": shape.draft_heads,
        "head_dim": shape.draft_head_dim,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.max_position_embeddings,
        "rms_norm_eps": sizes.rms_norm_eps,
    }
    saved: dict[str, Any] = {
        "transformer_layer_config": layer,
        "draft_vocab_size": len(targets),
        "eagle_aux_hidden_state_layer_ids": verifier.aux_layer_ids(settings),
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": True,
    }
    flat = export.flat_config(saved, saved["eagle_aux_hidden_state_layer_ids"])
    torch.manual_seed(1)
    tensors = {
        name: torch.ones(size, dtype=torch.bfloat16)
        if len(size) == 1
        else (torch.randn(size) * size[1] ** -0.5).to(torch.bfloat16)
        for name, size in export.tensor_table(flat).items()
    }
    tensors["d2t"] = torch.tensor(targets) - torch.arange(len(targets))
    export.check_tensors(tensors, flat)
    folder.mkdir(parents=True)
    save_file(tensors, folder / export.WEIGHTS, metadata={"format": "pt"})
    (folder / export.CONFIG).write_text(json.dumps(flat, indent=1), encoding="utf-8")
    return {**layer, "draft_vocab_size": len(targets), "parameters": sum(t.numel() for t in tensors.values())}
