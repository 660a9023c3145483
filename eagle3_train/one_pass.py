"""States saved while the verifier answers (`generation.capture: one_pass`): stage 01b's part of it.

    01b_traces/states/<id>.safetensors   a shard as stage 02 makes them; 02 takes it over
    01b_traces/states.jsonl              its row, as in 02's index

Of every answer the log-probs of its sampled tokens are recomputed from the saved states and held against those that
the server returned: with vLLM's asynchronous scheduling every state after a token that was sampled twice in a row is
one row off (vllm#56417), and nothing says so. It is switched off here, and what fails the check is made again from its
token ids on the same server. A trace whose states stay wrong, or find no room, is kept without: 02 loads the verifier
for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from eagle3_train import parity
from eagle3_train import server as vllm
from eagle3_train.asking import SetAside
from eagle3_train.capture import Capturer, DiskFull, Expected, Sample, StatesFile
from eagle3_train.config import Config
from eagle3_train.errors import PipelineError
from eagle3_train.run import JsonlLog

STATES, STATES_INDEX = "states", "states.jsonl"
# Fields of a request whose states are wanted, with the log-probs that check them.
ASKED: dict[str, Any] = {"logprobs": True, "kv_transfer_params": {"include_output_tokens": True}}
CANARY_TOKENS = 256


def server_args(config: Config, staging: Path) -> list[str]:
    """Arguments of a server that generates and saves states; those of extraction count where both say something."""
    capturing = vllm.extraction_args(config, staging, decodes=True)
    return [*config.generation.server_args, *capturing, "--no-async-scheduling"]


class OnePass:
    """Takes over the states of answers, one server long; used inside `async with`.

    Attributes:
        kept: samples whose states were kept.
        made_again: of these, how many needed a second pass over their token ids.
        missed: traces that are left without states.
    """

    def __init__(self, config: Config, folder: Path, server: vllm.Server, staging: Path):
        self.kept = self.made_again = self.missed = 0
        self._config, self._folder = config, folder
        self._expected = Expected.of(config)
        self._capturer = Capturer(server, staging, self._expected, config.extraction.request_timeout_s)
        self._head = parity.Head(config.verifier)
        _, self._allowed = parity.allowed_gaps(config.extraction.storage_dtype)
        (folder / STATES).mkdir(exist_ok=True)

    async def __aenter__(self) -> OnePass:
        self._index = JsonlLog(self._folder / STATES_INDEX)
        await self._capturer.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._capturer.__aexit__(*exc)
        self._index.close()

    async def gate(
        self, ask: Callable[[str], Awaitable[tuple[dict[str, Any], dict[str, Any]]]], ids: Sequence[str]
    ) -> None:
        """The parity gate, on canaries that this server has generated; their sampling and their states are checked too.

        Args:
            ask: gives the answer to a prompt id, and the sampling it was asked with.
            ids: prompts to take the canaries from.

        Raises:
            PipelineError: the states, or the sampling, are not the verifier's own.
        """
        asked = await asyncio.gather(*(ask(prompt_id) for prompt_id in parity.chosen(ids)))
        answers = [(answer, sampling) for answer, sampling in asked if len(_output_ids(answer)) > 1]
        if not answers:
            raise PipelineError("the verifier answers none of the canaries with two tokens or more")
        sampled, gaps = [], []
        try:
            for number, (answer, sampling) in enumerate(answers):
                prompt_ids, whole = answer["prompt_token_ids"], answer["prompt_token_ids"] + _output_ids(answer)
                one = await self._capturer.look(answer, whole[:-1])
                again = await self._capturer.prefill(whole[:-1], f"canary-{number}-again")
                two = await self._capturer.look(again, whole[:-1])
                parity.check_same(
                    one.states, two.states, f"canary {number}, saved while it was generated", "in a prefill"
                )
                last_TD = one.states[:, -1].float()
                parity.check_sampled(
                    self._head, last_TD, whole, len(prompt_ids), sampled_log_probs(answer), self._allowed
                )
                if sampling["temperature"] > 0:
                    sampled.append((last_TD, whole, len(prompt_ids), sampling["temperature"], sampling["top_p"]))
                else:
                    gaps.append(parity.greedy_gap(self._head, last_TD, whole, len(prompt_ids)))
        except SetAside as problem:
            raise PipelineError(f"parity gate: {problem}") from None
        parity.check_sampling(parity.sampling_z(self._head, sampled) if sampled else None, max(gaps) if gaps else None)
        candidates = [answer["prompt_token_ids"] + _output_ids(answer)[:-1] for answer, _ in answers]
        await parity.pass_gate(self._capturer, candidates, self._folder, self._config)

    async def keep(self, answer: dict[str, Any], sample: Sample) -> None:
        """Check the states of an answer and keep them, made again from the token ids where they are not right.

        Args:
            answer: the chat completion that was asked with `ASKED`.
            sample: its trace as it is trained on.

        Raises:
            DiskFull: no room for them.
        """
        whole = [*sample.token_ids, _output_ids(answer)[-1]]
        log_probs = sampled_log_probs(answer)

        def check(held: StatesFile) -> None:
            parity.check_sampled(self._head, held.last_layer(), whole, len(sample.prompt_ids), log_probs, self._allowed)

        folder = self._folder / STATES
        try:
            try:
                row = await self._capturer.keep(answer, sample, folder, check)
            except SetAside:
                self.made_again += 1
                second = await self._capturer.prefill(sample.token_ids, f"{sample.id}-again")
                row = await self._capturer.keep(second, sample, folder)
        except SetAside:
            self.missed += 1
            return
        except DiskFull:
            self.missed += 1
            raise
        self._index.append(row)
        self.kept += 1

    async def discard(self, answer: dict[str, Any]) -> None:
        """Remove the states of an answer that nothing is trained on."""
        await self._capturer.discard(answer)


def sampled_log_probs(answer: dict[str, Any]) -> list[float]:
    """The server's log-prob of each output token.

    Raises:
        PipelineError: it returned none, or not one a token.
    """
    listed = (answer["choices"][0].get("logprobs") or {}).get("content") or []
    if len(listed) != len(_output_ids(answer)):
        raise PipelineError(
            f"the server returned {len(listed)} log-probs for {len(_output_ids(answer))} tokens; without them the "
            "states of generation.capture one_pass cannot be checked"
        )
    return [entry["logprob"] for entry in listed]


def _output_ids(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])
