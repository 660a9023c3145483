"""Stage 06: a draft on a live vLLM, on prompts that nothing was trained on.

With the draft, then without it: the same prompts, greedily and sampled, then the same load. What is shown:

- mean acceptance length and acceptance by position, by prompt set, by context position, in thinking and in the answer;
- the acceptance length that stage 04 expected beside it;
- greedy output equals the verifier's alone, token by token;
- sampled output is the verifier's distribution: its tokens, scored by the verifier without the draft, are as likely
  as the verifier's own samples;
- tokens a second and time between tokens at several concurrencies, by vLLM's own benchmark.

Each server's measurements are kept in `measurements/` as soon as they are made: a rerun measures only what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import math
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from eagle3_train import acceptance, load_test, prompt_sets, report, verifier
from eagle3_train import server as vllm
from eagle3_train.acceptance import GREEDY, SAMPLED, Output
from eagle3_train.asking import watch_server
from eagle3_train.config import Config
from eagle3_train.errors import GateFailed, PipelineError
from eagle3_train.generation import SERVER_LOG
from eagle3_train.progress import bar
from eagle3_train.run import EVALUATE, EXPORT, TRAIN, Result, Stage, StageSpec, hardware, versions, write_text

MEASUREMENTS = "measurements"
_EXPECTED = {GREEDY: "expected_acceptance_length", SAMPLED: "expected_sampled_acceptance_length"}  # in 04's summary
# Two sets of samples of one distribution differ by more than this many standard errors once in 15,000 times.
_MAX_STANDARD_ERRORS = 4.0
# The last answers may reach us a moment before vLLM counts them.
_COUNTERS_SETTLE_S = 5.0

Prompts = dict[str, list[dict[str, Any]]]


def spec(config: Config) -> StageSpec:
    """Stage 06 of this run's own draft, or of another draft in a folder of its own."""
    if config.evaluation.draft is None:
        return EVALUATE
    name = Path(config.evaluation.draft.rstrip("/")).name
    return dataclasses.replace(EVALUATE, folder=f"{EVALUATE.folder}_{name}", needs=("01_prompts",))


def evaluate(stage: Stage) -> Result:
    """Measure, compare, report, and hold the result against the preset's floors."""
    config, settings = stage.config, stage.config.evaluation
    draft = settings.draft or str(stage.input("05_export"))
    prompts = {name: prompt_sets.load(stage, name, settings.max_prompts) for name in settings.prompt_sets}
    drafted = _measured(stage, "with_draft", lambda: _with_draft(stage, draft, prompts, settings.draft_tokens))
    alone = _measured(stage, "alone", lambda: _alone(stage, prompts, drafted))
    sweep = {
        count: _measured(stage, f"draft_tokens_{count}", functools.partial(_one_of_sweep, stage, draft, prompts, count))
        for count in settings.sweep
        if count != settings.draft_tokens
    }
    results = compare(drafted, alone, sweep, _think_end(config), settings.draft_tokens)
    results |= {
        "draft": settings.draft or "05_export",
        "prompts": {name: len(rows) for name, rows in prompts.items()},
        "hardware": hardware(),
        "versions": versions(),
        "date": time.strftime("%Y-%m-%d"),
        "expected": beside_training(stage, results),
    }
    write_text(stage.folder / report.RESULTS, json.dumps(results, indent=1) + "\n")
    report.write(stage, results)
    if failures := gate_failures(results, config):
        raise GateFailed("\n\n".join([*failures, report.diagnosis(stage, results)]))
    summary = {
        "mean_acceptance_length": round(results["overall"][GREEDY]["mean_acceptance_length"], 4),
        "greedy_identical": results["greedy_identical"],
        "prompts": sum(len(rows) for rows in prompts.values()),
    }
    return Result([report.RESULTS, *report.FILES], summary, report.lines(stage, results))


def _measured(stage: Stage, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A server's measurements: those of an earlier attempt, or made now and kept."""
    path = stage.folder / MEASUREMENTS / f"{name}.json"
    if path.exists():
        print(f"{name}: measured by an earlier attempt")
    else:
        write_text(path, json.dumps(measure()))
    return json.loads(path.read_text(encoding="utf-8"))


@contextlib.contextmanager
def _server(stage: Stage, endpoint: str | None, extra: list[str], what: str) -> Iterator[vllm.Server]:
    if endpoint:
        yield vllm.attach(endpoint)
        return
    arguments = [*extra, *stage.config.evaluation.server_args]
    with vllm.serve(stage.config, log=stage.folder / SERVER_LOG, extra_args=arguments, what=what) as server:
        yield server


def _with_draft(stage: Stage, draft: str, prompts: Prompts, draft_tokens: int) -> dict[str, Any]:
    settings = stage.config.evaluation
    extra = vllm.draft_args(draft, draft_tokens)
    with _server(stage, settings.endpoint, extra, "verifier + draft") as server:
        return {
            "outputs": _ask_every_way(server, prompts, stage.config, "draft", drafts=True),
            "load": _load(server, stage, prompts, "with_draft", settings.load_concurrency),
        }


def _alone(stage: Stage, prompts: Prompts, drafted: dict[str, Any]) -> dict[str, Any]:
    config, settings = stage.config, stage.config.evaluation
    with _server(stage, settings.endpoint_alone, [], "verifier alone") as server:
        outputs = _ask_every_way(server, prompts, config, "alone", drafts=False)
        scores = {
            name: score(server, _flat(of, SAMPLED), config, f"06 scoring, {name}")
            for name, of in (("with draft", drafted["outputs"]), ("alone", outputs))
        }
        load = _load(server, stage, prompts, "alone", settings.load_concurrency)
    return {"outputs": outputs, "scores": scores, "load": load}


def _one_of_sweep(stage: Stage, draft: str, prompts: Prompts, draft_tokens: int) -> dict[str, Any]:
    settings = stage.config.evaluation
    extra = vllm.draft_args(draft, draft_tokens)
    with _server(stage, None, extra, f"{draft_tokens} draft tokens") as server:
        label = f"{draft_tokens} tokens"
        outputs = {
            n: {GREEDY: ask(server, rows, 0.0, stage.config, f"06 {n}, {label}", drafts=True)}
            for n, rows in prompts.items()
        }
        load = _load(server, stage, prompts, f"draft_tokens_{draft_tokens}", settings.load_concurrency[:1])
    return {"outputs": outputs, "load": load}


def _ask_every_way(
    server: vllm.Server, prompts: Prompts, config: Config, what: str, *, drafts: bool
) -> dict[str, dict[str, dict[str, Any]]]:
    ways = {GREEDY: 0.0, SAMPLED: config.evaluation.sampled_temperature}
    return {
        name: {
            way: ask(server, rows, temperature, config, f"06 {name}, {way}, {what}", drafts=drafts)
            for way, temperature in ways.items()
        }
        for name, rows in prompts.items()
    }


def ask(
    server: vllm.Server, prompts: list[dict[str, Any]], temperature: float, config: Config, label: str, *, drafts: bool
) -> dict[str, dict[str, Any]]:
    """Every prompt's answer, as an `Output`'s fields by prompt id, after an uncounted first one that warms up.

    Raises:
        PipelineError: a request failed, the server keeps no record of its steps, or it was restarted or used by
            others in between: figures over a part of the truth would mislead.
    """
    settings = config.evaluation
    outputs: dict[str, Output] = {}

    async def request(client: Any, prompt: dict[str, Any]) -> Output:
        answer = await client.chat.completions.create(
            model=server.model,
            messages=prompt["messages"],
            temperature=temperature,
            max_tokens=settings.max_tokens,
            seed=int(prompt["id"][:8], 16) % 2**31,
            extra_body={"return_token_ids": True},
        )
        extra = answer.model_extra or {}
        steps = (extra.get("metrics") or {}).get("speculative_decoding") or {}
        ids = answer.choices[0].model_extra["token_ids"]
        # An answer of one or two tokens may end without a verifier step.
        if drafts and len(ids) > 2 and not steps.get("per_step_accepted"):
            raise PipelineError(
                f"{server.base_url} keeps no record of its verifier steps: it runs without a draft, or without "
                "--per-request-spec-decode-metrics detailed"
            )
        return Output(
            extra["prompt_token_ids"], ids, steps.get("per_step_accepted") or [], steps.get("per_step_drafted") or []
        )

    async def ask_all(client: Any) -> None:
        async def one(prompt: dict[str, Any]) -> None:
            outputs[prompt["id"]] = await request(client, prompt)

        await request(client, prompts[0])
        await asyncio.sleep(0.5)
        before.update(counters(server))
        await _for_each(server, prompts, one, settings.concurrency, label)

    before: dict[str, float] = {}
    _run(ask_all, server, config)
    _check_undisturbed(server, before, list(outputs.values()), drafts=drafts)
    return {prompt_id: dataclasses.asdict(output) for prompt_id, output in outputs.items()}


def score(server: vllm.Server, outputs: list[Output], config: Config, label: str) -> list[float]:
    """Mean log-prob that `server`'s verifier gives each answer's tokens, one figure an answer."""
    means: list[float] = []

    async def score_all(client: Any) -> None:
        async def one(output: Output) -> None:
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

        answered = [output for output in outputs if output.output_ids]
        await _for_each(server, answered, one, config.evaluation.concurrency, label)

    _run(score_all, server, config)
    return means


def compare(
    drafted: dict[str, Any],
    alone: dict[str, Any],
    sweep: dict[int, dict[str, Any]],
    think_end: int | None,
    draft_tokens: int,
) -> dict[str, Any]:
    """Everything the report says, from the measurements with and without the draft."""
    of_sets = {
        name: {way: [Output(**o).steps(think_end) for o in answers.values()] for way, answers in ways.items()}
        for name, ways in drafted["outputs"].items()
    }
    per_answer = {way: [steps for ways in of_sets.values() for steps in ways[way]] for way in (GREEDY, SAMPLED)}
    everything = {way: [step for steps in answers for step in steps] for way, answers in per_answer.items()}
    width = acceptance.bucket_width(_flat(drafted["outputs"], GREEDY))
    return {
        "draft_tokens": draft_tokens,
        "overall": {way: _with_interval(per_answer[way], draft_tokens) for way in per_answer},
        "acceptance": {
            name: {way: _with_interval(answers, draft_tokens) for way, answers in ways.items()}
            for name, ways in of_sets.items()
        },
        "by_section": {way: acceptance.by_section(steps, draft_tokens) for way, steps in everything.items()},
        "context_bucket": width,
        "by_context": {way: acceptance.by_context(steps, draft_tokens, width) for way, steps in everything.items()},
        **_identity(_flat_by_id(drafted["outputs"]), _flat_by_id(alone["outputs"])),
        **_likelihood(alone["scores"]),
        "load": {"with draft": drafted["load"], "alone": alone["load"]},
        "sweep": _sweep(drafted, sweep, think_end, draft_tokens),
    }


def _with_interval(answers: list[list[acceptance.Step]], draft_tokens: int) -> dict[str, Any]:
    summary = acceptance.summarise([step for steps in answers for step in steps], draft_tokens)
    return summary | {"interval": acceptance.confidence_interval(answers)}


def _identity(ours: dict[str, list[int]], theirs: dict[str, list[int]]) -> dict[str, Any]:
    apart = {
        prompt: next((place for place, (a, b) in enumerate(zip(ids, theirs[prompt], strict=False)) if a != b), None)
        for prompt, ids in ours.items()
        if ids != theirs[prompt]
    }
    # Equal up to the shorter one's end: they part where it stops.
    apart = {p: min(len(ours[p]), len(theirs[p])) if place is None else place for p, place in apart.items()}
    return {"greedy_prompts": len(ours), "greedy_identical": len(ours) - len(apart), "greedy_apart_at_token": apart}


def _likelihood(scores: dict[str, list[float]]) -> dict[str, Any]:
    summary: dict[str, dict[str, Any]] = {
        name: {
            "mean": statistics.fmean(means),
            "standard_error": statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
        }
        for name, means in scores.items()
    }
    one, other = summary.values()
    # With a single answer there is no spread to judge by.
    spread = math.hypot(*(part["standard_error"] or math.inf for part in (one, other)))
    apart = abs(one["mean"] - other["mean"]) / max(spread, 1e-9)
    return {"scores": summary, "standard_errors_apart": apart}


def _sweep(
    drafted: dict[str, Any], sweep: dict[int, dict[str, Any]], think_end: int | None, draft_tokens: int
) -> dict[str, Any]:
    """Number of draft tokens -> mean acceptance length and tokens a second of one stream; the fastest is named."""
    rows = {}
    for count, measured in sorted({draft_tokens: drafted, **sweep}.items()):
        steps = [step for o in _flat(measured["outputs"], GREEDY) for step in o.steps(think_end)]
        load = next(iter(measured["load"].values()), None)
        rows[str(count)] = {
            "mean_acceptance_length": acceptance.summarise(steps, count)["mean_acceptance_length"],
            "tokens_per_s": load["output_throughput"] if load else None,
        }
    timed = {count: row["tokens_per_s"] for count, row in rows.items() if row["tokens_per_s"]}
    return {"rows": rows, "fastest": max(timed, key=lambda count: timed[count]) if len(timed) > 1 else None}


def beside_training(stage: Stage, results: dict[str, Any]) -> dict[str, Any]:
    """What stage 04 expected of this run's draft beside what was measured.

    Measured on the questions of 01's own split where they were asked, else on all; with more draft tokens than 04
    trained TTT steps, as if only so many had been drafted.

    Returns:
        `prompts`, `draft_tokens` and `by_decoding`, of each way `expected`, `measured` and their `difference`; or
        nothing but `left_out`, the reason why they cannot be compared.
    """
    if stage.config.evaluation.draft is not None:
        return {"left_out": "another draft was measured than this run trained"}
    trained, exported = Stage(stage.run, TRAIN).manifest, Stage(stage.run, EXPORT).manifest
    if trained is None or exported is None or exported["inputs"].get(TRAIN.folder) != trained["digest"]:
        return {"left_out": f"{EXPORT.folder} was not made from what {TRAIN.folder} holds"}
    served, learnt = results["draft_tokens"], trained["config"]["training.ttt_steps"]
    if served < learnt:
        return {"left_out": f"{served} draft tokens were served, 04's figure is for {learnt} (training.ttt_steps)"}
    own = prompt_sets.EVAL_SPLIT if prompt_sets.EVAL_SPLIT in results["acceptance"] else "all"
    measured = results["acceptance"].get(own, results["overall"])
    found = {}
    for way, name in _EXPECTED.items():
        # 04 reckons with rejection sampling at temperature 1; a manifest of before it did names no such figure.
        if name not in trained["summary"] or (way == SAMPLED and stage.config.evaluation.sampled_temperature != 1):
            continue
        length = measured[way]["length_with_fewer"][learnt - 1]
        expected = trained["summary"][name]
        found[way] = {"expected": expected, "measured": length, "difference": length - expected}
    return {"prompts": own, "draft_tokens": learnt, "by_decoding": found}


def gate_failures(results: dict[str, Any], config: Config) -> list[str]:
    """A sentence for each of the preset's floors that the results are below."""
    settings, failures = config.evaluation, []
    reached = results["overall"][GREEDY]["mean_acceptance_length"]
    if reached < settings.min_acceptance_length:
        failures.append(
            f"mean acceptance length {reached:.2f} is below evaluation.min_acceptance_length "
            f"{settings.min_acceptance_length:.2f}"
        )
    if results["greedy_identical"] / results["greedy_prompts"] < settings.min_greedy_identical:
        failures.append(
            f"greedy output is identical on {results['greedy_identical']} of {results['greedy_prompts']} prompts only "
            f"(evaluation.min_greedy_identical {settings.min_greedy_identical:.0%}): the draft changes the answers"
        )
    if results["standard_errors_apart"] > _MAX_STANDARD_ERRORS:
        scores = results["scores"]
        failures.append(
            f"sampled tokens with the draft are not the verifier's: mean log-prob {scores['with draft']['mean']:.3f} "
            f"against {scores['alone']['mean']:.3f} ({results['standard_errors_apart']:.1f} standard errors apart): "
            "the server samples wrongly"
        )
    return failures


def counters(server: vllm.Server) -> dict[str, float]:
    """vLLM's own counters: `drafts`, `accepted`, output `tokens`, finished `requests`, and its `started` time.

    Raises:
        PipelineError: the server does not answer.
    """
    from prometheus_client.parser import text_string_to_metric_families

    names = {
        "vllm:spec_decode_num_drafts_total": "drafts",
        "vllm:spec_decode_num_accepted_tokens_total": "accepted",
        "vllm:generation_tokens_total": "tokens",
        "vllm:request_success_total": "requests",
        "vllm:generation_tokens_created": "started",
    }
    try:
        with urllib.request.urlopen(f"{server.root_url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    except OSError as error:
        server.check_alive()
        raise PipelineError(f"{server.root_url}/metrics does not answer: {error}") from None
    found = dict.fromkeys(names.values(), 0.0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in names:
                found[names[sample.name]] += sample.value
    return found


def _check_undisturbed(server: vllm.Server, before: dict[str, float], outputs: list[Output], *, drafts: bool) -> None:
    ours = {"tokens": sum(len(output.output_ids) for output in outputs), "requests": len(outputs)}
    if drafts:
        ours["drafts"] = sum(len(output.accepted) for output in outputs)
        ours["accepted"] = sum(sum(output.accepted) for output in outputs)
    deadline = time.monotonic() + _COUNTERS_SETTLE_S
    while True:
        after = counters(server)
        if after["started"] != before["started"]:
            raise PipelineError(f"{server.base_url} was restarted during the measurement; run this again")
        counted = {name: int(after[name] - before[name]) for name in ours}
        if counted == ours:
            return
        if time.monotonic() > deadline:
            raise PipelineError(
                f"{server.base_url} counted {counted} where this stage asked for {ours}: it has other traffic. "
                "Measure on a server that nobody else uses"
            )
        time.sleep(0.2)


def _load(
    server: vllm.Server, stage: Stage, prompts: Prompts, name: str, concurrency: list[int]
) -> dict[str, dict[str, float]]:
    """Concurrency -> figures of vLLM's benchmark on the same prompts; nothing when no concurrency is asked for."""
    settings = stage.config.evaluation
    if not concurrency:
        return {}
    print(f"06 load, {name}: vLLM's benchmark at {', '.join(map(str, concurrency))} requests in flight")
    with tempfile.TemporaryDirectory() as folder:  # not in the run: the benchmark's own files name this machine's paths
        file = Path(folder) / "prompts.jsonl"
        asked = [row["messages"][-1]["content"] for rows in prompts.values() for row in rows]
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked), encoding="utf-8")
        measured = load_test.measure(
            {
                "base_url": server.root_url,
                "model": server.model,
                "tokenizer": verifier.location(stage.config.verifier),
                "trust_remote_code": stage.config.verifier.trust_remote_code,
                "prompts": str(file),
                "output_tokens": settings.max_tokens,
                "concurrency": concurrency,
                "requests": settings.load_prompts,
            },
            Path(folder),
        )
    return {str(number): figures for number, figures in measured.items()}


def _think_end(config: Config) -> int | None:
    if not config.generation.thinking_share:
        return None
    found = verifier.tokenizer(config.verifier).convert_tokens_to_ids("</think>")
    return found if isinstance(found, int) and found >= 0 else None


def _flat(outputs: dict[str, Any], way: str) -> list[Output]:
    return [Output(**output) for ways in outputs.values() for output in ways[way].values()]


def _flat_by_id(outputs: dict[str, Any]) -> dict[str, list[int]]:
    return {f"{n} {p}": output["output_ids"] for n, ways in outputs.items() for p, output in ways[GREEDY].items()}


async def _for_each(
    server: vllm.Server, items: list[Any], work: Callable[[Any], Awaitable[None]], concurrency: int, label: str
) -> None:
    queue = iter(items)
    with bar(total=len(items), desc=label, unit="prompt") as progress:

        async def worker() -> None:
            for item in queue:
                await work(item)
                progress.update()

        await watch_server(server, [worker() for _ in range(min(concurrency, len(items)))])


def _run(work: Callable[[Any], Coroutine[Any, Any, None]], server: vllm.Server, config: Config) -> None:
    from openai import OpenAIError

    async def with_client() -> None:
        client = vllm.async_client(
            server,
            timeout_s=config.generation.request_timeout_s,
            connect_timeout_s=config.generation.connect_timeout_s,
            max_retries=0,  # a request answered twice would be counted twice
        )
        try:
            await work(client)
        finally:
            await client.close()

    try:
        asyncio.run(with_client())
    except OpenAIError as error:
        server.check_alive()
        raise PipelineError(f"a request to {server.base_url} failed: {error}") from None
