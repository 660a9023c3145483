"""Stage 04 whole, at Kimi-K2.5's draft size, beside its bare step: does the data loader keep the GPU busy?

Makes what stage 02 would leave (random states of 7168 on disk, 57 KB a token, 64 documents of 2,048 tokens = 7.5 GB)
and a stand-in for the verifier with random heads, runs 04_train.py on them with --prepared-data, and compares its
tokens a second with the same step on packs that lie on the GPU already.

    python -m benchmarks.train_end_to_end [--fp8] [--steps 60]      about 3 minutes on one H200, 14 GB of disk

Writes benchmarks/results/train_end_to_end.json, or where $OUT names a folder there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.common import ROOT, write_result
from benchmarks.train_step import HIDDEN, PACK, Ours, documents, draft_model, timed_steps
from tests import kimi_standin

SAMPLES, LENGTH, VALIDATION = 64, 2048, 4
_HEADS = "model-heads.safetensors"


def standin(path: Path) -> Path:
    """Kimi's stand-in with random values in the three tensors that training reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kimi_standin.build(path)
    index = path / "model.safetensors.index.json"
    whole = json.loads(index.read_text(encoding="utf-8"))
    heads = {}
    for name in whole["weight_map"]:
        if name.endswith(("embed_tokens.weight", "lm_head.weight", "language_model.model.norm.weight")):
            shape = [HIDDEN] if name.endswith("norm.weight") else [163840, HIDDEN]
            heads[name] = torch.randn(shape, dtype=torch.bfloat16) * (1 if len(shape) == 1 else 0.02)
            whole["weight_map"][name] = _HEADS
    save_file(heads, path / _HEADS)
    index.write_text(json.dumps(whole), encoding="utf-8")
    return path


def prepared(path: Path) -> Path:
    """A data set in speculators' format; tokens from 1,024 ids, states random."""
    import datasets

    states = path / "hidden_states"
    states.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(SAMPLES):
        ids = torch.randint(0, 1024, (LENGTH,), generator=generator)
        hidden = torch.randn(LENGTH, 4, HIDDEN, device="cuda" if torch.cuda.is_available() else "cpu").bfloat16().cpu()
        save_file({"hidden_states": hidden, "token_ids": ids}, states / f"hs_{number}.safetensors")
        mask = [0] * (LENGTH // 10) + [1] * (LENGTH - LENGTH // 10)
        split = "train" if number < SAMPLES - VALIDATION else "val"
        rows.append({"input_ids": ids.tolist(), "loss_mask": mask, "seq_len": LENGTH, "split": split})
    table = datasets.Dataset.from_list(rows)
    table.set_format("torch", columns=["input_ids", "loss_mask", "seq_len"])
    table.save_to_disk(path)
    return path


def main() -> None:
    """Make the data, run the stage, run the bare step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of the stage")
    parser.add_argument("--workers", type=int, default=6, help="processes that read shards")
    parser.add_argument("--folder", type=Path, help="where to make the data; kept, and used again when it is there")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp())
    started = time.monotonic()
    kimi, data = folder / "kimi", folder / "data"
    if not data.exists():
        standin(kimi)
        prepared(data)
    print(f"made verifier and data in {time.monotonic() - started:.0f} s", flush=True)
    run = folder / f"run-{time.time():.0f}"
    command = [
        sys.executable, "04_train.py", "--run", str(run), "--preset", "presets/kimi-k2.5-b300x8.yaml",
        "--verifier.path", str(kimi), "--prepared-data", str(data), "--max-steps", str(arguments.steps),
        "--training.epochs", "100", "--training.pack_tokens", str(PACK), "--batch-size", "1",
        "--training.data_workers", str(arguments.workers), "--training.checkpoint_steps", "100000",
        "--training.validation_steps", str(arguments.steps), "--draft.sliding_window", "null",
        "--training.fp8" if arguments.fp8 else "--no-training.fp8",
    ]  # fmt: skip
    started = time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True)
    seconds = time.monotonic() - started
    rows = [json.loads(line) for line in (run / "04_train" / "metrics.jsonl").read_text().splitlines()]
    rates = [row["tokens_per_s"] for row in rows if "train" in row][2:]
    model = draft_model()
    bare = timed_steps(Ours(model, "adamw", use_fp8=arguments.fp8), documents(model.lm_head.weight.float(), seed=1))
    stage = {
        "tokens_per_s": round(statistics.median(rates)),
        "min": round(min(rates)),
        "max": round(max(rates)),
        "whole_stage_s": round(seconds),
    }
    write_result(
        "train_end_to_end" + ("_fp8" if arguments.fp8 else ""),
        module="train_end_to_end",
        ours=stage,
        peer=bare,
        ratio={"stage_over_bare_step": round(stage["tokens_per_s"] / bare["tokens_per_s"], 3)},
        unit="tokens/s",
        notes=[
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {SAMPLES} documents of {LENGTH} tokens, read "
            f"again each epoch (from the page cache after the first), {arguments.workers} reading threads",
        ],
    )


if __name__ == "__main__":
    main()
