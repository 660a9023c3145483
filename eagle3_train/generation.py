"""Stage 01b: the verifier answers every question; its thinking, answer and token ids are kept.

Row of traces.jsonl: `id, prompt_token_ids, output_token_ids, reasoning, content, finish_reason, usage, sampling,
flags, server {model, version}`. Token ids are the server's own. `flags` lists what a later stage may want to know:
cut_off, repetition, refusal, thinking_off.

Rows are appended as answers arrive and are matched by id, so a rerun asks only what is missing. Of a conversation
(`prompts.turns: all`) each user turn has its own trace, `<id>.2`, `<id>.3`, ..., with the verifier's earlier answers as
history; all belong to the prompt `<id>`.

With `generation.capture: one_pass` the hidden states are saved as well, while the verifier answers (one_pass.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from eagle3_train import charts, verifier
from eagle3_train import server as vllm
from eagle3_train.asking import Answerer, Lost, SetAside
from eagle3_train.capture import Room, disk_full_is_no_crash, fresh_staging, sample_of, token_bytes
from eagle3_train.config import Config, Extraction, Generation
from eagle3_train.errors import PipelineError
from eagle3_train.one_pass import ASKED, CANARY_TOKENS, STATES, OnePass, server_args
from eagle3_train.progress import bar
from eagle3_train.prompts import PROMPTS_FILE, hash_share
from eagle3_train.run import ERRORS, JsonlLog, Result, Stage, check_set_aside, read_jsonl

TRACES_FILE, PICTURE = "traces.jsonl", "lengths.png"
SERVER_LOG = "server.log"
CUT_OFF, REPETITION, REFUSAL, THINKING_OFF = "cut_off", "repetition", "refusal", "thinking_off"
# Enough answers to tell a server that never thinks from a verifier that sometimes does not.
_THINKING_PROBE = 10
# A loop: the end of the output is one cycle of at most this many tokens, this often, over at least so many tokens.
_LONGEST_CYCLE, _FEWEST_CYCLES, _SHORTEST_LOOP = 64, 4, 48
_REFUSAL_OPENINGS = (
    "i can't help",
    "i cannot help",
    "i can't assist",
    "i cannot assist",
    "i'm sorry, but i can",
    "抱歉,我无法",
)


def generate(stage: Stage) -> Result:
    """Ask what has no trace yet, on a server of our own or on attached ones."""
    with disk_full_is_no_crash(stage.folder):
        return _generate(stage)


def _generate(stage: Stage) -> Result:
    settings = stage.config.generation
    prompts = {row["id"]: row for row in read_jsonl(stage.input("01_prompts") / PROMPTS_FILE)}
    traces_path, errors_path = stage.folder / TRACES_FILE, stage.folder / ERRORS
    errors_path.unlink(missing_ok=True)  # what an earlier attempt set aside is asked again
    seconds = 0.0
    with JsonlLog(traces_path) as traces, JsonlLog(errors_path) as errors:
        have: dict[str, dict[str, Any] | None] = {}
        thinking_seen = False
        for row in read_jsonl(traces_path):
            if prompt_of(row["id"]) in prompts:
                have[row["id"]] = _said(row, prompts)
                thinking_seen = thinking_seen or bool(row["reasoning"])
        had = set(have)
        missing = [prompt for prompt in prompts.values() if not _turns(prompt).keys() <= have.keys()]
        if have:
            print(f"{len(prompts) - len(missing)} of {len(prompts)} prompts have their traces already")
        if missing:
            asking = _Asking(stage, missing, have, traces, errors, thinking_seen=thinking_seen)
            seconds = asking.run(done=len(prompts) - len(missing))
    set_aside = sum(1 for _ in read_jsonl(errors_path))
    check_set_aside("prompts", set_aside, len(prompts), settings.max_set_aside, errors_path)
    return _summarise(stage, prompts, had, set_aside, seconds)


def prompt_of(trace_id: str) -> str:
    """The prompt that a trace belongs to: a conversation's later turns carry its id and their number."""
    return trace_id.partition(".")[0]


def is_left_out(trace: dict[str, Any], settings: Extraction) -> bool:
    """Whether the preset, or an output too short to learn from, keeps a trace out of the training data."""
    wishes = ((CUT_OFF, settings.cut_off), (REPETITION, settings.repetition))
    return len(trace["output_token_ids"]) < 2 or any(wish == "drop" and flag in trace["flags"] for flag, wish in wishes)


def _said(trace: dict[str, Any], prompts: dict[str, Any]) -> dict[str, Any] | None:
    """What a later turn of the same conversation needs of a trace; None where there is none: memory must stay flat."""
    if not prompts[prompt_of(trace["id"])].get("follow_ups"):
        return None
    return {"role": "assistant", "content": trace["content"] or "", "reasoning": trace["reasoning"]}


def _turns(prompt: dict[str, Any]) -> dict[str, str | None]:
    """Trace id -> the user turn that it answers; None for the first, whose messages are the prompt's own."""
    later = prompt.get("follow_ups", [])
    return {prompt["id"]: None, **{f"{prompt['id']}.{number}": text for number, text in enumerate(later, 2)}}


class _Asking:
    """One attempt at the prompts that miss a trace."""

    def __init__(
        self,
        stage: Stage,
        prompts: list[dict[str, Any]],
        have: dict[str, dict[str, Any] | None],
        traces: JsonlLog,
        errors: JsonlLog,
        *,
        thinking_seen: bool,
    ):
        self.stage, self.settings = stage, stage.config.generation
        self.prompts, self.have = prompts, have
        self.traces, self.errors = traces, errors
        self.tokens = self.set_aside = 0
        self._one_pass = self.settings.capture == "one_pass"
        self._room = Room(stage.folder)
        self._held: list[dict[str, Any]] = []
        self._thinking_seen = thinking_seen
        self._check = _TokenCheck(stage.config)

    def run(self, *, done: int) -> float:
        """Ask everything; our own server is started again when it dies. Returns the seconds of asking alone."""
        seconds = 0.0
        queue = list(reversed(self.prompts))
        with bar(total=len(self.prompts) + done, initial=done, desc="01b traces", unit="prompt") as progress:
            for restarts in itertools.count():
                with self._servers() as servers:
                    self._started = time.monotonic()
                    try:
                        asyncio.run(self._ask_all(queue, servers, progress))
                        return seconds + time.monotonic() - self._started
                    except Lost as loss:
                        seconds += time.monotonic() - self._started
                        if self.settings.endpoint or restarts >= self.settings.max_restarts:
                            raise PipelineError(
                                f"{loss}\nWhat was answered is kept; the same command goes on."
                            ) from None
                        print(f"\n{loss}\nstarting the server again ({restarts + 1} of {self.settings.max_restarts})")
        raise AssertionError("unreachable")

    @contextlib.contextmanager
    def _servers(self) -> Iterator[list[vllm.Server]]:
        if self.settings.endpoint:
            yield [vllm.attach(endpoint) for endpoint in self.settings.endpoint]
            return
        log, extra = self.stage.folder / SERVER_LOG, self.settings.server_args
        if self._one_pass:
            self._staging = fresh_staging(self.stage.folder, self.stage.folder / STATES)
            # How long an answer will be nobody knows before.
            self._longest_bytes = self.stage.config.server.max_model_len * token_bytes(self.stage.config)
            self._room.check(self._longest_bytes)
            extra = server_args(self.stage.config, self._staging)
        try:
            with vllm.serve(self.stage.config, log=log, extra_args=extra) as server:
                yield [server]
        finally:
            if self._one_pass:
                shutil.rmtree(self._staging, ignore_errors=True)

    async def _ask_all(self, queue: list[dict[str, Any]], servers: list[vllm.Server], progress: Any) -> None:
        """Work `queue` off its end; what was in flight when a server is lost goes back to it."""
        async with Answerer(servers, self.settings) as answerer, contextlib.AsyncExitStack() as stack:
            states = None
            if self._one_pass:
                states = OnePass(self.stage.config, self.stage.folder, servers[0], self._staging)
                await stack.enter_async_context(states)
                await answerer.run([self._pass_gate(answerer, states)])
                self._started = time.monotonic()

            async def worker() -> None:
                while queue:
                    prompt = queue.pop()
                    try:
                        await self._converse(prompt, answerer, states)
                    except SetAside as problem:
                        self.errors.append({"id": prompt["id"], "reason": problem.reason, "detail": problem.detail})
                        self.set_aside += 1
                    except BaseException:
                        queue.append(prompt)
                        raise
                    progress.update()
                    elapsed = max(progress.format_dict["elapsed"], 1e-9)
                    speed = self.tokens / elapsed
                    progress.set_postfix_str(
                        f"{answerer.in_flight} in flight, {self.set_aside} set aside, {speed:.0f} tok/s", refresh=False
                    )

            count = min(self.settings.concurrency * len(servers), len(queue))
            await answerer.run([worker() for _ in range(count)])
            if states is not None:
                print(
                    f"states of {states.kept} traces saved, {states.made_again} of them in a second pass; "
                    f"{states.missed} left to 02"
                )
        self._release(final=True)

    async def _pass_gate(self, answerer: Answerer, states: OnePass) -> None:
        prompts = {prompt["id"]: prompt for prompt in self.prompts}

        async def ask(prompt_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
            sampling = sampling_of(self.settings, prompt_id)
            sampling["max_tokens"] = min(CANARY_TOKENS, sampling["max_tokens"])
            messages = prompts[prompt_id]["messages"]
            answer, _, _ = await answerer.ask(messages, sampling, thinking=self._thinks(prompt_id), **ASKED)
            return answer, sampling

        try:
            await states.gate(ask, list(prompts))
        except SetAside as problem:
            raise PipelineError(f"a canary got no answer: {problem}") from None

    def _thinks(self, trace_id: str) -> bool:
        return hash_share(self.settings.seed, "thinking", trace_id) < self.settings.thinking_share

    async def _converse(self, prompt: dict[str, Any], answerer: Answerer, states: OnePass | None) -> None:
        """Every turn of a prompt in order; turns that have their trace only lend it as history."""
        messages = list(prompt["messages"])
        for trace_id, question in _turns(prompt).items():
            if question is not None:
                messages.append({"role": "user", "content": question})
            if trace_id not in self.have:
                thinking, sampling = self._thinks(trace_id), sampling_of(self.settings, trace_id)
                if states is not None:
                    self._room.check(self._longest_bytes)
                answer, server, version = await answerer.ask(
                    messages, sampling, thinking=thinking, **(ASKED if states else {})
                )
                trace = trace_from(answer, trace_id, sampling, server, version, thinking=thinking)
                self._check.look(messages, trace, thinking=thinking)
                try:
                    if states is not None:
                        await self._save_states(states, answer, trace, prompt["split"])
                finally:  # also when its states find no room: 02 can make them, and nobody its words
                    self._keep(trace, _said(trace, {prompt["id"]: prompt}))
            if (said := self.have[trace_id]) is not None:
                messages.append(said)

    async def _save_states(self, states: OnePass, answer: dict[str, Any], trace: dict[str, Any], split: str) -> None:
        if split == "eval" or is_left_out(trace, self.stage.config.extraction):
            await states.discard(answer)
        else:
            await states.keep(answer, sample_of(trace, split))

    def _keep(self, trace: dict[str, Any], said: dict[str, Any] | None) -> None:
        self.have[trace["id"]] = said
        self.tokens += len(trace["output_token_ids"])
        if THINKING_OFF in trace["flags"] or self._thinking_seen:
            self.traces.append(trace)
            return
        # The first traces wait until one of them holds thinking: a wrong parser must not leave its traces behind.
        self._held.append(trace)
        self._thinking_seen = bool(trace["reasoning"])
        self._release(final=False)

    def _release(self, *, final: bool) -> None:
        if self._thinking_seen:
            for held in self._held:
                self.traces.append(held)
            self._held.clear()
        elif self._held and (final or len(self._held) >= _THINKING_PROBE):
            for held in self._held:
                self.have.pop(held["id"], None)
            raise PipelineError(
                f"none of the first {len(self._held)} answers holds any thinking; is the server's --reasoning-parser "
                "right (verifier.reasoning_parser), and does this verifier think at all? One that does not: "
                "--generation.thinking_share 0"
            )


def sampling_of(settings: Generation, trace_id: str) -> dict[str, Any]:
    """The sampling of one trace: a temperature of the mix and a seed, both by its id."""
    place = int(hash_share(settings.seed, "temperature", trace_id) * len(settings.temperatures))
    return {
        "temperature": settings.temperatures[place],
        "top_p": settings.top_p,
        "max_tokens": settings.max_tokens,
        "seed": (settings.seed + int(prompt_of(trace_id)[:8], 16)) % 2**31,
    }


def trace_from(
    answer: dict[str, Any],
    trace_id: str,
    sampling: dict[str, Any],
    server: vllm.Server,
    version: str,
    *,
    thinking: bool,
) -> dict[str, Any]:
    """The row of traces.jsonl for a chat completion.

    Raises:
        SetAside: this answer cannot be used.
        PipelineError: the server is set up in a way that would spoil every trace.
    """
    if not answer.get("choices"):
        raise SetAside("an answer without choices")
    choice = answer["choices"][0]
    message, finish_reason = choice.get("message"), choice.get("finish_reason")
    if message is None:
        raise SetAside("an answer without a message")
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    content = message.get("content")
    prompt_ids = answer.get("prompt_token_ids")
    output_ids = choice.get("token_ids")
    if not prompt_ids or output_ids is None:
        raise PipelineError(
            f"the server at {server.base_url} does not return token ids (return_token_ids): it is no vLLM, or too old"
        )
    if not reasoning and "</think>" in (content or ""):
        raise PipelineError(
            f"the server at {server.base_url} leaves thinking inside the answer: "
            "start it with --reasoning-parser (kimi_k2 for Kimi-K2.5)"
        )
    if finish_reason not in ("stop", "length"):
        raise SetAside(f"ended by {finish_reason}")
    if not output_ids or not (reasoning or content):
        raise SetAside("empty answer")
    said = (content or "").strip().lower().replace("’", "'")
    flags = {
        CUT_OFF: finish_reason == "length",
        REPETITION: ends_in_a_loop(output_ids),
        REFUSAL: said.startswith(_REFUSAL_OPENINGS) or bool(message.get("refusal")),
        THINKING_OFF: not thinking,
    }
    return {
        "id": trace_id,
        "prompt_token_ids": prompt_ids,
        "output_token_ids": output_ids,
        "reasoning": reasoning,
        "content": content,
        "finish_reason": finish_reason,
        "usage": {name: value for name, value in (answer.get("usage") or {}).items() if value is not None} or None,
        "sampling": sampling,
        "flags": [name for name, holds in flags.items() if holds],
        "server": {"model": server.model, "version": version},
    }


def ends_in_a_loop(ids: list[int]) -> bool:
    """Whether the output's end is one short cycle over and over."""
    for cycle in range(1, _LONGEST_CYCLE + 1):
        span = max(_FEWEST_CYCLES * cycle, _SHORTEST_LOOP)
        if span > len(ids):
            return False
        if ids[-1] == ids[-1 - cycle]:  # else the slices, a fifth of the client's time, would differ
            tail = ids[-span:]
            if tail[cycle:] == tail[:-cycle]:
                return True
    return False


class _TokenCheck:
    """Holds the first answers' token ids against the verifier's own tokenizer and chat template.

    A server with another template or tokenizer answers well and would spoil every trace.
    """

    ANSWERS = 10

    def __init__(self, config: Config):
        self._left = self.ANSWERS
        try:
            self._tokenizer = verifier.tokenizer(config.verifier)
        except (OSError, ValueError, PipelineError) as error:
            self._left = 0
            reason = (str(error) or type(error).__name__).splitlines()[0]
            print(f"warning: token ids are not checked, for the verifier has no usable tokenizer here: {reason}")

    def look(self, messages: list[dict[str, Any]], trace: dict[str, Any], *, thinking: bool) -> None:
        """Check one of the first answers.

        Raises:
            PipelineError: the ids are not those of the messages or of the text.
        """
        if not self._left:
            return
        self._left -= 1
        options = {} if thinking else {"thinking": False}
        rendered = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        asked = self._tokenizer.decode(trace["prompt_token_ids"])
        if asked != rendered:
            raise PipelineError(
                f"the server's prompt is not the verifier's chat template: it was asked {_clip(asked)}, and the "
                f"template gives {_clip(rendered)}. Does it serve this verifier, with its own --chat-template?"
            )
        said = self._tokenizer.decode(trace["output_token_ids"])
        for part in (trace["reasoning"], trace["content"]):
            if part and part.strip() not in said:
                raise PipelineError(
                    f"the server's token ids are not those of its text: they decode to {_clip(said)}, and the text is "
                    f"{_clip(part)}. Does it serve this verifier with its own tokenizer?"
                )


def _clip(text: str) -> str:
    return repr(text if len(text) <= 160 else f"{text[:80]} ... {text[-80:]}")


def _summarise(stage: Stage, prompts: dict[str, Any], had: set[str], set_aside: int, seconds: float) -> Result:
    reasons: Counter[str] = Counter()
    flags: Counter[str] = Counter()
    lengths, thinking, answers = [], [], []
    asked_tokens = 0
    think_end = None
    with contextlib.suppress(OSError, ValueError, PipelineError):
        think_end = verifier.tokenizer(stage.config.verifier).convert_tokens_to_ids("</think>")
    for row in read_jsonl(stage.folder / TRACES_FILE):
        if prompt_of(row["id"]) not in prompts:
            continue
        ids = row["output_token_ids"]
        reasons[row["finish_reason"]] += 1
        flags.update(row["flags"])
        lengths.append(len(ids))
        asked_tokens += len(ids) if row["id"] not in had else 0
        closes = ids.index(think_end) if think_end in ids else (len(ids) if row["reasoning"] else 0)
        thinking.append(closes)
        answers.append(len(ids) - closes)
    if not lengths:
        raise PipelineError(f"there is not one usable trace; see the reasons in {stage.folder / ERRORS}")
    charts.lengths(stage.folder / PICTURE, thinking, answers)
    lengths.sort()
    summary = {
        "traces": len(lengths),
        "output_tokens": sum(lengths),
        "set_aside": set_aside,
        "with_thinking": sum(count > 0 for count in thinking),
        "finish_reasons": dict(reasons),
        "flags": dict(flags),
        "p50_tokens": lengths[len(lengths) // 2],
        "p95_tokens": lengths[int(len(lengths) * 0.95)],
        "max_tokens": lengths[-1],
        # Of this attempt alone, without the server's start.
        "asked_seconds": round(seconds, 2),
        "asked_tokens": asked_tokens,
    }
    line = (
        f"{len(lengths)} traces, {sum(lengths)} tokens (p50 {summary['p50_tokens']}, p95 {summary['p95_tokens']}, "
        f"longest {lengths[-1]}), {summary['with_thinking']} with thinking, ended by {_listed(reasons)}"
        + (f", {_listed(flags)}" if flags else "")
        + f"; {set_aside} set aside"
    )
    if asked_tokens and seconds:
        line += f"; {asked_tokens / seconds:.0f} tok/s"
    return Result([TRACES_FILE, ERRORS, PICTURE], summary, [line])


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
