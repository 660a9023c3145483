"""Stage 01b's client beside `speculators regenerate-responses`, on the same fake server.

Both are run as their own command, each on the same single core, against benchmarks/fake_vllm.py on the other core:
20,000 questions, answered after 5 ms with about 270 token ids, at the same concurrency. The sides alternate, and each
is also run on 2,000 questions: the difference of the two sizes is what a request costs without the start of the
process, and how memory grows.

Requests a second are the server's own count, from the first request to the last answer: start-up is left out for both.

    python -m benchmarks.client_vs_speculators [--repeats 3] [--requests 20000]      about 5 minutes
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import (
    ROOT,
    Measured,
    on_core,
    run_measured,
    spread,
    stage_command,
    summary_of,
    write_result,
)

CLIENT_CORE, SERVER_CORE = 0, 1
SMALL = 2000
MAX_TOKENS = 1024
TARGET_RPS = 200


@dataclass(frozen=True)
class Attempt:
    """One run of a client: what the process took, and what the server saw."""

    process: Measured
    requests: int
    seconds: float

    @property
    def rps(self) -> float:
        return self.requests / self.seconds


def main() -> None:
    """Both sides, both sizes, alternating; then the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="of each size, each side")
    parser.add_argument("--requests", type=int, default=20000)
    parser.add_argument("--concurrency", type=int, default=64, help="64 is the default of speculators")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = (SMALL, given.requests)
        asked = {size: _write_questions(folder, size) for size in sizes}
        for size in sizes:
            source = {"prompts__source": asked[size], "prompts__max_prompt_tokens": 1024}
            run_measured(stage_command("01_prepare_data.py", folder / f"run-{size}", **source), log=folder / "log")
        ours: dict[int, list[Attempt]] = {size: [] for size in sizes}
        peer: dict[int, list[Attempt]] = {size: [] for size in sizes}
        with _server(asked[given.requests]) as url:
            command = [sys.executable, "-m", "benchmarks.fake_vllm", "ceiling", url]
            ceiling = [
                float(run_measured([*command, str(path), str(given.concurrency)], log=folder / "log", core=0).output)
                for path in asked.values()
            ]
            _stats(url)
            print(f"the server's ceiling: {', '.join(f'{rate:.0f}' for rate in ceiling)} answers/s", flush=True)
            for size in (SMALL, given.requests) * given.repeats:
                peer[size].append(_speculators(folder, url, asked[size], size, given.concurrency))
                print(f"speculators {size}: {_shown(peer[size][-1])}", flush=True)
                ours[size].append(_stage(folder, url, size, given.concurrency))
                print(f"stage 01b   {size}: {_shown(ours[size][-1])}", flush=True)
    figures_ours, figures_peer = _figures(ours, given.requests), _figures(peer, given.requests)
    write_result(
        "client_vs_speculators",
        ours=figures_ours,
        peer=figures_peer,
        ratio={
            "requests_per_second": spread(
                [mine.rps / its.rps for mine, its in zip(ours[given.requests], peer[given.requests], strict=True)], 2
            ),
            **{
                name: round(figures_ours[name]["median"] / figures_peer[name]["median"], 2)
                for name in ("requests_per_cpu_second", "process_cpu_s", "peak_mib")
            },
        },
        unit="requests/s",
        notes=[
            f"{given.requests} questions, {given.concurrency} in flight, answers after 5 ms with about 270 token ids; "
            "client and server on a core each",
            f"the fake server's own ceiling: {max(ceiling):.0f} answers/s to a client that looks at nothing",
            f"targets: no slower than speculators, at least {TARGET_RPS} requests/s, memory flat",
            "requests_per_second: by the server, first request to last answer; requests_per_cpu_second: what a request "
            f"costs beyond the start of the process (difference of {given.requests} and {SMALL} requests)",
            "stage 01b also keeps thinking and text apart, checks loops, refusals and flags, and picks up what is "
            "missing turn by turn; speculators decodes each row to text and drops the parsed thinking",
        ],
    )


def _write_questions(folder: Path, count: int) -> Path:
    path = folder / f"questions-{count}.jsonl"
    rows = [{"id": f"q{n}", "prompt": f"Compute {n % 97} + {n % 89}, then name question {n}."} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@contextmanager
def _server(asked: Path) -> Iterator[str]:
    process = subprocess.Popen(
        [*on_core(SERVER_CORE), sys.executable, "-m", "benchmarks.fake_vllm", "serve", str(asked)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _stats(url: str) -> tuple[int, float]:
    with urllib.request.urlopen(f"{url}/stats") as answer:
        stats = json.loads(answer.read())
    return stats["answers"], stats["seconds"]


def _stage(folder: Path, url: str, size: int, concurrency: int) -> Attempt:
    flags = {
        "generation__endpoint": f"{url}/v1",
        "generation__concurrency": concurrency,
        "generation__max_tokens": MAX_TOKENS,
    }
    command = stage_command("01b_generate_synthetic.py", folder / f"run-{size}", **flags)
    process = run_measured([*command, "--force"], log=folder / "log", core=CLIENT_CORE)
    assert summary_of(folder / f"run-{size}", "01b_traces")["traces"] == size
    return Attempt(process, *_stats(url))


def _speculators(folder: Path, url: str, asked: Path, size: int, concurrency: int) -> Attempt:
    answers = folder / "answers.jsonl"
    answers.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "speculators", "regenerate-responses"),
        *("--endpoint", f"{url}/v1/chat/completions"),
        *("--dataset", str(asked)),
        *("--outfile", str(answers)),
        *("--concurrency", str(concurrency)),
        *("--max-tokens", str(MAX_TOKENS)),
        *("--sampling-params", '{"temperature": 0.7, "top_p": 1.0, "seed": 0}'),
    ]
    process = run_measured(command, log=folder / "log", core=CLIENT_CORE)
    with answers.open("rb") as written:
        assert sum(1 for _ in written) == size, process.output[-2000:]
    return Attempt(process, *_stats(url))


def _figures(attempts: dict[int, list[Attempt]], large: int) -> dict[str, dict[str, float]]:
    start_cpu_s = statistics.median(a.process.cpu_s for a in attempts[SMALL])
    start_mib = statistics.median(a.process.peak_mib for a in attempts[SMALL])
    more = large - SMALL
    return {
        "requests_per_second": spread([a.rps for a in attempts[large]]),
        "requests_per_cpu_second": spread([more / (a.process.cpu_s - start_cpu_s) for a in attempts[large]]),
        "process_cpu_s": spread([a.process.cpu_s for a in attempts[large]]),
        "process_wall_s": spread([a.process.wall_s for a in attempts[large]]),
        "peak_mib": spread([a.process.peak_mib for a in attempts[large]]),
        f"peak_mib_at_{SMALL}": spread([a.process.peak_mib for a in attempts[SMALL]]),
        "growth_kib_per_request": spread([1024 * (a.process.peak_mib - start_mib) / more for a in attempts[large]], 2),
    }


def _shown(attempt: Attempt) -> str:
    took = attempt.process
    return f"{attempt.rps:.0f} requests/s, {took.cpu_s:.1f} CPU s, {took.wall_s:.1f} s in all, {took.peak_mib:.0f} MiB"


if __name__ == "__main__":
    main()
