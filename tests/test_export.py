"""Contract of stage 05: nothing is published that vLLM would serve at acceptance 1.0 without saying why.

Guarded: every way in which a draft's tensors can be broken is caught by name; the table they are held against is the
published Kimi drafts' and speculators' own model's; the flat config writes every key that decides the arithmetic and
names no path of this machine; both formats read back as what was trained; and nothing is published whose logits were
not compared, on states as they were captured.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_train import verifier, vocabulary
from eagle3_train.checkpoints import Checkpoints
from eagle3_train.config import Config, Draft, Export, Training, Verifier, Vocabulary
from eagle3_train.draft import build_draft
from eagle3_train.errors import PipelineError
from eagle3_train.export import _ids_and_states, check_tensors, export, flat_config, push, tensor_table, verify
from eagle3_train.extraction import DATASET, LINKS, SHARDS, Sample
from eagle3_train.run import EXPORT, HIDDEN, PROMPTS, TRACES, TRAIN, VOCAB, Result, Run, Stage
from eagle3_train.training import CHECKPOINTS, spec
from tests import kimi_standin
from tests.fault_server import ROOT, finish_stage, no_work, write_hidden

LAYERS = [2, 4, 5]
EPOCH, STEP = 3, 40
TARGET_SIZE = 512
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# What only training needs; the verifier's embedding is vLLM's to share.
NOT_PUBLISHED = {"t2d", "verifier_lm_head.weight", "verifier_norm.weight", "embed_tokens.weight"}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "draft_vocab_size": 20,
    "num_aux_hidden_states": 3,
    "norm_before_fc": True,
    "fc_norm": False,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 64.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}

Tensors = dict[str, torch.Tensor]


def sound_draft(config: dict[str, Any]) -> Tensors:
    """Random tensors for `config`; draft token i stands for target token 3 i + 2."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in tensor_table(config).items()
        if name != "d2t"
    }
    if config["draft_vocab_size"] != config["vocab_size"]:
        tensors["d2t"] = 2 * torch.arange(config["draft_vocab_size"]) + 2
    return tensors


# ---- the table


def test_the_table_at_kimi_k2_5_sizes_is_that_of_the_published_drafts() -> None:
    kimi = {
        "hidden_size": 7168,
        "intermediate_size": 12288,
        "num_hidden_layers": 1,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "head_dim": 128,
        "vocab_size": 163840,
        "draft_vocab_size": 32000,
        "num_aux_hidden_states": 3,
        "norm_before_fc": False,
        "fc_norm": False,
    }
    assert tensor_table(kimi) == kimi_standin.DRAFT_PUBLISHED


def test_the_table_has_no_d2t_for_the_whole_vocabulary() -> None:
    assert "d2t" not in tensor_table(SMALL | {"draft_vocab_size": 100})


# ---- what is wrong with a draft


def test_a_sound_draft_passes() -> None:
    check_tensors(sound_draft(SMALL), SMALL)


def test_a_sound_draft_of_the_whole_vocabulary_passes_without_d2t() -> None:
    whole = SMALL | {"draft_vocab_size": 100}
    tensors = sound_draft(whole)
    check_tensors(tensors, whole)
    with pytest.raises(PipelineError, match="not known to vLLM: d2t"):
        check_tensors(tensors | {"d2t": torch.zeros(100, dtype=torch.int64)}, whole)


@pytest.mark.parametrize("name", sorted(tensor_table(SMALL)))
def test_each_missing_tensor_is_named(name: str) -> None:
    tensors = sound_draft(SMALL)
    del tensors[name]
    with pytest.raises(PipelineError, match=rf"missing: {name} "):
        check_tensors(tensors, SMALL)


@pytest.mark.parametrize(
    "name", ["verifier_lm_head.weight", "verifier_norm.weight", "t2d", "layers.1.mlp.up_proj.weight"]
)
def test_each_tensor_that_vllm_does_not_know_is_named(name: str) -> None:
    with pytest.raises(PipelineError, match=f"not known to vLLM: {name}"):
        check_tensors(sound_draft(SMALL) | {name: torch.ones(20, 32, dtype=torch.bfloat16)}, SMALL)


def test_a_width_of_two_aux_states_where_three_are_read_is_caught() -> None:
    with pytest.raises(PipelineError, match=r"fc\.weight: shape \[32, 64\], expected \[32, 96\]"):
        check_tensors(sound_draft(SMALL) | {"fc.weight": torch.ones(32, 64, dtype=torch.bfloat16)}, SMALL)


def put(name: str, place: int, value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name].view(-1)[place] = value

    return change


def change_to(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        pytest.param(put("lm_head.weight", 5, float("nan")), r"lm_head\.weight: holds a NaN", id="a NaN"),
        pytest.param(put("fc.weight", -1, float("inf")), r"fc\.weight: holds a NaN or inf", id="an infinity"),
        pytest.param(change_to("norm.weight", torch.zeros_like), r"norm\.weight: all zero", id="an empty norm"),
        pytest.param(change_to("lm_head.weight", torch.zeros_like), r"lm_head\.weight: all zero", id="an empty head"),
        pytest.param(change_to("lm_head.weight", torch.t), r"lm_head\.weight: shape \[32, 20\]", id="transposed"),
        pytest.param(change_to("fc.weight", torch.Tensor.float), r"fc\.weight: torch\.float32", id="float32"),
        pytest.param(change_to("fc.weight", torch.Tensor.char), r"fc\.weight: torch\.int8", id="packed integers"),
        pytest.param(change_to("d2t", torch.Tensor.int), r"d2t: torch\.int32, expected torch\.int64", id="d2t int32"),
        pytest.param(change_to("d2t", torch.Tensor.float), r"d2t: torch\.float32, expected", id="d2t float"),
        pytest.param(change_to("d2t", lambda d: d.flip(0)), "d2t: .*not strictly rising", id="d2t unsorted"),
        pytest.param(change_to("d2t", lambda d: 1 - torch.arange(20)), "d2t: .*not strictly", id="d2t repeats"),
        pytest.param(put("d2t", 19, 81), r"d2t: target ids reach 100, .* ends at 99", id="d2t beyond the vocabulary"),
        pytest.param(put("d2t", 0, -1), "d2t: ", id="d2t below zero"),
    ],
)
def test_each_unsound_tensor_is_named_with_its_fault(spoil: Callable[[Tensors], None], said: str) -> None:
    tensors = sound_draft(SMALL)
    spoil(tensors)
    with pytest.raises(PipelineError, match=said):
        check_tensors(tensors, SMALL)


def test_absolute_ids_in_place_of_offsets_are_caught() -> None:
    """The usual mistake; a real map reaches the end of the vocabulary, where the special tokens are."""
    tensors = sound_draft(SMALL)
    targets = torch.linspace(2, 99, 20).long()
    check_tensors(tensors | {"d2t": targets - torch.arange(20)}, SMALL)
    with pytest.raises(PipelineError, match="d2t: target ids reach 118"):
        check_tensors(tensors | {"d2t": targets}, SMALL)


def test_all_faults_are_listed_at_once() -> None:
    tensors = sound_draft(SMALL)
    del tensors["layers.0.self_attn.q_proj.weight"], tensors["layers.0.hidden_norm.weight"]
    tensors["extra"] = torch.ones(1)
    tensors["norm.weight"][0] = float("nan")
    with pytest.raises(PipelineError) as refused:
        check_tensors(tensors, SMALL)
    for name in ("q_proj", "hidden_norm", "extra", "norm.weight: holds a NaN"):
        assert name in str(refused.value)


# ---- a run with a draft to export


def new_run(folder: Path, draft_size: int | None = 64, **draft: Any) -> Run:
    """A run done up to stage 04, whose draft is not trained but has no weight at its initial value."""
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64}
    config = Config(
        verifier=Verifier(path="tiny", dtype="float32"),
        vocabulary=Vocabulary(draft_size=draft_size),
        draft=Draft(**(shape | {"norm_before_fc": True, "sliding_window": None} | draft)),
        training=Training(dtype="float32", ttt_steps=2),
    )
    run = Run(folder / "run", config)
    samples = [Sample(f"{split}-0", split, [4, 9], list(range(20, 32))) for split in ("train", "val")]
    generator = torch.Generator().manual_seed(0)
    finish_stage(run, PROMPTS, no_work)
    finish_stage(run, TRACES, no_work)
    finish_stage(
        run,
        HIDDEN,
        lambda stage: write_hidden(
            stage, samples, lambda _s: torch.randn(14, 4, 128, generator=generator), [*LAYERS, 8]
        ),
    )
    finish_stage(run, VOCAB, vocabulary.build)
    finish_stage(run, TRAIN, lambda stage: save_draft(stage, EPOCH))
    return run


def save_draft(stage: Stage, epoch: int) -> Result:
    """The work of stage 04: a float32 checkpoint as the trainer saves it, linked as the best."""
    torch.manual_seed(0)
    model = build_draft(stage.config, vocabulary.load(stage.input("03_vocab"), TARGET_SIZE))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    metrics = {"loss": 1.0, "full_acc_0": 0.5}
    Checkpoints(stage.folder / CHECKPOINTS, keep=1).save(model, {}, STEP, epoch, metrics, 1.5)
    return Result([CHECKPOINTS], {"steps": 1, "samples": 1, "best_epoch": epoch + 1, "expected_acceptance_length": 1.5})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return new_run(tmp_path_factory.mktemp("export"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same with the verifier's whole vocabulary."""
    return new_run(tmp_path_factory.mktemp("whole"), draft_size=None)


def copy_of(run: Run, folder: Path, **settings: Any) -> Run:
    """A run directory of its own, with other sections of the configuration where given."""
    shutil.copytree(run.path, folder / "run", symlinks=True)
    return Run(folder / "run", run.config.model_copy(update=settings))


def checkpoint_of(run: Run) -> Path:
    return run.folder("04_train") / CHECKPOINTS / f"step_{STEP:06d}"


def publish(run: Run) -> Path:
    finish_stage(run, EXPORT, export)
    return run.folder("05_export")


def change_checkpoint(run: Run, change: Callable[[Tensors], Any]) -> None:
    path = checkpoint_of(run) / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "draft",
    [
        {"norm_before_fc": False},
        {"norm_before_fc": True},
        {"norm_before_fc": False, "fc_norm": True, "norm_output": True},
        {"num_layers": 2},
    ],
)
def test_the_table_is_that_of_speculators_own_model(trained: Run, draft: dict[str, Any]) -> None:
    config = trained.config.model_copy(update={"draft": trained.config.draft.model_copy(update=draft)})
    model = build_draft(config, vocabulary.load(trained.folder("03_vocab"), TARGET_SIZE))
    flat = flat_config(json.loads(model.config.to_json_string(use_diff=False)), LAYERS)
    shapes = {name: list(t.shape) for name, t in model.state_dict().items() if name not in NOT_PUBLISHED}
    assert tensor_table(flat) == shapes


def test_the_flat_checkpoint_is_the_trained_one_in_bfloat16(trained: Run, tmp_path: Path) -> None:
    run = copy_of(trained, tmp_path)
    folder = publish(run)
    published = load_file(folder / "model.safetensors")
    source = load_file(checkpoint_of(run) / "model.safetensors")
    assert published.keys() == source.keys() - NOT_PUBLISHED
    for name, tensor in published.items():
        assert torch.equal(tensor, source[name] if name == "d2t" else source[name].to(torch.bfloat16)), name
    manifest = Stage(run, EXPORT).manifest
    assert manifest is not None
    assert manifest["summary"]["epoch"] == EPOCH + 1


def test_the_best_checkpoint_is_exported_not_the_last(trained: Run, tmp_path: Path) -> None:
    run = copy_of(trained, tmp_path)
    shutil.copytree(checkpoint_of(run), checkpoint_of(run).with_name(str(EPOCH + 1)))
    (checkpoint_of(run).with_name(str(EPOCH + 1)) / "model.safetensors").write_bytes(b"not this one")
    folder = publish(run)
    norm = load_file(checkpoint_of(run) / "model.safetensors")["norm.weight"]
    assert torch.equal(load_file(folder / "model.safetensors")["norm.weight"], norm.to(torch.bfloat16))


def test_nothing_published_names_a_path_of_this_machine(trained: Run, tmp_path: Path) -> None:
    run = copy_of(trained, tmp_path)
    folder = publish(run)
    for path in folder.rglob("*"):
        content = path.read_bytes()
        assert str(ROOT).encode() not in content, f"{path.name} names the project's directory"
        assert str(run.path).encode() not in content, f"{path.name} names the run's directory"


@pytest.mark.parametrize("name", ["layers.0.self_attn.q_proj.weight", "fc.weight", "lm_head.weight", "d2t"])
def test_a_checkpoint_that_lacks_a_tensor_publishes_nothing(trained: Run, tmp_path: Path, name: str) -> None:
    run = copy_of(trained, tmp_path)
    change_checkpoint(run, lambda tensors: tensors.pop(name))
    with pytest.raises(PipelineError, match=f"missing: {name}"):
        publish(run)
    assert not (run.folder("05_export") / "model.safetensors").exists()
    assert not (run.folder("05_export") / "config.json").exists()


def test_a_d2t_that_is_not_the_one_trained_with_publishes_nothing(trained: Run, tmp_path: Path) -> None:
    """Absolute ids that stay below the vocabulary's end look like offsets: only t2d, saved beside, tells."""
    run = copy_of(trained, tmp_path)
    change_checkpoint(run, lambda tensors: tensors["d2t"].add_(torch.arange(64)))
    with pytest.raises(PipelineError, match="d2t"):
        publish(run)


def test_the_whole_vocabulary_is_published_without_d2t(whole: Run, tmp_path: Path) -> None:
    folder = publish(copy_of(whole, tmp_path))
    assert "d2t" not in load_file(folder / "model.safetensors")
    assert json.loads((folder / "config.json").read_text())["draft_vocab_size"] == 512


def test_a_d2t_of_the_whole_vocabulary_is_left_out(whole: Run, tmp_path: Path) -> None:
    run = copy_of(whole, tmp_path)
    change_checkpoint(run, lambda tensors: tensors.update(d2t=torch.zeros(512, dtype=torch.int64)))
    assert "d2t" not in load_file(publish(run) / "model.safetensors")


@pytest.mark.parametrize(
    ("first", "second"), [("mlp.gate_proj", "mlp.up_proj"), ("self_attn.k_proj", "self_attn.v_proj")]
)
def test_two_tensors_of_one_shape_in_each_others_place_are_caught_by_the_logits(
    trained: Run, tmp_path: Path, first: str, second: str
) -> None:
    run = copy_of(trained, tmp_path)
    folder = publish(run)
    shards = sorted((run.folder("02_hidden") / SHARDS).iterdir())
    assert verify(folder, checkpoint_of(run), run.config, shards) < 1e-4
    tensors = load_file(folder / "model.safetensors")
    one, other = (f"layers.0.{name}.weight" for name in (first, second))
    tensors[one], tensors[other] = tensors[other], tensors[one]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PipelineError, match="not what was trained"):
        verify(folder, checkpoint_of(run), run.config, shards)


# ---- what the logits are computed on


def on_prepared_data(run: Run, folder: Path) -> Path:
    """Make the run one that was trained on data prepared elsewhere, without states of its own; returns their folder."""
    shards = folder / "prepared" / LINKS
    shutil.copytree(run.folder("02_hidden") / DATASET / LINKS, shards)  # links become files
    for stage in ("02_hidden", "04_train"):
        shutil.rmtree(run.folder(stage))
    run.config = run.config.model_copy(
        update={"training": run.config.training.model_copy(update={"prepared_data": str(shards.parent)})}
    )
    finish_stage(run, spec(run.config), lambda stage: save_draft(stage, EPOCH))
    return shards


@pytest.mark.parametrize("prepared", [False, True])
def test_the_logits_are_compared_on_the_validation_rows_of_what_was_trained_on(
    trained: Run, tmp_path: Path, prepared: bool
) -> None:
    run = copy_of(trained, tmp_path)
    shards = on_prepared_data(run, tmp_path) if prepared else run.folder("02_hidden") / DATASET / LINKS
    (shards / "hs_0.safetensors").unlink()  # a training row: in waves they come and go
    assert "equal the trained one's on 1 shards" in finish_stage(run, EXPORT, export).lines[0]
    card = (run.folder("05_export") / "README.md").read_text()
    assert ("Data: prepared, prepared elsewhere; 1 training samples." in card) == prepared
    assert ("answers of the verifier itself" in card) != prepared


@pytest.mark.parametrize("prepared", [False, True])
def test_nothing_is_published_when_there_is_nothing_to_compare_logits_on(
    trained: Run, tmp_path: Path, prepared: bool
) -> None:
    run = copy_of(trained, tmp_path)
    shards = on_prepared_data(run, tmp_path) if prepared else run.folder("02_hidden") / DATASET / LINKS
    (shards / "hs_1.safetensors").unlink()
    with pytest.raises(PipelineError, match=rf"{shards}/hs_1.safetensors is not there.*nothing shows"):
        publish(run)
    assert not (run.folder("05_export") / "model.safetensors").exists()


def test_a_torn_shard_is_refused_by_name(trained: Run, tmp_path: Path) -> None:
    run = copy_of(trained, tmp_path)
    path = run.folder("02_hidden") / SHARDS / "val-0.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(PipelineError, match=r"val-0\.safetensors: not a whole safetensors file"):
        publish(run)


def test_logits_that_are_no_numbers_are_not_taken_for_equal(trained: Run, tmp_path: Path) -> None:
    run = copy_of(trained, tmp_path)
    path = run.folder("02_hidden") / SHARDS / "val-0.safetensors"
    tensors = load_file(path)
    tensors["hidden_states"][5] = float("nan")
    save_file(tensors, path)
    with pytest.raises(PipelineError, match="differ from the trained model's by up to nan"):
        publish(run)


def test_the_logits_are_compared_without_a_compiler_where_a_gpu_makes_speculators_compile(
    trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a GPU is seen speculators' forward is torch.compile's, and C++ of torch 2.11 for a CPU does not compile."""
    from speculators import Eagle3DraftModel

    def compiler(*_given: Any) -> Any:
        raise AssertionError("a compiler was started")

    monkeypatch.setattr(Eagle3DraftModel, "forward", torch.compile(Eagle3DraftModel.forward, backend=compiler))
    assert (publish(copy_of(trained, tmp_path)) / "model.safetensors").exists()


def test_float8_shards_are_read_as_what_was_captured(tmp_path: Path) -> None:
    """Every finite e4m3 number, by the format's definition (arXiv 2209.05433): bias 7, subnormals, no infinity."""
    codes = [code for code in range(256) if code & 0x7F != 0x7F]
    exact = [
        (-1.0) ** (code >> 7)
        * ((code & 7) / 8 * 2.0**-6 if code >> 3 & 15 == 0 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3 & 15) - 7))
        for code in codes
    ]
    scales = torch.tensor([3.0, 0.011])
    shard = {
        "hidden_states": torch.tensor(codes, dtype=torch.uint8)
        .view(torch.float8_e4m3fn)
        .reshape(1, 2, 127)
        .repeat(2, 1, 1),
        "hidden_states_scales": scales.reshape(2, 1, 1),
        "token_ids": torch.tensor([4, 9]),
    }
    save_file(shard, tmp_path / "shard.safetensors")
    ids, states = _ids_and_states(tmp_path / "shard.safetensors")
    expected = torch.tensor([exact, exact]) * scales[:, None]
    assert ids.tolist() == [4, 9]
    torch.testing.assert_close(states.flatten(1), expected, rtol=1e-6, atol=0)


def test_the_speculators_format_reloads_in_speculators(trained: Run, tmp_path: Path) -> None:
    from speculators import SpeculatorModel, SpeculatorModelConfig

    run = copy_of(trained, tmp_path, export=Export(format="speculators", verifier_name="moonshotai/Kimi-K2.5"))
    folder = publish(run)
    config = SpeculatorModelConfig.from_pretrained(str(folder))
    assert config.speculators_config.verifier.name_or_path == "moonshotai/Kimi-K2.5"
    config.speculators_config.verifier.name_or_path = verifier.location(run.config.verifier)  # no hub here
    model = SpeculatorModel.from_pretrained(str(folder), config=config)
    assert type(model).__name__ == "Eagle3DraftModel"
    assert model.config.eagle_aux_hidden_state_layer_ids == LAYERS
    loaded, source = model.state_dict(), load_file(checkpoint_of(run) / "model.safetensors")
    for name in source.keys() - {"embed_tokens.weight"}:
        expected = source[name].to(torch.bfloat16) if source[name].is_floating_point() else source[name]
        assert torch.equal(loaded[name].to(expected.dtype), expected), name


def test_the_speculators_format_without_the_verifiers_name_says_what_is_missing(trained: Run, tmp_path: Path) -> None:
    """speculators 0.9 cannot load a checkpoint whose verifier has no name: it asks the hub for one called None."""
    run = copy_of(trained, tmp_path, export=Export(format="speculators"))
    try:
        said = "\n".join(finish_stage(run, EXPORT, export).lines)
    except PipelineError as refused:
        said = str(refused)
    else:
        written = json.loads((run.folder("05_export") / "config.json").read_text())
        if written["speculators_config"]["verifier"]["name_or_path"] is not None:
            return
    assert "export.verifier_name" in said


def test_the_embedding_is_published_when_asked_for(trained: Run, tmp_path: Path) -> None:
    run = copy_of(trained, tmp_path, export=Export(keep_embeddings=True))
    folder = publish(run)
    embedding = verifier.head_weights(run.config.verifier)[verifier.EMBEDDING]
    assert torch.equal(load_file(folder / "model.safetensors")["embed_tokens.weight"], embedding.to(torch.bfloat16))


# ---- the flat config


@pytest.fixture
def saved(trained: Run) -> dict[str, Any]:
    """speculators' nested config of the checkpoint."""
    return json.loads((checkpoint_of(trained) / "config.json").read_text())


def test_the_flat_config_is_what_vllm_and_sglang_read(saved: dict[str, Any]) -> None:
    flat = flat_config(saved, LAYERS)
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "vocab_size": 512,
        "draft_vocab_size": 64,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "eagle_aux_hidden_state_layer_ids": LAYERS,
        "num_aux_hidden_states": 3,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    assert {name: flat.get(name) for name in expected} == expected


@pytest.mark.parametrize("value", [True, False])
def test_every_norm_key_is_written_whatever_its_value(saved: dict[str, Any], value: bool) -> None:
    keys = {name for name in saved if name.startswith("norm_") or name == "fc_norm"}
    assert keys == set(NORMS), "speculators has another norm key, whose default in vLLM must be looked up"
    for name in keys:
        assert flat_config(saved | {name: value}, LAYERS)[name] is value


def test_four_aux_layers_are_counted_in_the_flat_config(saved: dict[str, Any]) -> None:
    ids = [1, 2, 4, 5]
    flat = flat_config(saved | {"eagle_aux_hidden_state_layer_ids": ids}, ids)
    assert flat["num_aux_hidden_states"] == 4
    assert tensor_table(flat)["fc.weight"] == [128, 512]


def test_the_verifiers_rope_scaling_and_context_are_kept(saved: dict[str, Any]) -> None:
    layer = saved["transformer_layer_config"] | {"rope_parameters": YARN, "max_position_embeddings": 262144}
    flat = flat_config(saved | {"transformer_layer_config": layer}, LAYERS)
    assert flat["rope_parameters"] == YARN
    assert flat["max_position_embeddings"] == 262144


def test_a_sliding_window_is_kept(saved: dict[str, Any]) -> None:
    layer = saved["transformer_layer_config"] | {"layer_types": ["sliding_attention"], "sliding_window": 2048}
    flat = flat_config(saved | {"transformer_layer_config": layer}, LAYERS)
    assert (flat["sliding_window"], flat["layer_types"]) == (2048, ["sliding_attention"])


@pytest.mark.parametrize("ids", [[1, 3, 4], [2, 4, 6], [2, 4], [5, 4, 2]])
def test_layer_ids_other_than_the_verifiers_are_refused(saved: dict[str, Any], ids: list[int]) -> None:
    with pytest.raises(PipelineError) as refused:
        flat_config(saved | {"eagle_aux_hidden_state_layer_ids": ids}, LAYERS)
    assert str(ids) in str(refused.value)
    assert str(LAYERS) in str(refused.value)


# -- the hub, only when asked for


def test_the_checkpoint_is_uploaded_privately_only_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    class Hub:
        def create_repo(self, name: str, **options: Any) -> None:
            calls.append((name, options))

        def upload_folder(self, **options: Any) -> None:
            calls.append(("upload", options))

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    push(Stage(Run(tmp_path, Config()), EXPORT))
    assert calls == []
    asked = Config(export=Export(push_to="owner/draft"))
    push(Stage(Run(tmp_path, asked), EXPORT))
    (repository, options), (_, upload) = calls
    assert (repository, options["private"]) == ("owner/draft", True)
    assert upload["folder_path"] == tmp_path / "05_export"
    assert {"config.json", "model.safetensors", "README.md"} <= set(upload["allow_patterns"])


def test_a_hub_that_refuses_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hub:
        def create_repo(self, name: str, **_options: Any) -> None:
            raise OSError("401 Unauthorized")

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    asked = Config(export=Export(push_to="owner/draft"))
    with pytest.raises(PipelineError, match=r"owner/draft could not be uploaded: 401 Unauthorized\n.*HF_TOKEN"):
        push(Stage(Run(tmp_path, asked), EXPORT))
