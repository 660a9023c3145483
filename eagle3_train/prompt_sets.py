"""What stage 06 asks: the run's held-out split, a local file, or one of the field's usual sets by name.

A named set is read from `data/benchmarks/NAME.jsonl` (.json, .parquet) when it is there, else from the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_train.config import Prompts
from eagle3_train.errors import PipelineError
from eagle3_train.prompts import FILE_KINDS, PROMPTS_FILE, BadRow, content_id, read_conversation, read_rows
from eagle3_train.run import Stage, read_jsonl

EVAL_SPLIT = "eval"
BENCHMARKS = Path(__file__).resolve().parent.parent / "data" / "benchmarks"
_READING = Prompts(max_prompt_chars=1_000_000)


@dataclass(frozen=True)
class NamedSet:
    """Where a set lies on the hub and how its row becomes a question.

    Attributes:
        repository: hub data set id.
        split: its split.
        question: row -> question; raises KeyError for a row of another form.
        configurations: the hub's subsets to read, one after the other.
    """

    repository: str
    split: str
    question: Callable[[dict[str, Any]], str]
    configurations: tuple[str | None, ...] = (None,)


def _first_turn(row: dict[str, Any]) -> str:
    # The hub's copy calls the turns `prompt`, FastChat's own question.jsonl `turns`.
    return (row["turns"] if "turns" in row else row["prompt"])[0]


def _problem(row: dict[str, Any]) -> str:
    return row["problem"] if "problem" in row else row["Problem"]


def _complete(row: dict[str, Any]) -> str:
    return f"Complete this Python function. Answer with the whole function.\n\n```python\n{row['prompt']}```"


def _multiple_choice(row: dict[str, Any]) -> str:
    return row["question"] + "".join(f"\n{letter}. {row[letter]}" for letter in "ABCD")


NAMED_SETS = {
    "mt_bench": NamedSet("HuggingFaceH4/mt_bench_prompts", "train", _first_turn),
    "gsm8k": NamedSet("openai/gsm8k", "test", lambda row: row["question"], ("main",)),
    "humaneval": NamedSet("openai/openai_humaneval", "test", _complete),
    "math500": NamedSet("HuggingFaceH4/MATH-500", "test", _problem),
    "aime": NamedSet("HuggingFaceH4/aime_2024", "train", _problem),
    "ceval": NamedSet(
        "ceval/ceval-exam",
        "val",
        _multiple_choice,
        ("chinese_language_and_literature", "high_school_physics", "computer_network", "law"),
    ),
}


def load(stage: Stage, name: str, limit: int) -> list[dict[str, Any]]:
    """The first `limit` prompts of a set: rows with `id` and `messages`.

    Raises:
        PipelineError: unknown name, unreadable, or no usable prompt.
    """
    if name == EVAL_SPLIT:
        rows = read_jsonl(stage.input("01_prompts") / PROMPTS_FILE)
        prompts = [row for row in rows if row["split"] == EVAL_SPLIT]
    elif Path(name).exists():
        prompts = list(_usable(row for _, row in read_rows(name)))
    elif name in NAMED_SETS:
        prompts = list(_named(name))
    else:
        raise PipelineError(
            f"evaluation.prompt_sets: {name} is no file and no known set; known: {', '.join((EVAL_SPLIT, *NAMED_SETS))}"
        )
    if not prompts:
        raise PipelineError(f"evaluation.prompt_sets: {name} holds no usable prompt")
    return prompts[:limit]


def _usable(rows: Iterator[Any]) -> Iterator[dict[str, Any]]:
    seen = set()
    for row in rows:
        try:
            messages, _ = read_conversation(row, _READING)
        except BadRow:
            continue
        prompt_id = content_id(messages)
        if prompt_id not in seen:
            seen.add(prompt_id)
            yield {"id": prompt_id, "messages": messages}


def _named(name: str) -> Iterator[dict[str, Any]]:
    known = NAMED_SETS[name]
    local = [BENCHMARKS / f"{name}{kind}" for kind in FILE_KINDS if (BENCHMARKS / f"{name}{kind}").exists()]
    rows = (row for _, row in read_rows(str(local[0]))) if local else _from_hub(known)
    try:
        yield from _usable({"prompt": known.question(row)} for row in rows)
    except (KeyError, TypeError, IndexError) as error:
        where = local[0] if local else known.repository
        raise PipelineError(f"{where}: not of the form of {name} ({type(error).__name__}: {error})") from None


def _from_hub(known: NamedSet) -> Iterator[dict[str, Any]]:
    from datasets import load_dataset

    for configuration in known.configurations:
        try:
            yield from load_dataset(known.repository, configuration, split=known.split)
        except (ConnectionError, ValueError, OSError) as error:
            raise PipelineError(
                f"{known.repository} could not be read from the hub: {str(error).splitlines()[0]}\n"
                f"Without a network, put the file into {BENCHMARKS}"
            ) from None
