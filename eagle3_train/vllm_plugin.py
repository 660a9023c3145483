"""Loaded in every vLLM process of this environment (entry point `vllm.general_plugins`).

Registers the hidden-states connector, and carries the patches to vLLM: each with its reason, and the version
that makes it unnecessary.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

CONNECTOR = "Eagle3HiddenStatesConnector"


def register() -> None:
    """Entry point; vLLM calls it once or more in each process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from eagle3_train.vllm_026 import supply_step_records

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "eagle3_train.connector", CONNECTOR)
    _patch_cpu_expand()
    supply_step_records()


def _patch_cpu_expand() -> None:
    """Give every request its own temperature on a CPU engine with speculative decoding.

    vllm.utils.cpu_triton_utils._expand_kernel_impl fills an int64 COPY of its float output, so temperature, top-p
    and top-k are uninitialised memory and sampling at temperature > 0 is garbage, without a sign of it.
    Seen in vLLM 0.32.0 (CPU only); drop this when tests/test_engine.py passes without it.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand_per_token


def keep_decoding_in_one_graph() -> None:
    """Let a server that saves states decode in whole CUDA graphs, as one that saves none does.

    CacheOnlyAttentionMetadataBuilder leaves `_cudagraph_support` at its base class's NEVER, so vLLM falls back to
    piecewise graphs for the verifier as well. But that layer belongs to the drafter alone, whose own graphs are
    piecewise at most (ExtractHiddenStatesProposer.initialize_cudagraph_keys).
    Seen in vLLM 0.26.0, whose log says "not supported with CacheOnlyAttentionBackend"; in 0.32.0 the class is the same,
    and the drafter runs without graphs. Drop this when the class declares its own. No effect on a CPU.
    The connector calls it: the class's module is too much for a plugin to import.
    """
    from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionMetadataBuilder
    from vllm.v1.attention.backend import AttentionCGSupport

    if "_cudagraph_support" not in vars(CacheOnlyAttentionMetadataBuilder):
        CacheOnlyAttentionMetadataBuilder._cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


def pack_before_the_copy(pack: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let vLLM's connector copy `pack(states)` [any shape] in place of the states [tokens, layers, hidden].

    It copies and then hands them to threads of the engine's process, where converting them takes the interpreter's lock
    from the engine: with float8 made there, one on an H200 prefilled at 0.37 of its rate. Seen in vLLM 0.26.0 and
    0.32.0; drop this when its connector stores states in a type of its own.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as base

    extract = inspect.unwrap(base.extract_from_kv_cache)

    @functools.wraps(extract)
    def extract_and_pack(*args: Any, **kwargs: Any) -> torch.Tensor:
        return pack(extract(*args, **kwargs))

    base.extract_from_kv_cache = extract_and_pack


def expand_per_token(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: Any,
    replace_to: Any,
    MAX_NUM_TOKENS: int | None = None,  # noqa: ARG001 - the signature of the kernel it stands in for
) -> None:
    """Repeat each request's value for each of its tokens, in place.

    Args:
        output: [num_tokens], any dtype; written.
        input_val: [num_requests], same dtype; `replace_from` is taken as `replace_to`.
        cu_num_tokens: [num_requests] integer, cumulative number of tokens.
    """
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input_val == replace_from, replace_to, input_val)
    expanded = torch.repeat_interleave(values, counts)
    output[: expanded.shape[0]].copy_(expanded)
