"""Stands in for Kimi-K2.5's checkpoint: the true structure and sizes, next to nothing on disk.

What the real one holds is written in our own words: the nested config.json with remote code, the safetensors index
over 64 shards, a tokenizer that is Python code beside a tiktoken vocabulary, the chat template. Every tensor listed
has its true name, shape and type; its data are a hole in a sparse file, so weights read as zeros. Of each layer's 384
experts only the first few are listed (`experts=`), which is the one way in which it is smaller.

    build(path)                    0.1 s, 1 MB of disk, 29 GB in `ls -l`
    build(path, experts=384)       every tensor of the real one: 4 s, 51 MB of disk, 595 GB in `ls -l`
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

SHARDS = 64
LISTED_EXPERTS = 4
DTYPE_BYTES = {"BF16": 2, "F32": 4, "I32": 4}
GROUP = 32  # weights that share one INT4 scale
PER_WORD = 8  # INT4 weights in an I32

# The published Llama drafts for Kimi-K2 and K2.5 (AQ-MedAI, lightseekorg; LlamaForCausalLMEagle3), `midlayer.` there:
# what is trained, and the whole checkpoint with a vocabulary of 32,000.
DRAFT_TRAINED = {
    "fc.weight": [7168, 21504],
    "layers.0.self_attn.q_proj.weight": [8192, 14336],
    "layers.0.self_attn.k_proj.weight": [8192, 14336],
    "layers.0.self_attn.v_proj.weight": [8192, 14336],
    "layers.0.self_attn.o_proj.weight": [7168, 8192],
    "layers.0.mlp.gate_proj.weight": [12288, 7168],
    "layers.0.mlp.up_proj.weight": [12288, 7168],
    "layers.0.mlp.down_proj.weight": [7168, 12288],
    "layers.0.input_layernorm.weight": [7168],
    "layers.0.hidden_norm.weight": [7168],
    "layers.0.post_attention_layernorm.weight": [7168],
    "norm.weight": [7168],
}
DRAFT_PUBLISHED = DRAFT_TRAINED | {"lm_head.weight": [32000, 7168], "d2t": [32000]}

SPECIAL_TOKENS = {
    163584: "[BOS]",
    163585: "[EOS]",
    163586: "<|im_end|>",
    163587: "<|im_user|>",
    163588: "<|im_assistant|>",
    163590: "<|start_header_id|>",
    163591: "<|end_header_id|>",
    163593: "[EOT]",
    163594: "<|im_system|>",
    163595: "<|tool_calls_section_begin|>",
    163596: "<|tool_calls_section_end|>",
    163597: "<|tool_call_begin|>",
    163598: "<|tool_call_argument_begin|>",
    163599: "<|tool_call_end|>",
    163601: "<|im_middle|>",
    163602: "<|media_begin|>",
    163603: "<|media_content|>",
    163604: "<|media_end|>",
    163605: "<|media_pad|>",
    163606: "<think>",
    163607: "</think>",
    163838: "[UNK]",
    163839: "[PAD]",
}
# Added tokens, but shown when special ones are skipped: a parser must see them.
SHOWN = ("<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")

TEXT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "vocab_size": 163840,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 262144,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "dtype": "bfloat16",
    "use_cache": True,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": GROUP,
                    "dynamic": False,
                },
            }
        },
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
    },
}
VISION: dict[str, Any] = {
    "model_type": "",
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed",
    "vt_num_attention_heads": 16,
    "vt_num_hidden_layers": 27,
    "vt_hidden_size": 1152,
    "vt_intermediate_size": 4304,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "video_attn_type": "spatial_temporal",
    "mm_projector_type": "patchmerger",
    "mm_hidden_size": 1152,
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
    "text_hidden_size": 7168,
}
CONFIG: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "auto_map": {
        "AutoConfig": "configuration_kimi_k25.KimiK25Config",
        "AutoModel": "modeling_kimi_k25.KimiK25ForConditionalGeneration",
        "AutoModelForCausalLM": "modeling_kimi_k25.KimiK25ForConditionalGeneration",
    },
    "model_type": "kimi_k25",
    "dtype": "bfloat16",
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "ignore_index": -100,
    "media_placeholder_token_id": 163605,
    "use_unified_vision_chunk": True,
    "tie_word_embeddings": False,
    "text_config": TEXT,
    "vision_config": VISION,
}

# The remote code that comes with the checkpoint; transformers imports it only where it is trusted.
CONFIGURATION_TEXT = """
from transformers import PretrainedConfig


class DeepseekV3Config(PretrainedConfig):
    model_type = "kimi_k2"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(self, rope_theta=10000.0, rope_scaling=None, **options):
        # Its own sizes first, as such code does, then what every config has.
        general = {"auto_map", "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config"}
        for name in options.keys() - general:
            setattr(self, name, options[name])
        self.rope_theta = rope_theta
        self.rope_scaling = rope_scaling
        super().__init__(**{name: options[name] for name in options.keys() & general})
"""
CONFIGURATION = """
from transformers import PretrainedConfig

from .configuration_deepseek import DeepseekV3Config


class KimiK25VisionConfig(PretrainedConfig):
    model_type = "kimi_k25_vision"


class KimiK25Config(PretrainedConfig):
    model_type = "kimi_k25"

    def __init__(self, text_config=None, vision_config=None, **others):
        self.text_config = DeepseekV3Config(**text_config) if isinstance(text_config, dict) else text_config
        self.vision_config = KimiK25VisionConfig(**vision_config) if isinstance(vision_config, dict) else vision_config
        super().__init__(**others)
"""
TOKENIZATION = r'''
import base64
from pathlib import Path

import tiktoken
from transformers import PreTrainedTokenizer


class TikTokenTokenizer(PreTrainedTokenizer):
    """Byte-pair ranks from tiktoken.model; a token's text form is its bytes read as latin-1."""

    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, added_tokens_decoder=None, **options):
        lines = Path(vocab_file).read_text().splitlines()
        ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, lines)}
        self.encoding = tiktoken.Encoding(
            name="kimi-standin", pat_str=r"\s?\w+|\s?[^\w\s]+|\s+", mergeable_ranks=ranks, special_tokens={}
        )
        self.ids = {token.decode("latin-1"): rank for token, rank in ranks.items()}
        self.pieces = {rank: piece for piece, rank in self.ids.items()}
        super().__init__(added_tokens_decoder=added_tokens_decoder, **options)

    @property
    def vocab_size(self):
        return len(self.ids)

    def get_vocab(self):
        return self.ids | self.added_tokens_encoder

    def _tokenize(self, text, **options):
        return [self.pieces[rank] for rank in self.encoding.encode_ordinary(text)]

    def _convert_token_to_id(self, token):
        return self.ids.get(token)

    def _convert_id_to_token(self, index):
        return self.pieces.get(index)

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens).encode("latin-1").decode("utf-8", "replace")
'''
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}<|im_assistant|>assistant<|im_middle|>"
    "<think>{{ message.reasoning_content or message.reasoning or '' }}</think>"
    "{%- else -%}<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>{%- endif -%}"
    "{{ message.content }}<|im_end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>"
    "{%- if thinking is defined and thinking is false -%}<think></think>{%- else -%}<think>{%- endif -%}"
    "{%- endif -%}"
)


class Tensor(NamedTuple):
    """One tensor of the checkpoint, as its header line says."""

    name: str
    dtype: str
    shape: list[int]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def tensors(experts: int = LISTED_EXPERTS) -> Iterator[tuple[int, Tensor]]:
    """(shard number from 1, tensor) for all tensors; `experts` of the 384 of each layer."""
    hidden, vocab, layers = TEXT["hidden_size"], TEXT["vocab_size"], TEXT["num_hidden_layers"]
    yield 1, Tensor("language_model.model.embed_tokens.weight", "BF16", [vocab, hidden])
    for layer in range(layers):
        for tensor in _layer(layer, experts):
            yield layer + 1, tensor
    yield layers + 1, Tensor("language_model.model.norm.weight", "BF16", [hidden])
    yield layers + 1, Tensor("language_model.lm_head.weight", "BF16", [vocab, hidden])
    for tensor in _vision():
        yield SHARDS - 1 if tensor.name.startswith("vision_tower") else SHARDS, tensor


def _layer(layer: int, experts: int) -> Iterator[Tensor]:
    prefix = f"language_model.model.layers.{layer}."
    hidden, heads = TEXT["hidden_size"], TEXT["num_attention_heads"]
    q_rank, kv_rank, rope = TEXT["q_lora_rank"], TEXT["kv_lora_rank"], TEXT["qk_rope_head_dim"]
    nope, value = TEXT["qk_nope_head_dim"], TEXT["v_head_dim"]
    for name, shape in {
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
        "self_attn.q_a_proj": [q_rank, hidden],
        "self_attn.q_a_layernorm": [q_rank],
        "self_attn.q_b_proj": [heads * (nope + rope), q_rank],
        "self_attn.kv_a_proj_with_mqa": [kv_rank + rope, hidden],
        "self_attn.kv_a_layernorm": [kv_rank],
        "self_attn.kv_b_proj": [heads * (nope + value), kv_rank],
        "self_attn.o_proj": [hidden, heads * value],
    }.items():
        yield Tensor(f"{prefix}{name}.weight", "BF16", shape)
    if layer < TEXT["first_k_dense_replace"]:
        yield from _mlp(f"{prefix}mlp.", TEXT["intermediate_size"])
        return
    yield Tensor(f"{prefix}mlp.gate.weight", "BF16", [TEXT["n_routed_experts"], hidden])
    yield Tensor(f"{prefix}mlp.gate.e_score_correction_bias", "F32", [TEXT["n_routed_experts"]])
    yield from _mlp(f"{prefix}mlp.shared_experts.", TEXT["moe_intermediate_size"])
    for expert in range(experts):
        for linear in _mlp(f"{prefix}mlp.experts.{expert}.", TEXT["moe_intermediate_size"]):
            yield from packed(linear)


def _mlp(prefix: str, wide: int) -> Iterator[Tensor]:
    hidden = TEXT["hidden_size"]
    yield Tensor(f"{prefix}gate_proj.weight", "BF16", [wide, hidden])
    yield Tensor(f"{prefix}up_proj.weight", "BF16", [wide, hidden])
    yield Tensor(f"{prefix}down_proj.weight", "BF16", [hidden, wide])


def packed(tensor: Tensor) -> list[Tensor]:
    """The three tensors that stand for a Linear's weight in INT4."""
    rows, columns = tensor.shape
    return [
        Tensor(f"{tensor.name}_packed", "I32", [rows, columns // PER_WORD]),
        Tensor(f"{tensor.name}_scale", "BF16", [rows, columns // GROUP]),
        Tensor(f"{tensor.name}_shape", "I32", [2]),
    ]


def _vision() -> Iterator[Tensor]:
    wide, patch, inner = VISION["vt_hidden_size"], VISION["patch_size"], VISION["vt_intermediate_size"]
    yield Tensor("vision_tower.patch_embed.proj.weight", "BF16", [wide, 3, patch, patch])
    for block in range(VISION["vt_num_hidden_layers"]):
        prefix = f"vision_tower.encoder.blocks.{block}."
        yield Tensor(f"{prefix}norm0.weight", "BF16", [wide])
        yield Tensor(f"{prefix}wqkv.weight", "BF16", [3 * wide, wide])
        yield Tensor(f"{prefix}wo.weight", "BF16", [wide, wide])
        yield Tensor(f"{prefix}norm1.weight", "BF16", [wide])
        yield Tensor(f"{prefix}mlp.fc0.weight", "BF16", [inner, wide])
        yield Tensor(f"{prefix}mlp.fc1.weight", "BF16", [wide, inner])
    yield Tensor("mm_projector.pre_norm.weight", "BF16", [wide])
    yield Tensor("mm_projector.proj.0.weight", "BF16", [4 * wide, 4 * wide])
    yield Tensor("mm_projector.proj.2.weight", "BF16", [TEXT["hidden_size"], 4 * wide])


def shard_name(number: int) -> str:
    """The file name of shard `number`, from 1."""
    return f"model-{number:05}-of-{SHARDS:06}.safetensors"


def build(path: Path, *, experts: int = LISTED_EXPERTS, without: tuple[str, ...] = (), pack_head: bool = False) -> Path:
    """Write the stand-in into the new directory `path` and return it.

    Args:
        path: made; its parent must exist.
        experts: of the 384 of each layer, how many are listed.
        without: names of tensors to leave out.
        pack_head: lm_head in INT4 as well, as some requantised checkpoints have it.
    """
    path.mkdir()
    for name, text in {
        "config.json": json.dumps(CONFIG, indent=2),
        "generation_config.json": json.dumps({"max_length": TEXT["max_position_embeddings"], "eos_token_id": 163586}),
        "configuration_deepseek.py": CONFIGURATION_TEXT,
        "configuration_kimi_k25.py": CONFIGURATION,
        "tokenization_kimi.py": TOKENIZATION,
        "tokenizer_config.json": json.dumps(_tokenizer_config(), indent=2),
        "tiktoken.model": _ranks(),
        "chat_template.jinja": CHAT_TEMPLATE,
    }.items():
        (path / name).write_text(text, encoding="utf-8")
    shards: dict[int, list[Tensor]] = {number: [] for number in range(1, SHARDS + 1)}
    for number, tensor in tensors(experts):
        is_head = pack_head and tensor.name.endswith("lm_head.weight")
        if tensor.name not in without:
            shards[number] += packed(tensor) if is_head else [tensor]
    for number, held in shards.items():
        write_sparse(path / shard_name(number), held)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for held in shards.values() for tensor in held)},
        "weight_map": {tensor.name: shard_name(number) for number, held in shards.items() for tensor in held},
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return path


def write_sparse(path: Path, held: list[Tensor]) -> None:
    """A valid safetensors file of `held` whose data are one hole: all zeros, no disk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in held:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _tokenizer_config() -> dict[str, Any]:
    added = {
        str(number): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token not in SHOWN,
        }
        for number, token in SPECIAL_TOKENS.items()
    }
    return {
        "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]",
        "eos_token": "<|im_end|>",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1000000000000000019884624838656,
    }


def _ranks() -> str:
    """A tiktoken vocabulary: the 256 bytes, then the pairs that this module's own text has most of."""
    words = [[bytes([byte]) for byte in f" {word}".encode()] for word in (__doc__ or "").split()]
    tokens = [bytes([byte]) for byte in range(256)]
    for _ in range(64):
        pairs = Counter(pair for word in words for pair in pairwise(word))
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        tokens.append(best[0] + best[1])
        words = [_merge(word, best) for word in words]
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))


def _merge(word: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    merged: list[bytes] = []
    for piece in word:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged
