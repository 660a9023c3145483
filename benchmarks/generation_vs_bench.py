"""Stage 01b beside vLLM's own `bench serve`, on one real vLLM server: output tokens a second.

The tiny verifier is served once (about a minute on a CPU); then both clients ask the 400 questions of
data/tiny_prompts.jsonl in turn, several times: greedy, the same longest output, the same most requests in flight. Each
client is its own process. Stage 01b's figure is its own: tokens over the seconds of asking, from its first request
to its last answer, with the growth from 8 requests in flight; the benchmark's is its `output_throughput`.

    python -m benchmarks.generation_vs_bench [--repeats 3]      about 5 minutes
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.common import ROOT, run_measured, spread, stage_command, summary_of, write_result
from eagle3_train import server as vllm
from eagle3_train.config import parse
from eagle3_train.load_test import measure
from eagle3_train.run import read_jsonl

PROMPTS = ROOT / "data" / "tiny_prompts.jsonl"
PRESET = ROOT / "presets" / "tiny.yaml"
TARGET = 0.95


def main() -> None:
    """One server, both sides in turn; then the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="of each side")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _, config = parse(["--run", str(folder / "run"), "--preset", str(PRESET)], "")
        run_measured(stage_command("01_prepare_data.py", folder / "run", prompts__source=PROMPTS), log=folder / "log")
        asked = _bench_prompts(folder)
        ours: list[float] = []
        bench: list[float] = []
        counts: set[tuple[str, int]] = set()
        with vllm.serve(config, log=folder / "server.log", extra_args=config.generation.server_args) as server:
            spec = {
                "base_url": server.root_url,
                "model": server.model,
                "tokenizer": _tokenizer_of(config),
                "trust_remote_code": False,
                "prompts": str(folder / "prompts.jsonl"),
                "output_tokens": config.generation.max_tokens,
                "concurrency": [config.generation.concurrency],
                "requests": asked,
            }
            measure(spec, folder)  # the server's own first requests are slower
            for _ in range(given.repeats):
                figures = measure(spec, folder)[config.generation.concurrency]
                bench.append(figures["output_throughput"])
                counts.add(("bench serve", round(figures["output_throughput"] * figures["duration"])))
                print(f"bench serve: {bench[-1]:.0f} tokens/s in {figures['duration']:.1f} s", flush=True)
                flags = {"generation__endpoint": server.base_url, "generation__temperatures": 0}
                command = stage_command("01b_generate_synthetic.py", folder / "run", **flags)
                run_measured([*command, "--force"], log=folder / "log")
                summary = summary_of(folder / "run", "01b_traces")
                ours.append(summary["asked_tokens"] / summary["asked_seconds"])
                counts.add(("stage 01b", summary["asked_tokens"]))
                print(f"stage 01b:   {ours[-1]:.0f} tokens/s in {summary['asked_seconds']:.1f} s", flush=True)
    ratio = spread([mine / theirs for mine, theirs in zip(ours, bench, strict=True)], 3)
    write_result(
        "generation_vs_bench",
        ours={"output_tokens_per_second": spread(ours)},
        peer={"output_tokens_per_second": spread(bench)},
        ratio={"output_tokens_per_second": ratio},
        unit="tokens/s",
        notes=[
            f"{asked} questions, at most {config.generation.concurrency} in flight, temperature 0, at most "
            f"{config.generation.max_tokens} tokens; the two in turn on one server, the ratio is of neighbours",
            f"target: at least {TARGET:.0%} of bench serve",
            "output tokens: " + ", ".join(f"{side} {count}" for side, count in sorted(counts)),
            "bench serve streams its answers and stage 01b does not: each streamed token costs the server's front end "
            "time, which on a machine of few cores is taken from the engine",
        ],
    )


def _tokenizer_of(config: object) -> str:
    from eagle3_train import verifier

    return verifier.location(config.verifier)  # type: ignore[attr-defined]


def _bench_prompts(folder: Path) -> int:
    """The questions of stage 01 in the form of the benchmark; returns how many."""
    rows = list(read_jsonl(folder / "run" / "01_prompts" / "prompts.jsonl"))
    lines = [json.dumps({"prompt": row["messages"][-1]["content"]}) + "\n" for row in rows]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    return len(rows)


if __name__ == "__main__":
    main()
