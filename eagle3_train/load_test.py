"""Speed under load, by vLLM's own `bench serve`, at several concurrencies in one process.

    python -m eagle3_train.load_test SPEC.json

SPEC: base_url, model, tokenizer, trust_remote_code, prompts (a JSONL file of {"prompt"}), output_tokens,
concurrency (a list), requests, results (a folder). Writes RESULTS/<concurrency>.json.

A process of its own: the benchmark takes over the event loop, the random state and the screen.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from eagle3_train.errors import PipelineError

KEPT = ("output_throughput", "median_tpot_ms", "p99_tpot_ms", "median_ttft_ms", "completed", "failed", "duration")


def measure(spec: dict[str, Any], folder: Path) -> dict[int, dict[str, float]]:
    """Run the benchmark; concurrency -> output tokens a second and times between tokens [ms].

    Raises:
        PipelineError: it failed, with its last line, or some requests did.
    """
    path = folder / "spec.json"
    path.write_text(json.dumps(spec | {"results": str(folder)}), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "eagle3_train.load_test", str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PipelineError(f"vLLM's benchmark failed: {last}")
    measured = {}
    for concurrency in spec["concurrency"]:
        result = json.loads((folder / f"{concurrency}.json").read_text(encoding="utf-8"))
        if result.get("failed"):
            raise PipelineError(f"{result['failed']} requests of vLLM's benchmark failed at concurrency {concurrency}")
        measured[concurrency] = {name: result[name] for name in KEPT if name in result}
    return measured


def main() -> None:
    """The process: one benchmark after the other."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    for concurrency in spec["concurrency"]:
        arguments = parser.parse_args(
            [
                *("--backend", "openai-chat"),
                *("--base-url", spec["base_url"]),
                *("--endpoint", "/v1/chat/completions"),
                *("--model", spec["tokenizer"]),
                *("--served-model-name", spec["model"]),
                *("--dataset-name", "custom"),
                *("--dataset-path", spec["prompts"]),
                *("--custom-output-len", str(spec["output_tokens"])),
                "--skip-chat-template",
                *("--num-prompts", str(spec["requests"])),
                *("--max-concurrency", str(concurrency)),
                *("--num-warmups", "1"),
                *("--temperature", "0"),
                *("--percentile-metrics", "ttft,tpot,itl"),
                *("--result-dir", spec["results"]),
                *("--result-filename", f"{concurrency}.json"),
                "--save-result",
                "--disable-tqdm",
                *(["--trust-remote-code"] if spec["trust_remote_code"] else []),
            ]
        )
        with contextlib.redirect_stdout(io.StringIO()):
            bench(arguments)


if __name__ == "__main__":
    main()
