"""Our connector against vLLM's own, and asynchronous scheduling against none, on one server after the other.

    python -m benchmarks.gpu.connectors RUN      writes RUN/connectors.json; about 3 minutes on a GPU

- The same token ids, one request at a time, through our connector and through ExampleHiddenStatesConnector: the files
  must hold the same bits.
- States saved while the verifier answers at temperature 2, by vLLM's own connector, with asynchronous scheduling on
  and off: how many samples with and without a doubled token are shifted (vLLM issue 56417).
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.gpu.check import Reference, is_shifted
from eagle3_train import server as vllm
from eagle3_train.config import Config, read_preset
from eagle3_train.run import read_jsonl, write_text
from eagle3_train.vllm_plugin import CONNECTOR

STOCK = "ExampleHiddenStatesConnector"
COMPARED, SAMPLES, IN_FLIGHT = 64, 400, 64


def main() -> None:
    run = Path(sys.argv[1])
    config = Config(**read_preset(run / "run.yaml"))
    traces = list(read_jsonl(run / "01b_traces" / "traces.jsonl"))
    reference = Reference(config.verifier)
    found = {
        "same_bits": _same_bits(run, config, traces),
        "one_pass": {
            scheduling: _one_pass(run, config, traces, flags, reference)
            for scheduling, flags in (
                ("asynchronous scheduling", ["--async-scheduling"]),
                ("no asynchronous scheduling", ["--no-async-scheduling"]),
            )
        },
    }
    write_text(run / "connectors.json", json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


def _same_bits(run: Path, config: Config, traces: list[dict[str, Any]]) -> dict[str, int]:
    samples = [trace["prompt_token_ids"] + trace["output_token_ids"] for trace in traces[:COMPARED]]

    async def ask(client: Any, server: vllm.Server) -> list[dict[str, torch.Tensor]]:
        return [await _states(client, server, ids, max_tokens=1, temperature=0.0) for ids in samples]

    ours, theirs = (_with_server(run, config, connector, [], ask) for connector in (CONNECTOR, STOCK))
    equal = [
        torch.equal(a["token_ids"], b["token_ids"]) and torch.equal(a["hidden_states"], b["hidden_states"])
        for a, b in zip(ours, theirs, strict=True)
    ]
    return {"samples": len(equal), "equal": sum(equal)}


def _one_pass(
    run: Path, config: Config, traces: list[dict[str, Any]], flags: list[str], reference: Reference
) -> dict[str, dict[str, int]]:
    prompts = [traces[number % len(traces)]["prompt_token_ids"] for number in range(SAMPLES)]

    async def ask(client: Any, server: vllm.Server) -> list[dict[str, torch.Tensor]]:
        gate = asyncio.Semaphore(IN_FLIGHT)

        async def one(number: int) -> dict[str, torch.Tensor]:
            async with gate:
                return await _states(
                    client,
                    server,
                    prompts[number],
                    max_tokens=config.generation.max_tokens,
                    temperature=2.0,
                    seed=number,
                    extra_body={"kv_transfer_params": {"include_output_tokens": True}},
                )

        return await asyncio.gather(*(one(number) for number in range(SAMPLES)))

    found = {group: {"samples": 0, "shifted": 0} for group in ("doubled token", "no doubled token")}
    for prompt, sample in zip(prompts, _with_server(run, config, STOCK, flags, ask), strict=True):
        ids = sample["token_ids"].tolist()
        doubled = any(a == b for a, b in pairwise(ids[len(prompt) :]))
        group = found["doubled token" if doubled else "no doubled token"]
        group["samples"] += 1
        theirs = reference.states(ids)
        group["shifted"] += is_shifted(sample["hidden_states"].to(theirs), theirs)
    return found


def _with_server(
    run: Path,
    config: Config,
    connector: str,
    flags: list[str],
    ask: Callable[[Any, vllm.Server], Awaitable[list[dict[str, torch.Tensor]]]],
) -> list[dict[str, torch.Tensor]]:
    with tempfile.TemporaryDirectory(dir=run) as staging:
        extra = [part.replace(CONNECTOR, connector) for part in vllm.extraction_args(config, Path(staging).resolve())]
        log = run / "connectors" / "server.log"
        with vllm.serve(config, log=log, extra_args=[*extra, *flags], what=f"{connector} {' '.join(flags)}") as server:

            async def with_client() -> list[dict[str, torch.Tensor]]:
                client = vllm.async_client(server, timeout_s=120, connect_timeout_s=10, max_retries=0)
                try:
                    return await ask(client, server)
                finally:
                    await client.close()

            return asyncio.run(with_client())


async def _states(client: Any, server: vllm.Server, token_ids: list[int], **request: Any) -> dict[str, torch.Tensor]:
    answer = await client.completions.create(model=server.model, prompt=token_ids, **request)
    path = Path(answer.model_extra["kv_transfer_params"]["hidden_states_path"])
    with path.with_name(path.name + ".lock").open() as lock:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_SH)
    return load_file(path)


if __name__ == "__main__":
    main()
