"""Warm start: the weights of a published draft in a fresh one, checked before a single weight is changed.

Read are speculators' format and the flat one of vLLM and SGLang (LlamaForCausalLMEagle3; safetensors or .bin, whole
or sharded). A draft of another shape, on other layers or with another arithmetic would load and be no better than
chance, so every difference refuses, all of them in one message.

Two drafts seldom share their vocabulary. The draft's head is frozen: speculators leaves the verifier's rows in it,
SpecForge and TorchSpec train their own, and a layer only fits the head it was trained below. So a head that is not the
verifier's is taken over for the tokens that both vocabularies hold; the others keep the verifier's rows.
"""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_train import verifier
from eagle3_train.config import Verifier
from eagle3_train.errors import PipelineError

if TYPE_CHECKING:
    import torch
    from speculators import Eagle3DraftModel
    from transformers import LlamaConfig

CONFIG, INDEX = "config.json", ".index.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the first that is there is read
# vLLM's own name of the class and the one its checkpoints carry.
_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_EMBEDDINGS, _HEAD = "embed_tokens.weight", "lm_head.weight"
_NOT_TRAINED = (_EMBEDDINGS, _HEAD, "d2t", "t2d", "verifier_lm_head.weight", "verifier_norm.weight")
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
)
_NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Half of bf16's spacing, and the smallest steps of fp16: one tensor rounded by two savers.
_ROUNDING = {"rtol": 2**-8, "atol": 1e-6}
_ROWS_AT_ONCE = 8192


@dataclass(frozen=True)
class Published:
    """What a published draft's config.json says.

    Attributes:
        form: flat or speculators.
        layer: its decoder layer; `vocab_size` is the verifier's.
        norm_flags: `_NORM_FLAGS`.
        layer_ids: its auxiliary layers as written, None where the config names none.
        draft_vocab_size: tokens it can propose.
        tied: its head is its embedding.
    """

    form: str
    layer: LlamaConfig
    norm_flags: dict[str, bool]
    layer_ids: list[int] | None
    draft_vocab_size: int
    tied: bool


def load_into(model: Eagle3DraftModel, init_from: str, verifier_layers: int) -> dict[str, Any]:
    """Put a published draft's weights into a fresh draft, and say what was taken over.

    Args:
        model: as `draft.build_draft` makes it, on the CPU; unchanged when this refuses.
        init_from: a local directory or a hub id, in speculators' or flat format.
        verifier_layers: the verifier's number of layers, for drafts whose config names no auxiliary layers.

    Returns:
        For metrics.jsonl: `format`, `tensors` loaded, `layer_numbering` (vllm, sglang or default), `shared_tokens` in
        both vocabularies, `new_tokens` in ours alone, and whose `head` the shared tokens have (verifier or draft).

    Raises:
        PipelineError: not there, not whole, another kind of draft, or different in shape, layers, rope or norms.
    """
    import torch

    folder = _folder(init_from)
    published = _read_config(folder / CONFIG)
    numbering = _layer_numbering(published.layer_ids, model.target_layer_ids, verifier_layers)
    wrong = _differences(model, published)
    if numbering is None:
        wrong.append(_other_layers(published.layer_ids, model.target_layer_ids, verifier_layers))
    if wrong:
        raise PipelineError(
            f"{init_from} is not a draft of this shape; its value, then this run's:\n  "
            + "\n  ".join(wrong)
            + "\nSet the preset's draft section (or verifier.aux_layer_ids) to its values, or start from another draft."
        )
    tensors = _read_tensors(folder)
    if faults := _tensor_faults(model, tensors, published):
        raise PipelineError(f"{init_from} cannot be loaded whole:\n  " + "\n  ".join(faults))
    theirs, reading = _target_ids(tensors, published, folder)
    rows = _rows_for(model, theirs)
    shared = rows >= 0
    if not shared.any():
        raise PipelineError(f"{init_from}: its vocabulary and this run's share no token")
    trained = trainable(model)
    own_head = _HEAD in tensors and _rows_apart(model.lm_head.weight[shared], tensors[_HEAD], rows[shared]) > 0
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(tensors[name])
        if own_head:
            model.lm_head.weight[shared] = tensors[_HEAD][rows[shared]].to(model.lm_head.weight)
    summary = {
        "format": published.form,
        "tensors": len(trained),
        "layer_numbering": numbering,
        "shared_tokens": int(shared.sum()),
        "new_tokens": int((~shared).sum()),
        "head": "draft" if own_head else "verifier",
    }
    print(f"starting from {init_from}: {_told(summary, published, reading, model.target_layer_ids)}")
    for remark in _remarks(model, published, tensors):
        print(f"  {remark}")
    return summary


def trainable(model: Eagle3DraftModel) -> dict[str, torch.nn.Parameter]:
    """The parameters that training changes, by name: all but the embedding, the head and what is the verifier's."""
    return {name: parameter for name, parameter in model.named_parameters() if name not in _NOT_TRAINED}


def _folder(init_from: str) -> Path:
    """The draft's directory; of a hub id only the config and one kind of weights are fetched."""
    if Path(init_from).is_dir():
        return Path(init_from)
    if verifier.hub_name(Verifier(path=init_from), None) is None:
        raise PipelineError(f"draft.init_from {init_from}: no such directory, and not a hub id (owner/name) either")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        for name in WEIGHTS:
            stem, _, suffix = name.rpartition(".")
            patterns = [CONFIG, f"{stem}*.{suffix}", name + INDEX]
            folder = Path(snapshot_download(init_from, allow_patterns=patterns))
            if (folder / name).exists() or (folder / (name + INDEX)).exists():
                break
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise PipelineError(
            f"draft.init_from {init_from} could not be fetched from the hub: {str(error).splitlines()[0]}\n"
            "Check the name and the network, or give a local directory."
        ) from None
    return folder


def _read_config(path: Path) -> Published:
    """The config of either format.

    A key that is missing means what it means to vLLM: norm_before_residual is true in speculators' format and false
    in the flat one.
    """
    from transformers import LlamaConfig

    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        in_speculators = "speculators_model_type" in raw
        layer = raw["transformer_layer_config"] if in_speculators else raw
        eagle = raw.get("eagle_config") or {}
        _check_kind(path, raw, layer, in_speculators)
        ids = raw.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
        return Published(
            form="speculators" if in_speculators else "flat",
            layer=LlamaConfig(**{name: value for name, value in layer.items() if name != "model_type"}),
            norm_flags={
                "norm_before_residual": bool(raw.get("norm_before_residual", in_speculators)),
                "norm_before_fc": bool(eagle.get("norm_before_fc", raw.get("norm_before_fc", False))),
                "fc_norm": bool(raw.get("fc_norm", False)),
                "norm_output": bool(raw.get("norm_output", False)),
            },
            layer_ids=[int(layer_id) for layer_id in ids] if ids else None,
            draft_vocab_size=int(raw.get("draft_vocab_size") or layer["vocab_size"]),
            tied=not in_speculators and bool(raw.get("tie_word_embeddings")),
        )
    except PipelineError:
        raise
    except Exception as error:  # LlamaConfig's own checks raise many kinds
        reason = str(error).strip().splitlines() or [""]
        raise PipelineError(f"{path}: not a draft's config ({type(error).__name__}: {reason[-1].strip()})") from None


def _check_kind(path: Path, raw: dict[str, Any], layer: dict[str, Any], in_speculators: bool) -> None:
    """Refuse every draft that is not an EAGLE-3 draft with a Llama layer, by the name of its kind."""
    if in_speculators:
        kind = f"{raw['speculators_model_type']} with a {layer.get('model_type')} layer"
        wanted = "eagle3 with a llama layer"
        fits = kind == wanted
    else:
        names = raw.get("architectures") or ["no architecture"]
        kind, wanted = ", ".join(names), _ARCHITECTURES[0]
        fits = any(name in _ARCHITECTURES for name in names)
    if not fits:
        mla = " (its attention is MLA)" if "Deepseek" in kind or layer.get("kv_lora_rank") else ""
        raise PipelineError(f"{path}: a draft of another kind, {kind}{mla}; only {wanted} can start this one")


def _differences(model: Eagle3DraftModel, published: Published) -> list[str]:
    """Every value that decides the shape or the arithmetic and is not the same in both."""
    ours, theirs = model.config.transformer_layer_config, published.layer
    pairs = {name: (getattr(theirs, name, None), getattr(ours, name, None)) for name in _SIZES}
    pairs |= {name: (flag, getattr(model.config, name)) for name, flag in published.norm_flags.items()}
    wrong = [f"{name}: {its!r}, {mine!r}" for name, (its, mine) in pairs.items() if its != mine]
    if not _same_rope(model, theirs):
        wrong.append(f"rope (ours is the verifier's): {_shown_rope(theirs)}, {_shown_rope(ours)}")
    return wrong


def _same_rope(model: Eagle3DraftModel, theirs: LlamaConfig) -> bool:
    """Whether both rotate alike: frequencies and scaling are compared, for configs spell the same rope in many ways."""
    import torch

    turned = copy.deepcopy(model.config.transformer_layer_config)
    turned.rope_parameters = theirs.rope_parameters
    turned.max_position_embeddings = theirs.max_position_embeddings
    ours, its = model.rotary_emb, type(model.rotary_emb)(turned)
    return (
        ours.rope_type == its.rope_type
        and ours.attention_scaling == its.attention_scaling
        and torch.allclose(ours.inv_freq, its.inv_freq)
    )


def _shown_rope(layer: LlamaConfig) -> dict[str, Any]:
    return {name: value for name, value in layer.rope_parameters.items() if name != "type"}


def _layer_numbering(stated: list[int] | None, ours: list[int], verifier_layers: int) -> str | None:
    """The numbering in which a draft's layers are ours; None when in neither.

    vLLM's id k is the stream ENTERING layer k, SGLang's the one LEAVING it. Without ids both servers take the same
    streams, [2, n/2, n-3] in vLLM's numbering.
    """
    if stated is None:
        return "default" if ours == _default_layers(verifier_layers) else None
    if stated == ours:
        return "vllm"
    return "sglang" if [layer + 1 for layer in stated] == ours else None


def _default_layers(verifier_layers: int) -> list[int]:
    return [2, verifier_layers // 2, verifier_layers - 3]


def _other_layers(stated: list[int] | None, ours: list[int], verifier_layers: int) -> str:
    if stated is None:
        return f"auxiliary layers: none named, so the default {_default_layers(verifier_layers)}, {ours}"
    shifted = [layer + 1 for layer in stated]
    return f"auxiliary layers: {stated} (if in SGLang's numbering, vLLM's {shifted}), {ours}"


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor, by speculators' names, on the CPU."""
    for name in WEIGHTS:
        index = folder / (name + INDEX)
        if index.exists():
            files = _indexed(index)
            break
        if (folder / name).exists():
            files = [name]
            break
    else:
        raise PipelineError(f"{folder}: no weights ({' or '.join(WEIGHTS)}, whole or with an index)")
    tensors: dict[str, torch.Tensor] = {}
    for name in files:
        for key, tensor in _read_file(folder / name).items():
            plain = key.removeprefix("model.").replace("midlayer.", "layers.0.")
            if plain in tensors:
                raise PipelineError(f"{folder / name}: {key} is there twice, under another name or in another file")
            tensors[plain] = tensor
    return tensors


def _indexed(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PipelineError(f"{index}: not a whole index ({error!r}); fetch it again") from None


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        table = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PipelineError(f"{path}: not a whole file of weights ({reason}); fetch it again") from None
    if not isinstance(table, dict) or not all(isinstance(value, torch.Tensor) for value in table.values()):
        raise PipelineError(f"{path}: not a table of tensors")
    return table


def _tensor_faults(model: Eagle3DraftModel, tensors: dict[str, torch.Tensor], published: Published) -> list[str]:
    """Missing, unknown, misshapen, packed and non-finite tensors, each by name."""
    import torch

    shapes = {name: list(parameter.shape) for name, parameter in trainable(model).items()}
    faults = [f"missing: {name} {shape}" for name, shape in shapes.items() if name not in tensors]
    faults += [f"not known: {name}" for name in tensors if name not in shapes and name not in _NOT_TRAINED]
    width, whole = published.layer.hidden_size, published.layer.vocab_size
    if _HEAD not in tensors and (published.tied or published.draft_vocab_size != whole):
        faults.append(f"missing: {_HEAD} [{published.draft_vocab_size}, {width}]")
    shapes[_HEAD] = [published.draft_vocab_size, width]
    shapes[_EMBEDDINGS] = [whole, width]
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            continue
        if list(tensor.shape) != shape:
            faults.append(f"{name}: shape {list(tensor.shape)}, expected {shape}")
        elif tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            faults.append(f"{name}: {tensor.dtype}, expected 16 or 32 bit floats; packed weights cannot be trained on")
        elif not all(part.isfinite().all() for part in tensor.split(_ROWS_AT_ONCE)):
            faults.append(f"{name}: holds a NaN or infinity")
    return faults


def _target_ids(tensors: dict[str, torch.Tensor], published: Published, folder: Path) -> tuple[torch.Tensor, str]:
    """The verifier's id of each of the draft's tokens, int64 [draft vocabulary], and how d2t was read.

    vLLM, SGLang and speculators read d2t as offsets (target id - draft id); some drafts hold the target ids. The
    reading whose ids are unique, in range and those of t2d is right; where both are, the servers' own.
    """
    import torch

    size, whole = published.draft_vocab_size, published.layer.vocab_size
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None:
        if size == whole:
            return torch.arange(whole), "none"
        raise PipelineError(f"{folder}: no d2t, so which {size} of the {whole} tokens it proposes is unknown")
    if d2t.is_floating_point() or list(d2t.shape) != [size]:
        raise PipelineError(f"{folder}: d2t is {d2t.dtype} {list(d2t.shape)}, expected {size} integers")
    readings = {"offsets": torch.arange(size) + d2t, "ids": d2t.long()}
    for reading, ids in readings.items():
        in_range = bool(((ids >= 0) & (ids < whole)).all())
        if in_range and len(ids.unique()) == size and (t2d is None or _is_set_of(ids, t2d, whole)):
            return ids, reading
    raise PipelineError(
        f"{folder}: d2t gives {size} different tokens of 0 to {whole - 1}"
        f"{'' if t2d is None else ', those of t2d,'} neither as offsets nor as ids"
    )


def _is_set_of(ids: torch.Tensor, t2d: torch.Tensor, whole: int) -> bool:
    import torch

    return list(t2d.shape) == [whole] and torch.equal(ids.sort().values, t2d.nonzero().flatten())


def _rows_for(model: Eagle3DraftModel, theirs: torch.Tensor) -> torch.Tensor:
    """For each of our draft tokens the row of the published head, or -1; int64 [our draft vocabulary]."""
    import torch

    row_of = torch.full((model.verifier_vocab_size,), -1)
    row_of[theirs] = torch.arange(len(theirs))
    ours = torch.arange(model.draft_vocab_size)
    return row_of[ours if model.d2t is None else ours + model.d2t]


def _rows_apart(ours: torch.Tensor, theirs: torch.Tensor, rows: torch.Tensor) -> int:
    """How many rows of `ours` are not, up to rounding, rows `rows` of `theirs`."""
    import torch

    apart = 0
    for part, numbers in zip(ours.split(_ROWS_AT_ONCE), rows.split(_ROWS_AT_ONCE), strict=True):
        apart += int((~torch.isclose(part.float(), theirs[numbers].float(), **_ROUNDING)).any(dim=1).sum())
    return apart


def _told(summary: dict[str, Any], published: Published, reading: str, layers: list[int]) -> str:
    """What was taken over, in a line."""
    numbering = {
        "default": f"it names no layers, taken for the default {layers}",
        "vllm": f"its layers {published.layer_ids} read in vLLM's numbering",
        "sglang": f"its layers {published.layer_ids} read in SGLang's numbering, vLLM's {layers}",
    }[summary["layer_numbering"]]
    shared, new = summary["shared_tokens"], summary["new_tokens"]
    if summary["head"] == "verifier":
        head = f"lm_head is the verifier's, {shared} of {shared + new} tokens are in its vocabulary"
    else:
        head = f"{shared} rows of its own lm_head taken over, {new} tokens it lacks keep the verifier's"
    ids = "; its d2t holds target ids, not offsets" if reading == "ids" else ""
    return f"{summary['tensors']} tensors ({published.form}); {numbering}; {head}{ids}"


def _remarks(model: Eagle3DraftModel, published: Published, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Differences that training makes up for, a line each."""
    import torch

    ours, theirs = model.config.transformer_layer_config, published.layer
    remarks = []
    if theirs.rms_norm_eps != ours.rms_norm_eps:
        remarks.append(f"rms_norm_eps was {theirs.rms_norm_eps:g}, is {ours.rms_norm_eps:g}")
    if _window(theirs) != _window(ours):
        remarks.append(f"attention window was {_window(theirs)}, is {_window(ours)} [tokens; None is everything]")
    if _EMBEDDINGS in tensors:
        whole = torch.arange(model.verifier_vocab_size)
        if apart := _rows_apart(model.embed_tokens.weight, tensors[_EMBEDDINGS], whole):
            remarks.append(f"{_EMBEDDINGS}: {apart} of {len(whole)} rows are not the verifier's, whose are kept")
    return remarks


def _window(layer: LlamaConfig) -> int | None:
    sliding = "sliding_attention" in (getattr(layer, "layer_types", None) or [])
    return layer.sliding_window if sliding else None
