"""Contract of waves: within a disk budget a training takes the steps of an unlimited disk, and nothing is lost.

Stages 02 and 04 are called in turn, as run_pipeline.sh does, in this process. The one stand-in is the engine, which
writes files as the connector in vLLM does; what training reads, learns and saves is real.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_train import charts, verifier, vocabulary
from eagle3_train import server as vllm
from eagle3_train.config import Config, Draft, Extraction, Training, Verifier, Vocabulary, parse
from eagle3_train.errors import ConfigError, MoreStates, PipelineError
from eagle3_train.extraction import INDEX, SHARDS, extract, wants_more
from eagle3_train.run import ERRORS, HIDDEN, PROMPTS, TRACES, TRAIN, VOCAB, Result, Run, Stage
from eagle3_train.training import train
from eagle3_train.waves import LEDGER, Wave, made_steps
from tests.conftest import FinishedRun, run_pipeline
from tests.fault_server import (
    HIDDEN_SIZE,
    TRACES_FILE,
    VOCABULARY,
    Engine,
    FaultServer,
    encode,
    finish_stage,
    prompt_id,
    rows_of,
    write_config,
    write_prompts,
    write_verifier,
)
from tests.small_training import assert_ends_alike, losses_of, steps_of

QUESTIONS = [f"Number {number}?" for number in range(100)]
SPLITS = {question: "val" if number % 10 == 0 else "train" for number, question in enumerate(QUESTIONS)}
TRAINED = [question for question, split in SPLITS.items() if split == "train"]
BUDGET_GB = 0.0014
EPOCHS = 2
TINY, ONE_PASS = "presets/tiny.yaml", ["--generation.capture", "one_pass"]


def output_of(question: str) -> list[int]:
    return encode(f"Answer to {question} " * random.Random(question).randint(4, 12))


def tokens_of(question: str) -> list[int]:
    return encode(f"user:{question}") + output_of(question)[:-1]


def write_traces(stage: Stage) -> Result:
    rows = [
        {
            "id": prompt_id(question),
            "prompt_token_ids": encode(f"user:{question}"),
            "output_token_ids": output_of(question),
            "finish_reason": "stop",
            "flags": [],
        }
        for question in QUESTIONS
    ]
    (stage.folder / TRACES_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Result([TRACES_FILE], {"traces": len(rows)})


def verifier_with_tokenizer(folder: Path) -> str:
    """The stand-in's three tensors, and the tiny verifier's tokenizer."""
    write_verifier(folder)
    write_config(folder, hidden_size=HIDDEN_SIZE, vocab_size=VOCABULARY, num_attention_heads=2, num_key_value_heads=2)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(verifier.location(Verifier(path="tiny"))) / name, folder)
    return str(folder)


def new_run(folder: Path, training: dict[str, Any] | None = None, **extraction: Any) -> Run:
    """A run whose stages 01 and 01b are done."""
    config = Config(
        verifier=Verifier(path=verifier_with_tokenizer(folder / "verifier")),
        extraction=Extraction(**({"concurrency": 3, "request_timeout_s": 5, "max_set_aside": 0.05} | extraction)),
        vocabulary=Vocabulary(draft_size=64),
        draft=Draft(num_attention_heads=2, num_key_value_heads=2, head_dim=8, intermediate_size=32),
        training=Training(
            **(
                {"epochs": EPOCHS, "pack_tokens": 512, "ttt_steps": 2, "dtype": "float32", "data_workers": 0}
                | {"lr": 4e-3, "trackers": [], "batch_size": 2}
                | (training or {})
            )
        ),
    )
    run = Run(folder / "run", config)
    finish_stage(run, PROMPTS, lambda stage: write_prompts(stage, SPLITS))
    finish_stage(run, TRACES, write_traces)
    run.keep_config()
    return run


@dataclass
class Watched:
    """What was seen of a run between its stages.

    Attributes:
        waves: as each was trained on.
        peak_bytes: most bytes that states, with those being written, ever took.
        deleted_untrained: shards that were deleted before a checkpoint had learnt them.
    """

    waves: list[Wave] = field(default_factory=list)
    peak_bytes: int = 0
    deleted_untrained: list[str] = field(default_factory=list)


def hold_states(run: Run) -> bool:
    """Stage 02 as its script runs it; whether there was anything to do."""
    stage = Stage(run, HIDDEN)
    with stage.locked():
        if not stage.begin(force=False, wants_more=wants_more):
            return False
        stage.finish(extract(stage))
    return True


def trained(run: Run) -> bool:
    """Stage 04 as its script runs it; False when it wants more states."""
    stage = Stage(run, TRAIN)
    with stage.locked():
        if stage.begin(force=False):
            try:
                stage.finish(train(stage))
            except MoreStates:
                return False
    return True


def wave_of(run: Run) -> Wave:
    return Wave(**json.loads((run.folder("02_hidden") / LEDGER).read_text()))


def on_disk(run: Run) -> set[str]:
    return {path.stem for path in (run.folder("02_hidden") / SHARDS).glob("*.safetensors")}


def bytes_of_states(run: Run) -> int:
    """Of finished and unfinished shards and the parity gate's own."""
    folder = run.folder("02_hidden")
    sizes = 0
    for path in folder.rglob("*.safetensors"):
        with contextlib.suppress(FileNotFoundError):
            sizes += 0 if path.is_symlink() else path.stat().st_size
    return sizes


def to_the_end(run: Run, most: int = 60) -> Watched:
    """02 and 04 in turn until every step is made, 03 after the first time."""
    seen = Watched()
    for _ in range(most):
        before = on_disk(run) if (run.folder("02_hidden") / SHARDS).exists() else set()
        hold_states(run)
        if run.config.in_waves:
            seen.waves.append(wave_of(run))
            # A checkpoint holds every step before this wave; what went belongs to those steps alone.
            assert made_steps(run) == wave_of(run).first_step
            gone = before - on_disk(run)
            seen.deleted_untrained += gone - taken_until(run, made_steps(run)) if gone else []
        if not (run.folder("03_vocab") / "manifest.json").exists():
            finish_stage(run, VOCAB, vocabulary.build)
        if trained(run):
            return seen
    raise AssertionError(f"not trained after {most} waves")


def taken_until(run: Run, step: int) -> set[str]:
    """Ids of the training samples that the steps before this one read, as stage 04's own order has them."""
    from eagle3_train.extraction import DATASET, train_lengths
    from eagle3_train.waves import training_order

    lengths = train_lengths(run.folder("02_hidden") / DATASET)
    rows = training_order(run.config, lengths, wave_of(run).room).rows(0, step)
    return {prompt_id(TRAINED[row]) for row in rows}


@pytest.fixture(autouse=True, scope="module")
def no_pictures() -> Iterator[None]:
    """Drawing them takes longer than all that is tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "_save", lambda _figure, path: path.touch())
        yield


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    torch.set_num_threads(1)
    with FaultServer() as server, contextlib.closing(Engine(server)) as running:
        monkeypatch.setattr(vllm, "serve", running.serve)
        yield running


def watch_disk(engine: Engine, run: Run, seen: list[int]) -> None:
    """Note the states' bytes whenever the engine has begun another file."""
    write = engine.server.capture

    def watched(*arguments: Any) -> Any:
        answer = write(*arguments)
        seen.append(bytes_of_states(run))
        return answer

    engine.server.capture = watched


def captures(engine: Engine) -> Counter[str]:
    """How often the states of each question were asked for; the parity gate's requests are not counted."""
    by_tokens = {tuple(tokens_of(question)): question for question in QUESTIONS}
    return Counter({by_tokens[ids]: count for ids, count in engine.server.captures.items() if ids in by_tokens})


@pytest.fixture(scope="module")
def unlimited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The same training with every state on disk."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch, FaultServer() as server, contextlib.closing(Engine(server)) as engine:
        patch.setattr(vllm, "serve", engine.serve)
        run = new_run(tmp_path_factory.mktemp("unlimited"))
        to_the_end(run)
        yield run


# ---- again


def test_in_waves_every_step_is_that_of_an_unlimited_disk(tmp_path: Path, engine: Engine, unlimited: Run) -> None:
    run = new_run(tmp_path, disk_budget_gb=BUDGET_GB)
    sizes: list[int] = []
    watch_disk(engine, run, sizes)
    seen = to_the_end(run)
    assert_ends_alike(run, unlimited)
    assert max(sizes) <= BUDGET_GB * 1e9
    assert max(sizes) < 0.7 * bytes_of_states(unlimited)
    assert seen.deleted_untrained == []
    assert len(seen.waves) >= 2 * EPOCHS
    assert [wave.number for wave in seen.waves] == list(range(1, len(seen.waves) + 1))
    assert [wave.first_step for wave in seen.waves[1:]] == [wave.last_step for wave in seen.waves[:-1]]
    assert seen.waves[-1].last_step == len(losses_of(unlimited))
    asked = captures(engine)
    # A wave may span the border of two epochs, and then reads what it has twice.
    assert all(1 <= asked[question] <= EPOCHS for question in TRAINED)
    assert all(asked[question] == 1 for question in QUESTIONS if SPLITS[question] == "val")


def test_stage_03_counts_all_training_tokens_whatever_is_on_disk(
    tmp_path: Path, engine: Engine, unlimited: Run
) -> None:
    run = new_run(tmp_path, disk_budget_gb=BUDGET_GB)
    hold_states(run)
    finish_stage(run, VOCAB, vocabulary.build)
    ours, theirs = (
        json.loads((one.folder("03_vocab") / "manifest.json").read_text())["outputs"] for one in (run, unlimited)
    )
    assert ours == theirs


def test_when_every_step_is_made_nothing_is_done_again(tmp_path: Path, engine: Engine) -> None:
    run = new_run(tmp_path, disk_budget_gb=BUDGET_GB)
    to_the_end(run)
    starts, digest = engine.starts, json.loads((run.folder("04_train") / "manifest.json").read_text())["digest"]
    assert not hold_states(run)
    assert not Stage(run, TRAIN).begin(force=False)
    assert engine.starts == starts
    assert json.loads((run.folder("04_train") / "manifest.json").read_text())["digest"] == digest


# ---- replay


def test_replayed_waves_extract_once_and_train_all_epochs_before_the_next(tmp_path: Path, engine: Engine) -> None:
    run = new_run(tmp_path, disk_budget_gb=BUDGET_GB, wave_epochs="replay")
    sizes: list[int] = []
    watch_disk(engine, run, sizes)
    seen = to_the_end(run)
    assert max(sizes) <= BUDGET_GB * 1e9
    assert seen.deleted_untrained == []
    assert captures(engine) == Counter(dict.fromkeys(QUESTIONS, 1))
    assert len(seen.waves) >= 2
    from eagle3_train.extraction import DATASET, train_lengths
    from eagle3_train.waves import training_order

    drawn = training_order(run.config, train_lengths(run.folder("02_hidden") / DATASET), seen.waves[0].room)
    trained_rows: list[int] = []
    for wave in seen.waves:
        taken = Counter(row for step in drawn.steps[wave.first_step : wave.last_step] for pack in step for row in pack)
        assert set(taken.values()) == {EPOCHS}
        trained_rows += taken
    assert sorted(trained_rows) == list(range(len(TRAINED)))
    assert sorted(steps_of(run)) == list(range(1, len(drawn.steps) + 1))


# ---- kills, faults, changes


class Stopped(BaseException):
    """Ends a stage as a signal does."""


def stop_after(engine: Engine, count: int) -> Callable[[], None]:
    """The engine's next captures but `count` end the stage; returns what makes it sound again."""
    write, left = engine.server.capture, [count]

    def stopping(*arguments: Any) -> Any:
        left[0] -= 1
        return b"{}" if left[0] < 0 else write(*arguments)

    engine.server.capture = stopping

    def mend() -> None:
        engine.server.capture = write

    return mend


def test_stopped_between_and_within_waves_a_run_ends_as_it_would_have(
    tmp_path: Path, engine: Engine, unlimited: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path, disk_budget_gb=BUDGET_GB, training={"checkpoint_steps": 1})
    hold_states(run)
    finish_stage(run, VOCAB, vocabulary.build)
    # Within a wave: after a step that a checkpoint holds.
    from eagle3_train.training_loop import _Loop

    optimize = _Loop._optimize

    def dies(loop: Any, *arguments: Any) -> None:
        if loop.made == 1:
            raise Stopped
        optimize(loop, *arguments)

    monkeypatch.setattr(_Loop, "_optimize", dies)
    with pytest.raises(Stopped):
        trained(run)
    monkeypatch.setattr(_Loop, "_optimize", optimize)
    assert made_steps(run) == 1
    assert not hold_states(run), "the wave that is trained on is whole"
    held = on_disk(run)
    assert not trained(run)
    # Within the next wave's extraction.
    from eagle3_train import extraction

    publish = extraction.publish
    monkeypatch.setattr(extraction, "publish", _raising(Stopped))
    with pytest.raises(Stopped):
        hold_states(run)
    monkeypatch.setattr(extraction, "publish", publish)
    asked = captures(engine)
    assert on_disk(run) != held
    with pytest.raises(PipelineError, match="stopped before its end"):
        trained(run)
    hold_states(run)
    assert captures(engine) == asked, "what the stopped stage had made is kept"
    to_the_end(run)
    assert_ends_alike(run, unlimited)


def _raising(error: type[BaseException]) -> Callable[..., None]:
    def fail(*_arguments: Any) -> None:
        raise error

    return fail


def test_a_sample_that_stays_unsound_is_left_out_of_its_steps_and_the_rest_is_learnt(
    tmp_path: Path, engine: Engine, unlimited: Run
) -> None:
    run = new_run(tmp_path, disk_budget_gb=BUDGET_GB, wave_epochs="replay")
    bad = TRAINED[7]
    engine.faults[tuple(tokens_of(bad))] = ("NaN", float("inf"))
    seen = to_the_end(run)
    assert [row["id"] for row in rows_of(run.folder("02_hidden") / ERRORS)] == [prompt_id(bad)]
    assert [row for wave in seen.waves for row in wave.left_out] == [7]
    assert len(losses_of(run)) == seen.waves[-1].last_step


def test_more_unsound_samples_than_allowed_stop_at_the_wave_that_has_them(tmp_path: Path, engine: Engine) -> None:
    run = new_run(tmp_path, disk_budget_gb=BUDGET_GB)
    for question in TRAINED[::4]:
        engine.faults[tuple(tokens_of(question))] = ("NaN", float("inf"))
    with pytest.raises(PipelineError, match="had to be set aside"):
        to_the_end(run)
    engine.faults.clear()
    to_the_end(run)
    assert rows_of(run.folder("02_hidden") / ERRORS) == []


def test_a_shard_that_is_lost_from_the_wave_is_made_again_and_no_other(tmp_path: Path, engine: Engine) -> None:
    run = new_run(tmp_path, disk_budget_gb=BUDGET_GB)
    hold_states(run)
    finish_stage(run, VOCAB, vocabulary.build)
    lost = next(question for question in TRAINED if prompt_id(question) in on_disk(run))
    (run.folder("02_hidden") / SHARDS / f"{prompt_id(lost)}.safetensors").unlink()
    with pytest.raises(PipelineError, match=r"rerun 02_extract_hidden\.py"):
        trained(run)
    before = captures(engine)
    assert hold_states(run)
    assert captures(engine) - before == Counter([lost])


def test_other_training_settings_are_refused_before_any_state_is_deleted(tmp_path: Path, engine: Engine) -> None:
    run = new_run(tmp_path, disk_budget_gb=BUDGET_GB)
    hold_states(run)
    finish_stage(run, VOCAB, vocabulary.build)
    assert not trained(run)
    held = on_disk(run)
    training = run.config.training.model_copy(update={"lr": 1e-3})
    changed = Run(run.path, run.config.model_copy(update={"training": training}))
    assert not hold_states(changed)
    with pytest.raises(PipelineError, match="made with another configuration"):
        trained(changed)
    assert on_disk(run) == held


def test_no_wave_is_made_while_training_reads_the_one_before(tmp_path: Path, engine: Engine) -> None:
    run = new_run(tmp_path, disk_budget_gb=BUDGET_GB)
    with Stage(run, TRAIN).locked(), pytest.raises(PipelineError, match=r"another process works on .*04_train"):
        hold_states(run)
    assert engine.starts == 0


def test_the_index_names_what_is_on_disk(tmp_path: Path, engine: Engine) -> None:
    run = new_run(tmp_path, disk_budget_gb=BUDGET_GB)
    for _ in range(2):
        hold_states(run)
        assert {row["id"] for row in rows_of(run.folder("02_hidden") / INDEX)} == on_disk(run)
        if not (run.folder("03_vocab") / "manifest.json").exists():
            finish_stage(run, VOCAB, vocabulary.build)
        assert not trained(run)


# ---- what a budget must be


def test_a_budget_too_small_is_refused_with_one_that_is_enough(tmp_path: Path, engine: Engine) -> None:
    run = new_run(tmp_path, disk_budget_gb=0.0002)
    with pytest.raises(PipelineError, match="must be") as refused:
        hold_states(run)
    enough = float(re.findall(r"must be ([\d.]+) or more", str(refused.value))[0])
    extraction = run.config.extraction.model_copy(update={"disk_budget_gb": enough})
    larger = Run(tmp_path / "larger", run.config.model_copy(update={"extraction": extraction}))
    finish_stage(larger, PROMPTS, lambda stage: write_prompts(stage, SPLITS))
    finish_stage(larger, TRACES, write_traces)
    to_the_end(larger)


def test_one_pass_cannot_keep_a_budget() -> None:
    with pytest.raises(ConfigError, match="two_pass"):
        parse(["--run", "x", "--preset", TINY, "--extraction.disk_budget_gb", "1", *ONE_PASS], "")


# ---- real engine


@pytest.mark.engine
def test_the_pipeline_trains_in_waves_on_a_real_server(default_run: FinishedRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for folder in ("01_prompts", "01b_traces"):
        shutil.copytree(default_run.path / folder, run / folder)
    shutil.copy(default_run.path / "run.yaml", run)
    budget = 0.017  # two thirds of what the states take
    waves = ["--extraction.disk_budget_gb", str(budget), "--extraction.wave_epochs", "replay"]
    done = run_pipeline(run, *waves, "--training.epochs", "4", FROM="02", TO="04")
    assert done.returncode == 0, done.stdout[-3000:]
    found = re.findall(r"^wave (\d+): .* for steps (\d+) to (\d+) of (\d+)$", done.stdout, re.MULTILINE)
    assert [int(wave[0]) for wave in found] == [1, 2]
    assert found[-1][2] == found[-1][3]
    assert bytes_of_states(Run(run, Config.model_construct())) <= budget * 1e9
    trained_on = json.loads((run / "04_train" / "manifest.json").read_text())["summary"]
    assert trained_on["steps"] == int(found[-1][3])
    assert trained_on["expected_acceptance_length"] > 2.5
