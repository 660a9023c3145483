"""Stage 06: the draft on a live vLLM, on prompts that nothing was trained on.

With the draft, then without it: the same prompts, greedily and sampled. What is shown:

- mean acceptance length = 1 + accepted / drafts, and the share of drafts accepted up to each position, as
  differences of vLLM's own counters (`/metrics`) around each measurement;
- greedy output equals the verifier's alone, token by token;
- sampled output is the verifier's distribution: its tokens, scored by the verifier without the draft, are as likely
  as the verifier's own samples.
"""

from __future__ import annotations

import asyncio
import csv
import json
import math
import statistics
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

from eagle3_train import charts
from eagle3_train import server as vllm
from eagle3_train.config import Config
from eagle3_train.errors import GateFailed, PipelineError
from eagle3_train.generation import SERVER_LOG, watch_server
from eagle3_train.progress import bar
from eagle3_train.prompts import PROMPTS_FILE
from eagle3_train.run import Result, Stage, atomic, hardware, read_jsonl, versions, write_text

REPORT, TABLE, RESULTS, PICTURE = "report.md", "acceptance.csv", "results.json", "acceptance.png"
GREEDY, SAMPLED = "greedy", "sampled"
# Two sets of samples of one distribution differ by more than this many standard errors once in 15,000 times.
_MAX_STANDARD_ERRORS = 4.0


@dataclass(frozen=True)
class Output:
    """One answer: the prompt's and the output's token ids, as the server says them."""

    prompt_ids: list[int]
    output_ids: list[int]


@dataclass(frozen=True)
class Measurement:
    """All prompts asked once.

    Attributes:
        outputs: prompt id -> answer.
        tokens_per_s: output tokens by wall time.
        drafts: verifier steps that had a draft to check.
        accepted: draft tokens accepted, by position.
    """

    outputs: dict[str, Output]
    tokens_per_s: float
    drafts: int
    accepted: list[int]

    @property
    def acceptance(self) -> dict[str, Any]:
        return {
            "mean_acceptance_length": 1 + sum(self.accepted) / self.drafts,
            "accepted_by_position": [count / self.drafts for count in self.accepted],
            "drafts": self.drafts,
        }


def evaluate(stage: Stage) -> Result:
    """Measure, compare, report, and hold the result against the preset's floors."""
    config, settings = stage.config, stage.config.evaluation
    draft = stage.input("05_export")
    rows = read_jsonl(stage.input("01_prompts") / PROMPTS_FILE)
    prompts = [row for row in rows if row["split"] == "eval"][: settings.max_prompts]
    if not prompts:
        raise PipelineError("there is no prompt in the eval split")
    log = stage.folder / SERVER_LOG
    temperatures = {GREEDY: 0.0, SAMPLED: settings.sampled_temperature}
    with vllm.serve(config, log=log, extra_args=vllm.draft_args(config, draft), what="verifier + draft") as server:
        drafted = {way: measure(server, prompts, t, config, f"06 {way}, draft") for way, t in temperatures.items()}
    with vllm.serve(config, log=log, what="verifier alone") as server:
        alone = {way: measure(server, prompts, t, config, f"06 {way}, alone") for way, t in temperatures.items()}
        scores = {
            "with draft": score(server, drafted[SAMPLED].outputs, config, "06 scoring, draft"),
            "alone": score(server, alone[SAMPLED].outputs, config, "06 scoring, alone"),
        }
    results = compare(drafted, alone, scores)
    results |= {"prompts": len(prompts), "draft_tokens": settings.draft_tokens}
    results |= {"hardware": hardware(), "versions": versions(), "date": time.strftime("%Y-%m-%d")}
    _write(stage, results)
    _check_gates(results, config)
    greedy = results["acceptance"][GREEDY]
    lines = [
        f"mean acceptance length {greedy['mean_acceptance_length']:.2f} greedy, "
        f"{results['acceptance'][SAMPLED]['mean_acceptance_length']:.2f} sampled "
        f"(ceiling {1 + settings.draft_tokens}), {settings.draft_tokens} draft tokens, {len(prompts)} held-out prompts",
        "accepted by position, greedy: "
        + ", ".join(f"{number}: {share:.0%}" for number, share in enumerate(greedy["accepted_by_position"], 1)),
        f"greedy output identical with and without the draft: {results['greedy_identical']} of {len(prompts)}",
        f"sampled tokens' mean log-prob: {results['scores']['with draft']['mean']:.3f} with the draft, "
        f"{results['scores']['alone']['mean']:.3f} alone, {results['standard_errors_apart']:.1f} standard errors apart",
        f"report: {stage.folder / REPORT}",
    ]
    summary = {
        "prompts": len(prompts),
        "mean_acceptance_length": round(greedy["mean_acceptance_length"], 4),
        "greedy_identical": results["greedy_identical"],
        "tokens_per_s_with_draft": results["tokens_per_s"]["with draft"],
        "tokens_per_s_alone": results["tokens_per_s"]["alone"],
    }
    return Result([RESULTS, TABLE, REPORT, PICTURE], summary, lines)


def measure(
    server: vllm.Server, prompts: list[dict[str, Any]], temperature: float, config: Config, label: str
) -> Measurement:
    """Ask every prompt once, after an untimed one that warms the server up.

    Raises:
        PipelineError: a request failed; a figure over a part of the prompts would mislead.
    """
    settings = config.evaluation
    outputs: dict[str, Output] = {}

    async def ask_all() -> float:
        client = _client(server, config)

        async def ask(prompt: dict[str, Any]) -> Output:
            answer = await client.chat.completions.create(
                model=server.model,
                messages=prompt["messages"],
                temperature=temperature,
                max_tokens=settings.max_tokens,
                seed=int(prompt["id"][:8], 16) % 2**31,
                extra_body={"return_token_ids": True},
            )
            return Output(answer.model_extra["prompt_token_ids"], answer.choices[0].model_extra["token_ids"])

        async def ask_one(prompt: dict[str, Any]) -> None:
            outputs[prompt["id"]] = await ask(prompt)

        await ask(prompts[0])
        before.update(_counters(server))
        started = time.monotonic()
        await _for_each(server, prompts, ask_one, settings.concurrency, label)
        elapsed = time.monotonic() - started
        await client.close()
        return elapsed

    before: dict[str, float] = {}
    seconds = _run(ask_all(), server)
    after = _counters(server)
    difference = {name: value - before.get(name, 0) for name, value in after.items()}
    accepted = [int(difference.get(f"position {place}", 0)) for place in range(settings.draft_tokens)]
    tokens = sum(len(output.output_ids) for output in outputs.values())
    return Measurement(outputs, tokens / seconds, int(difference.get("drafts", 0)), accepted)


def score(server: vllm.Server, outputs: dict[str, Output], config: Config, label: str) -> list[float]:
    """Mean log-prob that the verifier alone gives each answer's tokens, one figure an answer."""
    means: list[float] = []

    async def score_all() -> None:
        client = _client(server, config)

        async def score_one(output: Output) -> None:
            answer = await client.completions.create(
                model=server.model,
                prompt=output.prompt_ids + output.output_ids,
                max_tokens=1,
                temperature=0,
                extra_body={"prompt_logprobs": 0},
            )
            listed = answer.choices[0].model_extra["prompt_logprobs"][len(output.prompt_ids) :]
            said = [entry[str(t)]["logprob"] for entry, t in zip(listed, output.output_ids, strict=True)]
            # A log-prob of -inf (an impossible token) must weigh, not poison the mean.
            means.append(statistics.fmean(max(value, -100.0) for value in said))

        answered = [output for output in outputs.values() if output.output_ids]
        await _for_each(server, answered, score_one, config.evaluation.concurrency, label)
        await client.close()

    _run(score_all(), server)
    return means


def compare(
    drafted: dict[str, Measurement], alone: dict[str, Measurement], scores: dict[str, list[float]]
) -> dict[str, Any]:
    """Acceptance, identity and likelihood of what was measured with and without the draft.

    Raises:
        PipelineError: vLLM counted no draft at all.
    """
    if not all(measurement.drafts for measurement in drafted.values()):
        raise PipelineError("vLLM counted no drafts: the server did not use the draft model. See its log")
    ours, theirs = drafted[GREEDY].outputs, alone[GREEDY].outputs
    apart = {
        prompt_id: _first_difference(ours[prompt_id].output_ids, theirs[prompt_id].output_ids)
        for prompt_id in ours
        if ours[prompt_id].output_ids != theirs[prompt_id].output_ids
    }
    summarised = {
        name: {"mean": statistics.fmean(means), "standard_error": _standard_error(means)}
        for name, means in scores.items()
    }
    one, other = summarised.values()
    spread = math.hypot(one["standard_error"], other["standard_error"])
    return {
        "acceptance": {way: measurement.acceptance for way, measurement in drafted.items()},
        "greedy_identical": len(ours) - len(apart),
        "greedy_apart_at_token": apart,
        "scores": summarised,
        "standard_errors_apart": abs(one["mean"] - other["mean"]) / max(spread, 1e-9),
        "tokens_per_s": {
            "with draft": round(drafted[GREEDY].tokens_per_s, 1),
            "alone": round(alone[GREEDY].tokens_per_s, 1),
        },
    }


def _first_difference(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def _client(server: vllm.Server, config: Config) -> Any:
    generation = config.generation
    return vllm.async_client(
        server,
        timeout_s=generation.request_timeout_s,
        connect_timeout_s=generation.connect_timeout_s,
        max_retries=0,  # a request answered twice would be counted twice
    )


async def _for_each(server: vllm.Server, items: list[Any], work: Any, concurrency: int, label: str) -> None:
    queue = iter(items)
    with bar(total=len(items), desc=label, unit="prompt") as progress:

        async def worker() -> None:
            for item in queue:
                await work(item)
                progress.update()

        await watch_server(server, [worker() for _ in range(min(concurrency, len(items)))])


def _run(work: Any, server: vllm.Server) -> Any:
    from openai import OpenAIError

    try:
        return asyncio.run(work)
    except OpenAIError as error:
        server.check_alive()
        raise PipelineError(f"a request to {server.base_url} failed: {error}") from None


def _counters(server: vllm.Server) -> dict[str, float]:
    """vLLM's speculative-decoding counters: `drafts`, and `position k` for the accepted ones."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"{server.root_url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    counters: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "vllm:spec_decode_num_drafts_total":
                counters["drafts"] = counters.get("drafts", 0) + sample.value
            elif sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
                place = f"position {sample.labels['position']}"
                counters[place] = counters.get(place, 0) + sample.value
    return counters


def _write(stage: Stage, results: dict[str, Any]) -> None:
    acceptance, draft_tokens = results["acceptance"], results["draft_tokens"]
    write_text(stage.folder / RESULTS, json.dumps(results, indent=1) + "\n")
    with atomic(stage.folder / TABLE) as file:
        writer = csv.writer(file)
        writer.writerow(["decoding", "mean_acceptance_length", *(f"accepted_{k + 1}" for k in range(draft_tokens))])
        for way, values in acceptance.items():
            shares = [round(share, 4) for share in values["accepted_by_position"]]
            writer.writerow([way, round(values["mean_acceptance_length"], 4), *shares])
    charts.acceptance(stage.folder / PICTURE, acceptance, draft_tokens)
    write_text(stage.folder / REPORT, _report(stage, results))


def _report(stage: Stage, results: dict[str, Any]) -> str:
    draft_tokens = results["draft_tokens"]
    positions = "".join(f" {place} |" for place in range(1, draft_tokens + 1))
    rows = "\n".join(
        f"| {way} | {values['mean_acceptance_length']:.3f} | {values['drafts']} |"
        + "".join(f" {share:.1%} |" for share in values["accepted_by_position"])
        for way, values in results["acceptance"].items()
    )
    scores, speed = results["scores"], results["tokens_per_s"]
    apart = results["greedy_apart_at_token"]
    differing = "".join(f"\n- prompt {prompt_id}: from output token {place} on" for prompt_id, place in apart.items())
    version_list = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return f"""# Evaluation of {stage.run.path.name}

{results["prompts"]} held-out prompts, {draft_tokens} draft tokens, at most {stage.config.evaluation.max_tokens} output
tokens, {stage.config.evaluation.concurrency} requests in flight. {results["date"]}, {results["hardware"]}.
{version_list}.

## Acceptance

Mean acceptance length counts the verifier's own token: 1 is no gain, {1 + draft_tokens} the ceiling. A position is
accepted only if all before it were.

| decoding | mean acceptance length | drafts | {positions.lstrip()}
|---|---|---|{"---|" * draft_tokens}
{rows}

![acceptance]({PICTURE})

## Is it still the verifier?

Greedy output identical with and without the draft:
{results["greedy_identical"]} of {results["prompts"]} prompts.{differing}

Sampled tokens (temperature {stage.config.evaluation.sampled_temperature:g}), scored by the verifier alone, mean
log-prob of a token: {scores["with draft"]["mean"]:.4f} (standard error {scores["with draft"]["standard_error"]:.4f})
with the draft, {scores["alone"]["mean"]:.4f} ({scores["alone"]["standard_error"]:.4f}) without:
{results["standard_errors_apart"]:.1f} standard errors apart.

## Speed

Output tokens a second, greedy: {speed["with draft"]} with the draft, {speed["alone"]} without
({speed["with draft"] / speed["alone"]:.2f} times). On a CPU, or with a verifier as small as its draft, this says
nothing about a GPU.
"""


def _check_gates(results: dict[str, Any], config: Config) -> None:
    settings = config.evaluation
    reached = results["acceptance"][GREEDY]["mean_acceptance_length"]
    failures = []
    if reached < settings.min_acceptance_length:
        failures.append(
            f"mean acceptance length {reached:.2f} is below evaluation.min_acceptance_length "
            f"{settings.min_acceptance_length:.2f}. Usual causes, likeliest first: too few or unlike training "
            "prompts (see 04_train/curves.png: is the validation's expected acceptance low too?); if that one is "
            "high, the served draft is not the trained one (layer ids, norm flags, d2t: 05_export/config.json)"
        )
    identical = results["greedy_identical"] / results["prompts"]
    if identical < settings.min_greedy_identical:
        failures.append(
            f"greedy output is identical on {identical:.0%} of the prompts only "
            f"(evaluation.min_greedy_identical {settings.min_greedy_identical:.0%}): the draft changes the answers"
        )
    if results["standard_errors_apart"] > _MAX_STANDARD_ERRORS:
        failures.append(
            f"sampled tokens with the draft are not the verifier's: mean log-prob "
            f"{results['scores']['with draft']['mean']:.3f} against {results['scores']['alone']['mean']:.3f} "
            f"({results['standard_errors_apart']:.1f} standard errors apart): the server samples wrongly"
        )
    if failures:
        raise GateFailed("\n".join(failures))
