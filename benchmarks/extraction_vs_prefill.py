"""Stage 02 beside a server that only prefills, and beside `speculators generate-offline-data`: tokens a second.

Samples of random token ids, 64 to 256 long, on the tiny verifier. A server without the connector is asked for one token
after each sample, with stage 02's own client: the ceiling. A server with our connector serves stage 02 (request, file,
every check, move, index) and `speculators generate-offline-data`, with the same most requests in flight. The three take
turns, so that what else the machine does weighs on all; the server that is not asked is idle. Neither the servers'
start nor the parity gate nor imports are counted. Memory is that of stage 02's own process while it reads the traces
and publishes the data set, which needs no server.

    python -m benchmarks.extraction_vs_prefill [--sizes 100 1000] [--repeats 3]      about 8 minutes
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, run_measured, spread, traced_run, write_result
from eagle3_train import server as vllm
from eagle3_train.capture import Capturer, Expected, fresh_staging
from eagle3_train.config import Config, parse
from eagle3_train.extraction import DATASET, INDEX, LINKS, SHARDS, Located, Traces, extract_all, publish, read_samples
from eagle3_train.generation import TRACES_FILE
from eagle3_train.run import HIDDEN, JsonlLog, Run, Stage

SHORTEST, LONGEST, VOCABULARY = 64, 256, 512
MEMORY_SIZES = (1_000, 50_000)
TARGET = 0.9


def main() -> None:
    """Both servers in turn; then the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000], help="samples")
    parser.add_argument("--repeats", type=int, default=3, help="of each side")
    parser.add_argument("--publish", type=Path, help=argparse.SUPPRESS)  # the process whose memory is measured
    given = parser.parse_args()
    if given.publish:
        _publish(given.publish)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = _tiny_config()
        runs = {size: synthetic_run(folder / str(size), config, size) for size in given.sizes}
        ceiling: dict[int, list[float]] = {size: [] for size in given.sizes}
        ours: dict[int, list[float]] = {size: [] for size in given.sizes}
        theirs: dict[int, list[float]] = {size: [] for size in given.sizes}
        staging = fresh_staging(folder, folder / "moved")
        extra = vllm.extraction_args(config, staging)
        with (
            vllm.serve(config, log=folder / "plain.log", extra_args=["--no-enable-prefix-caching"]) as plain,
            vllm.serve(config, log=folder / "capture.log", extra_args=extra) as capturing,
        ):

            def turn(run: Run) -> tuple[float, float, float]:
                ceiling = asyncio.run(prefill(run, plain, folder))
                os.sync()  # what the last turn left to write is not this one's
                return ceiling, stage_02(run, capturing, staging), _speculators(run, capturing, folder)

            turn(runs[min(runs)])  # a server's first requests are slower
            for size, run in runs.items():
                for _ in range(given.repeats):
                    rates = turn(run)
                    for side, rate in zip((ceiling, ours, theirs), rates, strict=True):
                        side[size].append(rate)
                    print("{} samples, tokens/s: prefill {:.0f}, 02 {:.0f}, speculators {:.0f}".format(size, *rates))
        peaks = {size: _peak_mib(folder / f"memory-{size}", size) for size in MEMORY_SIZES}
    _write(given.sizes, ceiling, ours, theirs, peaks)


def _write(
    sizes: list[int],
    ceiling: dict[int, list[float]],
    ours: dict[int, list[float]],
    theirs: dict[int, list[float]],
    peaks: dict[int, float],
) -> None:
    def by_size(rates: dict[int, list[float]]) -> dict[str, Any]:
        return {str(size): spread(rates[size]) for size in sizes}

    def ratios(peer: dict[int, list[float]]) -> dict[str, float]:
        """Medians of the ratios of each turn."""
        return {
            str(size): round(statistics.median(a / b for a, b in zip(ours[size], peer[size], strict=True)), 3)
            for size in sizes
        }

    few, many = MEMORY_SIZES
    growth = (peaks[many] - peaks[few]) * 1024 / (many - few)
    write_result(
        "extraction_vs_prefill",
        ours={
            "tokens_per_second": by_size(ours),
            "peak_mib": {str(size): round(peak) for size, peak in peaks.items()},
            "growth_kib_per_sample": round(growth, 2),
        },
        peer={"prefill_only": by_size(ceiling), "generate_offline_data": by_size(theirs)},
        ratio={"to_prefill_only": ratios(ceiling), "to_generate_offline_data": ratios(theirs)},
        unit="tokens/s",
        notes=[
            f"random token ids, {SHORTEST} to {LONGEST} a sample; servers' start and the gate not counted",
            "a ratio is the median of those of each turn",
            f"targets: at least {TARGET:.0%} of prefill only, above generate-offline-data; memory flat",
            "client, server, writer and checks share the machine's cores",
        ],
    )


def _tiny_config() -> Config:
    arguments = ["--run", "unused", "--preset", str(ROOT / "presets" / "tiny.yaml"), "--extraction.concurrency", "32"]
    return parse(arguments, "")[1]


def synthetic_run(
    path: Path,
    config: Config,
    samples: int,
    shortest: int = SHORTEST,
    longest: int = LONGEST,
    among: Sequence[int] = range(20, VOCABULARY),
) -> Run:
    """A run that is done up to stage 01b, with traces of `shortest` to `longest` random token ids `among` these."""
    rng = random.Random(samples)
    ids = [f"{number:016x}" for number in range(samples)]
    prompts = [{"id": sample_id, "messages": [], "split": _split(number)} for number, sample_id in enumerate(ids)]

    def traces(stage: Stage) -> None:
        with (stage.folder / TRACES_FILE).open("w") as file:
            for sample_id in ids:
                tokens = rng.choices(among, k=rng.randint(shortest, longest))
                row = {"id": sample_id, "prompt_token_ids": tokens[:20], "output_token_ids": tokens[20:], "flags": []}
                file.write(json.dumps(row) + "\n")

    return traced_run(path, config, prompts, traces)


def _split(number: int) -> str:
    return "train" if number % 20 else "val"


def samples_of(run: Run) -> tuple[list[Located], Path, Stage]:
    """The samples of a run's traces, the file that holds them, and the stage that is to capture them."""
    stage = Stage(run, HIDDEN)
    stage.folder.mkdir(exist_ok=True)
    samples, _ = read_samples(stage)
    return samples, run.folder("01b_traces") / TRACES_FILE, stage


async def prefill(run: Run, server: vllm.Server, folder: Path) -> float:
    """Tokens a second of stage 02's client when nothing is saved."""
    samples, path, _ = samples_of(run)
    queue = iter(sorted(samples, key=lambda sample: -sample.tokens))
    expected = Expected.of(run.config)
    with Traces(path) as traces:
        async with Capturer(server, folder, expected, run.config.extraction.request_timeout_s) as client:

            async def worker() -> None:
                for located in queue:
                    await client.prefill(traces.load(located).token_ids, located.id)

            started = time.monotonic()
            await asyncio.gather(*(worker() for _ in range(run.config.extraction.concurrency)))
            return sum(sample.tokens for sample in samples) / (time.monotonic() - started)


def stage_02(run: Run, server: vllm.Server, staging: Path, waves: int = 1) -> float:
    """Tokens a second of stage 02 from its first sample to its last row, the parity gate left out.

    In `waves` the samples are captured in as many calls, and the states of each are deleted before the next.
    """
    samples, path, stage = samples_of(run)
    seconds = 0.0
    for wave in range(waves):
        started = time.monotonic()
        shutil.rmtree(stage.folder / SHARDS, ignore_errors=True)
        (stage.folder / INDEX).unlink(missing_ok=True)
        seconds += time.monotonic() - started if wave else 0.0
        (stage.folder / SHARDS).mkdir()
        with (
            Traces(path) as traces,
            JsonlLog(stage.folder / INDEX) as index,
            JsonlLog(stage.folder / "errors") as errors,
        ):
            canaries = [traces.load(sample).token_ids for sample in samples[:8]]
            part = samples[wave::waves]
            seconds += asyncio.run(extract_all(part, traces, run.config, server, staging, canaries, index, errors))
    if (stage.folder / "errors").stat().st_size:
        raise RuntimeError(f"stage 02 set samples aside: {(stage.folder / 'errors').read_text()[:1000]}")
    return sum(sample.tokens for sample in samples) / seconds


def _speculators(run: Run, server: vllm.Server, folder: Path) -> float:
    """Tokens a second of `speculators generate-offline-data`, by its own clock."""
    samples, path, stage = samples_of(run)
    if not (stage.folder / DATASET).exists():
        with Traces(path) as traces:
            publish(stage.folder, map(traces.load, sorted(samples, key=lambda sample: sample.split)))
        shutil.rmtree(stage.folder / DATASET / LINKS)
    shutil.rmtree(folder / "theirs", ignore_errors=True)
    command = [str(Path(sys.executable).with_name("speculators")), "generate-offline-data"]
    command += ["--endpoint", server.base_url, "--preprocessed-data", str(stage.folder / DATASET)]
    command += ["--output", str(folder / "theirs"), "--concurrency", str(run.config.extraction.concurrency)]
    said = run_measured([*command, "--fail-on-error"], log=folder / "log").output
    found = re.search(r"Timing: ([\d.]+)s elapsed", said.replace("\n", " "))
    if found is None or len(list((folder / "theirs").glob("hs_*.safetensors"))) != len(samples):
        raise RuntimeError(f"speculators did not save every sample:\n{said[-2000:]}")
    return sum(sample.tokens for sample in samples) / float(found[1])


def _publish(path: Path) -> None:
    _, config = parse(["--run", str(path)], "")
    samples, traces_path, stage = samples_of(Run(path, config))
    with Traces(traces_path) as traces:
        publish(stage.folder, map(traces.load, sorted(samples, key=lambda sample: sample.split)))


def _peak_mib(path: Path, samples: int) -> float:
    synthetic_run(path, _tiny_config(), samples)
    command = [sys.executable, "-m", "benchmarks.extraction_vs_prefill", "--publish", str(path)]
    peak = run_measured(command, log=path.parent / "log").peak_mib
    shutil.rmtree(path)
    print(f"{samples} samples read and published: peak {peak:.0f} MiB", flush=True)
    return peak


if __name__ == "__main__":
    main()
