"""Contract of stage 02: a shard counts as done only when it holds sound states of exactly its trace's tokens.

Guarded: every fault of a captured file is found and named; what was sound is never made again, and what was not is;
the published data set is read by speculators' own ArrowDataset and loaders, with the values that were written. The
one stand-in is the engine: FaultServer speaks its API, and `Engine` writes files as the connector in vLLM does.

Shapes: T tokens, L captured layers, D hidden size.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import json
import multiprocessing
import random
import shutil
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
from hs_connectors.fp8_utils import quantize_tensor_to_fp8
from safetensors.torch import load_file, save_file

from eagle3_train import server as vllm
from eagle3_train import verifier
from eagle3_train.asking import SetAside
from eagle3_train.capture import (
    Capturer,
    DiskFull,
    Expected,
    Sample,
    StatesFile,
    check_file,
    check_states,
    fresh_staging,
    token_bytes,
    wait_for_writer,
)
from eagle3_train.config import Config, Extraction, Verifier, parse
from eagle3_train.config import Server as ServerSettings
from eagle3_train.errors import PipelineError
from eagle3_train.extraction import (
    DATASET,
    INDEX,
    LINKS,
    SHARDS,
    TokensInFlight,
    Traces,
    extract,
    publish,
    read_samples,
)
from eagle3_train.run import ERRORS, HIDDEN, PROMPTS, TRACES, JsonlLog, Result, Run, Stage
from tests.fault_server import (
    HIDDEN_SIZE,
    LAYERS,
    TRACES_FILE,
    Engine,
    FaultServer,
    encode,
    finish_stage,
    prompt_id,
    rows_of,
    states_of,
    write_config,
    write_prompts,
    write_shard,
    write_verifier,
)

TRAIN = [f"Question {number}?" for number in range(5)]
VAL = ["Is this validation?", "Is this too?"]
EVAL = ["Is this held out?"]
SPLITS = {**dict.fromkeys(TRAIN, "train"), **dict.fromkeys(EVAL, "eval"), **dict.fromkeys(VAL, "val")}
Disk = namedtuple("Disk", "total used free")


def prompt_of(question: str) -> list[int]:
    return encode(f"user:{question}")


def output_of(question: str) -> list[int]:
    return encode(f"Answer to {question}")


def tokens_of(question: str) -> list[int]:
    """What is trained on: without the trace's last token."""
    return prompt_of(question) + output_of(question)[:-1]


def header_of(layers: list[int], dtype: str = "bfloat16") -> dict[str, str]:
    return {"layer_ids": json.dumps(layers), "dtype": dtype, "verifier": "", "vllm": "0.32.0"}


def expecting(dtype: str = "bfloat16") -> Expected:
    return Expected(LAYERS, HIDDEN_SIZE, dtype, "", 1e-3)


def with_value(states: torch.Tensor, token: int, layer: int, value: float) -> torch.Tensor:
    states[token, LAYERS.index(layer), 3] = value
    return states


def with_zero_token(states: torch.Tensor, token: int, layer: int) -> torch.Tensor:
    states[token, LAYERS.index(layer)] = 0
    return states


def with_equal_layers(states: torch.Tensor, first: int, second: int) -> torch.Tensor:
    states[:, LAYERS.index(second)] = states[:, LAYERS.index(first)]
    return states


# ---- one sample's states


def held(states: torch.Tensor, ids: list[int], scales: torch.Tensor | None = None) -> StatesFile:
    return StatesFile(states, scales, torch.tensor(ids), {})


def held_in_float8(states: torch.Tensor, ids: list[int]) -> StatesFile:
    quantized, scales = quantize_tensor_to_fp8(states)
    return held(quantized, ids, scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sound_states_are_accepted_in_both_storage_types(dtype: torch.dtype) -> None:
    ids = list(range(30, 42))
    check_states(held(states_of(ids).to(dtype), ids), ids, expecting())


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        pytest.param(lambda s: s[:-1], r"\[11, 4, 16\], expected \[12, 4, 16\]", id="fewer rows than tokens"),
        pytest.param(lambda s: s[:, :3], r"\[12, 3, 16\], expected \[12, 4, 16\]", id="three layers of four"),
        pytest.param(lambda s: s[:, :, :8], r"\[12, 4, 8\], expected \[12, 4, 16\]", id="another hidden size"),
        pytest.param(lambda s: with_value(s, 0, 2, float("nan")), r"layer 2\b", id="a NaN in the first value"),
        pytest.param(lambda s: with_value(s, 7, 4, float("nan")), r"layer 4\b", id="a NaN"),
        pytest.param(lambda s: with_value(s, 11, 8, float("inf")), r"layer 8\b", id="an infinity"),
        pytest.param(lambda s: with_value(s, 11, 5, float("-inf")), r"layer 5\b", id="a negative infinity"),
        pytest.param(lambda s: with_zero_token(s, 6, 5), r"zero in layer 5\b", id="a token all zero"),
        pytest.param(torch.zeros_like, r"zero in layer 2\b", id="everything zero"),
        pytest.param(lambda s: with_equal_layers(s, 2, 4), r"layers 2 and 4\b", id="two layers equal"),
        pytest.param(lambda s: with_equal_layers(s, 5, 8), r"layers 5 and 8\b", id="the last two layers equal"),
        pytest.param(lambda s: s[:1].expand_as(s), r"every token .* in layer 2\b", id="one state for all tokens"),
        pytest.param(lambda s: s * 1e-4, r"implausible size in layer 2: \d", id="far too small"),
        pytest.param(lambda s: s * 1e5, r"implausible size in layer 2: \d", id="far too large"),
    ],
)
def test_unsound_states_are_refused_naming_what_is_wrong(
    spoil: Callable[[torch.Tensor], torch.Tensor], said: str
) -> None:
    ids = list(range(30, 42))
    with pytest.raises(SetAside, match=said):
        check_states(held(spoil(states_of(ids)), ids), ids, expecting())


def test_sound_states_are_accepted_in_float8() -> None:
    ids = list(range(30, 142))
    check_states(held_in_float8(states_of(ids), ids), ids, expecting("float8_e4m3"))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        pytest.param(lambda s: with_value(s, 7, 4, float("nan")), "a NaN or infinity", id="a NaN"),
        pytest.param(lambda s: with_value(s, 40, 8, float("inf")), "a NaN or infinity", id="an infinity"),
        pytest.param(lambda s: with_zero_token(s, 39, 5), r"zero in layer 5\b", id="a token all zero"),
        pytest.param(lambda s: with_equal_layers(s, 5, 8), r"layers 5 and 8\b", id="two layers equal"),
        pytest.param(lambda s: s[:1].expand_as(s), r"every token .* in layer 2\b", id="one state for all tokens"),
        pytest.param(lambda s: s * 1e-4, r"implausible size in layer 2: \d", id="far too small"),
        pytest.param(lambda s: s * 1e5, r"implausible size in layer 2: \d", id="far too large"),
    ],
)
def test_unsound_states_are_refused_in_float8_too(spoil: Callable[[torch.Tensor], torch.Tensor], said: str) -> None:
    ids = list(range(30, 71))
    with pytest.raises(SetAside, match=said):
        check_states(held_in_float8(spoil(states_of(ids)), ids), ids, expecting("float8_e4m3"))


def test_float8_states_with_too_few_scales_are_refused() -> None:
    ids = list(range(30, 71))
    quantized, scales = quantize_tensor_to_fp8(states_of(ids))
    with pytest.raises(SetAside, match=r"scales of shape \[40, 1, 1\], expected \[41, 1, 1\]"):
        check_states(held(quantized, ids, scales[1:]), ids, expecting("float8_e4m3"))


@pytest.mark.parametrize("change", [lambda ids: ids[:-1], lambda ids: [*ids[:-1], 99], lambda ids: ids[::-1]])
def test_states_of_other_token_ids_are_refused(change: Callable[[list[int]], list[int]]) -> None:
    ids = list(range(30, 42))
    with pytest.raises(SetAside, match="other token ids"):
        check_states(held(states_of(ids), change(ids)), ids, expecting())


# ---- one captured file


@pytest.fixture
def sample() -> Sample:
    return Sample("0123456789abcdef", "train", list(range(30, 38)), list(range(50, 60)))


@pytest.fixture
def captured(tmp_path: Path, sample: Sample) -> Path:
    """A sound file, as the connector leaves it."""
    path = tmp_path / "cmpl-0.safetensors"
    write_shard(path, states_of(sample.token_ids), sample.token_ids, header_of(LAYERS))
    return path


def test_a_sound_file_passes_and_its_digest_is_the_files_own(captured: Path, sample: Sample) -> None:
    digest = check_file(captured, sample.token_ids, expecting())
    assert digest == hashlib.sha256(captured.read_bytes()).hexdigest()


@pytest.mark.parametrize("kept", [-100, -1, 8, 0])
def test_a_file_cut_short_is_never_counted_as_done(captured: Path, sample: Sample, kept: int) -> None:
    captured.write_bytes(captured.read_bytes()[:kept])
    with pytest.raises(SetAside, match="not a whole safetensors file"):
        check_file(captured, sample.token_ids, expecting())


def test_a_file_without_its_token_ids_is_refused(captured: Path, sample: Sample) -> None:
    header = {"layer_ids": json.dumps(LAYERS)}
    save_file({"hidden_states": states_of(sample.token_ids)}, captured, metadata=header)
    with pytest.raises(SetAside):
        check_file(captured, sample.token_ids, expecting())


def test_a_failed_write_is_reported_in_the_servers_own_words(captured: Path, sample: Sample) -> None:
    captured.with_name(captured.name + ".error").write_text("RuntimeError: the writer fell over")
    with pytest.raises(SetAside) as refused:
        check_file(captured, sample.token_ids, expecting())
    assert "the writer fell over" in refused.value.detail


@pytest.mark.parametrize(
    "words",
    [
        "OSError: [Errno 28] No space left on device",
        'SafetensorError: IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })',
        "OSError: [Errno 122] Disk quota exceeded",
    ],
)
def test_a_server_whose_disk_is_full_is_no_fault_of_the_sample(captured: Path, sample: Sample, words: str) -> None:
    captured.with_name(captured.name + ".error").write_text(words)
    with pytest.raises(DiskFull, match="make room"):
        check_file(captured, sample.token_ids, expecting())


def test_a_reason_that_found_no_room_itself_is_a_full_disk_too(
    captured: Path, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured.unlink()
    captured.with_name(captured.name + ".error").write_text("")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Disk(2**20, 2**20, 0))
    with pytest.raises(DiskFull, match="no space left"):
        check_file(captured, sample.token_ids, expecting())


def test_a_lock_released_without_a_file_is_refused(captured: Path, sample: Sample) -> None:
    captured.unlink()
    with pytest.raises(SetAside, match="without a file"):
        check_file(captured, sample.token_ids, expecting())


def test_other_layers_than_asked_stop_the_stage(captured: Path, sample: Sample) -> None:
    write_shard(captured, states_of(sample.token_ids), sample.token_ids, header_of([1, 3, 4, 8]))
    with pytest.raises(PipelineError, match=r"\[1, 3, 4, 8\], asked were \[2, 4, 5, 8\]"):
        check_file(captured, sample.token_ids, expecting())


def test_three_layers_where_four_were_asked_stop_the_stage(captured: Path, sample: Sample) -> None:
    write_shard(captured, states_of(sample.token_ids)[:, :3], sample.token_ids, header_of(LAYERS))
    with pytest.raises(PipelineError, match="3 layers where 4 were asked: this vLLM is too old"):
        check_file(captured, sample.token_ids, expecting())


@contextlib.contextmanager
def locked(captured: Path) -> Iterator[TextIO]:
    """The connector's lock on a file that is being written."""
    with captured.with_name(captured.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def test_a_file_that_is_being_written_is_waited_for(captured: Path) -> None:
    with locked(captured) as lock:
        release = threading.Timer(0.3, lambda: fcntl.flock(lock, fcntl.LOCK_UN))
        started = time.monotonic()
        release.start()
        asyncio.run(wait_for_writer(captured, timeout_s=5))
        assert 0.25 < time.monotonic() - started < 2
        release.join()


def test_a_file_that_is_never_finished_is_given_up_after_the_timeout(captured: Path) -> None:
    started = time.monotonic()
    with locked(captured), pytest.raises(SetAside, match="not written within"):
        asyncio.run(wait_for_writer(captured, timeout_s=0.2))
    assert 0.2 <= time.monotonic() - started < 2


def test_a_file_that_was_named_without_a_lock_is_refused(captured: Path) -> None:
    with pytest.raises(SetAside, match="no lock"):
        asyncio.run(wait_for_writer(captured, timeout_s=1))


# ---- the stage


def fault(engine: Engine, question: str, name: str, times: float = float("inf")) -> None:
    """What is written in place of the question's sound file."""
    engine.faults[tuple(tokens_of(question))] = (name, times)


def asked(engine: Engine) -> dict[str, int]:
    """Captures of each question; the parity gate's are not counted."""
    by_tokens = {tuple(tokens_of(question)): question for question in SPLITS}
    counts = {by_tokens.get(ids, "another"): count for ids, count in engine.server.captures.items()}
    return {question: count for question, count in counts.items() if count}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    with FaultServer() as server, contextlib.closing(Engine(server)) as running:
        monkeypatch.setattr(vllm, "serve", running.serve)
        yield running


def write_traces(
    stage: Stage,
    finish_reasons: dict[str, str],
    outputs: dict[str, list[int]] | None = None,
    splits: dict[str, str] | None = None,
) -> Result:
    """The work of stage 01b: a trace for each question, in an order of its own."""
    rows = [
        {
            "id": prompt_id(question),
            "prompt_token_ids": prompt_of(question),
            "output_token_ids": (outputs or {}).get(question, output_of(question)),
            "reasoning": "thinking",
            "content": "answer",
            "finish_reason": finish_reasons.get(question, "stop"),
            "flags": ["cut_off"] if finish_reasons.get(question) == "length" else [],
        }
        for question in reversed(splits or SPLITS)
    ]
    (stage.folder / TRACES_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Result([TRACES_FILE], {"traces": len(rows)})


def new_run(
    folder: Path,
    *,
    extraction: dict[str, Any] | None = None,
    max_model_len: int = 1024,
    cut_off: str = "keep",
    finish_reasons: dict[str, str] | None = None,
    splits: dict[str, str] = SPLITS,
    outputs: dict[str, list[int]] | None = None,
) -> Run:
    """A run whose stages 01 and 01b are done."""
    config = Config(
        verifier=Verifier(path=str(write_verifier(folder / "verifier"))),
        server=ServerSettings(max_model_len=max_model_len),
        extraction=Extraction(**({"concurrency": 3, "request_timeout_s": 5, "cut_off": cut_off} | (extraction or {}))),
    )
    run = Run(folder / "run", config)
    finish_stage(run, PROMPTS, lambda stage: write_prompts(stage, splits))
    finish_stage(run, TRACES, lambda stage: write_traces(stage, finish_reasons or {}, outputs, splits))
    return run


def capture(run: Run) -> Result:
    return finish_stage(run, HIDDEN, extract)


def shard(run: Run, question: str) -> Path:
    return run.folder("02_hidden") / SHARDS / f"{prompt_id(question)}.safetensors"


def dataset_of(run: Run) -> Path:
    return run.folder("02_hidden") / DATASET


def assert_speculators_reads(run: Run, questions: list[str]) -> None:
    """Every row of the data set, through speculators' ArrowDataset, is what was captured for its question."""
    from speculators.train.data import ArrowDataset

    rows = ArrowDataset(max_len=512, datapath=str(dataset_of(run)), on_missing="raise")
    assert len(rows) == len(questions)
    for number, question in enumerate(questions):
        row, ids = rows[number], tokens_of(question)
        states = states_of(ids)
        assert row["input_ids"].tolist() == ids
        assert torch.equal(row["hidden_states"], states[:, :3].flatten(1))
        assert torch.equal(row["verifier_last_hidden_states"], states[:, 3])
        assert row["loss_mask"].tolist() == [0] * len(prompt_of(question)) + [1] * (len(output_of(question)) - 1)


def test_speculators_own_dataset_reads_back_what_was_captured(tmp_path: Path, engine: Engine) -> None:
    run = new_run(tmp_path)
    result = capture(run)
    assert_speculators_reads(run, [*TRAIN, *VAL])
    assert asked(engine) == dict.fromkeys([*TRAIN, *VAL], 1)
    assert (result.summary["train"], result.summary["val"], result.summary["set_aside"]) == (5, 2, 0)
    assert result.summary["tokens"] == sum(len(tokens_of(question)) for question in [*TRAIN, *VAL])


def test_train_rows_come_first_and_the_evaluation_split_is_absent(tmp_path: Path, engine: Engine) -> None:
    import datasets

    run = new_run(tmp_path)
    capture(run)
    table = datasets.load_from_disk(str(dataset_of(run))).with_format(None)
    assert table["split"] == ["train"] * 5 + ["val"] * 2
    assert table["id"] == [prompt_id(question) for question in [*TRAIN, *VAL]]
    assert table["seq_len"] == [len(tokens_of(question)) for question in [*TRAIN, *VAL]]
    assert not shard(run, EVAL[0]).exists()


@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_speculators_loaders_split_at_the_boundary_and_pack_the_captured_values(tmp_path: Path, engine: Engine) -> None:
    from speculators.train.dataloader import create_train_val_loaders

    run = new_run(tmp_path)
    capture(run)
    loaders = create_train_val_loaders(
        data_path=str(dataset_of(run)),
        total_seq_len=128,
        hidden_states_dtype=torch.bfloat16,
        vllm_endpoint="",
        on_missing="raise",
        verifier_name_or_path="unused",
        request_timeout=None,
        max_retries=0,
        generation_validation_retries=0,
        max_consecutive_generation_failures=1,
        hidden_size=HIDDEN_SIZE,
        num_target_layers=3,
        num_workers=0,
        prefetch_factor=4,
        preprocess=None,
        train_data_ratio=5.5 / 7,
    )
    for loader, questions in zip(loaders, (TRAIN, VAL), strict=True):
        unseen = {tuple(tokens_of(question)): question for question in questions}
        for batch in loader:
            for document in range(int(batch["document_ids"].max()) + 1):
                here = batch["document_ids"][0] == document
                ids = tuple(batch["input_ids"][0, here].tolist())
                question = unseen.pop(ids)
                states = states_of(list(ids))
                assert torch.equal(batch["hidden_states"][0, here], states[:, :3].flatten(1))
                assert torch.equal(batch["verifier_last_hidden_states"][0, here], states[:, 3])
                assert batch["loss_mask"][0, here].sum() == len(output_of(question)) - 1
        assert unseen == {}


def test_a_moved_run_is_still_read(tmp_path: Path, engine: Engine) -> None:
    run = new_run(tmp_path)
    capture(run)
    shutil.move(run.path, tmp_path / "elsewhere")
    moved = Run(tmp_path / "elsewhere", run.config)
    assert_speculators_reads(moved, [*TRAIN, *VAL])
    for link in (dataset_of(moved) / LINKS).iterdir():
        assert not link.readlink().is_absolute()
    texts = [path for path in moved.folder("02_hidden").rglob("*") if path.suffix in (".json", ".jsonl")]
    assert texts
    for path in texts:
        assert str(tmp_path) not in path.read_text(), f"{path.name} names a path of this machine"


def test_the_index_vouches_for_each_shard_by_digest_and_size(tmp_path: Path, engine: Engine) -> None:
    run = new_run(tmp_path)
    capture(run)
    rows = rows_of(run.folder("02_hidden") / INDEX)
    assert [row["id"] for row in rows] == [prompt_id(question) for question in [*TRAIN, *VAL]]
    for row, question in zip(rows, [*TRAIN, *VAL], strict=True):
        content = shard(run, question).read_bytes()
        assert row["sha256"] == hashlib.sha256(content).hexdigest()
        assert (row["bytes"], row["tokens"]) == (len(content), len(tokens_of(question)))


@pytest.mark.parametrize(
    "name", ["fewer rows", "NaN", "cut short", "failed write", "no file", "never finished", "not JSON"]
)
def test_a_fault_that_passes_costs_one_more_request(tmp_path: Path, engine: Engine, name: str) -> None:
    fault(engine, TRAIN[1], name, 1)
    run = new_run(tmp_path, extraction={"request_timeout_s": 0.5} if name == "never finished" else None)
    result = capture(run)
    assert result.summary["set_aside"] == 0
    assert asked(engine)[TRAIN[1]] == 2
    assert_speculators_reads(run, [*TRAIN, *VAL])


def test_a_sample_that_stays_unsound_is_set_aside_and_leaves_no_gap(tmp_path: Path, engine: Engine) -> None:
    fault(engine, TRAIN[1], "NaN")
    run = new_run(tmp_path, extraction={"max_set_aside": 0.2})
    result = capture(run)
    (row,) = rows_of(run.folder("02_hidden") / ERRORS)
    assert row["id"] == prompt_id(TRAIN[1])
    assert "layer 5" in row["reason"]
    assert result.summary["set_aside"] == 1
    assert_speculators_reads(run, [TRAIN[0], *TRAIN[2:], *VAL])


def test_more_unsound_samples_than_allowed_are_refused_and_the_rest_is_kept(tmp_path: Path, engine: Engine) -> None:
    fault(engine, TRAIN[1], "NaN", 2)
    fault(engine, VAL[0], "fewer rows", 2)
    run = new_run(tmp_path, extraction={"max_set_aside": 0.2})
    with pytest.raises(PipelineError, match="2 of 7") as refused:
        capture(run)
    assert "layer 5" in str(refused.value)
    assert not dataset_of(run).exists()
    before = dict(asked(engine))
    capture(run)
    again = {question: count - before.get(question, 0) for question, count in asked(engine).items()}
    assert {question for question, count in again.items() if count} == {TRAIN[1], VAL[0]}
    assert_speculators_reads(run, [*TRAIN, *VAL])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("outside", "outside its staging folder"),
        ("other layers", "asked were"),
        ("another verifier", "files are of verifier 0123"),
        ("nothing named", "connector did not load"),
    ],
)
def test_a_server_that_captures_something_else_stops_the_stage_at_once(
    tmp_path: Path, engine: Engine, name: str, said: str
) -> None:
    for question in SPLITS:
        fault(engine, question, name)
    run = new_run(tmp_path, extraction={"concurrency": 1})
    with pytest.raises(PipelineError, match=said):
        capture(run)
    assert sum(asked(engine).values()) <= 2, "one with the engine, one being checked"
    assert list((run.folder("02_hidden") / SHARDS).iterdir()) == []


def test_a_stopped_stage_captures_only_what_is_missing(tmp_path: Path, engine: Engine) -> None:
    fault(engine, TRAIN[4], "other layers", 1)
    run = new_run(tmp_path, extraction={"concurrency": 1})
    with pytest.raises(PipelineError):
        capture(run)
    kept = {question: shard(run, question).read_bytes() for question in SPLITS if shard(run, question).exists()}
    assert 0 < len(kept) < len([*TRAIN, *VAL])
    with (run.folder("02_hidden") / INDEX).open("ab") as index:
        index.write(b'{"id": "0123456789ab')  # torn by a kill
    capture(run)
    counts = asked(engine)
    assert counts.keys() == {*TRAIN, *VAL}
    assert all(counts[question] == 1 for question in kept)
    assert_speculators_reads(run, [*TRAIN, *VAL])
    assert all(shard(run, question).read_bytes() == content for question, content in kept.items())


def spoil_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def spoil_empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("spoil", [spoil_truncate, spoil_empty, Path.unlink])
def test_a_shard_that_is_no_longer_whole_is_made_again_and_no_other(
    tmp_path: Path, engine: Engine, spoil: Callable[[Path], None]
) -> None:
    run = new_run(tmp_path)
    capture(run)
    spoil(shard(run, TRAIN[2]))
    result = capture(run)
    assert asked(engine) == dict.fromkeys([*TRAIN, *VAL], 1) | {TRAIN[2]: 2}
    assert result.summary["extracted_tokens"] == len(tokens_of(TRAIN[2]))
    assert_speculators_reads(run, [*TRAIN, *VAL])


def test_a_shard_that_no_index_row_vouches_for_is_made_again(tmp_path: Path, engine: Engine) -> None:
    """As after a kill between the file's last rename and its row."""
    run = new_run(tmp_path)
    capture(run)
    index = run.folder("02_hidden") / INDEX
    index.write_text("".join(line for line in index.open() if prompt_id(TRAIN[0]) not in line))
    write_shard(shard(run, TRAIN[0]), torch.zeros(3, 4, HIDDEN_SIZE), [1, 2, 3], header_of(LAYERS))
    capture(run)
    assert asked(engine)[TRAIN[0]] == 2
    assert_speculators_reads(run, [*TRAIN, *VAL])


def test_a_trace_that_changed_is_captured_again_and_no_other(tmp_path: Path, engine: Engine) -> None:
    run = new_run(tmp_path)
    capture(run)
    traces = Stage(run, TRACES)
    # Of the same length, so that neither counts nor sizes tell.
    traces.finish(write_traces(traces, {}, outputs={TRAIN[3]: output_of(TRAIN[3])[::-1]}))
    capture(run)
    assert asked(engine) == dict.fromkeys([*TRAIN, *VAL], 1) | {"another": 1}
    changed = prompt_of(TRAIN[3]) + output_of(TRAIN[3])[:0:-1]
    tensors = load_file(shard(run, TRAIN[3]))
    assert tensors["token_ids"].tolist() == changed
    assert torch.equal(tensors["hidden_states"], states_of(changed))


def test_a_finished_stage_starts_no_server_again(tmp_path: Path, engine: Engine) -> None:
    run = new_run(tmp_path)
    capture(run)
    assert Stage(run, HIDDEN).begin(force=False) is False
    shutil.rmtree(dataset_of(run))  # only the index of what is there
    capture(run)
    assert engine.starts == 1
    assert_speculators_reads(run, [*TRAIN, *VAL])


@pytest.mark.parametrize(("cut_off", "left_out"), [("keep", 0), ("drop", 1)])
def test_cut_off_traces_are_kept_or_left_out_as_the_preset_says(
    tmp_path: Path, engine: Engine, cut_off: str, left_out: int
) -> None:
    run = new_run(tmp_path, cut_off=cut_off, finish_reasons={TRAIN[0]: "length", EVAL[0]: "length"})
    result = capture(run)
    assert result.summary["left_out"] == left_out
    assert_speculators_reads(run, [*TRAIN[left_out:], *VAL])


@pytest.mark.parametrize("empty", ["train", "val"])
def test_a_split_without_any_trace_is_refused_before_a_server_starts(
    tmp_path: Path, engine: Engine, empty: str
) -> None:
    splits = {question: "eval" if split == empty else split for question, split in SPLITS.items()}
    run = new_run(tmp_path, splits=splits)
    with pytest.raises(PipelineError, match=f"{empty} split"):
        capture(run)
    assert engine.starts == 0


# ---- kept in float8


def test_float8_shards_are_read_by_hs_connectors_own_transfer(tmp_path: Path, engine: Engine) -> None:
    from hs_connectors import FP8Transfer
    from speculators.train.data import ArrowDataset

    run = new_run(tmp_path, extraction={"storage_dtype": "float8_e4m3"})
    capture(run)
    shards = dataset_of(run) / LINKS
    rows = ArrowDataset(max_len=512, datapath=str(dataset_of(run)), on_missing="raise", transfer=FP8Transfer(shards))
    for number, question in enumerate([*TRAIN, *VAL]):
        row, states = rows[number], states_of(tokens_of(question)).float()
        assert row["input_ids"].tolist() == tokens_of(question)
        assert row["hidden_states"].dtype == torch.bfloat16
        read = torch.cat([row["hidden_states"], row["verifier_last_hidden_states"]], 1).float()
        # e4m3 keeps three bits after the leading one, and bfloat16 rounds scale and product: half a place of each.
        largest = states.flatten(1).abs().amax(1, keepdim=True)
        allowed = states.flatten(1).abs() * (2.0**-4 + 3 * 2.0**-9) + largest * 2.0**-10 / 448
        assert ((read - states.flatten(1)).abs() <= allowed).all()
    size = shard(run, TRAIN[0]).stat().st_size
    assert size < len(tokens_of(TRAIN[0])) * token_bytes(run.config) + 1000


def test_a_shard_of_another_type_than_asked_stops_the_stage(captured: Path, sample: Sample) -> None:
    with pytest.raises(PipelineError, match="dtype bfloat16, asked was float8_e4m3"):
        check_file(captured, sample.token_ids, expecting("float8_e4m3"))


def test_a_header_that_does_not_say_what_the_file_holds_is_refused(captured: Path, sample: Sample) -> None:
    write_shard(captured, states_of(sample.token_ids).float(), sample.token_ids, header_of(LAYERS))
    with pytest.raises(SetAside, match="kept in float32"):
        check_file(captured, sample.token_ids, expecting())


# ---- killed


def extract_in_this_process(run: Path, url: str, model: str) -> None:
    """Stage 02 of a run by hand against a server that is there; started in processes that are made to be killed."""

    @contextlib.contextmanager
    def attached(*_args: Any, **_options: Any) -> Iterator[vllm.Server]:
        yield vllm.Server(url, model)

    vllm.serve = attached
    _, config = parse(["--run", str(run)], "")
    finish_stage(Run(run, config), HIDDEN, extract)


def test_killed_at_twenty_moments_a_run_ends_with_the_same_shards(tmp_path: Path) -> None:
    questions = [f"Number {number}?" for number in range(160)]
    splits = {question: "val" if number % 8 == 0 else "train" for number, question in enumerate(questions)}
    rng = random.Random(0)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["torch", "datasets", "tests.test_extraction"])
    with FaultServer() as server, contextlib.closing(Engine(server)) as engine:
        run = new_run(tmp_path, splits=splits, extraction={"concurrency": 4})
        run.keep_config()
        folder = run.folder("02_hidden")
        engine.write_to((folder / "staging").resolve(), "bfloat16", verifier.fingerprint(run.config.verifier) or "")
        server.delay_s = 0.02
        kept: set[str] = set()
        for _ in range(20):
            process = processes.Process(target=extract_in_this_process, args=(run.path, server.url, server.models[0]))
            process.start()
            # Some are killed during the gate or while what is there is looked at.
            server.wait_until_answered(server.answered + rng.randint(1, 24), timeout_s=60)
            time.sleep(rng.random() * 0.02)
            process.kill()
            process.join()
            index = folder / INDEX
            lines = index.read_bytes().splitlines(keepends=True) if index.exists() else []
            whole = {json.loads(line)["id"] for line in lines if line.endswith(b"\n")}
            assert kept <= whole, "a kill lost states that were there before"
            kept = whole
        assert 0 < len(kept) < len(questions)
        server.delay_s = 0.0
        extract_in_this_process(run.path, server.url, server.models[0])
    for question in questions:
        tensors = load_file(shard(run, question))
        assert tensors["token_ids"].tolist() == tokens_of(question)
        assert torch.equal(tensors["hidden_states"], states_of(tokens_of(question)))
    rows = rows_of(folder / INDEX)
    assert [row["id"] for row in rows] == [prompt_id(question) for question in questions]
    assert all(
        row["sha256"] == hashlib.sha256(shard(run, q).read_bytes()).hexdigest()
        for row, q in zip(rows, questions, strict=True)
    )
    assert len(list((folder / SHARDS).iterdir())) == len(questions)
    assert not (folder / "staging").exists()


# ---- memory


def test_token_ids_are_never_all_in_memory(tmp_path: Path, engine: Engine) -> None:
    """Beyond what the number of samples costs: their ids, places and digests."""
    import tracemalloc

    peaks = {}
    for count in (100, 400):
        questions = [f"Question {number}?" for number in range(count)]
        splits = {question: "val" if number % 8 == 0 else "train" for number, question in enumerate(questions)}
        folder = tmp_path / str(count)
        run = new_run(folder, splits=splits, outputs={question: list(range(20, 2020)) for question in questions})
        stage = Stage(run, HIDDEN)
        stage.begin(force=False)
        tracemalloc.start()
        samples, _ = read_samples(stage)
        with Traces(run.folder("01b_traces") / TRACES_FILE) as traces:
            publish(stage.folder, map(traces.load, sorted(samples, key=lambda sample: sample.split)))
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    a_sample = (peaks[400] - peaks[100]) / 300
    assert a_sample < 2000 * 8 / 4, f"{a_sample:.0f} bytes a sample of 2,000 tokens"


# ---- what must fit


@pytest.mark.parametrize(("room", "fits"), [(0, False), (1, True)])
def test_the_longest_trace_and_one_token_more_must_fit_the_server(
    tmp_path: Path, engine: Engine, room: int, fits: bool
) -> None:
    longest = max(len(tokens_of(question)) for question in [*TRAIN, *VAL])
    run = new_run(tmp_path, max_model_len=longest + room)
    if fits:
        capture(run)
    else:
        with pytest.raises(PipelineError, match=r"server\.max_model_len"):
            capture(run)
    assert engine.starts == int(fits)


def test_a_disk_too_small_is_refused_before_a_server_starts_and_what_is_there_stays(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path)
    capture(run)
    shard(run, TRAIN[0]).unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Disk(2**40, 2**40 - 2**29, 2**29))
    with pytest.raises(PipelineError, match=r"0\.50 GiB free") as refused:
        capture(run)
    assert "--max-samples" in str(refused.value)
    assert engine.starts == 1
    assert all(shard(run, question).exists() for question in [*TRAIN[1:], *VAL])


class ShrinkingDisk:
    """Room for so many looks at the disk; then it is full, until `room` is given again."""

    def __init__(self, looks: int):
        self.looks = looks

    def __call__(self, _path: Path) -> Disk:
        self.looks -= 1
        free = 2**40 if self.looks >= 0 else 2**29
        return Disk(2**40, 2**40 - free, free)


def test_a_disk_that_fills_up_stops_the_stage_between_samples_and_it_goes_on_when_there_is_room(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path, extraction={"concurrency": 1})
    disk = ShrinkingDisk(looks=4)  # the first before the server starts
    monkeypatch.setattr(shutil, "disk_usage", disk)
    with pytest.raises(DiskFull, match=r"0\.50 GiB free.*make room"):
        capture(run)
    kept = {question: shard(run, question).read_bytes() for question in SPLITS if shard(run, question).exists()}
    assert 0 < len(kept) <= 3
    disk.looks = 1000
    capture(run)
    assert all(asked(engine)[question] == 1 for question in kept)
    assert_speculators_reads(run, [*TRAIN, *VAL])


def test_a_full_disk_in_the_servers_writer_stops_the_stage_and_sets_no_sample_aside(
    tmp_path: Path, engine: Engine
) -> None:
    fault(engine, TRAIN[2], "disk full", 1)
    run = new_run(tmp_path)
    with pytest.raises(DiskFull, match="No space left on device"):
        capture(run)
    assert rows_of(run.folder("02_hidden") / ERRORS) == []
    capture(run)
    assert_speculators_reads(run, [*TRAIN, *VAL])


def test_a_full_disk_of_our_own_writing_is_no_traceback(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path)

    def full(*_args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(JsonlLog, "append", full)
        with pytest.raises(DiskFull, match="make room"):
            capture(run)
    capture(run)
    assert_speculators_reads(run, [*TRAIN, *VAL])


def test_staging_on_another_file_system_is_refused_and_what_lay_in_it_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "staging").mkdir()
    (tmp_path / "staging" / "left.safetensors").write_text("of a killed run")
    assert list(fresh_staging(tmp_path, tmp_path / "shards").iterdir()) == []
    elsewhere = Path("/dev/shm")
    if elsewhere.stat().st_dev != tmp_path.stat().st_dev:
        with pytest.raises(PipelineError, match="different file systems"):
            fresh_staging(tmp_path, elsewhere)


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", 57_344), ("float32", 114_688), ("float8_e4m3", 28_676)])
def test_a_token_of_kimi_k2_5_takes_57344_bytes(tmp_path: Path, dtype: str, expected: int) -> None:
    kimi = write_config(tmp_path, hidden_size=7168, num_hidden_layers=61, vocab_size=163840)
    config = Config(verifier=Verifier(path=str(kimi)), extraction=Extraction(storage_dtype=dtype))
    assert token_bytes(config) == expected


# ---- tokens in flight


def test_no_more_tokens_are_under_way_than_allowed_and_every_sample_gets_its_turn() -> None:
    most, rng = 100, random.Random(3)
    lengths = [rng.randint(1, 60) for _ in range(200)] + [250]
    under_way: list[int] = []
    seen: list[int] = []

    async def sample(flight: TokensInFlight, tokens: int) -> None:
        async with flight.taken(tokens):
            under_way.append(tokens)
            seen.append(sum(under_way))
            assert sum(under_way) <= most or under_way == [250]
            await asyncio.sleep(0)
            under_way.remove(tokens)

    async def all_of_them() -> None:
        flight = TokensInFlight(most)
        await asyncio.gather(*(sample(flight, tokens) for tokens in lengths))

    asyncio.run(asyncio.wait_for(all_of_them(), 30))
    assert len(seen) == len(lengths)
    assert max(total for total in seen if total <= most) > 0.8 * most


def test_requests_are_held_back_by_their_tokens_too(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = max(len(tokens_of(question)) for question in SPLITS)
    run = new_run(tmp_path, extraction={"concurrency": 8, "tokens_in_flight": longest})
    engine.server.delay_s = 0.05
    under_way: list[int] = []
    seen: list[int] = []
    prefill = Capturer.prefill

    async def watched(self: Capturer, token_ids: list[int], name: str, **options: Any) -> Any:
        if name.startswith("canary"):
            return await prefill(self, token_ids, name, **options)
        under_way.append(len(token_ids))
        seen.append(sum(under_way))
        try:
            return await prefill(self, token_ids, name, **options)
        finally:
            under_way.remove(len(token_ids))

    monkeypatch.setattr(Capturer, "prefill", watched)
    capture(run)
    assert len(seen) == len([question for question, split in SPLITS.items() if split != "eval"])
    assert max(seen) <= longest
