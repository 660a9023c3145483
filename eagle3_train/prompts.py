"""Stage 01: a data set of conversations becomes prompts.jsonl, one question a row.

Row: `id` (hash of the messages' content), `messages` [{role, content}], `source`, `split` (train | val | eval).

A question's id, whether it is in the sample and which split it is in depend on its content and the seed alone,
never on the order of a file or on how many others there are.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from eagle3_train.config import Prompts
from eagle3_train.errors import PipelineError
from eagle3_train.progress import bar
from eagle3_train.run import ERRORS, Result, Stage, atomic, check_set_aside

PROMPTS_FILE = "prompts.jsonl"
SPLITS = ("train", "val", "eval")
FILE_KINDS = (".json", ".jsonl", ".parquet")
# ShareGPT and OpenAI names for who speaks; an unknown one is set aside, never taken as the assistant.
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "system": "system",
}
PLAIN_KEYS = ("prompt", "question", "instruction")
_SHORTEST_LINE_SHOWN = 60


class BadRow(Exception):
    """Why a row cannot be used: counted and listed, never fatal by itself."""


def prepare(stage: Stage) -> Result:
    """Read the source, set aside what cannot be used, sample, split, and write prompts.jsonl."""
    settings = stage.config.prompts
    counts: Counter[str] = Counter()
    chosen: dict[str, tuple[int, dict[str, Any]]] = {}
    # Max-heap of the sample's ranks: the smallest max_samples are kept, whatever the order they come in.
    ranks: list[tuple[int, str]] = []
    seen: set[bytes] = set()
    with atomic(stage.folder / ERRORS) as errors:
        rows = bar(read_source(settings), desc="01 prompts", unit="row")
        for where, row in rows:
            counts["rows"] += 1
            try:
                messages = first_question(row, settings.max_prompt_chars)
            except BadRow as reason:
                counts["set aside"] += 1
                errors.write(json.dumps({"row": where, "reason": str(reason)}) + "\n")
                continue
            key = _normalised(messages)
            if key in seen:
                counts["duplicates"] += 1
                continue
            seen.add(key)
            prompt_id = content_id(messages)
            rank = _rank(settings.seed, "sample", prompt_id)
            chosen[prompt_id] = (rank, {"messages": messages, "source": str(row.get("source") or where.split(":")[0])})
            heapq.heappush(ranks, (-rank, prompt_id))
            if settings.max_samples is not None and len(ranks) > settings.max_samples:
                _, dropped = heapq.heappop(ranks)
                del chosen[dropped]
    if not counts["rows"]:
        raise PipelineError(f"prompts.source {settings.source} holds no rows")
    check_set_aside("rows", counts["set aside"], counts["rows"], settings.max_set_aside, stage.folder / ERRORS)
    splits = assign_splits(list(chosen), settings)
    with atomic(stage.folder / PROMPTS_FILE) as file:
        for prompt_id, (_, prompt) in sorted(chosen.items(), key=lambda item: item[1][0]):
            row = {"id": prompt_id, **prompt, "split": splits[prompt_id]}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    by_split = Counter(splits.values())
    summary = {"prompts": len(chosen), **{split: by_split[split] for split in SPLITS}, **counts}
    line = (
        f"{len(chosen)} prompts of {counts['rows']} rows: {by_split['train']} train, {by_split['val']} val, "
        f"{by_split['eval']} eval; {counts['duplicates']} duplicates, {counts['set aside']} set aside"
    )
    return Result([PROMPTS_FILE, ERRORS], summary, [line])


def read_source(settings: Prompts) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) for every row of a file, a directory of files, or a hub data set.

    Raises:
        PipelineError: the source is not there, has no readable file, or is not what its name says.
    """
    path = Path(settings.source)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in FILE_KINDS and p.is_file())
        if not files:
            raise PipelineError(f"prompts.source {path}: no {', '.join(FILE_KINDS)} file in this directory")
        for file in files:
            yield from _read_file(file)
    elif path.is_file():
        yield from _read_file(path)
    elif settings.source.count("/") == 1 and path.suffix not in FILE_KINDS and not settings.source.startswith("."):
        yield from _read_hub(settings)
    else:
        raise PipelineError(f"prompts.source {settings.source}: no such file or directory")


def _read_file(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(path) as table:
                batches = (row for batch in table.iter_batches(1024) for row in batch.to_pylist())
                for number, row in enumerate(batches, 1):
                    yield f"{path.name}:{number}", row
        except pyarrow.ArrowInvalid as error:
            raise PipelineError(f"{path}: not a Parquet file ({error})") from None
        return
    with path.open("rb") as file:
        first = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if path.suffix == ".json" and first == b"[":
        try:
            rows = json.loads(path.read_text(encoding="utf-8-sig", errors="replace"))
        except ValueError as error:
            raise PipelineError(f"{path}: not valid JSON: {error}") from None
        for number, row in enumerate(rows, 1):
            yield f"{path.name}:{number}", row
        return
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield f"{path.name}:{number}", json.loads(line)
            except ValueError:
                yield f"{path.name}:{number}", line.strip()


def _read_hub(settings: Prompts) -> Iterator[tuple[str, dict[str, Any]]]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    try:
        rows = load_dataset(settings.source, split=settings.hub_split, streaming=True)
        for number, row in enumerate(rows, 1):
            yield f"{settings.source}:{number}", row
    except (DatasetNotFoundError, ConnectionError, ValueError, OSError) as error:
        raise PipelineError(
            f"hub data set {settings.source} (split {settings.hub_split}) could not be read: "
            f"{str(error).splitlines()[0]}\nCheck the name and the network, or give prompts.source a local file."
        ) from None


def first_question(row: Any, max_chars: int) -> list[dict[str, str]]:
    """The messages to ask: the first user turn, after the system turn if there is one.

    Args:
        row: ShareGPT `conversations`, OpenAI `messages`, or a plain `prompt` / `question` / `instruction`.
        max_chars: longest question.

    Raises:
        BadRow: with the reason.
    """
    if not isinstance(row, dict):
        shown = str(row)[:_SHORTEST_LINE_SHOWN]
        raise BadRow(f"not a JSON object: {shown!r}")
    if row.get("tools"):
        raise BadRow("offers tools, which a question on its own cannot carry")
    turns = list(_turns(row))
    messages = [turn for turn in turns[:1] if turn["role"] == "system"]
    rest = turns[len(messages) :]
    if not rest:
        raise BadRow("no user turn")
    if rest[0]["role"] != "user":
        raise BadRow(f"opens with a turn of the {rest[0]['role']}")
    if len(rest) > 1 and rest[1]["role"] == "user":
        raise BadRow("two user turns in a row")
    question = rest[0]["content"]
    if not question.strip():
        raise BadRow("empty question")
    if len(question) > max_chars:
        raise BadRow(f"longer than prompts.max_prompt_chars ({max_chars})")
    return [*messages, rest[0]]


def _turns(row: dict[str, Any]) -> Iterator[dict[str, str]]:
    listed = next((row[key] for key in ("conversations", "messages") if row.get(key)), None)
    if listed is None:
        plain = next((row[key] for key in PLAIN_KEYS if row.get(key)), None)
        if plain is None:
            raise BadRow(f"none of conversations, messages, {', '.join(PLAIN_KEYS)}")
        extra = row.get("input") if isinstance(row.get("instruction"), str) else None
        yield {"role": "user", "content": _text(plain) + (f"\n\n{extra}" if extra else "")}
        return
    if not isinstance(listed, list):
        raise BadRow("the conversation is not a list of turns")
    for turn in listed:
        if not isinstance(turn, dict):
            raise BadRow("a turn is not an object")
        speaker = turn.get("from", turn.get("role"))
        if speaker not in ROLES:
            raise BadRow(f"unknown role {speaker!r}")
        yield {"role": ROLES[speaker], "content": _text(turn.get("value", turn.get("content")))}


def _text(content: Any) -> str:
    """The text of a turn, from a string or a list of text parts."""
    if isinstance(content, list):
        parts = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text":
                raise BadRow("a turn has a part that is not text")
            parts.append(part.get("text"))
        content = "".join(part for part in parts if isinstance(part, str))
    if not isinstance(content, str):
        raise BadRow("a turn without text")
    try:
        content.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRow("a lone surrogate, which is no text") from None
    if "\x00" in content:
        raise BadRow("a NUL character")
    return content


def content_id(messages: Iterable[dict[str, str]]) -> str:
    """16 hex digits that depend on the messages' roles and content alone."""
    canonical = json.dumps([[m["role"], m["content"]] for m in messages], ensure_ascii=False)
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()[:16]


def _normalised(messages: Iterable[dict[str, str]]) -> bytes:
    """Equal for questions that differ in white space or letter case only."""
    text = "\n".join(f"{m['role']} {' '.join(m['content'].split()).casefold()}" for m in messages)
    return hashlib.blake2b(text.encode("utf-8"), digest_size=12).digest()


def _rank(seed: int, purpose: str, prompt_id: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose} {prompt_id}".encode()).digest()[:8])


def assign_splits(ids: list[str], settings: Prompts) -> dict[str, str]:
    """A split for each id, by hash; val and eval get at least one prompt each.

    Raises:
        PipelineError: fewer than three prompts.
    """
    if len(ids) < len(SPLITS):
        raise PipelineError(f"{len(ids)} prompts are too few: train, val and eval need one each")
    ordered = sorted(ids, key=lambda prompt_id: _rank(settings.seed, "split", prompt_id))
    top = 2**64
    splits = {}
    for prompt_id in ordered:
        share = _rank(settings.seed, "split", prompt_id) / top
        if share < settings.eval_fraction:
            splits[prompt_id] = "eval"
        elif share < settings.eval_fraction + settings.val_fraction:
            splits[prompt_id] = "val"
        else:
            splits[prompt_id] = "train"
    # Small samples only: the hashes may leave a split empty.
    splits[ordered[0]] = "eval"
    if "val" not in splits.values():
        splits[next(i for i in ordered if i != ordered[0])] = "val"
    if "train" not in splits.values():
        splits[ordered[-1]] = "train"
    return splits
