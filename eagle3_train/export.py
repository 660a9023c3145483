"""Stage 05: the best checkpoint becomes what vLLM serves, checked tensor by tensor and logit by logit.

vLLM boots a draft with missing tensors and answers correctly; only acceptance shows it. So, before 05 is done:

- every tensor is held against `tensor_table`, both ways: missing, extra, shape, dtype, not finite, all zero, d2t;
- every key of the config is held against the checkpoint it came from;
- the published files, loaded afresh, give the trained model's logits on shards that validated it.

`flat` is LlamaForCausalLMEagle3 with a Llama config, read by vLLM and SGLang; `speculators` keeps speculators' nested
config, read by vLLM and `SpeculatorModel.from_pretrained`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_train import model_card, verifier
from eagle3_train.asking import SetAside
from eagle3_train.capture import read_states
from eagle3_train.checkpoints import BEST, Saved
from eagle3_train.config import Config
from eagle3_train.errors import PipelineError
from eagle3_train.extraction import DATASET, LINKS
from eagle3_train.run import HIDDEN, TRAIN, Result, Stage, save_tensors, write_text
from eagle3_train.training import CHECKPOINTS

if TYPE_CHECKING:
    import torch
    from speculators import Eagle3DraftModel

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
EMBEDDINGS = "embed_tokens.weight"
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
_DRAFT_FIELDS = (
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
)
# Logits of both models are computed in float32 from the same bf16 weights: only the order of sums may differ.
_LOGIT_TOLERANCE = 1e-3
_ROUND_TRIP_SHARDS = 4
_ROUND_TRIP_TOKENS = 1024  # of each; memory grows with their square


def export(stage: Stage) -> Result:
    """Convert, publish and check the best checkpoint.

    Raises:
        PipelineError: a tensor, the config or the logits are not what they must be, or there is nothing to compute
            logits on.
    """
    import torch
    from safetensors.torch import load_file

    settings = stage.config.export
    checkpoint = stage.input("04_train") / CHECKPOINTS / BEST
    shards = _validation_shards(stage)
    saved = json.loads((checkpoint / CONFIG).read_text(encoding="utf-8"))
    weights = load_file(checkpoint / WEIGHTS)
    tensors = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
        if name not in (*TRAINING_ONLY, EMBEDDINGS)
    }
    flat = flat_config(saved, verifier.aux_layer_ids(stage.config.verifier))
    if flat["draft_vocab_size"] == flat["vocab_size"]:
        tensors.pop("d2t", None)
    embedding = verifier.head_weights(stage.config.verifier)[verifier.EMBEDDING].to(torch.bfloat16)
    if settings.keep_embeddings:
        tensors[EMBEDDINGS] = embedding
    check_tensors(tensors, flat)
    if "d2t" in tensors and not torch.equal(_t2d(tensors, flat["vocab_size"])["t2d"], weights["t2d"]):
        raise PipelineError(f"{checkpoint}: d2t and t2d do not belong together; is d2t offsets (target id - draft id)?")
    if settings.format == "speculators":
        name = verifier.hub_name(stage.config.verifier, settings.verifier_name)
        config = speculators_config(saved, name)
        published = tensors | _t2d(tensors, flat["vocab_size"])
    else:
        config, published = flat, tensors
    save_tensors(stage.folder / WEIGHTS, published, {"format": "pt"})
    write_text(stage.folder / CONFIG, json.dumps(config, indent=2) + "\n")
    difference = verify(stage.folder, checkpoint, stage.config, shards)
    size = (stage.folder / WEIGHTS).stat().st_size
    write_text(stage.folder / CARD, model_card.text(stage.run, flat, size))
    summary = {
        "format": settings.format,
        "tensors": len(published),
        "bytes": size,
        "epoch": Saved.read(checkpoint.resolve()).epoch + 1,
        "largest_logit_difference": difference,
    }
    saved_bytes = embedding.numel() * embedding.element_size()
    shared = "" if settings.keep_embeddings else f"; {EMBEDDINGS} left to the verifier ({saved_bytes / 2**20:.1f} MiB)"
    line = (
        f"{len(published)} tensors, {size / 2**20:.1f} MiB, all checked; logits of the published draft equal the "
        f"trained one's on {len(shards)} shards (largest difference {difference:.1e}){shared}"
    )
    lines = [line]
    if settings.format == "speculators" and config["speculators_config"]["verifier"]["name_or_path"] is None:
        lines.append("speculators itself loads it only with the verifier's name: --export.verifier_name OWNER/NAME")
    # The card is not vouched for: 06 adds what it measured.
    return Result([CONFIG, WEIGHTS], summary, lines)


def _validation_shards(stage: Stage) -> list[Path]:
    """The first shards that validated the training, of the data set that stage 04 says it was trained on.

    Raises:
        PipelineError: none of them is there.
    """
    trained = Stage(stage.run, TRAIN).manifest
    assert trained is not None  # `Stage.input` has seen it
    prepared = trained["config"].get("training.prepared_data")
    folder = (Path(prepared) if prepared else stage.run.folder(HIDDEN.folder) / DATASET) / LINKS
    first = trained["summary"]["samples"]  # the training rows, which come before those of validation
    wanted = [folder / f"hs_{row}.safetensors" for row in range(first, first + _ROUND_TRIP_SHARDS)]
    found = [path for path in wanted if path.exists()]
    if not found:
        remedy = "put that data set back" if prepared else f"rerun {HIDDEN.script}"
        raise PipelineError(
            f"{wanted[0]} is not there: without a hidden state of the validation samples nothing shows that the "
            f"published draft computes what was trained; {remedy}, then run this again"
        )
    return found


def flat_config(saved: dict[str, Any], layer_ids: list[int]) -> dict[str, Any]:
    """vLLM's Llama EAGLE-3 config from speculators' nested one.

    vLLM's defaults differ between its two formats (norm_before_residual is true in one and false in the other), so
    every key is written.

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
    if "sliding_attention" not in (layer.get("layer_types") or []):
        layer["sliding_window"] = None
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: layer.get(name) for name in _LAYER_FIELDS},
        "tie_word_embeddings": False,
        **{name: saved[name] for name in _DRAFT_FIELDS},
        "num_aux_hidden_states": len(layer_ids),
        "dtype": "bfloat16",
    }


def speculators_config(saved: dict[str, Any], verifier_name: str | None) -> dict[str, Any]:
    """speculators' own config of the checkpoint, with the dtype and the verifier's name as published."""
    nested = saved["speculators_config"]
    named = nested["verifier"] | {"name_or_path": verifier_name}
    return saved | {"speculators_config": nested | {"verifier": named}, "dtype": "bfloat16"}


def tensor_table(config: dict[str, Any]) -> dict[str, list[int]]:
    """The shape of every tensor a flat draft must have, from its config; besides these only `embed_tokens` may be.

    Floating point tensors are bfloat16, d2t is int64.
    """
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
        PipelineError: listing every missing, extra, misshapen, mistyped, non-finite or all-zero tensor, and a bad d2t.
    """
    import torch

    table = tensor_table(config)
    allowed = table | {EMBEDDINGS: [config["vocab_size"], config["hidden_size"]]}
    wrong = [f"missing: {name} {table[name]}" for name in table if name not in tensors]
    wrong += [f"not known to vLLM: {name}" for name in tensors if name not in allowed]
    for name in allowed.keys() & tensors.keys():
        tensor = tensors[name]
        expected_dtype = torch.int64 if name == "d2t" else torch.bfloat16
        if list(tensor.shape) != allowed[name]:
            wrong.append(f"{name}: shape {list(tensor.shape)}, expected {allowed[name]}")
        elif tensor.dtype != expected_dtype:
            wrong.append(f"{name}: {tensor.dtype}, expected {expected_dtype}")
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

    targets = torch.arange(len(d2t)) + d2t
    if targets.min() < 0 or targets.max() >= vocab_size:
        return [f"d2t: target ids reach {int(targets.max())}, the verifier's vocabulary ends at {vocab_size - 1}"]
    if not (targets.diff() > 0).all():
        return ["d2t: target ids (draft id + offset) are not strictly rising; are they offsets, of a sorted list?"]
    return []


def _t2d(tensors: dict[str, torch.Tensor], vocab_size: int) -> dict[str, torch.Tensor]:
    """speculators' second map, from the first; nothing for a full vocabulary."""
    import torch

    if "d2t" not in tensors:
        return {}
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[torch.arange(len(tensors["d2t"])) + tensors["d2t"]] = True
    return {"t2d": t2d}


def verify(folder: Path, checkpoint: Path, config: Config, shards: list[Path]) -> float:
    """Check a published draft against the training checkpoint it came from; nothing is taken from memory.

    Args:
        folder: the published config.json and model.safetensors, of either format.
        checkpoint: the training checkpoint.
        config: the run's configuration, for the verifier.
        shards: hidden states to compute logits on, one file at least.

    Returns:
        The largest difference between the two models' logits, over all TTT steps.

    Raises:
        PipelineError: a tensor, a key of the config, or the logits are not what they must be.
    """
    import torch
    from safetensors.torch import load_file

    published = load_file(folder / WEIGHTS)
    written = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    saved = json.loads((checkpoint / CONFIG).read_text(encoding="utf-8"))
    expected = flat_config(saved, verifier.aux_layer_ids(config.verifier))
    if "speculators_model_type" in written:
        published.pop("t2d", None)
        written = flat_config(written, verifier.aux_layer_ids(config.verifier))
    check_tensors(published, written)
    wrong = [
        f"{key}: {written.get(key)!r}, trained with {expected[key]!r}"
        for key in expected
        if written.get(key, ...) != expected[key]
    ]
    if wrong:
        raise PipelineError(f"{folder / CONFIG} is not of the model that was trained:\n  " + "\n  ".join(wrong))
    trained = load_file(checkpoint / WEIGHTS)
    # Logits are over draft ids: they cannot show a map that names other tokens.
    if "d2t" in published and not torch.equal(published["d2t"], trained["d2t"]):
        raise PipelineError(f"{folder / WEIGHTS}: d2t is not the trained model's: each draft would be another token")
    trained_shape = saved | saved["transformer_layer_config"]
    difference = _compare_logits((published, written), (trained, trained_shape), config, shards)
    if not difference <= _LOGIT_TOLERANCE:  # nor NaN
        raise PipelineError(
            f"the published draft's logits differ from the trained model's by up to {difference:.3g} "
            f"(allowed {_LOGIT_TOLERANCE:g}): what would be served is not what was trained"
        )
    return difference


def _compare_logits(
    published: tuple[dict[str, torch.Tensor], dict[str, Any]],
    trained: tuple[dict[str, torch.Tensor], dict[str, Any]],
    config: Config,
    shards: list[Path],
) -> float:
    """Largest difference of two drafts' logits, each given as tensors and flat-named config; NaN where one is."""
    import torch

    models = [_draft_model(tensors, shape, config) for tensors, shape in (published, trained)]
    differences = []
    for shard in shards:
        ids, states = _ids_and_states(shard)
        ours, theirs = (_logits(model, ids, states, config.training.ttt_steps) for model in models)
        differences.append((ours - theirs).abs().max())
    return float(torch.stack(differences).max())


def _draft_model(tensors: dict[str, torch.Tensor], shape: dict[str, Any], config: Config) -> Eagle3DraftModel:
    """An Eagle3DraftModel in float32 with exactly `tensors`, and the verifier's embedding where it has none.

    Args:
        tensors: the draft's, in any floating point type; rounded to bf16 first, as they are served, so that of two
            models only a wrong conversion differs.
        shape: `_LAYER_FIELDS` and `_DRAFT_FIELDS`.
        config: for the verifier.
    """
    import torch
    from speculators import Eagle3DraftModel, SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    layer = LlamaConfig(**{name: shape[name] for name in _LAYER_FIELDS if name in shape})
    layer._attn_implementation = "sdpa"
    draft_config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **{name: shape[name] for name in _DRAFT_FIELDS},
    )
    model = Eagle3DraftModel(config=draft_config).float().eval()
    embedding = verifier.head_weights(config.verifier)[verifier.EMBEDDING]
    full = shape["draft_vocab_size"] == shape["vocab_size"]
    unused = (*TRAINING_ONLY, "d2t") if full else TRAINING_ONLY
    state = {EMBEDDINGS: embedding} | {name: tensor for name, tensor in tensors.items() if name not in unused}
    rounded = {n: t.to(torch.bfloat16).float() if t.is_floating_point() else t for n, t in state.items()}
    missing, unexpected = model.load_state_dict(rounded, strict=False)
    if lacking := [name for name in missing if name not in TRAINING_ONLY] + list(unexpected):
        raise PipelineError(f"the published draft cannot be loaded: {', '.join(lacking)}")
    return model


def _ids_and_states(shard: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The first token ids [T] and states [T, layers, hidden] of a shard, these in float32 as they were captured."""
    try:
        held = read_states(shard)
    except SetAside as error:
        raise PipelineError(f"{shard.resolve()}: {error}; make it again, then run this again") from None
    return held.token_ids[:_ROUND_TRIP_TOKENS], held.restored()[:_ROUND_TRIP_TOKENS].float()


def _logits(model: Eagle3DraftModel, ids: torch.Tensor, states: torch.Tensor, ttt_steps: int) -> torch.Tensor:
    """The draft's logits [ttt_steps, T - 1, draft vocabulary] on ids [T] and states, shifted as in training."""
    import torch

    seen: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
    # speculators compiles this wherever a GPU is seen, for a CPU too: longer than all the rest, and torch 2.11 writes
    # C++ that no compiler takes.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        model(
            hidden_states=states[:-1, :-1].flatten(1)[None],
            input_ids=ids[None, 1:],
            document_ids=torch.zeros(1, len(ids) - 1, dtype=torch.long),
            position_ids=torch.arange(1, len(ids))[None],
            ttt_steps=ttt_steps,
        )
    hook.remove()
    return torch.stack(seen)


def push(stage: Stage) -> None:
    """Upload the finished checkpoint to the hub, when `export.push_to` asks for it.

    Raises:
        PipelineError: the hub refused.
    """
    target = stage.config.export.push_to
    if target is None:
        return
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        api.create_repo(target, private=True, exist_ok=True)
        api.upload_folder(repo_id=target, folder_path=stage.folder, allow_patterns=[CONFIG, WEIGHTS, CARD, "*.png"])
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise PipelineError(
            f"{target} could not be uploaded: {str(error).splitlines()[0]}\n"
            "Is HF_TOKEN set, with the right to write there? The checkpoint itself is finished."
        ) from None
    print(f"uploaded to the hub: {target} (private)")
