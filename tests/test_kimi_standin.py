"""Contract of everything that reads a verifier, on Kimi-K2.5's own structure and sizes (`kimi_standin.py`).

The three weights are read at their true size, 2 x 2.35 GB: they are holes in sparse files, mapped into memory and
never touched, which costs milliseconds and no memory.
"""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig

from eagle3_train import verifier
from eagle3_train.config import Config, Draft, Verifier
from eagle3_train.draft import draft_layer_config
from eagle3_train.errors import PipelineError
from eagle3_train.export import flat_config, tensor_table
from eagle3_train.extraction import token_bytes
from eagle3_train.verifier import EMBEDDING, FINAL_NORM, LM_HEAD
from tests import kimi_standin
from tests.kimi_standin import SHARDS, TEXT, build, tensors

QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@pytest.fixture
def trusted(kimi: Path) -> Verifier:
    return Verifier(path=str(kimi), trust_remote_code=True)


# The stand-in itself -------------------------------------------------------------------------------------------------


def test_it_is_built_in_seconds_and_takes_next_to_no_disk(tmp_path: Path) -> None:
    started = time.monotonic()
    path = build(tmp_path / "kimi")
    assert time.monotonic() - started < 5
    files = [file.stat() for file in path.iterdir()]
    assert sum(file.st_blocks * 512 for file in files) < 50e6
    assert sum(file.st_size for file in files) > 25e9


def test_with_all_experts_it_lists_the_595_gigabytes_of_the_real_one() -> None:
    listed = [tensor for _, tensor in tensors(experts=384)]
    assert sum(tensor.nbytes for tensor in listed) == pytest.approx(595.1e9, rel=1e-3)
    assert len({tensor.name for tensor in listed}) == len(listed)


def test_every_shard_opens_and_holds_what_the_index_says(kimi: Path) -> None:
    index = json.loads((kimi / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) == SHARDS
    held = {}
    for name in set(index.values()):
        with safe_open(kimi / name, framework="pt") as shard:
            held |= dict.fromkeys(shard.keys(), name)
    assert held == index
    assert {name.split(".")[0] for name in index} == {"language_model", "vision_tower", "mm_projector"}


def test_only_routed_experts_are_packed_and_the_ignore_list_says_so(kimi: Path) -> None:
    from compressed_tensors.utils import match_named_modules

    packed = {tensor.name for _, tensor in tensors() if tensor.name.endswith("_packed")}
    assert packed
    assert all(".mlp.experts." in name for name in packed)
    model = torch.nn.Module()
    for _, tensor in tensors():
        if tensor.name.startswith("language_model.") and (".proj" in tensor.name or "_proj" in tensor.name):
            owner = model
            *path, leaf = tensor.name.removeprefix("language_model.").split(".")[:-1]
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, torch.nn.Module())
                owner = getattr(owner, part)
            owner.add_module(leaf, torch.nn.Linear(1, 1))
    ignore = TEXT["quantization_config"]["ignore"]
    matched = {f"language_model.{name}" for name, _ in match_named_modules(model, ["Linear"], ignore)}
    assert matched == {name.rsplit(".", 1)[0] for name in packed}


@pytest.mark.parametrize("trust", [True, False], ids=["its remote code", "transformers' own"])
def test_its_config_is_read_by_transformers(kimi: Path, trust: bool) -> None:
    config = AutoConfig.from_pretrained(kimi, trust_remote_code=trust)
    assert type(config).__module__.startswith("transformers_modules" if trust else "transformers.models.kimi_k25")
    text = config.text_config
    assert (text.hidden_size, text.num_hidden_layers, text.vocab_size) == (7168, 61, 163840)
    assert (text.n_routed_experts, text.num_experts_per_tok, text.kv_lora_rank) == (384, 8, 512)


# Layers and weights --------------------------------------------------------------------------------------------------


def test_the_draft_reads_layers_2_30_58_and_61_is_captured_too(trusted: Verifier) -> None:
    assert verifier.aux_layer_ids(trusted) == [2, 30, 58]
    assert verifier.captured_layer_ids(trusted) == [2, 30, 58, 61]


def test_a_token_costs_57344_bytes(trusted: Verifier) -> None:
    assert token_bytes(Config(verifier=trusted)) == 57344


def test_the_three_weights_are_taken_by_exact_key_without_reading_them(trusted: Verifier) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    head = verifier.head_weights(trusted)
    assert {name: list(tensor.shape) for name, tensor in head.items()} == {
        EMBEDDING: [163840, 7168],
        LM_HEAD: [163840, 7168],
        FINAL_NORM: [7168],
    }
    assert {tensor.dtype for tensor in head.values()} == {torch.bfloat16}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB; the tensors have 4.7 GB


def test_a_packed_head_is_refused_naming_what_is_there(tmp_path: Path) -> None:
    path = build(tmp_path / "kimi", pack_head=True)
    with pytest.raises(PipelineError, match=r"language_model\.lm_head\.weight is missing") as refused:
        verifier.head_weights(Verifier(path=str(path)))
    assert "language_model.lm_head.weight_packed" in str(refused.value)


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_a_missing_tensor_is_refused_although_others_end_alike(tmp_path: Path, name: str) -> None:
    path = build(tmp_path / "kimi", without=(f"language_model.{name}",))
    with pytest.raises(PipelineError, match=rf"tensor language_model\.{name} is missing"):
        verifier.head_weights(Verifier(path=str(path)))


# Tokenizer and template ----------------------------------------------------------------------------------------------


def test_the_tokenizer_is_the_checkpoints_code_and_reads_any_text_back(trusted: Verifier) -> None:
    own = verifier.tokenizer(trusted)
    assert type(own).__module__.startswith("transformers_modules")
    for text in ("What is 12 + 30?", "à 日本 🙂\n\n  x", "<think>a</think>b<|im_end|>"):
        assert own.decode(own(text, add_special_tokens=False)["input_ids"]) == text


def test_think_tags_and_turn_ends_are_single_tokens_with_their_true_ids(trusted: Verifier) -> None:
    own = verifier.tokenizer(trusted)
    assert own("<think></think><|im_end|>", add_special_tokens=False)["input_ids"] == [163606, 163607, 163586]
    assert own.eos_token_id == 163586
    assert verifier.special_token_ids(trusted) == sorted(kimi_standin.SPECIAL_TOKENS)


def test_without_trust_the_code_is_neither_run_nor_guessed_around(kimi: Path) -> None:
    with pytest.raises(PipelineError) as refused:
        verifier.tokenizer(Verifier(path=str(kimi)))
    assert "tokenization_kimi.TikTokenTokenizer" in str(refused.value)
    assert "verifier.trust_remote_code: true" in str(refused.value)


def test_a_tokenizer_that_cannot_be_loaded_is_refused_with_the_reason(tmp_path: Path, kimi: Path) -> None:
    path = build(tmp_path / "kimi")
    (path / "tiktoken.model").unlink()
    with pytest.raises(PipelineError, match="its tokenizer cannot be loaded"):
        verifier.tokenizer(Verifier(path=str(path), trust_remote_code=True))


def test_the_template_opens_think_and_closes_it_where_thinking_is_off(trusted: Verifier) -> None:
    own = verifier.tokenizer(trusted)
    text = own.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_assistant|>assistant<|im_middle|><think>")
    assert own(text, add_special_tokens=False)["input_ids"][-1] == 163606
    off = own.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False, thinking=False)
    assert off == f"{text}</think>"


# The draft -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trust", [True, False], ids=["its remote code", "transformers' own"])
def test_the_drafts_layer_is_that_of_the_published_kimi_drafts(kimi: Path, trust: bool) -> None:
    layer = draft_layer_config(Config(verifier=Verifier(path=str(kimi), trust_remote_code=trust)))
    assert (layer.model_type, layer.num_hidden_layers, layer.hidden_size) == ("llama", 1, 7168)
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (64, 64, 128)
    assert (layer.intermediate_size, layer.vocab_size, layer.max_position_embeddings) == (12288, 163840, 262144)
    assert layer.rope_parameters == ROPE
    assert layer.rms_norm_eps == TEXT["rms_norm_eps"]


def test_the_exported_tensors_have_the_published_shapes(trusted: Verifier) -> None:
    config, draft = Config(verifier=trusted), Draft()
    saved = {
        "transformer_layer_config": draft_layer_config(config).to_dict(),
        "draft_vocab_size": 32000,
        "eagle_aux_hidden_state_layer_ids": [2, 30, 58],
        "norm_before_residual": draft.norm_before_residual,
        "norm_before_fc": draft.norm_before_fc,
        "fc_norm": draft.fc_norm,
        "norm_output": draft.norm_output,
    }
    assert tensor_table(flat_config(saved, verifier.aux_layer_ids(trusted))) == kimi_standin.DRAFT_PUBLISHED
