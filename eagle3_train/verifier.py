"""Everything special about a verifier: where its files are, its nested config, layer ids, weights and think tokens.

A verifier is a local directory, a Hugging Face hub id, or `tiny` (built on first use beside the project's other
models, so that a copy of the directory carries it along).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_train.config import Verifier
from eagle3_train.errors import PipelineError
from eagle3_train.run import sampled_digest

if TYPE_CHECKING:
    import torch

TINY_DIRECTORY = Path(__file__).resolve().parent.parent / "models" / "tiny-kimi-k2.5"
WEIGHTS_INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# Where the text model sits inside the checkpoint: Kimi-K2.5 and its like, then a plain text model.
WEIGHT_PREFIXES = ("language_model.", "")
# `models/` and `my models/kimi` are paths that are not there, not names on the hub.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*[A-Za-z0-9]")
EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True)
class TextConfig:
    """The verifier's sizes that the pipeline needs, from `text_config` where the config is nested."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    raw: dict[str, Any]


def location(settings: Verifier) -> str:
    """What vLLM is given as `--model`: a local directory (built first, if it is the tiny one) or a hub id.

    Raises:
        PipelineError: neither a directory nor shaped like a hub id.
    """
    if settings.path == "tiny":
        from eagle3_train.tiny import build_verifier

        return str(build_verifier(TINY_DIRECTORY))
    if Path(settings.path).is_dir():
        return settings.path
    if _HUB_ID.fullmatch(settings.path):
        return settings.path
    raise PipelineError(f"verifier.path {settings.path}: no such directory, and not a hub id (owner/name) either")


def file(settings: Verifier, name: str) -> Path:
    """The local path of one of the verifier's files, fetched from the hub where it must be.

    Raises:
        PipelineError: the file is not there.
    """
    where = location(settings)
    if Path(where).is_dir():
        path = Path(where) / name
        if not path.exists():
            raise PipelineError(f"{path} is missing; is verifier.path a complete checkpoint?")
        return path
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(where, name))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise PipelineError(
            f"{name} of {where} could not be fetched from the hub: {reason}\n"
            "Check the name and the network, or give verifier.path a local directory."
        ) from None


def fingerprint(settings: Verifier) -> str | None:
    """A digest that changes with the verifier's weights, config or tokenizer; None when it is not on this machine."""
    path = TINY_DIRECTORY if settings.path == "tiny" else Path(settings.path)
    if settings.path == "tiny":
        location(settings)
    if path.is_dir():
        return sampled_digest(path)
    try:
        # In the hub's cache a file lies in a folder named after its commit.
        return file(settings, "config.json").parent.name
    except PipelineError:
        return None


def text_config(settings: Verifier) -> TextConfig:
    """Read the verifier's config.json, nested or flat.

    Raises:
        PipelineError: unreadable, or a size is missing.
    """
    path = file(settings, "config.json")
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        raw = whole.get("text_config", whole)
        return TextConfig(
            model_type=raw["model_type"],
            hidden_size=raw["hidden_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            vocab_size=raw["vocab_size"],
            max_position_embeddings=raw["max_position_embeddings"],
            rms_norm_eps=raw["rms_norm_eps"],
            tie_word_embeddings=raw.get("tie_word_embeddings", whole.get("tie_word_embeddings", False)),
            raw=raw,
        )
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise PipelineError(f"{path}: not a config this project can read ({error!r})") from None


def aux_layer_ids(settings: Verifier) -> list[int]:
    """The layers that feed the draft, ascending, in vLLM's numbering: id k is the residual stream ENTERING layer k.

    Raises:
        PipelineError: repeated ids, or ids out of [1, n): vLLM crashes on them or saves another layer.
    """
    layers = text_config(settings).num_hidden_layers
    ids = settings.aux_layer_ids or [2, layers // 2, layers - 3]
    if sorted(set(ids)) != sorted(ids) or not all(0 < layer < layers for layer in ids):
        raise PipelineError(
            f"verifier.aux_layer_ids {ids}: they must differ and lie between 1 and {layers - 1}, "
            f"for the verifier has {layers} layers"
        )
    return sorted(ids)


def captured_layer_ids(settings: Verifier) -> list[int]:
    """The layers saved for a token: the auxiliary ones, then n, the last layer's output BEFORE the final norm."""
    return [*aux_layer_ids(settings), text_config(settings).num_hidden_layers]


def weight_files(settings: Verifier) -> dict[str, str]:
    """Tensor name -> file name for every tensor of the checkpoint.

    Raises:
        PipelineError: no index and no single safetensors file.
    """
    try:
        index = file(settings, WEIGHTS_INDEX)
    except PipelineError:
        with _opened(file(settings, SINGLE_FILE)) as tensors:
            return dict.fromkeys(tensors.keys(), SINGLE_FILE)
    try:
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise PipelineError(f"{index}: not a whole index ({error!r}); fetch it again") from None


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise PipelineError(f"{path}: not a whole safetensors file ({error}); fetch it again") from None


def head_weights(settings: Verifier) -> dict[str, torch.Tensor]:
    """The three tensors that a draft and the parity check are built on, by exact key.

    speculators takes whatever key ends alike: a missing lm_head silently becomes the embedding and a missing
    final norm some layer's own. So the keys, shapes and types are checked here first.

    Returns:
        {EMBEDDING: [vocab, hidden], LM_HEAD: [vocab, hidden], FINAL_NORM: [hidden]} in the checkpoint's dtype.

    Raises:
        PipelineError: a key is missing, packed (not floating point), or of another shape.
    """
    import torch

    sizes = text_config(settings)
    files = weight_files(settings)
    prefix = next((p for p in WEIGHT_PREFIXES if p + EMBEDDING in files), None)
    if prefix is None:
        near = sorted(name for name in files if "embed" in name)[:5]
        raise PipelineError(f"{settings.path}: no tensor {EMBEDDING} (with or without language_model.); found {near}")
    shapes = {
        EMBEDDING: [sizes.vocab_size, sizes.hidden_size],
        LM_HEAD: [sizes.vocab_size, sizes.hidden_size],
        FINAL_NORM: [sizes.hidden_size],
    }
    tensors = {}
    for name, shape in shapes.items():
        key = prefix + (EMBEDDING if name == LM_HEAD and sizes.tie_word_embeddings else name)
        if key not in files:
            near = sorted(n for n in files if n.endswith(name.rsplit(".", 2)[-2] + ".weight") or name[:7] in n)[:5]
            raise PipelineError(f"{settings.path}: tensor {key} is missing (packed or renamed?); nearest: {near}")
        with _opened(file(settings, files[key])) as opened:
            if key not in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                raise PipelineError(f"{settings.path}: {files[key]} does not hold {key}, though the index says so")
            tensor = opened.get_tensor(key)
        if list(tensor.shape) != shape or tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise PipelineError(
                f"{settings.path}: {key} is {tensor.dtype} {list(tensor.shape)}, expected 16 or 32 bit floats {shape}; "
                "a quantised embedding, head or norm cannot be trained on"
            )
        tensors[name] = tensor
    return tensors


def tokenizer(settings: Verifier) -> Any:
    """The verifier's own tokenizer, with its chat template.

    Raises:
        PipelineError: it cannot be loaded, or is code that `verifier.trust_remote_code` does not allow.
    """
    from transformers import AutoTokenizer

    # Untrusted, transformers leaves Kimi's code out without a word and guesses how the text is to be split.
    if not settings.trust_remote_code and (code := _tokenizer_code(settings)):
        raise PipelineError(
            f"{settings.path}: its tokenizer is Python code ({code}) and verifier.trust_remote_code is false\n"
            "Read that code, then set verifier.trust_remote_code: true in the preset."
        )
    try:
        return AutoTokenizer.from_pretrained(location(settings), trust_remote_code=settings.trust_remote_code)
    except Exception as error:  # the checkpoint's own code may raise anything
        raise PipelineError(f"{settings.path}: its tokenizer cannot be loaded: {str(error).strip()}") from error


def _tokenizer_code(settings: Verifier) -> str | None:
    """The class that the checkpoint brings as its only tokenizer; None where transformers' own will do."""
    try:
        options = json.loads(file(settings, "tokenizer_config.json").read_text(encoding="utf-8"))
    except (PipelineError, ValueError):
        return None
    code = options.get("auto_map", {}).get("AutoTokenizer")
    if code is None:
        return None
    try:
        file(settings, "tokenizer.json")
    except PipelineError:
        return next(name for name in code if name) if isinstance(code, list) else code
    return None


def special_token_ids(settings: Verifier) -> list[int]:
    """Ids of every special and added token (think tags, turn ends, tools): rare in a sample, needed in any draft."""
    own = tokenizer(settings)
    limit = text_config(settings).vocab_size
    return sorted(i for i in {*own.all_special_ids, *own.get_added_vocab().values()} if 0 <= i < limit)


def hub_name(settings: Verifier, recorded: str | None) -> str | None:
    """The verifier's name for a checkpoint or card: `recorded`, or its hub id, never a path of this machine."""
    named = _HUB_ID.fullmatch(settings.path) and not Path(settings.path).exists()
    return recorded or (settings.path if named else None)


def describe() -> int:
    """Make the verifier ready (the tiny one is built here) and say what it is; arguments as for any stage."""
    from eagle3_train.config import parse

    _, config = parse(None, describe.__doc__ or "")
    settings = config.verifier
    where, sizes = location(settings), text_config(settings)
    print(
        f"{where}: {sizes.num_hidden_layers} layers, hidden size {sizes.hidden_size}, "
        f"vocabulary {sizes.vocab_size}; the draft reads layers {aux_layer_ids(settings)}"
    )
    return 0


if __name__ == "__main__":
    from eagle3_train.cli import exit_with

    exit_with("verifier", describe)
