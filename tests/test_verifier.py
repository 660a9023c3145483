"""Contract of the verifier: its sizes, layers and weights are taken by exact name, or refused with what was found.

The stand-ins are directories of a few kilobytes in the two shapes that exist: Kimi-K2.5's (`text_config` inside,
`language_model.` before every weight) and a plain text model's. Below them, the same for the embedded tiny verifier:
its questions, its template and its configuration; the model itself is not trained here.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from safetensors.torch import save_file

from eagle3_train import tiny, verifier
from eagle3_train.config import Verifier
from eagle3_train.errors import PipelineError
from eagle3_train.verifier import EMBEDDING, FINAL_NORM, LM_HEAD

ROOT = Path(__file__).resolve().parent.parent
VOCAB, HIDDEN = 32, 8
SIZES = {
    "model_type": "kimi_k2",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 61,
    "vocab_size": VOCAB,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
KIMI, PLAIN = "language_model.", ""


def weights(prefix: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """The three tensors asked for, and others whose names end alike."""
    random = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(torch.bfloat16)

    return {
        prefix + EMBEDDING: tensor(VOCAB, HIDDEN),
        prefix + FINAL_NORM: tensor(HIDDEN),
        prefix + LM_HEAD: tensor(VOCAB, HIDDEN),
        prefix + "model.layers.0.input_layernorm.weight": tensor(HIDDEN),
        prefix + "model.layers.60.post_attention_layernorm.weight": tensor(HIDDEN),
        prefix + "model.layers.0.self_attn.q_a_norm.weight": tensor(HIDDEN),
        "vision_tower.norm.weight": tensor(HIDDEN),
        "vision_tower.embed_tokens.weight": tensor(VOCAB, HIDDEN),
    }


def checkpoint(
    path: Path, prefix: str, tensors: dict[str, torch.Tensor] | None = None, shards: int = 1, **sizes: Any
) -> Verifier:
    """A stand-in verifier at `path`, with these sizes other than `SIZES`."""
    path.mkdir(parents=True)
    config = {**SIZES, **sizes}
    if prefix == KIMI:
        # The sizes outside are another model's: only those of the text model count.
        config = {"model_type": "kimi_k25", "hidden_size": 7, "vocab_size": 7, "text_config": config}
    (path / "config.json").write_text(json.dumps(config))
    tensors = weights(prefix) if tensors is None else tensors
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return Verifier(path=str(path))
    weight_map = {name: f"model-{n % shards:05}.safetensors" for n, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return Verifier(path=str(path))


@pytest.fixture
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub out of reach and its cache empty; returns the cache."""
    cache = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # The library reads its environment once, at import.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return cache


# Sizes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [KIMI, PLAIN], ids=["nested", "flat"])
def test_the_sizes_are_the_text_models(tmp_path: Path, prefix: str) -> None:
    sizes = verifier.text_config(checkpoint(tmp_path / "v", prefix))
    assert {name: getattr(sizes, name) for name in SIZES} == SIZES
    assert sizes.raw == SIZES


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "{}", '{"text_config": {}}', '{"text_config": null}', '{"hidden_size": 8}'],
)
def test_a_config_without_the_sizes_is_refused_naming_the_file(tmp_path: Path, text: str) -> None:
    settings = checkpoint(tmp_path / "v", PLAIN)
    (tmp_path / "v" / "config.json").write_text(text)
    with pytest.raises(PipelineError) as refused:
        verifier.text_config(settings)
    assert str(tmp_path / "v" / "config.json") in str(refused.value)


@pytest.mark.parametrize("size", [name for name in SIZES if name != "tie_word_embeddings"])
def test_a_missing_size_is_refused_naming_it(tmp_path: Path, size: str) -> None:
    settings = checkpoint(tmp_path / "v", PLAIN)
    config = {name: value for name, value in SIZES.items() if name != size}
    (tmp_path / "v" / "config.json").write_text(json.dumps(config))
    with pytest.raises(PipelineError, match=size):
        verifier.text_config(settings)


# Layers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "aux"),
    [(61, [2, 30, 58]), (32, [2, 16, 29]), (8, [2, 4, 5]), (7, [2, 3, 4])],
)
def test_the_default_layers_are_an_early_a_middle_and_a_late_one_and_the_last_is_captured_too(
    tmp_path: Path, layers: int, aux: list[int]
) -> None:
    settings = checkpoint(tmp_path / "v", KIMI, num_hidden_layers=layers)
    assert verifier.aux_layer_ids(settings) == aux
    assert verifier.captured_layer_ids(settings) == [*aux, layers]


@pytest.mark.parametrize(
    ("asked", "used"),
    [([5, 2, 4], [2, 4, 5]), ([1, 4, 7], [1, 4, 7]), ([1, 3, 5, 7], [1, 3, 5, 7]), ([3], [3])],
)
def test_layers_asked_for_are_used_in_ascending_order(tmp_path: Path, asked: list[int], used: list[int]) -> None:
    settings = checkpoint(tmp_path / "v", KIMI, num_hidden_layers=8).model_copy(update={"aux_layer_ids": asked})
    assert verifier.aux_layer_ids(settings) == used
    assert verifier.captured_layer_ids(settings) == [*used, 8]


@pytest.mark.parametrize(
    ("asked", "layers"),
    [
        pytest.param([2, 2, 5], 8, id="twice the same"),
        pytest.param([0, 2, 4], 8, id="the embedding's"),
        pytest.param([-1, 2, 4], 8, id="negative"),
        pytest.param([2, 4, 8], 8, id="the last output"),
        pytest.param([2, 30, 58], 8, id="of a deeper verifier"),
        pytest.param(None, 6, id="the default of 6 layers: 2, 3, 3"),
        pytest.param(None, 4, id="the default of 4 layers: 2, 2, 1"),
        pytest.param(None, 2, id="the default of 2 layers: 2, 1, -1"),
    ],
)
def test_repeated_or_absent_layers_are_refused(tmp_path: Path, asked: list[int] | None, layers: int) -> None:
    settings = checkpoint(tmp_path / "v", KIMI, num_hidden_layers=layers).model_copy(update={"aux_layer_ids": asked})
    with pytest.raises(PipelineError, match=r"verifier\.aux_layer_ids") as refused:
        verifier.aux_layer_ids(settings)
    assert f"between 1 and {layers - 1}" in str(refused.value)


# Weights ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("prefix", [KIMI, PLAIN], ids=["nested", "flat"])
def test_the_head_is_taken_by_its_exact_names(tmp_path: Path, prefix: str, shards: int) -> None:
    tensors = weights(prefix)
    head = verifier.head_weights(checkpoint(tmp_path / "v", prefix, tensors, shards))
    assert head.keys() == {EMBEDDING, FINAL_NORM, LM_HEAD}
    for name, tensor in head.items():
        assert torch.equal(tensor, tensors[prefix + name])
        assert tensor.dtype == torch.bfloat16


@pytest.mark.parametrize("shards", [1, 2])
def test_every_tensor_is_found_in_its_file(tmp_path: Path, shards: int) -> None:
    tensors = weights(KIMI)
    files = verifier.weight_files(checkpoint(tmp_path / "v", KIMI, tensors, shards))
    assert files.keys() == tensors.keys()
    assert len(set(files.values())) == shards
    assert all((tmp_path / "v" / name).is_file() for name in files.values())


def test_another_models_head_in_the_same_file_is_not_taken(tmp_path: Path) -> None:
    tensors = {**weights(KIMI), PLAIN + FINAL_NORM: torch.zeros(HIDDEN), PLAIN + LM_HEAD: torch.zeros(VOCAB, HIDDEN)}
    head = verifier.head_weights(checkpoint(tmp_path / "v", KIMI, tensors))
    assert torch.equal(head[LM_HEAD], tensors[KIMI + LM_HEAD])
    assert torch.equal(head[FINAL_NORM], tensors[KIMI + FINAL_NORM])


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("prefix", [KIMI, PLAIN], ids=["nested", "flat"])
@pytest.mark.parametrize("name", [LM_HEAD, FINAL_NORM])
def test_a_missing_tensor_is_refused_and_never_replaced_by_one_that_ends_alike(
    tmp_path: Path, prefix: str, name: str, shards: int
) -> None:
    tensors = weights(prefix)
    del tensors[prefix + name]
    settings = checkpoint(tmp_path / "v", prefix, tensors, shards)
    with pytest.raises(PipelineError, match=f"tensor {re.escape(prefix + name)} is missing"):
        verifier.head_weights(settings)


def test_a_head_under_another_prefix_than_the_embedding_is_refused(tmp_path: Path) -> None:
    tensors = weights(KIMI)
    tensors[LM_HEAD] = tensors.pop(KIMI + LM_HEAD)
    with pytest.raises(PipelineError, match=r"language_model\.lm_head\.weight is missing") as refused:
        verifier.head_weights(checkpoint(tmp_path / "v", KIMI, tensors))
    assert "nearest: ['lm_head.weight']" in str(refused.value)


def test_weights_under_an_unknown_prefix_are_refused_with_what_was_found(tmp_path: Path) -> None:
    tensors = {f"model.language_{name}": tensor for name, tensor in weights(PLAIN).items()}
    with pytest.raises(PipelineError) as refused:
        verifier.head_weights(checkpoint(tmp_path / "v", PLAIN, tensors))
    assert "model.language_model.embed_tokens.weight" in str(refused.value)


def test_a_head_tied_to_the_embedding_is_the_embedding(tmp_path: Path) -> None:
    tensors = weights(KIMI)
    del tensors[KIMI + LM_HEAD]
    head = verifier.head_weights(checkpoint(tmp_path / "v", KIMI, tensors, tie_word_embeddings=True))
    assert torch.equal(head[LM_HEAD], tensors[KIMI + EMBEDDING])


def test_an_int4_packed_head_is_refused_naming_what_is_there(tmp_path: Path) -> None:
    tensors = weights(KIMI)
    del tensors[KIMI + LM_HEAD]
    tensors |= {
        KIMI + "lm_head.weight_packed": torch.zeros(VOCAB, 1, dtype=torch.int32),
        KIMI + "lm_head.weight_scale": torch.ones(VOCAB, 1),
        KIMI + "lm_head.weight_shape": torch.tensor([VOCAB, HIDDEN]),
    }
    with pytest.raises(PipelineError) as refused:
        verifier.head_weights(checkpoint(tmp_path / "v", KIMI, tensors))
    assert "language_model.lm_head.weight is missing" in str(refused.value)
    assert "language_model.lm_head.weight_packed" in str(refused.value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", [EMBEDDING, LM_HEAD])
def test_a_quantised_tensor_under_the_plain_name_is_refused(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Its values mean nothing without the scale that lies beside it."""
    tensors = weights(KIMI)
    tensors[KIMI + name] = tensors[KIMI + name].to(dtype)
    tensors[KIMI + name + "_scale_inv"] = torch.ones(1, 1)
    with pytest.raises(PipelineError) as refused:
        verifier.head_weights(checkpoint(tmp_path / "v", KIMI, tensors))
    assert KIMI + name in str(refused.value)
    assert str(dtype) in str(refused.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_head_of_any_plain_type_is_taken_as_it_is(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in weights(PLAIN).items()}
    head = verifier.head_weights(checkpoint(tmp_path / "v", PLAIN, tensors))
    assert {tensor.dtype for tensor in head.values()} == {dtype}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (EMBEDDING, [VOCAB + 1, HIDDEN]),
        (LM_HEAD, [VOCAB - 1, HIDDEN]),
        (LM_HEAD, [HIDDEN, VOCAB]),
        (LM_HEAD, [VOCAB * HIDDEN]),
        (FINAL_NORM, [HIDDEN + 1]),
        (FINAL_NORM, [1, HIDDEN]),
    ],
)
def test_a_tensor_of_another_shape_is_refused_with_both_shapes(tmp_path: Path, name: str, shape: list[int]) -> None:
    tensors = {**weights(KIMI), KIMI + name: torch.zeros(shape)}
    with pytest.raises(PipelineError) as refused:
        verifier.head_weights(checkpoint(tmp_path / "v", KIMI, tensors))
    expected = [HIDDEN] if name == FINAL_NORM else [VOCAB, HIDDEN]
    assert all(part in str(refused.value) for part in (KIMI + name, str(shape), str(expected)))


@pytest.mark.parametrize(
    "broken",
    ["weights cut", "weights empty", "weights gone", "shard gone", "shard cut", "index cut", "index without map"],
)
def test_a_damaged_checkpoint_is_refused_naming_the_file(tmp_path: Path, broken: str) -> None:
    what, how = broken.split(" ", 1)
    settings = checkpoint(tmp_path / "v", KIMI, shards=1 if what == "weights" else 2)
    name = {"weights": "model.safetensors", "shard": "model-00000.safetensors", "index": "model.safetensors.index.json"}
    file = tmp_path / "v" / name[what]
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes({"cut": file.read_bytes()[:-100], "empty": b"", "without map": b"{}"}[how])
    with pytest.raises(PipelineError) as refused:
        verifier.head_weights(settings)
    assert str(file) in str(refused.value)


# Where it is, and which one it is -----------------------------------------------------------------------------------


def test_a_local_directory_is_used_as_it_is(tmp_path: Path) -> None:
    settings = checkpoint(tmp_path / "v", PLAIN)
    assert verifier.location(settings) == settings.path
    assert verifier.file(settings, "config.json") == tmp_path / "v" / "config.json"
    with pytest.raises(PipelineError) as refused:
        verifier.file(settings, "tokenizer.json")
    assert str(tmp_path / "v" / "tokenizer.json") in str(refused.value)


@pytest.mark.parametrize(
    "path",
    ["/nowhere/kimi", "./kimi", "../kimi", "~/kimi", "kimi", "a/b/c", "my models/kimi", "owner/.kimi", "models/"],
)
def test_a_path_that_is_neither_a_directory_nor_a_hub_id_is_refused_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: Path, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PipelineError) as refused:
        verifier.file(Verifier(path=path), "config.json")
    assert f"verifier.path {path}: no such directory" in str(refused.value)
    assert verifier.fingerprint(Verifier(path=path)) is None


def test_a_hub_id_out_of_reach_is_refused_with_the_remedy(no_hub: Path) -> None:
    settings = Verifier(path="moonshotai/Kimi-K2.5")
    assert verifier.location(settings) == "moonshotai/Kimi-K2.5"
    assert verifier.fingerprint(settings) is None
    with pytest.raises(PipelineError) as refused:
        verifier.text_config(settings)
    assert all(part in str(refused.value) for part in ("config.json", "moonshotai/Kimi-K2.5", "local directory"))


def test_a_verifier_in_the_hubs_cache_is_read_without_a_network(no_hub: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = no_hub / "models--owner--name"
    checkpoint(repository / "snapshots" / commit, KIMI, shards=2)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    settings = Verifier(path="owner/name")
    assert verifier.fingerprint(settings) == commit
    assert verifier.aux_layer_ids(settings) == [2, 30, 58]
    assert torch.equal(verifier.head_weights(settings)[LM_HEAD], weights(KIMI)[KIMI + LM_HEAD])


@pytest.mark.parametrize("changed", ["weights", "config", "tokenizer", "nothing"])
def test_the_fingerprint_changes_with_the_verifier_alone(tmp_path: Path, changed: str) -> None:
    settings = checkpoint(tmp_path / "v", KIMI)
    (tmp_path / "v" / "tokenizer.json").write_text('{"a": 1}')
    before = verifier.fingerprint(settings)
    weights_file = tmp_path / "v" / "model.safetensors"
    if changed == "weights":
        size = weights_file.stat().st_size
        save_file(weights(KIMI, seed=1), weights_file)
        assert weights_file.stat().st_size == size
    elif changed == "config":
        config = tmp_path / "v" / "config.json"
        config.write_text(config.read_text().replace("262144", "131072"))
    elif changed == "tokenizer":
        (tmp_path / "v" / "tokenizer.json").write_text('{"a": 2}')
    else:
        weights_file.touch()
    (tmp_path / "v").rename(tmp_path / "moved")
    assert (verifier.fingerprint(Verifier(path=str(tmp_path / "moved"))) == before) == (changed == "nothing")


def test_a_downloaders_bookkeeping_does_not_make_another_verifier(tmp_path: Path) -> None:
    """`hf download --local-dir` keeps time stamps in .cache/huggingface, new ones at every call."""
    settings = checkpoint(tmp_path / "v", KIMI)
    before = verifier.fingerprint(settings)
    bookkeeping = tmp_path / "v" / ".cache" / "huggingface" / "download" / "config.json.metadata"
    bookkeeping.parent.mkdir(parents=True)
    bookkeeping.write_text("0123456789abcdef\n1733011200.0\n")
    assert verifier.fingerprint(settings) == before


@pytest.mark.parametrize("path", ["tiny", "/nowhere/kimi", "~/kimi", "./kimi", "../kimi", "kimi/", "HERE"])
def test_the_recorded_name_is_never_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    settings = checkpoint(tmp_path / "v", PLAIN) if path == "HERE" else Verifier(path=path)
    assert verifier.hub_name(settings, None) is None
    assert verifier.hub_name(settings, "owner/recorded") == "owner/recorded"


def test_the_recorded_name_of_a_hub_verifier_is_its_id() -> None:
    assert verifier.hub_name(Verifier(path="moonshotai/Kimi-K2.5"), None) == "moonshotai/Kimi-K2.5"


# The tiny verifier: questions and template --------------------------------------------------------------------------


def first_exchanges(seed: int, count: int) -> list[tiny.Exchange]:
    return list(itertools.islice(tiny.exchanges(seed), count))


def test_exchanges_depend_on_the_seed_alone() -> None:
    assert first_exchanges(3, 100) == first_exchanges(3, 100)
    assert first_exchanges(3, 100)[:20] == first_exchanges(3, 20)
    assert first_exchanges(3, 100) != first_exchanges(4, 100)


def test_what_the_tiny_verifier_is_taught_is_true() -> None:
    equations = 0
    for exchange in first_exchanges(0, 1000):
        for a, sign, b, result in re.findall(r"(-?\d+) ([+-]) (\d+) = (-?\d+)", exchange.reasoning):
            assert int(a) + int(b) * (1 if sign == "+" else -1) == int(result), exchange
            assert result in exchange.answer, exchange
            equations += 1
        for larger, smaller in re.findall(r"(\d+) is more than (\d+)", exchange.reasoning):
            assert int(larger) > int(smaller), exchange
            assert exchange.answer == f"{larger} is larger than {smaller}.", exchange
    assert equations == 750  # three kinds of four calculate


def test_the_prompts_that_come_along_are_those_the_generator_writes(tmp_path: Path) -> None:
    tiny.write_prompts(tmp_path / "made" / "prompts.jsonl")
    assert (tmp_path / "made" / "prompts.jsonl").read_bytes() == (ROOT / "data" / "tiny_prompts.jsonl").read_bytes()


def test_the_prompts_that_come_along_are_distinct_questions_with_thought_out_answers() -> None:
    rows = [json.loads(line) for line in (ROOT / "data" / "tiny_prompts.jsonl").read_text().splitlines()]
    turns = [row["conversations"] for row in rows]
    assert len({human["value"] for human, _ in turns}) == len(rows) == tiny.NUM_PROMPTS
    assert all((human["from"], gpt["from"]) == ("human", "gpt") for human, gpt in turns)
    assert all(re.fullmatch(r"<think>[^<]+</think>[^<]+", gpt["value"]) for _, gpt in turns)


@pytest.mark.parametrize("count", [1, 57])
def test_as_many_prompts_as_asked_for_are_written(tmp_path: Path, count: int) -> None:
    tiny.write_prompts(tmp_path / "p.jsonl", seed=5, count=count)
    assert len(set((tmp_path / "p.jsonl").read_text().splitlines())) == count


def test_the_command_line_writes_the_prompts_of_the_seed_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    for name, flags in (("default", []), ("other", ["--seed", "9"])):
        monkeypatch.setattr(sys, "argv", ["tiny", "prompts", str(tmp_path / name), *flags])
        tiny.main()
        written.append((tmp_path / name).read_bytes())
    assert written[0] == (ROOT / "data" / "tiny_prompts.jsonl").read_bytes()
    assert written[1] != written[0]


def test_an_exchange_is_rendered_as_the_chat_template_gives_it() -> None:
    template = jinja2.Template(tiny.CHAT_TEMPLATE)
    for exchange in first_exchanges(0, 8):
        question = {"role": "user", "content": exchange.question}
        answer = {"role": "assistant", "reasoning": exchange.reasoning, "content": exchange.answer}
        rendered = tiny.render(exchange)
        assert template.render(messages=[question, answer]) == rendered
        # What the verifier is asked with is how its training text begins.
        asked = template.render(messages=[question], add_generation_prompt=True)
        assert asked.endswith("<|im_middle|><think>")
        assert rendered.startswith(asked)
        assert rendered[len(asked) :].startswith(exchange.reasoning)


@pytest.mark.parametrize(("thinking", "opening"), [(True, "<think>"), (False, "<think></think>")])
def test_thinking_can_be_switched_off_in_the_chat_template(thinking: bool, opening: str) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    template = jinja2.Template(tiny.CHAT_TEMPLATE)
    assert template.render(messages=messages, add_generation_prompt=True, thinking=thinking) == (
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>Why?<|im_end|>"
        f"<|im_assistant|>assistant<|im_middle|>{opening}"
    )


# The tiny verifier: tokenizer and configuration ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny verifier's directory with everything but its weights."""
    path = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny._train_tokenizer([tiny.render(exchange) for exchange in first_exchanges(0, 400)])
    tokenizer.save_pretrained(path)
    text_config = tiny._text_config(tokenizer.eos_token_id).to_dict()
    tiny._write_configs(path, text_config, tiny.SPECIAL_TOKENS.index("<|media_pad|>"))
    return path


def test_the_tiny_verifier_has_kimis_shape(tiny_directory: Path) -> None:
    config = json.loads((tiny_directory / "config.json").read_text())
    assert config["architectures"] == ["KimiK25ForConditionalGeneration"]
    assert config["model_type"] == "kimi_k25"
    text = config["text_config"]
    assert (text["model_type"], text["scoring_func"], text["topk_method"]) == ("kimi_k2", "sigmoid", "noaux_tc")
    # vLLM's MLA kernels know no other widths than these of Kimi's.
    assert (text["kv_lora_rank"], text["qk_rope_head_dim"]) == (512, 64)
    assert text["n_routed_experts"] > text["num_experts_per_tok"] > 1
    assert text["n_shared_experts"] == text["first_k_dense_replace"] == 1


def test_of_two_first_starts_at_once_one_trains_the_tiny_verifier_and_the_other_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings: list[int] = []

    def train(*_given: Any) -> None:
        trainings.append(1)
        time.sleep(1)  # another start arrives meanwhile

    monkeypatch.setattr(tiny, "_train", train)
    monkeypatch.setattr(tiny, "CORPUS_SEQUENCES", 400)
    out = tmp_path / "models" / "tiny"
    with ThreadPoolExecutor(2) as starts:
        assert list(starts.map(tiny.build_verifier, [out, out])) == [out, out]
    assert len(trainings) == 1
    assert verifier.text_config(Verifier(path=str(out))).vocab_size == tiny.VOCAB_SIZE


def test_the_tiny_verifiers_sizes_and_layers_are_read_like_kimis(tiny_directory: Path) -> None:
    settings = Verifier(path=str(tiny_directory))
    sizes = verifier.text_config(settings)
    assert (sizes.model_type, sizes.hidden_size, sizes.vocab_size) == ("kimi_k2", 128, tiny.VOCAB_SIZE)
    assert not sizes.tie_word_embeddings
    assert verifier.captured_layer_ids(settings) == [2, 4, 5, 8]


def test_the_tiny_tokenizer_reads_any_text_back_and_gives_every_digit_a_token(tiny_directory: Path) -> None:
    tokenizer = verifier.tokenizer(Verifier(path=str(tiny_directory)))
    for text in ("What is 12 + 305?", "naïve 为什么？ \U0001f914\n\ttab", "<|im_end|>"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert len(tokenizer("12305", add_special_tokens=False)["input_ids"]) == 5
    assert len(tokenizer) <= tiny.VOCAB_SIZE
    assert tokenizer.eos_token == "<|im_end|>"
    assert "<think>" in tokenizer.chat_template


def test_every_special_token_is_listed_with_the_id_the_model_knows(tiny_directory: Path) -> None:
    ids = verifier.special_token_ids(Verifier(path=str(tiny_directory)))
    assert ids == list(range(len(tiny.SPECIAL_TOKENS)))
    tokenizer = verifier.tokenizer(Verifier(path=str(tiny_directory)))
    assert tuple(tokenizer.convert_ids_to_tokens(ids)) == tiny.SPECIAL_TOKENS


def test_added_tokens_are_special_unless_they_lie_beyond_the_vocabulary(tiny_directory: Path, tmp_path: Path) -> None:
    tokenizer = verifier.tokenizer(Verifier(path=str(tiny_directory)))
    first = len(tokenizer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tiny_directory / "config.json").read_text())
    config["text_config"]["vocab_size"] = first + 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = verifier.special_token_ids(Verifier(path=str(tmp_path)))
    assert ids == [*range(len(tiny.SPECIAL_TOKENS)), first]


def test_a_tiny_verifier_that_is_there_is_used_and_never_built_again(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in tiny_directory.iterdir()}
    monkeypatch.setattr(verifier, "TINY_DIRECTORY", tiny_directory)
    settings = Verifier(path="tiny")
    assert verifier.location(settings) == str(tiny_directory)
    assert verifier.fingerprint(settings) == verifier.fingerprint(Verifier(path=str(tiny_directory)))
    assert {path.name: path.stat().st_mtime_ns for path in tiny_directory.iterdir()} == before
