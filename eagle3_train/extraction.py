"""Stage 02: the verifier's hidden states for every token of every trace, checked, on disk.

    02_hidden/shards/<id>.safetensors   hidden_states [tokens, layers, hidden], token_ids [tokens]
    02_hidden/index.jsonl               id, tokens, bytes, sha256 of every shard that passed its checks
    02_hidden/dataset/                  Arrow rows: id, input_ids, loss_mask, seq_len; train rows, then val rows
    02_hidden/dataset/hidden_states/hs_<row>.safetensors -> ../../shards/<id>.safetensors

Shards are named by id, so a larger sample keeps what is there; the numbered names that speculators' `ArrowDataset`
and `FileTransfer` look for are relative links made last. `speculators train --data-path 02_hidden/dataset` reads it.
The evaluation split has no states: nothing trains on it.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_train import server as vllm
from eagle3_train import verifier
from eagle3_train.asking import SetAside, watch_server
from eagle3_train.config import Config
from eagle3_train.errors import PipelineError
from eagle3_train.generation import CUT_OFF, REPETITION, SERVER_LOG, TRACES_FILE, prompt_of
from eagle3_train.progress import bar
from eagle3_train.prompts import PROMPTS_FILE
from eagle3_train.run import ERRORS, JsonlLog, Result, Stage, check_set_aside, read_jsonl, write_text

if TYPE_CHECKING:
    import torch

SHARDS, STAGING, DATASET, INDEX = "shards", "staging", "dataset", "index.jsonl"
LINKS = "hidden_states"  # the folder speculators' ArrowDataset looks in by default
_ATTEMPTS = 2
_LOCK_POLL_S = 0.02
_BYTES = {"bfloat16": 2, "float32": 4}
# Room left on the disk for everything else.
_DISK_RESERVE_BYTES = 1 << 30


@dataclass(frozen=True)
class Sample:
    """One trace as it is trained on: prompt and output ids, the output alone supervised."""

    id: str
    split: str
    prompt_ids: list[int]
    output_ids: list[int]

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    @property
    def loss_mask(self) -> list[int]:
        return [0] * len(self.prompt_ids) + [1] * len(self.output_ids)

    @property
    def digest(self) -> str:
        """Of the token ids: a shard belongs to these and no others."""
        return hashlib.sha256(json.dumps(self.token_ids).encode()).hexdigest()[:16]


def extract(stage: Stage) -> Result:
    """Save and check the states of every trace that has none yet, then publish the data set."""
    config = stage.config
    settings = config.extraction
    samples, left_out = read_samples(stage)
    shards = stage.folder / SHARDS
    shards.mkdir(exist_ok=True)
    staging = stage.folder / STAGING
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    index_path = stage.folder / INDEX
    have = _whole_shards(index_path, shards, samples)
    _rewrite_index(index_path, have)
    missing = [sample for sample in samples if sample.id not in have]
    if have:
        print(f"{len(have)} of {len(samples)} traces have their states already")
    errors_path = stage.folder / ERRORS
    errors_path.unlink(missing_ok=True)
    seconds = 0.0
    with JsonlLog(index_path) as index, JsonlLog(errors_path) as errors:
        if missing:
            verifier.head_weights(config.verifier)  # training needs them; better known before hours of extraction
            _check_fits(config, missing, stage.folder)
            extra = vllm.extraction_args(config, staging.resolve())
            with vllm.serve(config, log=stage.folder / SERVER_LOG, extra_args=extra, what="state capture") as server:
                started = time.monotonic()
                asyncio.run(_extract_all(missing, config, server, stage.folder, index, errors))
                seconds = time.monotonic() - started
    shutil.rmtree(staging)
    set_aside = sum(1 for _ in read_jsonl(errors_path))
    check_set_aside("traces", set_aside, len(samples), settings.max_set_aside, errors_path)
    rows = {row["id"]: row for row in read_jsonl(index_path)}
    kept = [sample for sample in samples if sample.id in rows]
    _rewrite_index(index_path, {sample.id: rows[sample.id] for sample in kept})
    publish(stage.folder, kept)
    return _summarise(kept, rows, {sample.id for sample in missing}, left_out, set_aside, seconds)


def read_samples(stage: Stage) -> tuple[list[Sample], int]:
    """The traces to train and validate on, in the order of the prompts, and how many the preset leaves out.

    Raises:
        PipelineError: the training or the validation split has no trace.
    """
    settings = stage.config.extraction
    dropped = {
        flag for flag, wish in ((CUT_OFF, settings.cut_off), (REPETITION, settings.repetition)) if wish == "drop"
    }
    splits = {row["id"]: row["split"] for row in read_jsonl(stage.input("01_prompts") / PROMPTS_FILE)}
    found: dict[str, Sample] = {}
    left_out = 0
    for trace in read_jsonl(stage.input("01b_traces") / TRACES_FILE):
        split = splits.get(prompt_of(trace["id"]))
        if split is None or split == "eval":
            continue
        if dropped & set(trace["flags"]):
            left_out += 1
            continue
        found[trace["id"]] = Sample(trace["id"], split, trace["prompt_token_ids"], trace["output_token_ids"])
    # In the order of the prompts, a conversation's turns one after the other: not in that of the answers' arrival.
    places = {prompt_id: place for place, prompt_id in enumerate(splits)}
    samples = sorted(found.values(), key=lambda sample: (places[prompt_of(sample.id)], len(sample.prompt_ids)))
    for split in ("train", "val"):
        if not any(sample.split == split for sample in samples):
            raise PipelineError(f"no trace is left in the {split} split; prepare more prompts (--max-samples)")
    return samples, left_out


def _whole_shards(index_path: Path, shards: Path, samples: list[Sample]) -> dict[str, dict[str, Any]]:
    """Index rows of shards that are there, whole, and of exactly these token ids."""
    if not index_path.exists():
        return {}
    wanted = {sample.id: sample.digest for sample in samples}
    whole = {}
    for row in read_jsonl(index_path):
        path = shards / f"{row['id']}.safetensors"
        if wanted.get(row["id"]) == row["ids"] and path.exists() and path.stat().st_size == row["bytes"]:
            whole[row["id"]] = row
    return whole


def _rewrite_index(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows.values()))


def token_bytes(config: Config) -> int:
    """Bytes on disk for one token: every captured layer in the storage type."""
    sizes = verifier.text_config(config.verifier)
    layers = len(verifier.captured_layer_ids(config.verifier))
    return layers * sizes.hidden_size * _BYTES[config.extraction.storage_dtype]


def _check_fits(config: Config, samples: list[Sample], folder: Path) -> None:
    longest = max(len(sample.token_ids) for sample in samples)
    if longest + 1 > config.server.max_model_len:
        raise PipelineError(
            f"the longest trace has {longest} tokens and capture asks for one more, "
            f"but server.max_model_len is {config.server.max_model_len}"
        )
    need = sum(len(sample.token_ids) for sample in samples) * token_bytes(config) + _DISK_RESERVE_BYTES
    free = shutil.disk_usage(folder).free
    if need > free:
        raise PipelineError(
            f"the states need {need / 2**30:.1f} GiB ({token_bytes(config)} bytes a token) and {folder} has "
            f"{free / 2**30:.1f} GiB free; make room, or prepare fewer prompts (--max-samples)"
        )


async def _extract_all(
    samples: list[Sample], config: Config, server: vllm.Server, folder: Path, index: JsonlLog, errors: JsonlLog
) -> None:
    settings = config.extraction
    client = vllm.async_client(server, timeout_s=settings.request_timeout_s, connect_timeout_s=10, max_retries=2)
    layer_ids = verifier.captured_layer_ids(config.verifier)
    hidden_size = verifier.text_config(config.verifier).hidden_size
    # Longest first: the end of the stage is then not one long sample on an idle engine.
    queue = iter(sorted(samples, key=lambda sample: -len(sample.token_ids)))
    total = sum(len(sample.token_ids) for sample in samples)
    with bar(total=total, desc="02 states", unit="tok", unit_scale=True) as progress:

        async def worker() -> None:
            for sample in queue:
                for attempt in range(_ATTEMPTS):
                    try:
                        row = await _extract_one(
                            sample, client, server, folder, settings.request_timeout_s, layer_ids, hidden_size
                        )
                    except SetAside as problem:
                        if attempt + 1 == _ATTEMPTS:
                            errors.append({"id": sample.id, "reason": problem.reason, "detail": problem.detail})
                    else:
                        index.append(row)
                        break
                progress.update(len(sample.token_ids))

        await watch_server(server, [worker() for _ in range(min(settings.concurrency, len(samples)))])
        await client.close()


async def _extract_one(
    sample: Sample,
    client: Any,
    server: vllm.Server,
    folder: Path,
    timeout_s: float,
    layer_ids: list[int],
    hidden_size: int,
) -> dict[str, Any]:
    """Capture one sample and move its checked file into place.

    Raises:
        SetAside: this sample's states are not sound.
        PipelineError: the server cannot capture this verifier.
    """
    from openai import OpenAIError

    try:
        answer = await client.completions.create(
            model=server.model, prompt=sample.token_ids, max_tokens=1, temperature=0
        )
    except (OpenAIError, json.JSONDecodeError) as error:
        server.check_alive()
        raise SetAside("no answer from the server", str(error)[:500]) from None
    named = ((answer.model_extra or {}).get("kv_transfer_params") or {}).get("hidden_states_path")
    if named is None:
        raise PipelineError("the server saves no hidden states; its connector did not load. See the server's log")
    captured = Path(named)
    if captured.parent != (folder / STAGING).resolve():
        raise PipelineError(f"the server names {captured}, outside its staging folder {folder / STAGING}")
    await asyncio.to_thread(_wait_for_writer, captured, timeout_s)
    digest = await asyncio.to_thread(_check_file, captured, sample, layer_ids, hidden_size)
    final = folder / SHARDS / f"{sample.id}.safetensors"
    size = captured.stat().st_size
    os.replace(captured, final)
    captured.with_name(captured.name + ".lock").unlink(missing_ok=True)
    return {"id": sample.id, "ids": sample.digest, "tokens": len(sample.token_ids), "bytes": size, "sha256": digest}


def _wait_for_writer(captured: Path, timeout_s: float) -> None:
    """Until the connector has released the file's lock."""
    lock = captured.with_name(captured.name + ".lock")
    deadline = time.monotonic() + timeout_s
    try:
        with lock.open() as held:
            while True:
                try:
                    fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise SetAside(f"the file was not written within {timeout_s:.0f} s") from None
                    time.sleep(_LOCK_POLL_S)
    except FileNotFoundError:
        raise SetAside("the server made no lock for the file it named", captured.name) from None


def _check_file(captured: Path, sample: Sample, layer_ids: list[int], hidden_size: int) -> str:
    """SHA-256 of the captured file, after every check.

    Raises:
        SetAside: not written, cut short, or not sound.
        PipelineError: captured from other layers than asked.
    """
    from safetensors import SafetensorError, safe_open

    failed = captured.with_name(captured.name + ".error")
    if failed.exists():
        raise SetAside("the server could not write the file", failed.read_text()[:300])
    if not captured.exists():
        raise SetAside("the server released the lock without a file")
    try:
        with safe_open(captured, framework="pt") as tensors:
            header = tensors.metadata() or {}
            states, token_ids = tensors.get_tensor("hidden_states"), tensors.get_tensor("token_ids")
    except (SafetensorError, OSError) as error:
        raise SetAside("not a whole safetensors file", str(error)) from None
    if json.loads(header.get("layer_ids", "[]")) != layer_ids:
        raise PipelineError(f"the server captured layers {header.get('layer_ids')}, asked were {layer_ids}")
    if states.ndim == 3 and states.shape[1] != len(layer_ids):
        raise PipelineError(
            f"{states.shape[1]} layers where {len(layer_ids)} were asked: this vLLM is too old for this verifier"
        )
    check_states(states, token_ids, sample.token_ids, layer_ids, hidden_size)
    with captured.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_states(
    states: torch.Tensor, token_ids: torch.Tensor, expected_ids: list[int], layer_ids: list[int], hidden_size: int
) -> None:
    """What must hold of one sample's states [tokens, layers, hidden] before it counts as done.

    Raises:
        SetAside: naming the layer.
    """
    if token_ids.tolist() != expected_ids:
        raise SetAside("the states are of other token ids")
    shape = [len(expected_ids), len(layer_ids), hidden_size]
    if list(states.shape) != shape:
        raise SetAside(f"states of shape {list(states.shape)}, expected {shape}")
    for position, layer in enumerate(layer_ids):
        layer_states = states[:, position].float()
        if not layer_states.isfinite().all():
            raise SetAside(f"a NaN or infinity in layer {layer}")
        if (layer_states.abs().amax(dim=-1) == 0).any():
            raise SetAside(f"a token whose state is all zero in layer {layer}")
        if position and (states[:, position] == states[:, position - 1]).all():
            raise SetAside(f"layers {layer_ids[position - 1]} and {layer} hold the same states")


def publish(folder: Path, samples: list[Sample]) -> None:
    """Build `dataset/` beside and put it in place: Arrow rows, train before val, and a numbered link for each."""
    import datasets

    ordered = [s for s in samples if s.split == "train"] + [s for s in samples if s.split == "val"]
    building = folder / f".{DATASET}.tmp"
    shutil.rmtree(building, ignore_errors=True)

    def rows() -> Iterator[dict[str, Any]]:
        for sample in ordered:
            yield {
                "id": sample.id,
                "input_ids": sample.token_ids,
                "loss_mask": sample.loss_mask,
                "seq_len": len(sample.token_ids),
                "split": sample.split,
            }

    features = datasets.Features(
        {
            "id": datasets.Value("string"),
            "input_ids": datasets.List(datasets.Value("int64")),
            "loss_mask": datasets.List(datasets.Value("int64")),
            "seq_len": datasets.Value("int64"),
            "split": datasets.Value("string"),
        }
    )
    datasets.disable_progress_bars()
    table = datasets.Dataset.from_list(list(rows()), features=features)
    # The form speculators' ArrowDataset compares with the shard's token ids.
    table.set_format("torch", columns=["input_ids", "loss_mask", "seq_len"])
    table.save_to_disk(building)
    links = building / LINKS
    links.mkdir()
    for row, sample in enumerate(ordered):
        (links / f"hs_{row}.safetensors").symlink_to(Path("..") / ".." / SHARDS / f"{sample.id}.safetensors")
    shutil.rmtree(folder / DATASET, ignore_errors=True)
    os.rename(building, folder / DATASET)


def _summarise(
    kept: list[Sample],
    rows: dict[str, dict[str, Any]],
    extracted: set[str],
    left_out: int,
    set_aside: int,
    seconds: float,
) -> Result:
    tokens = sum(len(sample.token_ids) for sample in kept)
    size = sum(rows[sample.id]["bytes"] for sample in kept)
    new_tokens = sum(len(sample.token_ids) for sample in kept if sample.id in extracted)
    train = sum(sample.split == "train" for sample in kept)
    summary = {
        "samples": len(kept),
        "train": train,
        "val": len(kept) - train,
        "tokens": tokens,
        "bytes": size,
        "left_out": left_out,
        "set_aside": set_aside,
        "extracted_tokens": new_tokens,
        "extraction_seconds": round(seconds, 2),
    }
    line = f"{len(kept)} samples ({train} train), {tokens} tokens, {size / 2**20:.0f} MiB; {set_aside} set aside"
    if new_tokens:
        line += f"; {new_tokens / seconds:.0f} tok/s"
    return Result([INDEX, DATASET, ERRORS], summary, [line], counted=[SHARDS])
