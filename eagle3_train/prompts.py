"""Stage 01: data sets of conversations become prompts.jsonl, one question (or conversation) a row.

Row: `id` (hash of the messages' content), `messages` [{role, content}], `source`, `split` (train | val | eval);
with `prompts.turns: all` also `follow_ups`, the later user turns in order.

A question's id, whether it is in the sample and which split it is in depend on its content and the seed alone, never
on the order of a file or on how many others there are. All turns of a conversation share its split.

Memory stays flat: candidates go to a staging file, and only a hash and a file position of each are held.
"""

from __future__ import annotations

import gzip
import hashlib
import heapq
import io
import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from eagle3_train import charts
from eagle3_train.config import Config, Prompts, Source
from eagle3_train.errors import PipelineError
from eagle3_train.progress import bar
from eagle3_train.run import ERRORS, Result, Stage, atomic, check_set_aside

PROMPTS_FILE, PICTURE = "prompts.jsonl", "prompts.png"
SPLITS = ("train", "val", "eval")
FILE_KINDS = (".json", ".jsonl", ".parquet")
COMPRESSED = (".gz", ".zst")
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
_LANGUAGES_LOOKED_AT = 5000
_DEEPEST_JSON = 200
_HASH_TOP = 2**64


class BadRow(Exception):
    """Why a row cannot be used: counted and listed, never fatal by itself."""


def prepare(stage: Stage) -> Result:
    """Read the sources, set aside what cannot be used, sample, split, and write prompts.jsonl."""
    settings = stage.config.prompts
    counts: Counter[str] = Counter()
    measure = _TokenCounter(stage.config)
    with tempfile.TemporaryFile("w+b", dir=stage.folder) as staging:
        samples = _read_sources(stage, staging, measure, counts)
        if not counts["rows"]:
            raise PipelineError(f"prompts.source {' '.join(s.source.path for s in samples)} holds no rows")
        check_set_aside("rows", counts["set aside"], counts["rows"], settings.max_set_aside, stage.folder / ERRORS)
        chosen = _mix(samples, settings.max_samples)
        splits = assign_splits([key.id for key in chosen], settings)
        looked = _Look(measure, len(chosen))
        with atomic(stage.folder / PROMPTS_FILE) as file:
            for key in bar(chosen, desc="01 writing", unit="prompt"):
                staging.seek(key.offset)
                row = {"id": key.id, **json.loads(staging.readline()), "split": splits[key.id]}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                looked.at(row)
    charts.prompts(stage.folder / PICTURE, looked.lengths, looked.languages, looked.sources)
    by_split = Counter(splits.values())
    summary = {
        "prompts": len(chosen),
        **{split: by_split[split] for split in SPLITS},
        **counts,
        "by_source": dict(looked.sources.most_common()),
        "by_language": dict(looked.languages.most_common(20)),
        "p50_tokens": looked.percentile(0.5),
        "p95_tokens": looked.percentile(0.95),
        "max_tokens": looked.percentile(1.0),
    }
    lines = [
        f"{len(chosen)} prompts of {counts['rows']} rows: {by_split['train']} train, {by_split['val']} val, "
        f"{by_split['eval']} eval; {counts['duplicates']} duplicates, {counts['set aside']} set aside",
        f"tokens: p50 {summary['p50_tokens']}, p95 {summary['p95_tokens']}, longest {summary['max_tokens']}; languages "
        + ", ".join(f"{name} {share:.0%}" for name, share in looked.language_shares()),
    ]
    if len(looked.sources) > 1:
        lines.append("sources: " + ", ".join(f"{name} {count}" for name, count in looked.sources.most_common(12)))
    return Result([PROMPTS_FILE, ERRORS, PICTURE], summary, lines)


def _read_sources(stage: Stage, staging: IO[bytes], measure: _TokenCounter, counts: Counter[str]) -> list[_Sample]:
    """One sample of each source; counts rows, duplicates and those set aside, which errors.jsonl lists."""
    settings = stage.config.prompts
    seen: dict[bytes, _Key | None] = {}
    samples = []
    with atomic(stage.folder / ERRORS) as errors, bar(desc="01 prompts", unit="row") as progress:
        for source in settings.sources or [Source(path=settings.source)]:
            sample = _Sample(source, settings.max_samples)
            samples.append(sample)
            for where, row in read_rows(source.path, settings.hub_split):
                progress.update()
                counts["rows"] += 1
                try:
                    conversation = read_conversation(row, settings)
                    measure.check(conversation[0], settings.max_prompt_tokens)
                except BadRow as reason:
                    counts["set aside"] += 1
                    errors.write(json.dumps({"row": where, "reason": str(reason)}) + "\n")
                    continue
                name = source.name or _named_source(row) or where.rpartition(":")[0]
                counts["duplicates"] += sample.offer(staging, seen, conversation, name, settings.seed)
    return samples


class _Key:
    """What is held of a candidate while the sources are read: its id, its draw and its place in the staging file."""

    __slots__ = ("draw", "id", "normalised", "offset")

    def __init__(self, prompt_id: str, normalised: bytes, draw: float, offset: int):
        self.id, self.normalised, self.draw, self.offset = prompt_id, normalised, draw, offset

    def __lt__(self, other: _Key) -> bool:
        """Largest draw first: a heap then gives up the one that the sample can best do without."""
        return (self.draw, self.normalised) > (other.draw, other.normalised)


class _Sample:
    """The candidates of one source: its `limit` smallest draws, or all."""

    def __init__(self, source: Source, limit: int | None):
        self.source, self.limit = source, limit
        self.offered = 0
        self.kept: list[_Key] = []

    def offer(
        self,
        staging: IO[bytes],
        seen: dict[bytes, _Key | None],
        conversation: tuple[list[dict[str, str]], list[str]],
        name: str,
        seed: int,
    ) -> bool:
        """Take a candidate into the sample if it belongs there; True when its question was seen before.

        Args:
            staging: where candidates are written.
            seen: every question met so far -> its key while it is kept; of two that are alike, the one with the
                smaller id is kept, whichever came first.
            conversation: messages and follow-ups.
            name: of its source.
            seed: of the sample.
        """
        prompt_id, normalised = content_id(conversation[0]), _normalised(conversation[0])
        if normalised in seen:
            twin = seen[normalised]
            if twin is not None and prompt_id < twin.id:
                twin.id, twin.offset = prompt_id, _write(staging, conversation, name)
            return True
        self.offered += 1
        seen[normalised] = None
        # -log of a uniform number in (0, 1]: divided by a weight, the smallest draws are a weighted sample
        # (Efraimidis and Spirakis, Weighted random sampling, 2006), and a larger sample holds the smaller.
        draw = -math.log((_rank(seed, "sample", normalised.hex()) + 1) / _HASH_TOP)
        if self.limit is not None and len(self.kept) >= self.limit:
            if draw > self.kept[0].draw:
                return False
            seen[heapq.heappop(self.kept).normalised] = None
        key = _Key(prompt_id, normalised, draw, _write(staging, conversation, name))
        heapq.heappush(self.kept, key)
        seen[normalised] = key
        return False


def _write(staging: IO[bytes], conversation: tuple[list[dict[str, str]], list[str]], name: str) -> int:
    """Append a candidate to the staging file; returns its offset."""
    messages, follow_ups = conversation
    offset = staging.seek(0, io.SEEK_END)
    row = {"messages": messages, "source": name, **({"follow_ups": follow_ups} if follow_ups else {})}
    staging.write(json.dumps(row).encode() + b"\n")
    return offset


def _mix(samples: list[_Sample], limit: int | None) -> list[_Key]:
    """The final sample in order of its draws: sources in proportion to their weights, or as they come."""
    for sample in samples:
        if sample.source.weight is not None and sample.offered:
            # The weight is the source's; each of its questions carries an equal part of it.
            for key in sample.kept:
                key.draw *= sample.offered / sample.source.weight
    keys = [key for sample in samples for key in sample.kept]
    return sorted(keys, reverse=True)[:limit]


class _TokenCounter:
    """Counts tokens with the verifier's own tokenizer, loaded when first needed."""

    def __init__(self, config: Config):
        self._settings = config.verifier
        self._tokenizer: Any = None

    def count(self, messages: list[dict[str, str]]) -> int:
        """Tokens of the messages' text, without the template's own (a few a turn)."""
        if self._tokenizer is None:
            from eagle3_train import verifier

            self._tokenizer = verifier.tokenizer(self._settings)
        texts = [message["content"] for message in messages]
        return sum(len(ids) for ids in self._tokenizer(texts, add_special_tokens=False)["input_ids"])

    def check(self, messages: list[dict[str, str]], limit: int) -> None:
        # A byte-level vocabulary never makes more tokens than bytes: short questions need no look.
        if sum(len(m["content"].encode()) for m in messages) > limit and (tokens := self.count(messages)) > limit:
            raise BadRow(f"longer than prompts.max_prompt_tokens ({tokens} > {limit})")


class _Look:
    """Lengths, languages and sources of the sample, for the summary and the picture.

    The language is py3langid's guess, on an even part of at most `_LANGUAGES_LOOKED_AT` prompts.
    """

    def __init__(self, measure: _TokenCounter, total: int):
        import py3langid

        self._identify = py3langid.classify
        self._measure = measure
        self._every = max(1, -(-total // _LANGUAGES_LOOKED_AT))
        self._number = 0
        self.lengths: list[int] = []
        self.languages: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()

    def at(self, row: dict[str, Any]) -> None:
        self.lengths.append(self._measure.count(row["messages"]))
        self.sources[row["source"]] += 1
        if self._number % self._every == 0:
            self.languages[self._identify(row["messages"][-1]["content"][:1000])[0]] += 1
        self._number += 1

    def percentile(self, share: float) -> int:
        ordered = sorted(self.lengths)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    def language_shares(self, most: int = 5) -> list[tuple[str, float]]:
        total = sum(self.languages.values())
        return [(name, count / total) for name, count in self.languages.most_common(most)]


def read_rows(source: str, hub_split: str = "train") -> Iterator[tuple[str, Any]]:
    """(place, row) for every row of a file, a directory of files, or a hub data set.

    Raises:
        PipelineError: the source is not there, has no readable file, or is not what its name says.
    """
    path = Path(source)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if _kind(p) in FILE_KINDS and p.is_file())
        if not files:
            raise PipelineError(f"prompts.source {path}: no {', '.join(FILE_KINDS)} file in this directory")
        for file in files:
            yield from _read_file(file)
    elif path.is_file():
        yield from _read_file(path)
    elif source.count("/") == 1 and _kind(path) not in FILE_KINDS and not source.startswith((".", "/", "~")):
        yield from _read_hub(source, hub_split)
    else:
        raise PipelineError(f"prompts.source {source}: no such file or directory")


def _kind(path: Path) -> str:
    """The ending that says what a file is, under that of a compression."""
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def _read_file(path: Path) -> Iterator[tuple[str, Any]]:
    kind = _kind(path)
    if kind == ".parquet":
        if path.suffix in COMPRESSED:
            raise PipelineError(f"{path}: Parquet is compressed inside; unpack this file")
        yield from _read_parquet(path)
        return
    try:
        with _open(path) as file:
            head = file.peek(4096)[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
            rows = _read_array(file) if kind == ".json" and head == b"[" else _read_lines(file)
            for number, row in rows:
                yield f"{path.name}:{number}", row
    except (EOFError, OSError, ValueError, RecursionError) as error:
        raise PipelineError(f"{path}: cannot be read to its end: {error or type(error).__name__}") from None


def _open(path: Path) -> io.BufferedReader:
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.open(path))  # type: ignore[arg-type]
    if path.suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(str(path), "zstd"))
    return path.open("rb")


def _read_lines(file: Iterable[bytes]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file, 1):
        text = line.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace").strip()
        if text:
            try:
                yield number, json.loads(text)
            except (ValueError, RecursionError):
                yield number, text[:_SHORTEST_LINE_SHOWN]


def _read_array(file: io.BufferedReader) -> Iterator[tuple[int, Any]]:
    """The items of a JSON array, one at a time: the file may be larger than memory.

    Raises:
        ValueError: not whole, or nested beyond reason.
    """
    import ijson

    if file.peek(3).startswith(b"\xef\xbb\xbf"):
        file.read(3)
    number, depth, item = 0, 0, None
    try:
        for event, value in ijson.basic_parse(file, use_float=True):
            opens, closes = event in ("start_map", "start_array"), event in ("end_map", "end_array")
            if depth > 1 or (depth == 1 and not closes):
                item = item or ijson.ObjectBuilder()
                item.event(event, value)
            depth += opens - closes
            if depth > _DEEPEST_JSON:
                raise ValueError(f"nested deeper than {_DEEPEST_JSON} levels")
            if item is not None and depth == 1:
                number += 1
                yield number, item.value
                item = None
    except ijson.JSONError as error:
        raise ValueError(str(error).splitlines()[0]) from None


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            number = 0
            for batch in table.iter_batches(1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path.name}:{number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise PipelineError(f"{path}: cannot be read as Parquet: {str(error).splitlines()[0]}") from None


def _read_hub(source: str, split: str) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    try:
        for number, row in enumerate(load_dataset(source, split=split, streaming=True), 1):
            yield f"{source}:{number}", row
    except (DatasetNotFoundError, ConnectionError, ValueError, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise PipelineError(
            f"hub data set {source} (split {split}) could not be read: {reason}\n"
            "Check the name and the network, or give prompts.source a local file."
        ) from None


def _named_source(row: dict[str, Any]) -> str | None:
    named = row.get("source")
    return named.encode("utf-8", "replace").decode() if isinstance(named, str) and named else None


def read_conversation(row: Any, settings: Prompts) -> tuple[list[dict[str, str]], list[str]]:
    """The messages to ask first, and with `turns: all` the later user turns.

    Raises:
        BadRow: with the reason.
    """
    turns = list(_checked_turns(row))
    first = first_question(turns, settings.max_prompt_chars)
    later = []
    if settings.turns == "all":
        users = [turn["content"] for turn in turns if turn["role"] == "user"][1:]
        if any(not text.strip() for text in users):
            raise BadRow("an empty user turn")
        if sum(map(len, users)) > settings.max_prompt_chars:
            raise BadRow(f"longer than prompts.max_prompt_chars ({settings.max_prompt_chars})")
        later = users
    return first, later


def _checked_turns(row: Any) -> Iterator[dict[str, str]]:
    if not isinstance(row, dict):
        raise BadRow(f"not a JSON object: {str(row)[:_SHORTEST_LINE_SHOWN]!r}")
    if row.get("tools") not in (None, "", "[]", []):
        raise BadRow("offers tools, which a question on its own cannot carry")
    yield from _turns(row)


def first_question(turns: list[dict[str, str]], max_chars: int) -> list[dict[str, str]]:
    """The first user turn, after the system turn if there is one.

    Raises:
        BadRow: with the reason.
    """
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
        yield {"role": "user", "content": _text(plain) + (f"\n\n{_text(extra)}" if extra else "")}
        return
    if not isinstance(listed, list):
        raise BadRow("the conversation is not a list of turns")
    for turn in listed:
        if not isinstance(turn, dict):
            raise BadRow("a turn is not an object")
        if turn.get("tool_calls"):
            raise BadRow("calls a tool, which a question on its own cannot carry")
        # Parquet gives every turn the columns of all: the one that is not null counts.
        speaker = turn.get("from") if turn.get("from") is not None else turn.get("role")
        if not isinstance(speaker, str) or speaker not in ROLES:
            raise BadRow(f"unknown role {speaker!r}")
        said = turn.get("value") if turn.get("value") is not None else turn.get("content")
        yield {"role": ROLES[speaker], "content": _text(said)}


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
    """Equal for questions that differ in white space only."""
    text = "\n".join(f"{m['role']} {' '.join(m['content'].split())}" for m in messages)
    return hashlib.blake2b(text.encode("utf-8"), digest_size=12).digest()


def _rank(seed: int, purpose: str, prompt_id: str) -> int:
    """A number in [0, 2^64) that looks random and is always the same."""
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose} {prompt_id}".encode()).digest()[:8])


def hash_share(seed: int, purpose: str, prompt_id: str) -> float:
    """The same as a number in [0, 1)."""
    return _rank(seed, purpose, prompt_id) / _HASH_TOP


def assign_splits(ids: list[str], settings: Prompts) -> dict[str, str]:
    """A split for each id, by hash; every split gets at least one prompt.

    Raises:
        PipelineError: fewer than three prompts.
    """
    if len(ids) < len(SPLITS):
        raise PipelineError(f"{len(ids)} prompts are too few: train, val and eval need one each")
    shares = {prompt_id: hash_share(settings.seed, "split", prompt_id) for prompt_id in ids}
    splits = {}
    for prompt_id, share in shares.items():
        if share < settings.eval_fraction:
            splits[prompt_id] = "eval"
        elif share < settings.eval_fraction + settings.val_fraction:
            splits[prompt_id] = "val"
        else:
            splits[prompt_id] = "train"
    # Small samples only: the hashes may leave a split empty. It takes from the largest.
    choose: dict[str, Callable[[list[str]], str]] = {
        "eval": lambda members: min(members, key=shares.__getitem__),
        "val": lambda members: min(members, key=shares.__getitem__),
        "train": lambda members: max(members, key=shares.__getitem__),
    }
    for empty in (split for split in ("eval", "val", "train") if split not in splits.values()):
        largest, _ = Counter(splits.values()).most_common(1)[0]
        splits[choose[empty]([i for i, split in splits.items() if split == largest])] = empty
    return splits
