"""Stage 05: the best checkpoint becomes what vLLM serves, and is checked tensor by tensor.

vLLM boots a draft with missing tensors and answers correctly; only acceptance shows it. So every tensor is held
against the table below, both ways, before the checkpoint is published.

`flat` is LlamaForCausalLMEagle3 with a Llama config, read by vLLM and SGLang; `speculators` keeps speculators' nested
config, read by vLLM and `SpeculatorModel.from_pretrained`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_train import verifier
from eagle3_train.errors import PipelineError
from eagle3_train.run import Result, Stage, save_tensors, sha256_of, write_text
from eagle3_train.training import BEST, CHECKPOINTS

if TYPE_CHECKING:
    import torch

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
# Shared from the verifier by vLLM; at Kimi-K2.5's size each would cost 2.35 GB.
DROPPED = ("embed_tokens.weight",)
# Only used to train: vLLM refuses tensors it does not know.
TRAINING_ONLY = ("verifier_lm_head.weight", "verifier_norm.weight", "t2d")
_LAYER_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "initializer_range",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "sliding_window",
    "layer_types",
)


def export(stage: Stage) -> Result:
    """Convert, check, publish and reload the best checkpoint."""
    import torch
    from safetensors.torch import load_file

    checkpoint = stage.input("04_train") / CHECKPOINTS / BEST
    saved = json.loads((checkpoint / CONFIG).read_text(encoding="utf-8"))
    sizes = verifier.text_config(stage.config.verifier)
    tensors = {
        name: tensor if not tensor.is_floating_point() else tensor.to(torch.bfloat16)
        for name, tensor in load_file(checkpoint / WEIGHTS).items()
        if name not in DROPPED + TRAINING_ONLY
    }
    flat = flat_config(saved, verifier.aux_layer_ids(stage.config.verifier))
    if flat["draft_vocab_size"] == sizes.vocab_size:
        tensors.pop("d2t", None)
    check_tensors(tensors, flat)
    if stage.config.export.format == "speculators":
        config, kept = speculators_config(saved, stage), {**tensors, **_t2d(tensors, sizes.vocab_size)}
    else:
        config, kept = flat, tensors
    save_tensors(stage.folder / WEIGHTS, kept, {"format": "pt"})
    write_text(stage.folder / CONFIG, json.dumps(config, indent=2) + "\n")
    reload_and_compare(stage.folder, kept)
    size = (stage.folder / WEIGHTS).stat().st_size
    write_text(stage.folder / CARD, _card(stage, flat, size))
    summary = {
        "format": stage.config.export.format,
        "tensors": len(kept),
        "bytes": size,
        "epoch": int(checkpoint.resolve().name) + 1,
    }
    line = f"{len(kept)} tensors, {size / 2**20:.1f} MiB, all checked; {', '.join(DROPPED)} left to the verifier"
    return Result([CONFIG, WEIGHTS, CARD], summary, [line])


def flat_config(saved: dict[str, Any], layer_ids: list[int]) -> dict[str, Any]:
    """vLLM's Llama EAGLE-3 config from speculators' nested one; every key whose default differs is written.

    Raises:
        PipelineError: the checkpoint was trained on other layers than the verifier's settings name.
    """
    if saved["eagle_aux_hidden_state_layer_ids"] != layer_ids:
        raise PipelineError(
            f"the checkpoint was trained on layers {saved['eagle_aux_hidden_state_layer_ids']}, "
            f"but verifier.aux_layer_ids are {layer_ids}"
        )
    from transformers import LlamaConfig

    layer = LlamaConfig(**saved["transformer_layer_config"]).to_dict()
    if "sliding_attention" not in layer["layer_types"]:
        layer["sliding_window"] = None
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: layer.get(name) for name in _LAYER_FIELDS},
        "tie_word_embeddings": False,
        "draft_vocab_size": saved["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": layer_ids,
        "num_aux_hidden_states": len(layer_ids),
        "norm_before_residual": saved["norm_before_residual"],
        "norm_before_fc": saved["norm_before_fc"],
        "fc_norm": saved["fc_norm"],
        "norm_output": saved["norm_output"],
        "dtype": "bfloat16",
    }


def speculators_config(saved: dict[str, Any], stage: Stage) -> dict[str, Any]:
    """speculators' own config of the checkpoint, with the dtype and the verifier's name as published."""
    name = verifier.hub_name(stage.config.verifier, stage.config.export.verifier_name)
    nested = {**saved["speculators_config"], "verifier": {**saved["speculators_config"]["verifier"]}}
    nested["verifier"]["name_or_path"] = name
    return {**saved, "speculators_config": nested, "dtype": "bfloat16"}


def tensor_table(config: dict[str, Any]) -> dict[str, list[int]]:
    """Every tensor a flat draft must have and its shape, from its config; nothing else may be in it."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    aux = config["num_aux_hidden_states"]
    table = {"fc.weight": [hidden, aux * hidden], "norm.weight": [hidden]}
    table["lm_head.weight"] = [config["draft_vocab_size"], hidden]
    for layer in range(config["num_hidden_layers"]):
        # The first layer reads the token's embedding and the verifier's state side by side.
        read = 2 * hidden if layer == 0 else hidden
        prefix = f"layers.{layer}."
        table |= {
            f"{prefix}self_attn.q_proj.weight": [queries, read],
            f"{prefix}self_attn.k_proj.weight": [keys, read],
            f"{prefix}self_attn.v_proj.weight": [keys, read],
            f"{prefix}self_attn.o_proj.weight": [hidden, queries],
            f"{prefix}mlp.gate_proj.weight": [wide, hidden],
            f"{prefix}mlp.up_proj.weight": [wide, hidden],
            f"{prefix}mlp.down_proj.weight": [hidden, wide],
            f"{prefix}input_layernorm.weight": [hidden],
            f"{prefix}post_attention_layernorm.weight": [hidden],
        }
    table["layers.0.hidden_norm.weight"] = [hidden]
    if config["norm_before_fc"]:
        table["input_norm.weight"] = [aux * hidden]
    if config["fc_norm"]:
        table |= {f"fc_norm.{number}.weight": [hidden] for number in range(aux)}
    if config["draft_vocab_size"] != config["vocab_size"]:
        table["d2t"] = [config["draft_vocab_size"]]
    return table


def check_tensors(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Hold a flat draft's tensors against `tensor_table`, both ways.

    Raises:
        PipelineError: listing every missing, extra, misshapen, non-finite or all-zero tensor, and a wrong d2t.
    """
    table = tensor_table(config)
    wrong = [f"missing: {name} {table[name]}" for name in table if name not in tensors]
    wrong += [f"not known to vLLM: {name}" for name in tensors if name not in table]
    for name in table.keys() & tensors.keys():
        tensor = tensors[name]
        if list(tensor.shape) != table[name]:
            wrong.append(f"{name}: shape {list(tensor.shape)}, expected {table[name]}")
        elif name == "d2t":
            wrong += _d2t_faults(tensor, config["vocab_size"])
        elif not tensor.float().isfinite().all():
            wrong.append(f"{name}: holds a NaN or infinity")
        elif not tensor.any():
            wrong.append(f"{name}: all zero")
    if wrong:
        raise PipelineError(
            "this draft would serve at acceptance near 1.0 and vLLM would not say why:\n  " + "\n  ".join(sorted(wrong))
        )


def _d2t_faults(d2t: torch.Tensor, vocab_size: int) -> list[str]:
    import torch

    if d2t.dtype != torch.int64:
        return [f"d2t: {d2t.dtype}, expected int64"]
    targets = torch.arange(len(d2t)) + d2t
    if not (targets.diff() > 0).all():
        return ["d2t: target ids (draft id + offset) are not strictly rising; are they offsets?"]
    if targets[0] < 0 or targets[-1] >= vocab_size:
        return [f"d2t: target ids reach {int(targets[-1])}, the verifier's vocabulary ends at {vocab_size - 1}"]
    return []


def _t2d(tensors: dict[str, torch.Tensor], vocab_size: int) -> dict[str, torch.Tensor]:
    """speculators' second map, from the first; nothing for a full vocabulary."""
    import torch

    if "d2t" not in tensors:
        return {}
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[torch.arange(len(tensors["d2t"])) + tensors["d2t"]] = True
    return {"t2d": t2d}


def reload_and_compare(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Read the published file afresh and compare it bit for bit.

    Raises:
        PipelineError: what is on disk is not what was meant.
    """
    import torch
    from safetensors.torch import load_file

    published = load_file(folder / WEIGHTS)
    if published.keys() != tensors.keys() or not all(torch.equal(published[n], tensors[n]) for n in tensors):
        raise PipelineError(f"{folder / WEIGHTS} does not read back as it was written; is the disk sound?")


def _card(stage: Stage, config: dict[str, Any], size: int) -> str:
    name = verifier.hub_name(stage.config.verifier, stage.config.export.verifier_name) or stage.config.verifier.path
    name = Path(name).name if Path(name).exists() else name
    training = stage.run.folder("04_train") / "manifest.json"
    summary = json.loads(training.read_text(encoding="utf-8"))["summary"]
    drafted = stage.config.evaluation.draft_tokens
    speculative = json.dumps({"method": "eagle3", "model": "PATH_OF_THIS_DIRECTORY", "num_speculative_tokens": drafted})
    return f"""# EAGLE-3 draft for {name}

Made by eagle3-train. {config["num_hidden_layers"]} layer(s), hidden size {config["hidden_size"]}, draft vocabulary
{config["draft_vocab_size"]} of {config["vocab_size"]}, {size / 2**20:.1f} MiB in bfloat16. Reads the verifier's
residual stream entering layers {config["eagle_aux_hidden_state_layer_ids"]} (vLLM's numbering).

Trained on {summary["samples"]} of the verifier's own answers, {summary["steps"]} steps; expected acceptance length on
the validation split {summary["expected_acceptance_length"]}. What vLLM measures stands in `06_eval/report.md` of the
run.

    vllm serve VERIFIER --speculative-config '{speculative}'

Provenance: 04_train manifest sha256 {sha256_of(training)}.
"""
