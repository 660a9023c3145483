"""The README.md of an exported draft: what it is, how it was made, what it reaches, how to serve it.

Written by stage 05 and again by 06, which adds the acceptance it measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eagle3_train import verifier
from eagle3_train.config import Config
from eagle3_train.run import STAGES, Run

_MADE_BY = ("01_prompts", "01b_traces", "02_hidden", "03_vocab", "04_train")


def text(run: Run, config: dict[str, Any], size: int, evaluation: dict[str, Any] | None = None) -> str:
    """The card.

    Args:
        run: the run the draft comes from; its manifests are read.
        config: the draft's flat config.
        size: bytes of its weights.
        evaluation: results of stage 06, when there are any.
    """
    settings = run.config
    name = verifier.hub_name(settings.verifier, settings.export.verifier_name)
    local = "the embedded tiny verifier" if settings.verifier.path == "tiny" else Path(settings.verifier.path).name
    shown = name or local
    heads = f"{config['num_attention_heads']} heads of {config['head_dim']}"
    manifests = {folder: _manifest(run, folder) for folder in _MADE_BY}
    trained = manifests["04_train"].get("summary", {})
    front = ["---", f"license: {settings.export.license}", *([f"base_model: {name}"] if name else [])]
    front += ["tags: [eagle3, speculative-decoding, vllm]", "---"]
    provenance = "\n".join(
        f"| {STAGES[folder].script} | {manifest.get('written', '-')} | `{manifest.get('digest', '-')}` |"
        for folder, manifest in manifests.items()
    )
    versions = ", ".join(f"{n} {v}" for n, v in manifests["04_train"].get("versions", {}).items())
    training = settings.training
    return (
        "\n".join(front)
        + f"""

# EAGLE-3 draft for {shown}

A speculative-decoding draft: vLLM or SGLang proposes tokens with it, the verifier checks them, the output stays the
verifier's own.

| | |
|---|---|
| verifier | {shown} |
| layers | {config["num_hidden_layers"]} |
| widths | hidden {config["hidden_size"]}, {heads}, MLP {config["intermediate_size"]} |
| draft vocabulary | {config["draft_vocab_size"]} of {config["vocab_size"]} |
| reads | the residual stream entering layers {config["eagle_aux_hidden_state_layer_ids"]} (vLLM's numbering) |
| size | {size / 2**20:.1f} MiB, bfloat16 |

## Training

{_data(settings, manifests)}
{trained.get("steps", "?")} steps, {training.epochs} epochs, {training.optimizer}, learning rate {training.lr:g},
{training.ttt_steps} TTT steps, loss {training.loss}, packs of {training.pack_tokens} tokens. Best epoch
{trained.get("best_epoch", "?")}: expected acceptance length {trained.get("expected_acceptance_length", "?")} on the
validation split. {versions}.

## Acceptance on vLLM

{_acceptance(evaluation)}

## Serving

    {_vllm_command(name, settings.evaluation.draft_tokens)}

    {_sglang_command(name, settings.evaluation.draft_tokens)}

## Provenance

Digests of what it was made from, by eagle3-train:

| stage | written | content |
|---|---|---|
{provenance}
"""
    )


def _manifest(run: Run, folder: str) -> dict[str, Any]:
    path = run.folder(folder) / "manifest.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _data(settings: Config, manifests: dict[str, dict[str, Any]]) -> str:
    """What it was trained on."""
    traces, hidden, trained = (manifests[f].get("summary", {}) for f in ("01b_traces", "02_hidden", "04_train"))
    if settings.training.prepared_data:
        name = Path(settings.training.prepared_data).name
        return f"Data: {name}, prepared elsewhere; {trained.get('samples', '?')} training samples."
    source = settings.prompts.source
    source = Path(source).name if Path(source).exists() else source
    temperatures = ", ".join(f"{t:g}" for t in settings.generation.temperatures)
    return (
        f"Data: {source}; {traces.get('traces', '?')} answers of the verifier itself\n(temperature {temperatures}),\n"
        f"{hidden.get('tokens', '?')} tokens in {hidden.get('samples', '?')} training and validation samples."
    )


def _acceptance(evaluation: dict[str, Any] | None) -> str:
    if evaluation is None:
        return "Not measured yet: 06_evaluate.py fills this in."
    draft_tokens = evaluation["draft_tokens"]
    rows = [
        f"| {prompts} | {way} | {values['mean_acceptance_length']:.2f} |"
        + "".join(f" {share:.0%} |" for share in values["accepted_by_position"])
        for prompts, ways in evaluation["acceptance"].items()
        for way, values in ways.items()
    ]
    heads = "".join(f" accepted {place} |" for place in range(1, draft_tokens + 1))
    versions = ", ".join(f"{n} {v}" for n, v in evaluation["versions"].items() if n.startswith("vllm"))
    return "\n".join(
        [
            f"{draft_tokens} draft tokens; mean acceptance length counts the verifier's own token (1 = no gain).",
            f"{evaluation['hardware']}; {versions}; {evaluation['date']}.",
            "",
            f"| prompts | decoding | mean acceptance length |{heads}",
            "|---|---|---|" + "---|" * draft_tokens,
            *rows,
        ]
    )


def _vllm_command(name: str | None, draft_tokens: int) -> str:
    speculative = json.dumps({"method": "eagle3", "model": "THIS_DIRECTORY", "num_speculative_tokens": draft_tokens})
    return f"vllm serve {name or 'VERIFIER'} --speculative-config '{speculative}'"


def _sglang_command(name: str | None, draft_tokens: int) -> str:
    return (
        f"python -m sglang.launch_server --model-path {name or 'VERIFIER'} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path THIS_DIRECTORY --speculative-num-steps {draft_tokens} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {draft_tokens + 1}"
    )
