"""Real vLLM against transformers: the states, the log-probs and the sampling that everything rests on."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from safetensors.torch import load_file, save_file
from speculators.losses import resolve_loss_config
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from eagle3_train import one_pass, parity, verifier, vocabulary
from eagle3_train import server as vllm
from eagle3_train.capture import Capturer, Expected, fresh_staging
from eagle3_train.checkpoints import Checkpoints, load_weights
from eagle3_train.config import Config, parse
from eagle3_train.draft import build_draft
from eagle3_train.errors import PipelineError
from eagle3_train.packs import lay_out
from eagle3_train.step import TrainingStep
from eagle3_train.training import CHECKPOINTS
from eagle3_train.vllm_plugin import expand_per_token, keep_decoding_in_one_graph
from tests.conftest import PROJECT, FinishedRun, run_stage, wait_for

# bfloat16 has 8 significant bits: half a unit in the last place is 2^-8 of the value at most.
BF16_ROUNDING = 2.0**-8
LAYERS = [2, 4, 5, 8]


@pytest.fixture(scope="module")
def reference(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> DeepseekV3ForCausalLM:
    """The tiny verifier's text model in transformers, float32, read by transformers' own loader."""
    folder = tmp_path_factory.mktemp("text_model")
    raw = json.loads((tiny_verifier / "config.json").read_text())["text_config"]
    config = DeepseekV3Config(**{k: v for k, v in raw.items() if k not in ("architectures", "model_type")})
    config.save_pretrained(folder)
    weights = load_file(tiny_verifier / "model.safetensors")
    text = {name.removeprefix("language_model."): tensor for name, tensor in weights.items()}
    save_file(text, folder / "model.safetensors", metadata={"format": "pt"})
    model, report = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model.eval()


@pytest.mark.engine
def test_states_on_disk_equal_transformers_own_at_every_layer(
    default_run: FinishedRun, reference: DeepseekV3ForCausalLM
) -> None:
    assert_states_are_transformers_own(default_run.path, reference, default_run.rows("02_hidden/index.jsonl")[:40])


def assert_states_are_transformers_own(run: Path, reference: DeepseekV3ForCausalLM, rows: list[dict[str, Any]]) -> None:
    """Each shard's states against transformers' at every captured layer."""
    for row in rows:
        shard = load_file(run / "02_hidden" / "shards" / f"{row['id']}.safetensors")
        expected = states_of(reference, shard["token_ids"])
        for position, layer in enumerate(LAYERS):
            ours, theirs = shard["hidden_states"][:, position], expected[:, position]
            allowed = BF16_ROUNDING * theirs.abs() + 1e-5
            assert ((ours.float() - theirs).abs() <= allowed).all(), f"layer {layer} of {row['id']}"
            # All but the values on a rounding boundary are the very bits that torch rounds to.
            assert (ours == theirs.bfloat16()).float().mean() > 0.99, f"layer {layer} of {row['id']}"


def states_of(reference: DeepseekV3ForCausalLM, token_ids: torch.Tensor) -> torch.Tensor:
    """What enters each captured layer, and what the last one returns, [tokens, layers, hidden]."""
    before_norm: list[torch.Tensor] = []
    hook = reference.model.norm.register_forward_hook(lambda _m, inputs, _o: before_norm.append(inputs[0]))
    with torch.no_grad():
        entering = reference(token_ids[None], output_hidden_states=True).hidden_states
    hook.remove()
    return torch.stack([*(entering[layer][0] for layer in LAYERS[:-1]), before_norm[0][0]], dim=1)


@pytest.mark.engine
def test_the_draft_guesses_on_vllm_what_it_guesses_in_training(
    default_run: FinishedRun, reference: DeepseekV3ForCausalLM
) -> None:
    """vLLM's record of every verifier step against what 04 counts of the same answer, from transformers' states."""
    _, config = parse(["--run", str(default_run.path)], "")
    draft = build_draft(config, vocabulary.load(default_run.path / "03_vocab", 512)).float()
    best = Checkpoints(default_run.path / "04_train" / CHECKPOINTS, keep=1).best()
    assert best is not None
    load_weights(best.path, draft)
    loss = resolve_loss_config("kl_div", "eager")
    step = TrainingStep(draft, ttt_steps=3, loss_config=loss, loss_decay=1.0, dtype=torch.float32)
    answers = default_run.json("06_eval/measurements/with_draft.json")["outputs"]["eval"]["greedy"]
    assert len(answers) == 32
    for name, answer in answers.items():
        # The last token is never read: its state is not captured either.
        token_ids = torch.tensor(answer["prompt_ids"] + answer["output_ids"][:-1])
        own = torch.ones(len(token_ids))
        own[: len(answer["prompt_ids"])] = 0
        pack = lay_out([token_ids], [own], states_of(reference, token_ids), pack_tokens=1024, ttt_steps=3)
        with torch.no_grad():
            counted = step(pack, measure=True)[1]
        *accepted, last = answer["accepted"]
        # 04 has no states after the answer's end, where vLLM may still have accepted a guess.
        accepted.append(min(last, len(answer["output_ids"]) - 1 - len(accepted) - sum(accepted)))
        assert int(counted["greedy_steps"]) == len(accepted), name
        for guess in range(3):
            assert int(counted[f"greedy_accepted_{guess}"]) == sum(count > guess for count in accepted), name


@pytest.mark.engine
def test_float8_states_of_a_real_server_are_those_in_bfloat16_rounded(
    default_run: FinishedRun, tiny_config: Config, tmp_path: Path
) -> None:
    storage = tiny_config.extraction.model_copy(update={"storage_dtype": "float8_e4m3"})
    config = tiny_config.model_copy(update={"extraction": storage})
    (tmp_path / "kept").mkdir()
    staging = fresh_staging(tmp_path, tmp_path / "kept")
    shards = default_run.path / "02_hidden" / "shards"
    exact = [load_file(shards / f"{row['id']}.safetensors") for row in default_run.rows("02_hidden/index.jsonl")[:40]]

    async def capture(server: vllm.Server, token_ids: list[int], name: str) -> torch.Tensor:
        async with Capturer(server, staging, Expected.of(config), 60) as capturer:
            return (await capturer.look(await capturer.prefill(token_ids, name), token_ids)).states

    extra = vllm.extraction_args(config, staging)
    with vllm.serve(config, log=tmp_path / "log", extra_args=extra) as server:
        for number, shard in enumerate(exact):
            ours = asyncio.run(capture(server, shard["token_ids"].tolist(), f"sample-{number}"))
            theirs = shard["hidden_states"].float()
            # e4m3 keeps three bits after the leading one, down to 2^-9 of a token's scale: half a place of each.
            smallest = theirs.abs().amax((1, 2), keepdim=True) / 448 * 2.0**-10
            assert ((ours - theirs).abs() <= (2.0**-4 + 2 * BF16_ROUNDING) * theirs.abs() + 1.1 * smallest).all()


@pytest.fixture(scope="module")
def one_pass_run(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> FinishedRun:
    """Stages 01, 01b and 02 with states saved while the verifier answers."""
    path = tmp_path_factory.mktemp("one_pass") / "run"
    said = ""
    for script in ("01_prepare_data.py", "01b_generate_synthetic.py", "02_extract_hidden.py"):
        flags = ("--preset", "presets/tiny.yaml", "--max-samples", "150", "--generation.capture", "one_pass")
        done = run_stage(script, "--run", str(path), *flags)
        assert done.returncode == 0, done.stderr[-3000:]
        said += done.stdout
    return FinishedRun(path, said)


@pytest.mark.engine
def test_states_saved_while_the_verifier_answers_are_those_of_a_prefill_and_no_second_server_starts(
    one_pass_run: FinishedRun, reference: DeepseekV3ForCausalLM
) -> None:
    rows = one_pass_run.rows("02_hidden/index.jsonl")
    traces = {row["id"]: row for row in one_pass_run.rows("01b_traces/traces.jsonl")}
    assert len(rows) > 120
    for row in rows:
        trace = traces[row["id"]]
        shard = load_file(one_pass_run.path / "02_hidden" / "shards" / f"{row['id']}.safetensors")
        assert shard["token_ids"].tolist() == [*trace["prompt_token_ids"], *trace["output_token_ids"][:-1]]
    assert_states_are_transformers_own(one_pass_run.path, reference, rows[:40])
    assert not (one_pass_run.path / "02_hidden" / "server.log").exists()
    assert "0 of them in a second pass; 0 left to 02" in one_pass_run.output
    gate = one_pass_run.rows("01b_traces/parity.jsonl")[0]
    assert gate["passed"]
    assert gate["final_gap"] < 0.05


@pytest.mark.engine
def test_a_server_that_saves_states_samples_as_the_plain_server_does(
    one_pass_run: FinishedRun, default_run: FinishedRun, reference: DeepseekV3ForCausalLM
) -> None:
    """Scored by transformers: the two means of the sampled tokens' log-probs are no further apart than chance."""
    means, errors = [], []
    for run in (one_pass_run, default_run):
        scores = []
        for trace in run.rows("01b_traces/traces.jsonl")[:120]:
            ids, prompt = trace["prompt_token_ids"] + trace["output_token_ids"], len(trace["prompt_token_ids"])
            with torch.no_grad():
                logs = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
            scores.append(logs[torch.arange(prompt - 1, len(ids) - 1), torch.tensor(ids[prompt:])].mean())
        means.append(torch.stack(scores).mean().item())
        errors.append((torch.stack(scores).std() / len(scores) ** 0.5).item())
    assert abs(means[0] - means[1]) < 4 * (errors[0] ** 2 + errors[1] ** 2) ** 0.5


@pytest.mark.engine
def test_a_real_servers_states_one_layer_early_do_not_pass_the_gate(
    default_run: FinishedRun, tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = [2, 4, 5, 7]
    monkeypatch.setattr(verifier, "captured_layer_ids", lambda _settings: early)
    (tmp_path / "kept").mkdir()
    staging = fresh_staging(tmp_path, tmp_path / "kept")
    traces = default_run.rows("01b_traces/traces.jsonl")
    canaries = [row["prompt_token_ids"] + row["output_token_ids"] for row in traces[:8]]

    async def pass_gate(server: vllm.Server) -> None:
        async with Capturer(server, staging, Expected.of(tiny_config), 60) as capturer:
            await parity.pass_gate(capturer, canaries, tmp_path, tiny_config)

    extra = vllm.extraction_args(tiny_config, staging)
    with (
        vllm.serve(tiny_config, log=tmp_path / "log", extra_args=extra) as server,
        pytest.raises(PipelineError, match=r"log-probs \d\.\d+ away from the server's own"),
    ):
        asyncio.run(pass_gate(server))


@pytest.mark.engine
def test_extraction_killed_with_its_real_server_ends_with_the_same_states(
    default_run: FinishedRun, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    left_out = shutil.ignore_patterns("02_hidden", "03_vocab", "04_train", "05_export", "06_eval")
    shutil.copytree(default_run.path, run, ignore=left_out, symlinks=True)
    command = [sys.executable, "02_extract_hidden.py", "--run", str(run), "--extraction.concurrency", "2"]
    index = run / "02_hidden" / "index.jsonl"
    stage = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: index.exists() and index.read_bytes().count(b"\n") >= 20, 180)
    stage.kill()
    stage.wait()
    done = run_stage(*command[1:])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "traces have their states already" in done.stdout
    shards = {path.name for path in (default_run.path / "02_hidden" / "shards").iterdir()}
    assert {path.name for path in (run / "02_hidden" / "shards").iterdir()} == shards
    for name in shards:
        ours, first = (load_file(path / "02_hidden" / "shards" / name) for path in (run, default_run.path))
        assert torch.equal(ours["token_ids"], first["token_ids"])
        distance = parity.row_distances(ours["hidden_states"], first["hidden_states"])
        assert distance.max() < 4 * BF16_ROUNDING


@pytest.mark.engine
def test_head_over_the_last_state_gives_the_servers_log_probs(
    default_run: FinishedRun, plain_server: vllm.Server, tiny_config: Config
) -> None:
    weights = verifier.head_weights(tiny_config.verifier)
    epsilon = verifier.text_config(tiny_config.verifier).rms_norm_eps
    client = OpenAI(base_url=plain_server.base_url, api_key="EMPTY")
    for row in default_run.rows("02_hidden/index.jsonl")[:8]:
        shard = load_file(default_run.path / "02_hidden" / "shards" / f"{row['id']}.safetensors")
        ids = shard["token_ids"].tolist()
        last = shard["hidden_states"][:, -1].float()
        normed = last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + epsilon)
        logits = (normed * weights[verifier.FINAL_NORM].float()) @ weights[verifier.LM_HEAD].float().T
        ours = logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        assert ours.tolist() == pytest.approx(_prompt_log_probs(client, ids), abs=0.05)


def _prompt_log_probs(client: OpenAI, ids: list[int]) -> list[float]:
    answer: Any = client.completions.create(
        model=vllm.SERVED_NAME, prompt=ids, max_tokens=1, temperature=0, extra_body={"prompt_logprobs": 0}
    )
    listed = answer.choices[0].prompt_logprobs
    return [listed[place][str(ids[place])]["logprob"] for place in range(1, len(ids))]


@pytest.mark.engine
def test_the_servers_log_probs_equal_transformers(
    plain_server: vllm.Server, reference: DeepseekV3ForCausalLM, default_run: FinishedRun
) -> None:
    client = OpenAI(base_url=plain_server.base_url, api_key="EMPTY")
    for trace in default_run.rows("01b_traces/traces.jsonl")[:5]:
        ids = trace["prompt_token_ids"] + trace["output_token_ids"]
        with torch.no_grad():
            logits = reference(torch.tensor([ids])).logits[0]
        theirs = logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        assert _prompt_log_probs(client, ids) == pytest.approx(theirs.tolist(), abs=1e-3)


@pytest.mark.engine
def test_prompt_token_ids_are_the_chat_templates(default_run: FinishedRun, tiny_config: Config) -> None:
    tokenizer = verifier.tokenizer(tiny_config.verifier)
    prompts = {row["id"]: row for row in default_run.rows("01_prompts/prompts.jsonl")}
    for trace in default_run.rows("01b_traces/traces.jsonl"):
        rendered = tokenizer.apply_chat_template(
            prompts[trace["id"]]["messages"], tokenize=False, add_generation_prompt=True
        )
        assert tokenizer.decode(trace["prompt_token_ids"]) == rendered
        said = tokenizer.decode(trace["output_token_ids"])
        assert said == f"{trace['reasoning']}</think>{trace['content']}<|im_end|>"


@pytest.mark.engine
def test_answers_come_from_an_attached_server_as_well(plain_server: vllm.Server, tmp_path: Path) -> None:
    run = ("--run", str(tmp_path / "run"))
    prepared = run_stage("01_prepare_data.py", *run, "--preset", "presets/tiny.yaml", "--max-samples", "12")
    assert prepared.returncode == 0, prepared.stderr
    answered = run_stage("01b_generate_synthetic.py", *run, "--endpoint", plain_server.root_url)
    assert answered.returncode == 0, answered.stderr
    assert len((tmp_path / "run/01b_traces/traces.jsonl").read_text().splitlines()) == 12
    assert not (tmp_path / "run/01b_traces/server.log").exists()


def test_each_requests_value_is_repeated_for_each_of_its_tokens() -> None:
    output = torch.full((6,), torch.nan)
    expand_per_token(output, torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 3, 6]), 0.0, 1.0)
    assert output.tolist() == [0.5, 0.5, 1.0, 2.0, 2.0, 2.0]


def test_only_a_server_that_answers_as_well_is_made_to_decode_in_whole_cuda_graphs(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models import extract_hidden_states
    from vllm.v1.attention.backend import AttentionCGSupport

    theirs = extract_hidden_states.CacheOnlyAttentionMetadataBuilder
    assert theirs._cudagraph_support == AttentionCGSupport.NEVER, "vLLM declares it itself: the patch can go"
    ours = type("Builder", (theirs,), {})
    monkeypatch.setattr(extract_hidden_states, "CacheOnlyAttentionMetadataBuilder", ours)
    keep_decoding_in_one_graph()
    assert ours._cudagraph_support == AttentionCGSupport.UNIFORM_BATCH

    def decodes(arguments: list[str]) -> bool:
        transfer = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
        return bool(transfer["kv_connector_extra_config"]["decodes"])

    assert decodes(one_pass.server_args(tiny_config, tmp_path))
    assert not decodes(vllm.extraction_args(tiny_config, tmp_path))
