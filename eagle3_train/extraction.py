"""Stage 02: the verifier's hidden states for every token of every trace, checked, on disk.

    02_hidden/shards/<id>.safetensors   hidden_states [tokens, layers, hidden], token_ids [tokens]
    02_hidden/index.jsonl               id, tokens, bytes, sha256 of every shard that passed its checks
    02_hidden/dataset/                  Arrow rows: id, input_ids, loss_mask, seq_len; train rows, then val rows
    02_hidden/dataset/hidden_states/hs_<row>.safetensors -> ../../shards/<id>.safetensors
    02_hidden/parity.jsonl              the numbers of each parity gate, on canaries.json and canary_states/
    02_hidden/wave.json                 within a disk budget: which steps of training the shards are for (waves.py)

Shards are named by id, so a larger sample keeps what is there; the numbered names that speculators' `ArrowDataset`
and `FileTransfer` (float8: `FP8Transfer`) look for are relative links made last. `speculators train --data-path
02_hidden/dataset` reads it. The evaluation split has no states: nothing trains on it.

A sample is a trace without its last token, which is never an input of the verifier while it answers: states made while
generating and states made afterwards are of the same tokens. The last token is still learnt, as what follows the last
state. What stage 01b has saved itself (`generation.capture: one_pass`) is taken over; the verifier is loaded for the
rest, if there is any.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_train import parity, verifier
from eagle3_train import server as vllm
from eagle3_train.asking import SetAside, watch_server
from eagle3_train.capture import (
    Capturer,
    Expected,
    Room,
    Sample,
    check_header,
    check_same_file_system,
    disk_full_is_no_crash,
    fresh_staging,
    sample_of,
    token_bytes,
)
from eagle3_train.config import Config
from eagle3_train.errors import MoreStates, PipelineError
from eagle3_train.generation import SERVER_LOG, TRACES_FILE, is_left_out, prompt_of
from eagle3_train.one_pass import STATES, STATES_INDEX
from eagle3_train.progress import bar
from eagle3_train.prompts import PROMPTS_FILE
from eagle3_train.run import ERRORS, TRAIN, JsonlLog, Result, Stage, check_set_aside, read_jsonl, sha256_of, write_text

if TYPE_CHECKING:
    from eagle3_train.waves import Wave

__all__ = ["DATASET", "INDEX", "LINKS", "SHARDS", "Sample", "extract", "publish", "read_samples", "token_bytes"]

SHARDS, DATASET, INDEX = "shards", "dataset", "index.jsonl"
LINKS = "hidden_states"  # the folder speculators' ArrowDataset looks in by default
_ATTEMPTS = 2
_ROWS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Located:
    """Where a sample lies in traces.jsonl: token ids are read when they are needed, so memory does not grow with them.

    Attributes:
        id, split: of the sample.
        tokens: prompt and output without its last token.
        digest: of the token ids.
        offset: of its line in traces.jsonl [bytes].
    """

    id: str
    split: str
    tokens: int
    digest: str
    offset: int


class Traces:
    """The samples of a finished stage 01b, read one at a time."""

    def __init__(self, path: Path):
        self._path = path
        self._file = path.open("rb")

    def load(self, located: Located) -> Sample:
        """The sample with its token ids."""
        self._file.seek(located.offset)
        sample = sample_of(json.loads(self._file.readline()), located.split)
        if sample.id != located.id:
            raise PipelineError(f"{self._path} changed while it was read; run this again")
        return sample

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Traces:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def extract(stage: Stage) -> Result:
    """Save and check the states of every trace that has none yet, then publish the data set.

    In waves (waves.py): those of the validation split, and of what training takes next.
    """
    with disk_full_is_no_crash(stage.folder), _training_stands_still(stage):
        return _extract(stage)


def _extract(stage: Stage) -> Result:
    config = stage.config
    settings = config.extraction
    samples, left_out = read_samples(stage)
    shards = stage.folder / SHARDS
    staging = fresh_staging(stage.folder, shards)
    index_path, errors_path = stage.folder / INDEX, stage.folder / ERRORS
    wave, wanted = _wave(stage, samples) if config.in_waves else (None, samples)
    have = _whole_shards(index_path, shards, wanted)
    _rewrite_index(index_path, have)
    if have:
        print(f"{len(have)} of {len(wanted)} traces have their states already")
    if config.in_waves:
        _remove_others(shards, wanted)
    _forget_errors(errors_path, samples, wanted)
    seconds = 0.0
    traces_folder = stage.input("01b_traces")
    with JsonlLog(index_path) as index, JsonlLog(errors_path) as errors, Traces(traces_folder / TRACES_FILE) as traces:
        missing = [sample for sample in wanted if sample.id not in have]
        taken = _take_over(traces_folder, missing, shards, index, Expected.of(config))
        missing = [sample for sample in missing if sample.id not in taken]
        if missing:
            verifier.head_weights(config.verifier)  # training needs them; better known before hours of extraction
            _check_fits(config, missing, stage.folder)
            extra = vllm.extraction_args(config, staging)
            chosen = set(parity.chosen(sample.id for sample in samples))
            canaries = [traces.load(sample).token_ids for sample in samples if sample.id in chosen]
            with vllm.serve(config, log=stage.folder / SERVER_LOG, extra_args=extra, what="state capture") as server:
                seconds = asyncio.run(extract_all(missing, traces, config, server, staging, canaries, index, errors))
    shutil.rmtree(staging)
    set_aside = sum(1 for _ in read_jsonl(errors_path))
    check_set_aside("traces", set_aside, len(samples), settings.max_set_aside, errors_path)
    ids = {sample.id for sample in wanted}
    rows = {row["id"]: row for row in read_jsonl(index_path) if row["id"] in ids}
    # Training rows of other waves are in the data set without their states.
    kept = [sample for sample in samples if sample.id in rows or (config.in_waves and sample.split == "train")]
    _rewrite_index(index_path, {sample.id: rows[sample.id] for sample in kept if sample.id in rows})
    with Traces(traces_folder / TRACES_FILE) as traces:
        publish(stage.folder, map(traces.load, _training_first(kept)))
    new_tokens = sum(sample.tokens for sample in missing if sample.id in rows)
    result = _summarise(kept, rows, new_tokens, len(taken), left_out, set_aside, seconds)
    if config.in_waves:
        result = _keep_wave(stage, wave, samples, wanted, rows.keys(), result)
    return result


# In waves ------------------------------------------------------------------------------------------------------------


def wants_more(stage: Stage) -> bool:
    """Whether a stage that is done must make the next wave of states, for training has used the one it holds."""
    if not stage.config.in_waves:
        return False
    from eagle3_train import waves

    if waves.trained_otherwise(stage.run):
        return False  # 04 refuses, and says what to do
    try:
        _, needed = waves.of_training(stage, train_lengths(stage.folder / DATASET))
    except MoreStates:
        return True
    links = stage.folder / DATASET / LINKS
    return not all((links / f"hs_{row}.safetensors").exists() for row in needed)


def train_lengths(dataset: Path) -> list[int]:
    """Tokens of each training row of a published data set."""
    import datasets

    table = datasets.load_from_disk(str(dataset)).with_format(None)
    return list(table["seq_len"])[: sum(split == "train" for split in table["split"])]


@contextlib.contextmanager
def _training_stands_still(stage: Stage) -> Iterator[None]:
    if not stage.config.in_waves:
        yield
        return
    # It reads what a new wave deletes.
    with Stage(stage.run, TRAIN).locked():
        yield


def _wave(stage: Stage, samples: list[Located]) -> tuple[Wave | None, list[Located]]:
    """The wave to hold, written down before anything of the one before it is deleted, and the samples it takes."""
    from eagle3_train import waves

    ordered = _training_first(samples)
    train = [sample for sample in ordered if sample.split == "train"]
    val = ordered[len(train) :]
    wave, rows = waves.coming(
        stage.run,
        [sample.tokens for sample in train],
        [sample.tokens for sample in val],
        waves.digest_of_samples((sample.id, sample.digest) for sample in ordered),
    )
    if wave is not None:
        waves.keep(stage.folder, wave)
    if wave is None or wave.published:
        # The data set stays as it is: what it lacks is not made again.
        errors_path = stage.folder / ERRORS
        aside = {row["id"] for row in read_jsonl(errors_path)} if errors_path.exists() else set()
        val = [sample for sample in val if sample.id not in aside]
    return wave, [train[row] for row in sorted(rows)] + val


def _keep_wave(
    stage: Stage,
    wave: Wave | None,
    samples: list[Located],
    wanted: list[Located],
    made: Collection[str],
    result: Result,
) -> Result:
    """Write down that the wave is whole, and say so; the manifest vouches for the data set: its states come and go."""
    from eagle3_train import waves

    line = "every step of the training is made; what it read is deleted"
    if wave is not None:
        train = [sample.id for sample in samples if sample.split == "train"]
        taken = {sample.id for sample in wanted if sample.split == "train"}
        left_out = [row for row, sample_id in enumerate(train) if sample_id in taken and sample_id not in made]
        waves.keep(stage.folder, replace(wave, whole=True, published=True, left_out=left_out))
        line = f"wave {wave.number}: {len(taken)} of {len(train)} training samples, for steps {wave.first_step + 1} to "
        line += f"{wave.last_step} of {wave.steps}"
        result.summary.update(wave=wave.number, first_step=wave.first_step, last_step=wave.last_step)
    return Result([DATASET], result.summary, [*result.lines, line])


def _remove_others(shards: Path, wanted: list[Located]) -> None:
    keep = {f"{sample.id}.safetensors" for sample in wanted}
    for path in shards.iterdir():
        if path.name not in keep:
            path.unlink()


def _forget_errors(path: Path, samples: list[Located], wanted: list[Located]) -> None:
    """What is tried again has not failed; what is no sample any more does not count."""
    if path.exists():
        others = {sample.id for sample in samples} - {sample.id for sample in wanted}
        _rewrite_rows(path, [row for row in read_jsonl(path) if row["id"] in others])


def _training_first(samples: list[Located]) -> list[Located]:
    """As the data set has them."""
    return sorted(samples, key=lambda sample: sample.split != "train")


# Which samples -------------------------------------------------------------------------------------------------------


def read_samples(stage: Stage) -> tuple[list[Located], int]:
    """The traces to train and validate on, in the order of the prompts, and how many the preset leaves out.

    Raises:
        PipelineError: the training or the validation split has no trace.
    """
    splits = {row["id"]: row["split"] for row in read_jsonl(stage.input("01_prompts") / PROMPTS_FILE)}
    path = stage.input("01b_traces") / TRACES_FILE
    found: dict[str, tuple[int, Located]] = {}
    left_out = 0
    for offset, trace in zip(_line_offsets(path), read_jsonl(path), strict=False):
        split = splits.get(prompt_of(trace["id"]))
        if split is None or split == "eval":
            continue
        if is_left_out(trace, stage.config.extraction):
            left_out += 1
            continue
        sample = sample_of(trace, split)
        located = Located(sample.id, split, len(sample.token_ids), sample.digest, offset)
        found[sample.id] = len(sample.prompt_ids), located
    # In the order of the prompts, a conversation's turns one after the other: not in that of the answers' arrival.
    places = {prompt_id: place for place, prompt_id in enumerate(splits)}
    ordered = sorted(found.values(), key=lambda entry: (places[prompt_of(entry[1].id)], entry[0]))
    samples = [located for _, located in ordered]
    for split in ("train", "val"):
        if not any(sample.split == split for sample in samples):
            raise PipelineError(f"no trace is left in the {split} split; prepare more prompts (--max-samples)")
    return samples, left_out


def _line_offsets(path: Path) -> Iterator[int]:
    with path.open("rb") as file:
        yield from itertools.accumulate((len(line) for line in file), initial=0)


def _whole_shards(index_path: Path, shards: Path, samples: list[Located]) -> dict[str, dict[str, Any]]:
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


def _take_over(traces: Path, missing: list[Located], shards: Path, index: JsonlLog, expected: Expected) -> set[str]:
    """Move the checked states that stage 01b saved while generating among the shards; returns their ids."""
    from safetensors import SafetensorError, safe_open

    if not (traces / STATES_INDEX).exists():
        return set()
    check_same_file_system(traces / STATES, shards)
    rows = {row["id"]: row for row in read_jsonl(traces / STATES_INDEX)}
    taken = set()
    for sample in missing:
        row, source = rows.get(sample.id), traces / STATES / f"{sample.id}.safetensors"
        if row is None or row["ids"] != sample.digest or not source.exists() or source.stat().st_size != row["bytes"]:
            continue
        try:
            with safe_open(source, framework="pt") as tensors:
                check_header(tensors.metadata() or {}, expected)
        except (PipelineError, SafetensorError, OSError):
            continue  # of other settings than today's: made again
        final = shards / source.name
        final.unlink(missing_ok=True)
        # Its row first: a kill between the two leaves the file where the next run takes it over.
        index.append(row)
        os.replace(source, final)
        taken.add(sample.id)
    if taken:
        print(f"{len(taken)} traces had their states saved while they were generated")
    return taken


def _rewrite_index(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    _rewrite_rows(path, rows.values())


def _rewrite_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


# The work ------------------------------------------------------------------------------------------------------------


def _check_fits(config: Config, samples: list[Located], folder: Path) -> None:
    longest = max(sample.tokens for sample in samples)
    if longest + 1 > config.server.max_model_len:
        raise PipelineError(
            f"the longest trace has {longest} tokens and capture asks for one more, "
            f"but server.max_model_len is {config.server.max_model_len}"
        )
    a_token = token_bytes(config)
    try:
        Room(folder).check(sum(sample.tokens for sample in samples) * a_token)
    except PipelineError as error:
        raise PipelineError(
            f"the states take {a_token} bytes a token: {error}; or prepare fewer prompts (--max-samples)"
        ) from None


class TokensInFlight:
    """Lets samples through as long as no more than `most` tokens of them are under way; a longer one alone."""

    def __init__(self, most: int):
        self._most, self._taken = most, 0
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def taken(self, tokens: int) -> AsyncIterator[None]:
        """Hold so many tokens, once there is room for them."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._taken or self._taken + tokens <= self._most)
            self._taken += tokens
        try:
            yield
        finally:
            async with self._changed:
                self._taken -= tokens
                self._changed.notify_all()


async def extract_all(
    samples: list[Located],
    traces: Traces,
    config: Config,
    server: vllm.Server,
    staging: Path,
    canaries: list[list[int]],
    index: JsonlLog,
    errors: JsonlLog,
) -> float:
    """Pass the parity gate, then capture every sample into `shards/` beside the index; a row each in index or errors.

    Returns:
        Seconds of the samples alone.

    Raises:
        PipelineError: the gate is not passed, the server cannot capture this verifier or died.
        DiskFull: no room for the next sample.
    """
    settings = config.extraction
    folder = index.path.parent
    expected = Expected.of(config)
    room = Room(folder)
    # So much is with the engine; as much again is being written and checked, which must not empty its batches.
    engine = asyncio.Semaphore(settings.concurrency)
    engine_tokens, tokens = TokensInFlight(settings.tokens_in_flight), TokensInFlight(2 * settings.tokens_in_flight)
    # Longest first: the end of the stage is then not one long sample on an idle engine.
    queue = iter(sorted(samples, key=lambda sample: -sample.tokens))
    async with Capturer(server, staging, expected, settings.request_timeout_s) as capturer:
        await watch_server(server, [parity.pass_gate(capturer, canaries, folder, config)])
        started = time.monotonic()
        with bar(
            total=sum(sample.tokens for sample in samples), desc="02 states", unit="tok", unit_scale=True
        ) as progress:

            async def capture(located: Located) -> None:
                sample = traces.load(located)
                with room.promised(located.tokens * expected.token_bytes):
                    for attempt in range(1, _ATTEMPTS + 1):
                        answer = None
                        try:
                            async with engine_tokens.taken(located.tokens), engine:
                                answer = await capturer.prefill(sample.token_ids, f"{sample.id}-{attempt}")
                            index.append(await capturer.keep(answer, sample, folder / SHARDS))
                            break
                        except SetAside as problem:
                            if answer is not None:
                                await capturer.discard(answer)  # its room is for the next attempt
                            if attempt == _ATTEMPTS:
                                errors.append({"id": sample.id, "reason": problem.reason, "detail": problem.detail})
                progress.update(located.tokens)

            async def worker() -> None:
                for located in queue:
                    async with tokens.taken(located.tokens):
                        await capture(located)

            await watch_server(server, [worker() for _ in range(min(2 * settings.concurrency, len(samples)))])
        return time.monotonic() - started


# The data set --------------------------------------------------------------------------------------------------------


def publish(folder: Path, samples: Iterable[Sample]) -> None:
    """Build `dataset/` beside and put it in place: an Arrow row and a numbered link for each sample.

    Args:
        folder: of the stage.
        samples: every training sample, then every validation sample; read once, a few at a time.
    """
    import datasets
    from datasets.arrow_writer import ArrowWriter

    building = folder / f".{DATASET}.tmp"
    shutil.rmtree(building, ignore_errors=True)
    links = building / LINKS
    links.mkdir(parents=True)
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
    rows = folder / f".{DATASET}.arrow"
    before = "train"
    with ArrowWriter(path=str(rows), features=features, writer_batch_size=_ROWS_AT_ONCE) as writer:
        for number, sample in enumerate(samples):
            writer.write(
                {
                    "id": sample.id,
                    "input_ids": sample.token_ids,
                    "loss_mask": sample.loss_mask,
                    "seq_len": len(sample.token_ids),
                    "split": sample.split,
                }
            )
            (links / f"hs_{number}.safetensors").symlink_to(Path("..") / ".." / SHARDS / f"{sample.id}.safetensors")
            if (before, sample.split) == ("val", "train"):
                raise ValueError(f"{sample.id}: a training sample after those of validation")
            before = sample.split
        writer.finalize()
    # Left to itself, the fingerprint is of the time as well, and the same data set made again would be another.
    table = datasets.Dataset(datasets.Dataset.from_file(str(rows)).data, fingerprint=sha256_of(rows)[:16])
    # The form speculators' ArrowDataset compares with the shard's token ids.
    table.set_format("torch", columns=["input_ids", "loss_mask", "seq_len"])
    table.save_to_disk(building)
    rows.unlink()
    shutil.rmtree(folder / DATASET, ignore_errors=True)
    os.rename(building, folder / DATASET)


def _summarise(
    kept: list[Located],
    rows: dict[str, dict[str, Any]],
    new_tokens: int,
    taken_over: int,
    left_out: int,
    set_aside: int,
    seconds: float,
) -> Result:
    tokens = sum(sample.tokens for sample in kept)
    size = sum(row["bytes"] for row in rows.values())
    train = sum(sample.split == "train" for sample in kept)
    summary = {
        "samples": len(kept),
        "train": train,
        "val": len(kept) - train,
        "tokens": tokens,
        "bytes": size,
        "left_out": left_out,
        "set_aside": set_aside,
        "taken_over": taken_over,
        "extracted_tokens": new_tokens,
        "extraction_seconds": round(seconds, 2),
    }
    line = f"{len(kept)} samples ({train} train), {tokens} tokens, {size / 2**20:.0f} MiB; {set_aside} set aside"
    if new_tokens:
        line += f"; {new_tokens / seconds:.0f} tok/s"
    return Result([INDEX, DATASET, ERRORS], summary, [line], counted=[SHARDS])
