"""One pass beside two: seconds from questions to checked hidden states on disk, and whether the states are the same.

The tiny verifier answers the same questions both ways, each stage as a user runs it: 01b and 02 with
`generation.capture: two_pass` load the verifier twice, with `one_pass` once. Then stage 02 makes the states of the
one-pass run's own token ids again, in a prefill, and every shard is held against the one saved while it was generated.
What was sampled is scored by the verifier's head over these states, both ways.

    python -m benchmarks.one_pass_vs_two [--questions 400] [--repeats 1]      about 6 minutes
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.common import run_measured, spread, stage_command, summary_of, write_result
from eagle3_train import parity
from eagle3_train.capture import sample_of
from eagle3_train.config import Verifier
from eagle3_train.run import read_jsonl

STAGES = ("01b_generate_synthetic.py", "02_extract_hidden.py")


def main() -> None:
    """Both ways in turn; then the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=1, help="of each way")
    given = parser.parse_args()
    walls: dict[str, list[float]] = {"one_pass": [], "two_pass": []}
    asking: dict[str, list[float]] = {"one_pass": [], "two_pass": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for repeat in range(given.repeats):
            for way, seconds_of_both in walls.items():
                run = folder / f"{way}-{repeat}"
                prepare = stage_command("01_prepare_data.py", run, prompts__max_samples=given.questions)
                run_measured(prepare, log=folder / "log")
                seconds = []
                for script in STAGES:
                    command = stage_command(script, run, generation__capture=way)
                    seconds.append(run_measured(command, log=folder / "log").wall_s)
                summary = summary_of(run, "01b_traces")
                seconds_of_both.append(sum(seconds))
                asking[way].append(summary["asked_tokens"] / summary["asked_seconds"])
                print(f"{way}: 01b {seconds[0]:.1f} s, 02 {seconds[1]:.1f} s", flush=True)
        one, two, again = folder / "one_pass-0", folder / "two_pass-0", folder / "again"
        shutil.copytree(one, again, ignore=shutil.ignore_patterns("02_hidden", "states*"))
        run_measured(stage_command("02_extract_hidden.py", again), log=folder / "log")
        states = _compare(one, again)
        scores = {"one_pass": _score(one), "two_pass": _score(two)}
    ratio = spread([b / a for a, b in zip(walls["one_pass"], walls["two_pass"], strict=True)], 3)
    write_result(
        "one_pass_vs_two",
        ours={"seconds": spread(walls["one_pass"]), "answering_tokens_per_second": spread(asking["one_pass"])},
        peer={"seconds": spread(walls["two_pass"]), "answering_tokens_per_second": spread(asking["two_pass"])},
        ratio={"two_pass_to_one_pass_seconds": ratio},
        unit="s",
        notes=[
            f"{given.questions} questions, stages 01b and 02 with every start; ours is one pass, the peer two passes",
            "states saved while answering against a prefill of the same tokens: " + ", ".join(states),
            "mean log-prob of the sampled tokens by the verifier's head: "
            + ", ".join(f"{way} {mean:.4f} (standard error {error:.4f})" for way, (mean, error) in scores.items()),
        ],
    )


def _compare(one: Path, other: Path) -> list[str]:
    distances, equal, doubled = [], [], 0
    for row in read_jsonl(one / "02_hidden" / "index.jsonl"):
        ours, theirs = (load_file(run / "02_hidden" / "shards" / f"{row['id']}.safetensors") for run in (one, other))
        assert torch.equal(ours["token_ids"], theirs["token_ids"])
        distances.append(parity.row_distances(ours["hidden_states"], theirs["hidden_states"]).max().item())
        equal.append((ours["hidden_states"] == theirs["hidden_states"]).float().mean().item())
        doubled += bool((ours["token_ids"].diff() == 0).any())
    return [
        f"{len(distances)} samples ({doubled} with a doubled token)",
        f"farthest row {max(distances):.5f} of its length",
        f"{statistics.mean(equal):.2%} of the values the same bits",
    ]


def _score(run: Path) -> tuple[float, float]:
    head = parity.Head(Verifier(path="tiny"))
    means = [log_probs.mean().item() for log_probs in _sampled(run, head)]
    return statistics.mean(means), statistics.stdev(means) / len(means) ** 0.5


def _sampled(run: Path, head: parity.Head) -> Iterator[torch.Tensor]:
    have = {row["id"] for row in read_jsonl(run / "02_hidden" / "index.jsonl")}
    for trace in read_jsonl(run / "01b_traces" / "traces.jsonl"):
        if trace["id"] in have:
            prompt = len(sample_of(trace, "").prompt_ids)
            last: Any = load_file(run / "02_hidden" / "shards" / f"{trace['id']}.safetensors")["hidden_states"][:, -1]
            yield head.log_probs(last[prompt - 1 :], torch.tensor(trace["output_token_ids"]))


if __name__ == "__main__":
    main()
