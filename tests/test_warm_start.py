"""Contract of the warm start: a published draft, in whatever form, goes on as the same draft; any other is refused.

The source is speculators' own model with random weights, in the flat form that stage 05 publishes. It is rewritten in
every form in which drafts are published, loaded into a fresh draft, and both compute logits: on the tokens of both
vocabularies they are the same. What a refusal names is what the user has to change, and a refused draft leaves the
fresh one as it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3_train import verifier, warm_start
from eagle3_train.config import Config, Draft, Training, Verifier
from eagle3_train.draft import build_draft
from eagle3_train.errors import PipelineError
from eagle3_train.export import EMBEDDINGS, TRAINING_ONLY, check_tensors, flat_config
from eagle3_train.vocabulary import VocabMap
from tests import kimi_standin

LAYERS = [2, 4, 5]  # of the tiny verifier's 8, in vLLM's numbering
VERIFIER_LAYERS = 8
WHOLE = 512
SIZE = 64
SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64}
STEPS = 2

Tensors = dict[str, torch.Tensor]


class Checkpoint:
    """A flat draft in memory, to be changed and written."""

    def __init__(self, config: dict[str, Any], tensors: Tensors):
        self.config, self.tensors = config, tensors

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / "model.safetensors")
        return folder


def config_of(**draft: Any) -> Config:
    return Config(
        verifier=Verifier(path="tiny", dtype="float32"),
        draft=Draft(**(SHAPE | {"norm_before_fc": True, "sliding_window": None} | draft)),
        training=Training(dtype="float32", ttt_steps=STEPS),
    )


def fresh(ids: torch.Tensor | None, config: Config | None = None) -> Any:
    """A fresh draft that proposes the tokens `ids` (rising), or all."""
    vocab = VocabMap(WHOLE, None, None)
    if ids is not None:
        vocab = VocabMap(len(ids), ids - torch.arange(len(ids)), torch.isin(torch.arange(WHOLE), ids))
    return build_draft(config or config_of(), vocab)


@pytest.fixture
def source_ids() -> torch.Tensor:
    """The verifier's ids of the source's tokens; some are neighbours."""
    return torch.randperm(WHOLE, generator=torch.Generator().manual_seed(0))[:SIZE].sort().values


@pytest.fixture
def model(source_ids: torch.Tensor) -> Any:
    """A fresh draft of the source's vocabulary and shape."""
    return fresh(source_ids)


@pytest.fixture
@torch.no_grad()
def source(source_ids: torch.Tensor) -> Any:
    """A draft with no weight at its initial value, rounded to bf16 as it is published."""
    generator = torch.Generator().manual_seed(1)
    model = fresh(source_ids)
    for parameter in warm_start.trainable(model).values():
        parameter.copy_((parameter + 0.05 * torch.randn(parameter.shape, generator=generator)).bfloat16())
    return model


@pytest.fixture
def flat(source: Any) -> Checkpoint:
    """The source as stage 05 publishes it."""
    tensors = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor.clone()
        for name, tensor in source.state_dict().items()
        if name not in (*TRAINING_ONLY, EMBEDDINGS)
    }
    config = flat_config(source.config.to_dict(), LAYERS)
    check_tensors(tensors, config)
    return Checkpoint(config, tensors)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """[TTT steps, tokens, draft vocabulary] on states and tokens that are always the same."""
    generator = torch.Generator().manual_seed(3)
    seen: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
    model.eval()(
        hidden_states=torch.randn(1, 12, 3 * 128, generator=generator),
        input_ids=torch.randint(0, WHOLE, (1, 12), generator=generator),
        document_ids=torch.zeros(1, 12, dtype=torch.long),
        ttt_steps=STEPS,
    )
    hook.remove()
    return torch.stack(seen)


def load(model: Any, folder: Path | str) -> dict[str, Any]:
    return warm_start.load_into(model, str(folder), VERIFIER_LAYERS)


# ---- every form in which drafts are published


def as_it_is(flat: Checkpoint) -> None:
    """vLLM's flat form, as stage 05 writes it."""


def as_sglang(flat: Checkpoint) -> None:
    """SpecForge and TorchSpec: midlayer, both maps, the embedding; layers in eagle_config, SGLang's numbering."""
    flat.tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in flat.tensors.items()}
    flat.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}
    del flat.config["eagle_aux_hidden_state_layer_ids"], flat.config["num_aux_hidden_states"]
    flat.config["model_type"] = "kimi_k2"
    flat.tensors["t2d"] = torch.isin(torch.arange(WHOLE), target_ids(flat))
    flat.tensors["embed_tokens.weight"] = verifier.head_weights(Verifier(path="tiny"))[verifier.EMBEDDING].bfloat16()


def with_prefix(flat: Checkpoint) -> None:
    """Every module below `model.`, as transformers saves a causal model."""
    outside = ("lm_head.weight", "d2t", "t2d")
    flat.tensors = {name if name in outside else f"model.{name}": tensor for name, tensor in flat.tensors.items()}


def without_layer_ids(flat: Checkpoint) -> None:
    del flat.config["eagle_aux_hidden_state_layer_ids"]


def with_target_ids(flat: Checkpoint) -> None:
    """d2t holds the verifier's ids themselves; t2d says so."""
    flat.tensors["t2d"] = torch.isin(torch.arange(WHOLE), target_ids(flat))
    flat.tensors["d2t"] = target_ids(flat)


def in_another_order(flat: Checkpoint) -> None:
    """Draft tokens by frequency, not by id."""
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(1))
    ids = target_ids(flat)[order]
    flat.tensors["d2t"] = ids - torch.arange(SIZE)
    flat.tensors["lm_head.weight"] = flat.tensors["lm_head.weight"][order]


def in_float16(flat: Checkpoint) -> None:
    flat.tensors = {n: t.half() if t.is_floating_point() else t for n, t in flat.tensors.items()}


def with_older_rope_names(flat: Checkpoint) -> None:
    rope = flat.config.pop("rope_parameters")
    flat.config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}


def target_ids(flat: Checkpoint) -> torch.Tensor:
    return torch.arange(SIZE) + flat.tensors["d2t"]


@pytest.mark.parametrize(
    ("change", "numbering"),
    [
        (as_it_is, "vllm"),
        (as_sglang, "sglang"),
        (with_prefix, "vllm"),
        (without_layer_ids, "default"),
        (with_target_ids, "vllm"),
        (in_another_order, "vllm"),
        (in_float16, "vllm"),
        (with_older_rope_names, "vllm"),
    ],
)
def test_each_flat_form_goes_on_as_the_same_draft(
    flat: Checkpoint, source: Any, model: Any, tmp_path: Path, change: Callable[[Checkpoint], None], numbering: str
) -> None:
    assert not torch.allclose(logits(model), logits(source), atol=0.1)
    change(flat)
    summary = load(model, flat.write(tmp_path / "draft"))
    assert summary == {
        "format": "flat",
        "tensors": 13,
        "layer_numbering": numbering,
        "shared_tokens": SIZE,
        "new_tokens": 0,
        "head": "verifier",
    }
    torch.testing.assert_close(logits(model), logits(source), rtol=0, atol=1e-4)


def test_speculators_own_checkpoint_goes_on_as_the_same_draft(source: Any, model: Any, tmp_path: Path) -> None:
    source.save_pretrained(tmp_path / "draft")
    assert load(model, tmp_path / "draft")["format"] == "speculators"
    assert torch.equal(logits(model), logits(source))


def test_shards_with_an_index_are_read(flat: Checkpoint, source: Any, model: Any, tmp_path: Path) -> None:
    folder = flat.write(tmp_path / "draft")
    (folder / "model.safetensors").unlink()
    names = sorted(flat.tensors)
    parts = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, held in parts.items():
        save_file({name: flat.tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    load(model, folder)
    torch.testing.assert_close(logits(model), logits(source), rtol=0, atol=1e-4)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(PipelineError, match=r"model-00002-of-00002\.safetensors: not a whole file"):
        load(model, folder)


def test_a_bin_file_is_read_without_running_what_it_holds(
    flat: Checkpoint, source: Any, model: Any, tmp_path: Path
) -> None:
    folder = flat.write(tmp_path / "draft")
    (folder / "model.safetensors").unlink()
    torch.save(flat.tensors, folder / "pytorch_model.bin")
    load(model, folder)
    torch.testing.assert_close(logits(model), logits(source), rtol=0, atol=1e-4)

    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "harmed",)

    torch.save({"fc.weight": Harm()}, folder / "pytorch_model.bin")
    with pytest.raises(PipelineError, match=r"pytorch_model\.bin: not a whole file of weights"):
        load(model, folder)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_of_a_hub_id_only_the_config_and_one_kind_of_weights_are_fetched(
    flat: Checkpoint, source: Any, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    remote, cache, asked = flat.write(tmp_path / "remote"), tmp_path / "cache", []
    (remote / "optimizer.safetensors").write_text("")
    torch.save(flat.tensors, remote / "pytorch_model.bin")
    if kind == "bin":
        (remote / "model.safetensors").unlink()
    cache.mkdir()

    def snapshot_download(repository: str, allow_patterns: list[str]) -> str:
        asked.append(repository)
        for path in remote.iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                (cache / path.name).write_bytes(path.read_bytes())
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    load(model, "owner/draft-eagle3")
    assert set(asked) == {"owner/draft-eagle3"}
    weights = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
    assert {path.name for path in cache.iterdir()} == {"config.json", weights}
    torch.testing.assert_close(logits(model), logits(source), rtol=0, atol=1e-4)


# ---- the vocabulary


def other_vocabulary(ids: torch.Tensor) -> torch.Tensor:
    """Half of `ids`, and as many tokens that are not among them."""
    others = torch.arange(WHOLE)[~torch.isin(torch.arange(WHOLE), ids)]
    return torch.cat([ids[::2], others[: SIZE // 2]]).sort().values


def test_another_vocabulary_gives_the_same_logits_for_the_tokens_of_both(
    flat: Checkpoint, source: Any, source_ids: torch.Tensor, tmp_path: Path
) -> None:
    ours = other_vocabulary(source_ids)
    model = fresh(ours)
    summary = load(model, flat.write(tmp_path / "draft"))
    assert (summary["shared_tokens"], summary["new_tokens"], summary["head"]) == (32, 32, "verifier")
    in_ours, in_theirs = torch.isin(ours, source_ids), torch.isin(source_ids, ours)
    torch.testing.assert_close(logits(model)[..., in_ours], logits(source)[..., in_theirs], rtol=0, atol=1e-4)


def test_a_head_of_its_own_is_taken_over_for_the_tokens_of_both_and_counted(
    flat: Checkpoint, source: Any, source_ids: torch.Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = other_vocabulary(source_ids)
    own_head = torch.randn(SIZE, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    flat.tensors["lm_head.weight"] = own_head
    source.lm_head.weight.data = own_head.float()
    model = fresh(ours)
    verifiers = model.lm_head.weight.clone()
    summary = load(model, flat.write(tmp_path / "draft"))
    assert (summary["shared_tokens"], summary["new_tokens"], summary["head"]) == (32, 32, "draft")
    assert "32 rows of its own lm_head taken over, 32 tokens it lacks keep the verifier's" in capsys.readouterr().out
    in_ours, in_theirs = torch.isin(ours, source_ids), torch.isin(source_ids, ours)
    torch.testing.assert_close(logits(model)[..., in_ours], logits(source)[..., in_theirs], rtol=0, atol=1e-4)
    assert torch.equal(model.lm_head.weight[~in_ours], verifiers[~in_ours])
    # What is learnt from is the verifier's own head, whatever the draft's.
    assert torch.equal(model.verifier_lm_head.weight, verifiers)
    assert not model.lm_head.weight.requires_grad


def test_the_verifiers_head_saved_in_another_type_is_still_the_verifiers(
    flat: Checkpoint, model: Any, tmp_path: Path
) -> None:
    head = torch.randn(SIZE, 128, generator=torch.Generator().manual_seed(5))
    model.lm_head.weight.data = head.clone()
    flat.tensors["lm_head.weight"] = head.bfloat16()
    assert load(model, flat.write(tmp_path / "draft"))["head"] == "verifier"
    assert torch.equal(model.lm_head.weight, head)


def test_a_draft_of_the_whole_vocabulary_starts_one_of_a_part_and_the_other_way_round(
    flat: Checkpoint, source: Any, model: Any, source_ids: torch.Tensor, tmp_path: Path
) -> None:
    whole = fresh(None)
    assert load(whole, flat.write(tmp_path / "part"))["new_tokens"] == WHOLE - SIZE
    torch.testing.assert_close(logits(whole)[..., source_ids], logits(source), rtol=0, atol=1e-4)
    # As TorchSpec publishes: no d2t, no draft_vocab_size.
    own_head = torch.randn(WHOLE, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    flat.tensors["lm_head.weight"] = own_head
    del flat.tensors["d2t"], flat.config["draft_vocab_size"]
    source.lm_head.weight.data = own_head[source_ids].float()
    assert load(model, flat.write(tmp_path / "all"))["new_tokens"] == 0
    torch.testing.assert_close(logits(model), logits(source), rtol=0, atol=1e-4)


def test_a_draft_of_the_whole_vocabulary_may_share_the_verifiers_head(
    flat: Checkpoint, source: Any, model: Any, tmp_path: Path
) -> None:
    del flat.tensors["d2t"], flat.tensors["lm_head.weight"]
    flat.config["draft_vocab_size"] = None
    assert load(model, flat.write(tmp_path / "draft"))["head"] == "verifier"
    torch.testing.assert_close(logits(model), logits(source), rtol=0, atol=1e-4)


def test_t2d_decides_how_d2t_is_read_where_both_readings_would_do(
    flat: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids so low that, read as offsets, they are still different tokens of the vocabulary."""
    ids = torch.arange(SIZE) * 2 + 3
    flat.tensors |= {"d2t": ids, "t2d": torch.isin(torch.arange(WHOLE), ids)}
    assert load(fresh(ids), flat.write(tmp_path / "with"))["shared_tokens"] == SIZE
    assert "d2t holds target ids, not offsets" in capsys.readouterr().out
    # Without it the servers' reading stands.
    del flat.tensors["t2d"]
    offsets = fresh(ids + torch.arange(SIZE))
    assert load(offsets, flat.write(tmp_path / "without"))["shared_tokens"] == SIZE
    assert "target ids" not in capsys.readouterr().out


def test_target_ids_that_reach_the_end_of_the_vocabulary_need_no_t2d(flat: Checkpoint, tmp_path: Path) -> None:
    """As every real map does: the special tokens are there, and read as offsets they would lie beyond."""
    ids = torch.linspace(2, WHOLE - 1, SIZE).long()
    flat.tensors["d2t"] = ids
    assert load(fresh(ids), flat.write(tmp_path / "draft"))["shared_tokens"] == SIZE


# ---- what is said, and not refused


def test_what_differs_without_harm_is_said(
    flat: Checkpoint, source_ids: torch.Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    as_sglang(flat)
    flat.config["rms_norm_eps"] = 1e-5
    flat.tensors["embed_tokens.weight"][40:43] += 1
    model = fresh(source_ids, config_of(sliding_window=256))
    embedding = model.embed_tokens.weight.clone()
    load(model, flat.write(tmp_path / "draft"))
    said = capsys.readouterr().out
    assert "its layers [1, 3, 4] read in SGLang's numbering, vLLM's [2, 4, 5]" in said
    assert "rms_norm_eps was 1e-05, is 1e-06" in said
    assert "attention window was None, is 256" in said
    assert "embed_tokens.weight: 3 of 512 rows are not the verifier's, whose are kept" in said
    assert torch.equal(model.embed_tokens.weight, embedding)


def test_nothing_is_remarked_on_a_draft_of_the_same_settings(
    flat: Checkpoint, model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    as_sglang(flat)
    load(model, flat.write(tmp_path / "draft"))
    assert len(capsys.readouterr().out.splitlines()) == 1


# ---- refusals


def put(**values: Any) -> Callable[[Checkpoint], None]:
    return lambda flat: flat.config.update(values)


def drop(*names: str) -> Callable[[Checkpoint], None]:
    def change(flat: Checkpoint) -> None:
        for name in names:
            flat.tensors.pop(name, None)
            flat.config.pop(name, None)

    return change


def tensor(name: str, value: torch.Tensor) -> Callable[[Checkpoint], None]:
    return lambda flat: flat.tensors.update({name: value})


def spoil(name: str, value: float) -> Callable[[Checkpoint], None]:
    def change(flat: Checkpoint) -> None:
        flat.tensors[name].view(-1)[3] = value

    return change


def of_speculators(**values: Any) -> Callable[[Checkpoint], None]:
    """A nested config, which is refused before any tensor is read."""

    def change(flat: Checkpoint) -> None:
        layer = {name: value for name, value in flat.config.items() if name != "architectures"}
        flat.config = {"speculators_model_type": "eagle3", "transformer_layer_config": layer} | values

    return change


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
# Turns as the plain one does, up to max_position_embeddings.
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put(num_attention_heads=8), r"num_attention_heads: 8, 4"),
        (put(num_key_value_heads=4), r"num_key_value_heads: 4, 2"),
        (put(head_dim=32), r"head_dim: 32, 16"),
        (put(intermediate_size=48), r"intermediate_size: 48, 64"),
        (put(num_hidden_layers=2, layer_types=None), r"num_hidden_layers: 2, 1"),
        (put(hidden_size=64), r"hidden_size: 64, 128"),
        (put(vocab_size=500), r"vocab_size: 500, 512"),
        (put(attention_bias=True), r"attention_bias: True, False"),
        (put(hidden_act="gelu"), r"hidden_act: 'gelu', 'silu'"),
        (put(rope_parameters={"rope_type": "default", "rope_theta": 5e4}), r"rope \(ours .*50000\.0.*, \{.*10000\.0"),
        (put(rope_parameters=YARN), r"rope \(ours is the verifier's\): \{'rope_type': 'yarn'.*\}, \{.*'default'"),
        (put(rope_parameters=DYNAMIC), r"rope \(ours is the verifier's\): \{'rope_type': 'dynamic'"),
        (put(norm_before_residual=False), r"norm_before_residual: False, True"),
        (drop("norm_before_residual"), r"norm_before_residual: False, True"),
        (put(norm_before_fc=False), r"norm_before_fc: False, True"),
        (put(fc_norm=True), r"fc_norm: True, False"),
        (put(norm_output=True), r"norm_output: True, False"),
        (put(eagle_config={"norm_before_fc": False}), r"norm_before_fc: False, True"),
        (put(eagle_aux_hidden_state_layer_ids=[3, 5, 6]), r"layers: \[3, 5, 6\] .*vLLM's \[4, 6, 7\]\), \[2, 4, 5\]"),
        (put(eagle_aux_hidden_state_layer_ids=[5, 4, 2]), r"layers: \[5, 4, 2\]"),
        (of_speculators(norm_before_residual=False, norm_before_fc=True), r"norm_before_residual: False, True"),
        (of_speculators(speculators_model_type="peagle"), r"another kind, peagle with a llama layer; only eagle3"),
        (of_speculators(transformer_layer_config={"model_type": "qwen3"}), r"eagle3 with a qwen3 layer"),
        (
            put(architectures=["Eagle3DeepseekV2ForCausalLM"], model_type="kimi_k2"),
            r"another kind, Eagle3DeepseekV2ForCausalLM \(its attention is MLA\); only LlamaForCausalLMEagle3",
        ),
        (put(architectures=["EagleLlamaForCausalLM"]), r"another kind, EagleLlamaForCausalLM; only"),
        (drop("architectures"), r"another kind, no architecture"),
        (put(hidden_size="wide"), r"config\.json: not a draft's config .*hidden_size"),
        (drop("d2t"), r"no d2t, so which 64 of the 512 tokens"),
        (tensor("d2t", torch.arange(32)), r"d2t is torch\.int64 \[32\], expected 64 integers"),
        (tensor("d2t", torch.zeros(SIZE)), r"d2t is torch\.float32 \[64\], expected 64 integers"),
        (tensor("d2t", -torch.arange(SIZE)), r"neither as offsets nor as ids"),
        (tensor("d2t", torch.full((SIZE,), 500)), r"neither as offsets nor as ids"),
        (tensor("t2d", torch.zeros(WHOLE, dtype=torch.bool)), r"those of t2d, neither as offsets nor as ids"),
        (drop("fc.weight", "norm.weight"), r"missing: fc\.weight \[128, 384\]\n  missing: norm\.weight \[128\]"),
        (drop("lm_head.weight"), r"missing: lm_head\.weight \[64, 128\]"),
        (tensor("layers.0.self_attn.q_proj.bias", torch.ones(64)), r"not known: layers\.0\.self_attn\.q_proj\.bias"),
        (tensor("midlayer.hidden_norm.weight", torch.ones(128)), r"hidden_norm\.weight is there twice"),
        (tensor("fc.weight", torch.ones(128, 256)), r"fc\.weight: shape \[128, 256\], expected \[128, 384\]"),
        (tensor("fc.weight", torch.ones(128, 384, dtype=torch.int8)), r"fc\.weight: torch\.int8, expected 16 or 32"),
        (spoil("norm.weight", float("nan")), r"norm\.weight: holds a NaN or infinity"),
        (spoil("lm_head.weight", float("inf")), r"lm_head\.weight: holds a NaN or infinity"),
    ],
)
def test_each_draft_that_is_not_this_one_is_refused_with_both_sides_and_changes_nothing(
    flat: Checkpoint, model: Any, tmp_path: Path, change: Callable[[Checkpoint], None], said: str
) -> None:
    change(flat)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(PipelineError, match=said):
        load(model, flat.write(tmp_path / "draft"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_all_differences_are_told_at_once(flat: Checkpoint, model: Any, tmp_path: Path) -> None:
    put(num_attention_heads=8, fc_norm=True, eagle_aux_hidden_state_layer_ids=[1, 2, 3], rope_parameters=YARN)(flat)
    with pytest.raises(PipelineError) as refused:
        load(model, flat.write(tmp_path / "draft"))
    for name in ("num_attention_heads: 8, 4", "fc_norm: True, False", "rope", "auxiliary layers: [1, 2, 3]"):
        assert name in str(refused.value)


def test_a_scaled_rope_is_compared_by_what_it_does_not_by_how_it_is_spelt(
    flat: Checkpoint, model: Any, tmp_path: Path
) -> None:
    """Kimi's own YaRN, as older configs write it, with what is default left out; then without its mscale."""
    written = YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    model.config.transformer_layer_config.rope_parameters = written
    model.rotary_emb = type(model.rotary_emb)(model.config.transformer_layer_config)
    del flat.config["rope_parameters"]
    scaling = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 512, "mscale": 1, "mscale_all_dim": 1}
    flat.config |= {"rope_theta": 10000, "rope_scaling": scaling}
    load(model, flat.write(tmp_path / "older"))
    del scaling["mscale"]
    with pytest.raises(PipelineError, match=r"rope \(ours is the verifier's\)"):
        load(model, flat.write(tmp_path / "other"))


def test_default_layers_that_are_not_this_runs_are_refused(flat: Checkpoint, model: Any, tmp_path: Path) -> None:
    without_layer_ids(flat)
    with pytest.raises(PipelineError, match=r"none named, so the default \[2, 5, 7\], \[2, 4, 5\]"):
        warm_start.load_into(model, str(flat.write(tmp_path / "draft")), 10)


def test_a_head_tied_to_the_drafts_embedding_is_not_taken_for_the_verifiers(
    flat: Checkpoint, model: Any, tmp_path: Path
) -> None:
    del flat.tensors["d2t"], flat.tensors["lm_head.weight"]
    flat.config |= {"draft_vocab_size": None, "tie_word_embeddings": True}
    with pytest.raises(PipelineError, match=r"missing: lm_head\.weight \[512, 128\]"):
        load(model, flat.write(tmp_path / "draft"))


def test_a_vocabulary_without_a_common_token_is_refused(
    flat: Checkpoint, source_ids: torch.Tensor, tmp_path: Path
) -> None:
    others = torch.arange(WHOLE)[~torch.isin(torch.arange(WHOLE), source_ids)][:SIZE]
    with pytest.raises(PipelineError, match="share no token"):
        load(fresh(others), flat.write(tmp_path / "draft"))


def test_what_is_no_draft_at_all_is_refused_naming_the_place(model: Any, flat: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"draft\.init_from drafts/: no such directory, and not a hub id"):
        load(model, "drafts/")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PipelineError, match=r"empty/config\.json: not a draft's config"):
        load(model, tmp_path / "empty")
    folder = flat.write(tmp_path / "draft")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ')
    with pytest.raises(PipelineError, match=r"index\.json: not a whole index"):
        load(model, folder)
    (folder / "model.safetensors.index.json").unlink()
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(PipelineError, match=r"model\.safetensors: not a whole file of weights .*fetch it again"):
        load(model, folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(PipelineError, match="draft: no weights"):
        load(model, folder)


def test_a_hub_that_refuses_is_named_with_the_remedy(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_names: Any, **_options: Any) -> str:
        raise OSError("401 Unauthorized")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(PipelineError, match=r"owner/draft could not be fetched from the hub: 401 Unauthorized\n"):
        load(model, "owner/draft")


# ---- Kimi-K2.5


def test_at_kimi_k2_5_sizes_the_tensors_asked_for_are_those_of_the_published_drafts() -> None:
    from speculators import Eagle3DraftModel
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from transformers import LlamaConfig

    layer = LlamaConfig(
        hidden_size=7168,
        intermediate_size=12288,
        num_hidden_layers=1,
        num_attention_heads=64,
        num_key_value_heads=64,
        head_dim=128,
        vocab_size=163840,
    )
    layer._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = Eagle3DraftModel(
            Eagle3SpeculatorConfig(
                transformer_layer_config=layer,
                draft_vocab_size=32000,
                eagle_aux_hidden_state_layer_ids=[2, 30, 58],
            )
        )
    assert {
        name: list(parameter.shape) for name, parameter in warm_start.trainable(model).items()
    } == kimi_standin.DRAFT_TRAINED
