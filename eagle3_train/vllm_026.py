"""What vLLM 0.26 lacks of the 0.32 that the project is pinned to; for GPU machines whose torch is 2.11.

0.26 has no `--per-request-spec-decode-metrics` and keeps no record of a request's verifier steps. Here the flag is
accepted, the record kept, and given in the answer where 0.32 gives it: `metrics.speculative_decoding`.
Nothing is done under a vLLM that has the flag. Drop this file when 0.26 is no longer measured on.
"""

from __future__ import annotations

from typing import Any

FLAG = "--per-request-spec-decode-metrics"
_STEPS = "eagle3_verifier_steps"


def supply_step_records() -> None:
    """Patch the flag, the scheduler and the chat server of a vLLM without step records; once in each process."""
    from vllm.config import ObservabilityConfig
    from vllm.engine.arg_utils import EngineArgs

    if hasattr(ObservabilityConfig, "per_request_spec_decode_metrics") or hasattr(EngineArgs, _STEPS):
        return
    setattr(EngineArgs, _STEPS, True)
    _accept_flag(EngineArgs)
    _keep_steps()
    _answer_with_steps()


def _accept_flag(engine_args: Any) -> None:
    add = engine_args.add_cli_args

    def add_cli_args(parser: Any) -> Any:
        parser.add_argument(FLAG, choices=("none", "summary", "detailed"), help="always detailed")
        return add(parser)

    engine_args.add_cli_args = staticmethod(add_cli_args)


def _keep_steps() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    make, free = Scheduler.make_spec_decoding_stats, Scheduler._free_request

    def make_spec_decoding_stats(self: Any, stats: Any, **counts: Any) -> Any:
        if counts["num_draft_tokens"]:
            invalid = (counts["num_invalid_spec_tokens"] or {}).get(counts["request_id"], 0)
            record = vars(self.requests[counts["request_id"]]).setdefault(
                _STEPS, {"per_step_accepted": [], "per_step_drafted": []}
            )
            record["per_step_accepted"].append(counts["num_accepted_tokens"])
            record["per_step_drafted"].append(counts["num_draft_tokens"] - invalid)
        return make(self, stats, **counts)

    def free_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        transfer, other = free(self, request, *args, **kwargs)
        if record := vars(request).get(_STEPS):
            # The one field of an engine's output that takes anything and reaches the answer.
            transfer = {**(transfer or {}), _STEPS: record}
        return transfer, other

    Scheduler.make_spec_decoding_stats = make_spec_decoding_stats
    Scheduler._free_request = free_request


def _answer_with_steps() -> None:
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.engine.protocol import PerRequestTimingMetrics

    full = OpenAIServingChat.chat_completion_full_generator

    async def chat_completion_full_generator(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = await full(self, *args, **kwargs)
        transfer = getattr(answer, "kv_transfer_params", None) or {}
        if record := transfer.pop(_STEPS, None):
            answer.metrics = PerRequestTimingMetrics(speculative_decoding=record)
        return answer

    OpenAIServingChat.chat_completion_full_generator = chat_completion_full_generator
