"""The figures of several chains in one file, and as short tables on the screen.

    python -m benchmarks.gpu.results RUNS OUT CHAIN ...

RUNS holds a run and a log for each chain (run_chain.sh). Exit code 1 when a chain did not come to its end, or what it
made is not the verifier's own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eagle3_train.run import hardware, read_jsonl, versions, write_text

# Mean error of a layer's states against float32: bfloat16 arithmetic gives 0.006 (H200, 8 layers), and 8 bits more.
LARGEST_ERROR = {"bfloat16": 0.02, "float8_e4m3": 0.06}
# Once in 15,000 samplings of the same distribution.
MOST_DEVIATIONS = 4.0
# In bfloat16 two logits closer than this may change places.
NEAR_TIE = 0.5


def main() -> None:
    runs, out, names = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    chains = {name: _chain(runs, name) for name in names}
    result = {
        "name": "gpu_chain",
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": " ".join(["bash benchmarks/gpu/run_chain.sh OUT", *names]),
        "hardware": hardware(),
        "versions": versions(),
        "chains": chains,
    }
    write_text(out, json.dumps(result, indent=1) + "\n")
    for name, chain in chains.items():
        print("\n".join(_lines(name, chain)))
    faults = [f"{name}: {fault}" for name, chain in chains.items() for fault in chain["faults"]]
    print("\n".join(["", *faults] if faults else ["", "all chains came to their end, and everything checked holds"]))
    sys.exit(bool(faults))


def _chain(runs: Path, name: str) -> dict[str, Any]:
    run = runs / name
    timings = list(read_jsonl(run / "timings.jsonl")) if (run / "timings.jsonl").exists() else []
    chain: dict[str, Any] = {
        "stages": [
            {key: value for key, value in row.items() if key not in ("hardware", "versions")} for row in timings
        ],
        "check": _json(run / "check.json"),
        "ended": (run / "chain_done").exists(),
        "connectors": _json(run / "connectors.json"),
        "evaluation": _json(run / "06_eval" / "results.json"),
        "engine": _engine(run),
    }
    chain["faults"] = list(_faults(chain, runs / f"{name}.log"))
    return chain


def _json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _engine(run: Path) -> list[str]:
    """What vLLM says about the code paths that it took."""
    said: dict[str, None] = {}
    for log in sorted(run.glob("*/server.log")):
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            if any(word in line for word in ("attention backend", "synchronous scheduling", "MoE backend", "prefill")):
                said[line.split("] ", 1)[-1].replace(f"{Path.cwd()}/", "")[:160]] = None
    return list(said)[:12]


def _faults(chain: dict[str, Any], log: Path) -> Iterable[str]:
    if not chain["ended"]:
        words = (
            log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines() if log.exists() else []
        )
        spoken = [f"  {line[:240]}" for line in words[-15:] if line.strip()]
        yield "\n".join(["did not come to its end:", *spoken])
    connectors = chain["connectors"]
    if connectors and connectors["same_bits"]["equal"] < connectors["same_bits"]["samples"]:
        yield f"our connector's files are not those of vLLM's own: {connectors['same_bits']}"
    if chain["check"] is None:
        return
    states, greedy, sampled = (chain["check"][key] for key in ("states", "greedy", "sampled"))
    for layer, error in states["by_layer"].items():
        if error["mean"] > LARGEST_ERROR[states["stored_as"]]:
            yield f"states of layer {layer} are {error['mean']:.1%} off"
    for group in ("doubled token", "no doubled token"):
        if states.get(group, {}).get("shifted"):
            yield f"{states[group]['shifted']} of {states[group]['samples']} samples ({group}) are shifted by a row"
    if greedy["largest_lead"] > NEAR_TIE:
        yield f"a greedy token that is {greedy['largest_lead']:.2f} behind the likeliest one"
    for temperature, total in sampled.items():
        if abs(total["standard_deviations"]) > MOST_DEVIATIONS:
            yield f"samples at temperature {temperature} are {total['standard_deviations']:.1f} deviations off"


def _lines(name: str, chain: dict[str, Any]) -> Iterable[str]:
    yield f"\n{name}"
    yield "  " + ", ".join(f"{row['stage']} {row['seconds']:.0f} s" for row in chain["stages"])
    if connectors := chain["connectors"]:
        same = connectors["same_bits"]
        yield f"  the same bits as vLLM's own connector: {same['equal']} of {same['samples']} samples"
        for scheduling, groups in connectors["one_pass"].items():
            counted = ", ".join(f"{of['shifted']} of {of['samples']} with {group}" for group, of in groups.items())
            yield f"  one pass at temperature 2, {scheduling}: shifted {counted}"
    if check := chain["check"]:
        states = check["states"]
        shown = ", ".join(f"{k}: {v['mean']:.2%} (worst {v['largest']:.2%})" for k, v in states["by_layer"].items())
        yield f"  states ({states['stored_as']}) against float32, by layer: {shown}"
        for group in ("doubled token", "no doubled token"):
            if of := states.get(group):
                yield (
                    f"  {group}: {of['samples']} samples, {of['shifted']} shifted; "
                    f"{of['rows_off']} of {of['rows']} rows off by more than 10 %"
                )
        greedy = check["greedy"]
        yield (
            f"  greedy: {greedy['not_the_likeliest']} of {greedy['tokens']} tokens are not float32's likeliest, by at "
            f"most {greedy['largest_lead']:.3f}"
        )
        for temperature, total in check["sampled"].items():
            yield (
                f"  temperature {temperature}: {total['tokens']} tokens, log-prob + entropy "
                f"{total['mean_log_p_plus_entropy']:+.4f} ({total['standard_deviations']:+.1f} deviations), "
                f"{total['impossible']} impossible"
            )
    if evaluation := chain["evaluation"]:
        overall = evaluation["overall"]
        yield (
            f"  draft: {overall['greedy']['mean_acceptance_length']:.3f} tokens a step greedily, "
            f"{overall['sampled']['mean_acceptance_length']:.3f} sampled; greedy identical "
            f"{evaluation['greedy_identical']} of {evaluation['greedy_prompts']}; sampled scores "
            f"{evaluation['standard_errors_apart']:.1f} standard errors apart"
        )
        for concurrency, alone in evaluation["load"]["alone"].items():
            with_draft, without = (
                load["output_throughput"] for load in (evaluation["load"]["with draft"][concurrency], alone)
            )
            yield (
                f"  {concurrency} in flight: {with_draft:.0f} tok/s with draft, {without:.0f} alone "
                f"({with_draft / without:.2f})"
            )


if __name__ == "__main__":
    main()
