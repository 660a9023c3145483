"""00: is this box, this verifier and this disk fit for this run?

The checks of the verifier's files and of the room for the run are here, those of the machine in `box_checks.py`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from eagle3_train import box_checks, planning, verifier
from eagle3_train.box import Box, look
from eagle3_train.box_checks import FAIL, GIB, PASS, PROJECT, WARN, Check, Served
from eagle3_train.config import Config, Verifier, parse
from eagle3_train.errors import PipelineError
from eagle3_train.export import tensor_table
from eagle3_train.extraction import token_bytes
from eagle3_train.prompts import PROMPTS_FILE
from eagle3_train.run import EXPORT, HIDDEN, MANIFEST, PROMPTS, TRACES, TRAIN, hardware, versions, write_text

FOLDER, REPORT = "00_preflight", "preflight.json"

# Activations, CUDA graphs and NCCL's buffers beside weights and cache.
WORKING_ROOM_BYTES = 4 * GIB
# Published prefill of this verifier on 8 x RTX PRO 6000 [tokens/s]: the pace at which states arrive.
PREFILL_RATE = 7900
FEW_FILES = 1000  # everything but shards
FULL_DISK = 0.8
WRITE_PROBE_BYTES = 256 << 20


class Expected(NamedTuple):
    """How much the run will hold: samples, their tokens, and where that is known from."""

    samples: int
    tokens: int
    basis: str


def main(argv: list[str] | None, description: str | None) -> int:
    """Check everything, print the table, write RUN/00_preflight/preflight.json.

    Returns:
        1 when a check failed, else 0.

    Raises:
        ConfigError: wrong arguments or preset.
        PipelineError: the run's folder cannot be made.
    """
    arguments, config = parse(argv, description or "")
    folder = arguments.run / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PipelineError(f"{folder} cannot be made ({error.strerror}); give --run a folder you may write") from None
    checks = inspect(config, arguments.run, look())
    report = {
        "passed": not any(check.status == FAIL for check in checks),
        "checks": [asdict(check) for check in checks],
        "hardware": hardware(),
        "versions": versions(),
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    write_text(folder / REPORT, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(table(checks))
    return 0 if report["passed"] else 1


def inspect(config: Config, run: Path, box: Box) -> list[Check]:
    """Every check that has a meaning here, in the order of the table.

    Args:
        config: the run's configuration.
        run: its directory, with the folder `00_preflight` in it; a probe file is written there and removed.
        box: this machine.
    """
    servers = box_checks.served(config)
    wants_gpus = bool(box.gpus) or any(server.gpus > 1 for server in servers)
    checks = [_ask(box_checks.gpus, config, box)]
    if wants_gpus:
        checks += [_ask(box_checks.driver, box), _ask(box_checks.kernels, box)]
    if box.gpus:
        checks.append(_ask(box_checks.free_gpu_memory, config, box))
    if box.links is not None:
        checks.append(_ask(box_checks.links, box))
    if any(server.numa_bind for server in servers):
        checks.append(_ask(box_checks.numactl))
    requirements = PROJECT / ("requirements.txt" if wants_gpus else "requirements-cpu.txt")
    checks += [
        _ask(box_checks.packages, requirements),
        _ask(box_checks.vllm_plugin),
        _ask(box_checks.shared_memory, config, box),
        _ask(box_checks.open_files, config, box),
    ]
    if len(box.gpus) > 1:
        checks.append(_ask(box_checks.locked_memory, box))
    checks += [
        _ask(box_checks.port, config),
        _ask(verifier_files, config.verifier),
        _ask(verifier_layers, config.verifier),
        _ask(verifier_head, config.verifier),
        _ask(tokenizer, config.verifier),
        _ask(chat_template, config),
        _ask(memory, config, box),
        _ask(disk, config, run),
        _ask(inodes, config, run),
        _ask(write_speed, config, run),
        _ask(box_checks.clock, run / FOLDER),
    ]
    return checks


def table(checks: list[Check]) -> str:
    """The checks as text: status, name, what was found, and below it the remedy of what does not pass."""
    wide = max(len(check.name) for check in checks)
    indent = " " * (6 + wide + 2)
    lines = []
    for check in checks:
        head = f"{check.status:4}  {check.name:{wide}}  "
        lines.append(textwrap.fill(check.found, 118, initial_indent=head, subsequent_indent=indent))
        if check.remedy:
            remedy = f"{indent}-> {check.remedy}"
            lines.append(textwrap.fill(remedy, 118, subsequent_indent=indent + "   ", break_on_hyphens=False))
    counted = ", ".join(f"{sum(check.status == s for check in checks)} {s}" for s in (PASS, WARN, FAIL))
    return "\n".join([*lines, f"\n{len(checks)} checks: {counted}"])


def _ask(check: Callable[..., Check], *facts: Any) -> Check:
    """The check's answer; what the library refuses is a failed check, in the library's own words."""
    try:
        return check(*facts)
    except PipelineError as error:
        found, _, remedy = str(error).partition("\n")
        return Check(check.__name__.replace("_", " "), FAIL, found, remedy or "mend that, then run preflight again")


# The verifier


def _directory(settings: Verifier) -> Path | None:
    """Where the verifier's files are on this machine; None for a hub id that is not all here yet."""
    where = verifier.location(settings)
    if Path(where).is_dir():
        return Path(where)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(where, local_files_only=True))
    except (LocalEntryNotFoundError, OSError):
        return None


def _not_here(name: str, settings: Verifier) -> Check:
    remedy = f"hf download {settings.path} --local-dir DIR, then verifier.path: DIR"
    return Check(name, WARN, f"{settings.path} is not on this machine: the first stage would download it", remedy)


def verifier_files(settings: Verifier) -> Check:
    """Every file of the index is there and whole, and holds the tensors the index says."""
    directory = _directory(settings)
    if directory is None:
        return _not_here("verifier files", settings)
    indexed: dict[str, set[str]] = defaultdict(set)
    for tensor, name in verifier.weight_files(settings).items():
        indexed[name].add(tensor)
    wrong, size = [], 0
    for name, wanted in sorted(indexed.items()):
        path = directory / name
        try:
            listed, whole_bytes = read_header(path)
        except FileNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        except (ValueError, KeyError, TypeError, AttributeError):
            wrong.append(f"{name} is no safetensors file, or is cut short in its header")
            continue
        found_bytes = path.stat().st_size
        size += found_bytes
        if found_bytes != whole_bytes:
            wrong.append(f"{name} has {found_bytes} bytes, its header says {whole_bytes}")
        if absent := sorted(wanted - listed.keys()):
            wrong.append(f"{name} lacks {absent[0]}" + (f" and {len(absent) - 1} more" if absent[1:] else ""))
    if wrong:
        more = f"; and {len(wrong) - 3} more files" if wrong[3:] else ""
        source = "copy them again (rsync -c)" if Path(settings.path).is_dir() else f"hf download {settings.path}"
        return Check("verifier files", FAIL, "; ".join(wrong[:3]) + more, source)
    tensors = sum(map(len, indexed.values()))
    return Check("verifier files", PASS, f"{len(indexed)} files, {tensors} tensors, {size / 1e9:.2f} GB, all whole")


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The tensors a safetensors file lists, and the size it must have [bytes]; its data are not read.

    Raises:
        FileNotFoundError: no such file.
        ValueError, KeyError, TypeError, AttributeError: not the start of a safetensors file.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path}: not a safetensors header")
        header = json.loads(file.read(length))
    tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    return tensors, 8 + length + end


def verifier_layers(settings: Verifier) -> Check:
    """The layers the draft reads are there, and differ."""
    sizes = verifier.text_config(settings)
    found = f"{verifier.captured_layer_ids(settings)} of {sizes.num_hidden_layers}, hidden size {sizes.hidden_size}"
    return Check("verifier layers", PASS, found)


def verifier_head(settings: Verifier) -> Check:
    """Embedding, head and final norm by exact key, shape and type; mapped into memory, not read."""
    if _directory(settings) is None:
        return _not_here("verifier head", settings)
    head = verifier.head_weights(settings)
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in head.items())
    return Check("verifier head", PASS, f"{shapes}, {next(iter(head.values())).dtype}")


def tokenizer(settings: Verifier) -> Check:
    """It loads, reads its own text back, and every special token lies within the vocabulary."""
    own = verifier.tokenizer(settings)
    text = "What is 12 + 30?\nà 日本 🙂"
    back = own.decode(own(text, add_special_tokens=False)["input_ids"])
    if back != text:
        remedy = "is tokenizer.json or tiktoken.model this verifier's?"
        return Check("tokenizer", FAIL, f"{text!r} is read back as {back!r}", remedy)
    special = verifier.special_token_ids(settings)
    size = verifier.text_config(settings).vocab_size
    if beyond := sorted(i for i in own.get_added_vocab().values() if i >= size):
        found = f"{len(beyond)} added tokens lie beyond the vocabulary of {size}: {beyond[:3]}"
        return Check("tokenizer", WARN, found, "is this tokenizer the verifier's own? Such tokens are never drafted")
    return Check(
        "tokenizer", PASS, f"{type(own).__name__}, {len(special)} special tokens up to {max(special, default=0)}"
    )


def chat_template(config: Config) -> Check:
    """A question as the template gives it ends where the verifier begins to think, and the think tags are tokens."""
    own, thinking = verifier.tokenizer(config.verifier), config.generation.thinking_share > 0
    question = [{"role": "user", "content": "What is 1 + 1?"}]
    try:
        text = own.apply_chat_template(question, add_generation_prompt=True, tokenize=False, thinking=thinking)
    except (ValueError, TypeError) as error:
        found = f"the template cannot be used: {str(error).splitlines()[0]}"
        return Check("chat template", FAIL, found, "chat_template.jinja of the verifier is needed beside its config")
    if not thinking:
        return Check("chat template", PASS, f"thinking is off; a question ends with {text[-30:]!r}")
    ids = own.convert_tokens_to_ids(["<think>", "</think>"])
    if None in ids or own.unk_token_id in ids:
        remedy = "a verifier without thinking: --generation.thinking_share 0"
        return Check("chat template", FAIL, f"<think> and </think> are no tokens of this tokenizer ({ids})", remedy)
    found = f"a question ends with {text[-30:]!r}; <think> is {ids[0]}, </think> {ids[1]}"
    if not text.rstrip().endswith("<think>"):
        return Check("chat template", WARN, found, "Kimi's opens <think>; is this its chat_template.jinja?")
    return Check("chat template", PASS, found)


# Room


def memory_need(config: Config, checkpoint_bytes: int, server: Served) -> tuple[int, int]:
    """Bytes that every GPU holds of the weights, and of one token's cache and states.

    Tensor parallelism splits the weights, and the cache by heads; MLA's compressed cache and the states to be saved
    (in bfloat16) are held by every GPU in full. Data parallelism spreads the experts too, which is left out here: the
    estimate is on the safe side.
    """
    sizes, parallel = verifier.text_config(config.verifier), config.verifier.tensor_parallel_size
    raw = sizes.raw
    if "kv_lora_rank" in raw:
        width = raw["kv_lora_rank"] + raw["qk_rope_head_dim"]
    else:
        heads = raw.get("num_key_value_heads") or raw["num_attention_heads"]
        head_dim = raw.get("head_dim") or sizes.hidden_size // raw["num_attention_heads"]
        width = 2 * max(1, heads // parallel) * head_dim
    states = len(verifier.captured_layer_ids(config.verifier)) * sizes.hidden_size if server.saves_states else 0
    per_token = sizes.num_hidden_layers * width * server.value_bytes + 2 * states
    return math.ceil(checkpoint_bytes / parallel), per_token


def memory(config: Config, box: Box) -> Check:
    """In every stage the weights, and the cache and states of one sequence of full length, fit."""
    directory = _directory(config.verifier)
    if directory is None:
        return _not_here("memory", config.verifier)
    files = sorted(set(verifier.weight_files(config.verifier).values()))
    present = [directory / name for name in files if (directory / name).exists()]
    if len(present) < len(files):
        return Check("memory", WARN, f"{len(files) - len(present)} weight files are missing", "see verifier files")
    checkpoint_bytes = sum(path.stat().st_size for path in present)
    weights = math.ceil(checkpoint_bytes / config.verifier.tensor_parallel_size)
    if not box.gpus and config.verifier.tensor_parallel_size == 1:
        return _host_memory(config, weights, box)
    smallest = min((gpu.total_bytes for gpu in box.gpus), default=0)
    parts, wanted, short = [], 0.0, []
    for server in box_checks.served(config):
        _, per_token = memory_need(config, checkpoint_bytes, server)
        fixed, sequence = weights + WORKING_ROOM_BYTES, per_token * server.max_model_len
        wanted = max(wanted, (fixed + sequence) / server.memory_share)
        room = server.memory_share * smallest - fixed
        part = f"{server.stage} {server.memory_share:.0%}, {sequence / GIB:.1f} GiB for one sequence"
        part += f" ({server.max_model_len} x {per_token} bytes)"
        if box.gpus:
            part += f", {max(0, int(room / per_token))} tokens fit"
            short += [server.stage] if room < sequence else []
        parts.append(part)
    each = f"{smallest / GIB:.1f} GiB a GPU" if box.gpus else "of each GPU"
    found = f"{each}: {weights / GIB:.1f} of weights, {WORKING_ROOM_BYTES / GIB:.0f} to work in; {'; '.join(parts)}"
    remedy = f"GPUs of {wanted / GIB:.0f} GiB or more of them, or a smaller server.max_model_len"
    if not box.gpus:
        return Check("memory", WARN, found, remedy)
    if short:
        return Check("memory", FAIL, f"{found}: not enough for {', '.join(short)}", remedy)
    return Check("memory", PASS, found)


def _host_memory(config: Config, weights: int, box: Box) -> Check:
    need = weights + config.server.cpu_kv_cache_gib * GIB
    found = f"{need / GIB:.1f} GiB for weights and cache, {box.memory_free_bytes / GIB:.1f} GiB of RAM free"
    if need > box.memory_free_bytes:
        return Check("memory", FAIL, found, "a machine with GPUs, or more RAM, or a smaller verifier")
    return Check("memory", PASS, found)


def expected(config: Config, run: Path) -> Expected | None:
    """Samples and tokens this run will hold; from its own traces where they are made. None: nobody can know."""
    manifest = run / TRACES.folder / MANIFEST
    if manifest.exists() and (made := json.loads(manifest.read_text(encoding="utf-8")))["state"] == "done":
        samples, tokens = made["summary"]["traces"], made["summary"]["output_tokens"]
        return Expected(samples, tokens + samples * planning.PRIOR_PROMPT_TOKENS, "this run's traces")
    samples = _samples(config, run / PROMPTS.folder / PROMPTS_FILE)
    if samples is None:
        return None
    length = planning.lengths(config, None)
    a_sample = length.prompt + length.output
    return Expected(samples, round(samples * a_sample), f"{a_sample:.0f} tokens a sample, as planned: {length.basis}")


def _samples(config: Config, prepared: Path) -> int | None:
    """Prompts as prepared, or what will be: `max_samples`, or the rows of local JSONL files if those are fewer."""
    if prepared.exists():
        return _lines(prepared)
    sources = [Path(source.path) for source in config.prompts.sources] or [Path(config.prompts.source)]
    if all(source.suffix == ".jsonl" and source.exists() for source in sources):
        rows = sum(map(_lines, sources))
        return min(rows, config.prompts.max_samples or rows)
    return config.prompts.max_samples


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def disk_need(config: Config, tokens: int) -> dict[str, int]:
    """Bytes that each stage leaves in its folder."""
    sizes, draft = verifier.text_config(config.verifier), config.draft
    vocabulary = config.vocabulary.draft_size or sizes.vocab_size
    shape = draft.model_dump() | {
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": draft.num_layers,
        "num_aux_hidden_states": len(verifier.aux_layer_ids(config.verifier)),
        "draft_vocab_size": vocabulary,
        "vocab_size": sizes.vocab_size,
    }
    weights = sum(math.prod(tensor) for tensor in tensor_table(shape).values())
    embedding = sizes.vocab_size * sizes.hidden_size
    # float32: every weight but the frozen embedding; and the optimizer's two moments of what is trained.
    checkpoint = 4 * weights + 8 * (weights - vocabulary * sizes.hidden_size)
    states = int(tokens * (1 - config.prompts.eval_fraction) * token_bytes(config))
    if config.in_waves:
        states = min(states, int((config.extraction.disk_budget_gb or 0) * 1e9))
    return {
        TRACES.folder: tokens * planning.TRACE_BYTES,
        HIDDEN.folder: states,
        TRAIN.folder: checkpoint * planning.checkpoints(config),
        EXPORT.folder: 2 * (weights + (embedding if config.export.keep_embeddings else 0)),
    }


def disk(config: Config, run: Path) -> Check:
    """What is still to be written fits on the run's disk."""
    known = expected(config, run)
    if known is None:
        return _unknown_size("disk")
    coming = {
        folder: max(0, size - _bytes_in(run / folder)) for folder, size in disk_need(config, known.tokens).items()
    }
    need, free = sum(coming.values()), shutil.disk_usage(run).free
    parts = ", ".join(f"{folder} {size / GIB:.1f}" for folder, size in coming.items())
    found = (
        f"{need / GIB:.1f} GiB to come ({parts}), {free / GIB:.1f} GiB free; "
        f"{known.samples} samples, {known.tokens / 1e6:.2f} M tokens ({known.basis})"
    )
    remedy = (
        "fewer samples (--max-samples), shorter answers (generation.max_tokens), states in waves "
        "(extraction.disk_budget_gb), or --run on a larger disk"
    )
    if need > free:
        return Check("disk", FAIL, found, remedy)
    if need > FULL_DISK * free:
        return Check("disk", WARN, f"{found}: it would be nearly full", remedy)
    return Check("disk", PASS, found)


def _bytes_in(folder: Path) -> int:
    """Bytes of the files below a folder; links count as nothing."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def inodes(config: Config, run: Path) -> Check:
    """A shard and a link for every sample; some filesystems run out of names before bytes."""
    known = expected(config, run)
    if known is None:
        return _unknown_size("inodes")
    filesystem = os.statvfs(run)
    need = 2 * known.samples + FEW_FILES
    if filesystem.f_files == 0:
        return Check("inodes", PASS, f"{need} files wanted; this filesystem sets no limit")
    found = f"{need} files wanted, {filesystem.f_favail} free inodes"
    if need > filesystem.f_favail:
        return Check("inodes", FAIL, found, "--run on a filesystem with more inodes (df -i), or remove small files")
    return Check("inodes", PASS, found)


def _unknown_size(name: str) -> Check:
    found = "not known: prompts.max_samples is null, and how many questions the source holds is not known yet"
    return Check(name, WARN, found, "--max-samples N, or run 01_prepare_data.py first")


def write_speed(config: Config, run: Path) -> Check:
    """The run's disk takes states as fast as the verifier can make them."""
    probe = run / FOLDER / ".write-probe"
    block = os.urandom(16 << 20)
    started = time.perf_counter()
    try:
        with probe.open("wb") as file:
            for _ in range(WRITE_PROBE_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        speed = WRITE_PROBE_BYTES / (time.perf_counter() - started)
    except OSError as error:
        return Check("write speed", FAIL, f"{run} cannot be written: {error.strerror}", "--run on another disk")
    finally:
        probe.unlink(missing_ok=True)
    a_token = token_bytes(config)
    found = f"{speed / 1e6:.0f} MB/s, states of {speed / a_token:.0f} tokens/s ({a_token} bytes each)"
    if speed < PREFILL_RATE * a_token:
        remedy = f"capture at up to {PREFILL_RATE} tokens/s will wait for it: --run on a local NVMe disk"
        return Check("write speed", WARN, found, remedy)
    return Check("write speed", PASS, found)
