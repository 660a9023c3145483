"""What stage 06 shows: report.md, acceptance.csv, three pictures, the lines on the screen, and runs side by side."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

from eagle3_train import charts, model_card
from eagle3_train.errors import ConfigError, PipelineError
from eagle3_train.prompt_sets import EVAL_SPLIT
from eagle3_train.run import Stage, atomic, write_text

REPORT, TABLE = "report.md", "acceptance.csv"
BY_POSITION, BY_CONTEXT, SPEED_UP = "by_position.png", "by_context.png", "speed_up.png"
FILES = [REPORT, TABLE, BY_POSITION, BY_CONTEXT]
RESULTS = "results.json"
# Measured so much below what 04 expected, what is served is suspected before what was trained.
_FAR_BELOW = 0.3


def write(stage: Stage, results: dict[str, Any]) -> None:
    """Write every file of the report, and the acceptance into the draft's model card."""
    draft_tokens = results["draft_tokens"]
    charts.by_position(stage.folder / BY_POSITION, results["overall"], draft_tokens)
    charts.by_context(
        stage.folder / BY_CONTEXT,
        {way: {int(k): v for k, v in parts.items()} for way, parts in results["by_context"].items()},
        results["context_bucket"],
        draft_tokens,
    )
    if results["load"]["alone"]:
        charts.speed_up(stage.folder / SPEED_UP, results["load"])
    with atomic(stage.folder / TABLE) as file:
        writer = csv.writer(file)
        places = range(1, draft_tokens + 1)
        writer.writerow(
            ["prompts", "decoding", "mean_acceptance_length", "low", "high", "steps"]
            + [f"accepted_{p}" for p in places]
            + [f"conditional_{p}" for p in places]
        )
        for name, way, values in _rows(results):
            shares = values["accepted_by_position"] + values["conditional_by_position"]
            figures = [values["mean_acceptance_length"], *values["interval"]]
            rounded = [round(value, 4) for value in figures]
            writer.writerow([name, way, *rounded, values["steps"], *(round(share, 4) for share in shares)])
    write_text(stage.folder / REPORT, _markdown(stage, results))
    _refresh_card(stage, results)


def _refresh_card(stage: Stage, results: dict[str, Any]) -> None:
    export = stage.run.folder("05_export")
    if stage.config.evaluation.draft is None and (export / "config.json").exists():
        config = json.loads((export / "config.json").read_text(encoding="utf-8"))
        config = config.get("transformer_layer_config", {}) | config
        size = (export / "model.safetensors").stat().st_size
        write_text(export / "README.md", model_card.text(stage.run, config, size, results))


def lines(stage: Stage, results: dict[str, Any]) -> list[str]:
    """What the user sees at the end."""
    shown = [
        f"{way}: mean acceptance length {values['mean_acceptance_length']:.2f} of {1 + results['draft_tokens']} "
        f"({values['interval'][0]:.2f}-{values['interval'][1]:.2f}); accepted by position "
        + ", ".join(f"{share:.0%}" for share in values["accepted_by_position"])
        for way, values in results["overall"].items()
    ]
    scores = results["scores"]
    shown += [
        _expected_line(results["expected"]),
        f"greedy output identical with and without the draft: "
        f"{results['greedy_identical']} of {results['greedy_prompts']} prompts",
        f"sampled tokens' mean log-prob: {scores['with draft']['mean']:.3f} with the draft, "
        f"{scores['alone']['mean']:.3f} alone, {results['standard_errors_apart']:.1f} standard errors apart",
    ]
    shown += [
        f"{concurrency} in flight: {ours['output_throughput']:.0f} tok/s with the draft, "
        f"{theirs['output_throughput']:.0f} alone ({ours['output_throughput'] / theirs['output_throughput']:.2f} times)"
        for concurrency, ours, theirs in _speeds(results)
    ]
    return [*shown, f"report: {stage.folder / REPORT}"]


def _expected_line(expected: dict[str, Any]) -> str:
    if "left_out" in expected:
        return f"not beside what stage 04 expected: {expected['left_out']}"
    figures = [
        f"{of['expected']:.2f} {way} (measured {of['measured']:.2f}, {of['difference']:+.2f})"
        for way, of in expected["by_decoding"].items()
    ]
    return f"stage 04 had expected {', '.join(figures)}"


def diagnosis(stage: Stage, results: dict[str, Any]) -> str:
    """The usual causes of low acceptance, likeliest first, each with what this run's own figures say about it."""
    exported, vocab = (_summary(stage, folder) for folder in ("05_export", "03_vocab"))
    expected = results["expected"]
    causes = []
    if stage.config.evaluation.draft is not None:
        causes.append("another draft was measured: was it made for this verifier, and with these layer ids?")
    elif "left_out" in expected:
        causes.append(f"nothing that 04 expected can be compared with: {expected['left_out']}")
    else:
        greedy = expected["by_decoding"]["greedy"]
        figures = f"the validation split expected {greedy['expected']:.2f}, and {greedy['measured']:.2f} was measured"
        if greedy["difference"] > -_FAR_BELOW:
            causes.append(
                f"the draft is not trained enough: {figures}. More questions, more epochs; see 04_train/curves.png"
            )
            causes.append(
                "hidden states captured wrongly: training on them looks exactly like a draft that cannot learn"
            )
        else:
            causes.append(
                f"what is served is not what was trained: {figures}. Layer ids and norm flags of the served config; "
                "hidden states captured by another vLLM than the one that serves"
            )
    if set(results["prompts"]) != {EVAL_SPLIT}:
        causes.append("the prompts asked are unlike those trained on (see acceptance by prompt set in report.md)")
    if vocab:
        causes.append(
            f"the draft vocabulary is too small: it covers {vocab['val_coverage']:.2%} of the validation tokens"
        )
    if exported:
        causes.append(
            f"a damaged checkpoint: 05 checked {exported['tensors']} tensors and found logits equal to the trained "
            f"model's (largest difference {exported['largest_logit_difference']:.1e}), so this is unlikely"
        )
    by_context = list(results["by_context"]["greedy"].values())
    if len(by_context) > 1:
        first, last = by_context[0]["mean_acceptance_length"], by_context[-1]["mean_acceptance_length"]
        causes.append(f"long contexts: acceptance is {first:.2f} in the first bucket and {last:.2f} in the last")
    numbered = "\n".join(f"  {number}. {cause}" for number, cause in enumerate(causes, 1))
    return f"Usual causes, likeliest first:\n{numbered}\nThe report was written: {stage.folder / REPORT}"


def _summary(stage: Stage, folder: str) -> dict[str, Any]:
    path = stage.run.folder(folder) / "manifest.json"
    return json.loads(path.read_text(encoding="utf-8"))["summary"] if path.exists() else {}


def _rows(results: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    rows = [(name, way, values) for name, ways in results["acceptance"].items() for way, values in ways.items()]
    if len(results["acceptance"]) > 1:
        rows += [("all", way, values) for way, values in results["overall"].items()]
    return rows


def _speeds(results: dict[str, Any]) -> list[tuple[str, dict[str, float], dict[str, float]]]:
    ours, theirs = results["load"]["with draft"], results["load"]["alone"]
    return [(concurrency, ours[concurrency], theirs[concurrency]) for concurrency in ours if concurrency in theirs]


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def _percent(shares: list[float]) -> str:
    return " / ".join(f"{share:.1%}" for share in shares)


def _markdown(stage: Stage, results: dict[str, Any]) -> str:
    settings, draft_tokens = stage.config.evaluation, results["draft_tokens"]
    asked = ", ".join(f"{count} of {name}" for name, count in results["prompts"].items())
    version_list = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    by_set = _table(
        [
            "prompts",
            "decoding",
            "mean acceptance length",
            "95 %",
            "steps",
            "accepted, by position",
            "if all before were",
        ],
        [
            [
                name,
                way,
                f"**{values['mean_acceptance_length']:.3f}**",
                "{:.2f} - {:.2f}".format(*values["interval"]),
                str(values["steps"]),
                _percent(values["accepted_by_position"]),
                _percent(values["conditional_by_position"]),
            ]
            for name, way, values in _rows(results)
        ],
    )
    by_section = _table(
        ["part", "decoding", "mean acceptance length", "steps"],
        [
            [section, way, f"{values['mean_acceptance_length']:.3f}", str(values["steps"])]
            for way, sections in results["by_section"].items()
            for section, values in sections.items()
        ],
    )
    width = results["context_bucket"]
    by_context = _table(
        ["context position", "decoding", "mean acceptance length", "steps"],
        [
            [f"{start}-{int(start) + width - 1}", way, f"{v['mean_acceptance_length']:.3f}", str(v["steps"])]
            for way, parts in results["by_context"].items()
            for start, v in parts.items()
        ],
    )
    fewer = results["overall"]["greedy"]["length_with_fewer"]
    counts = ", ".join(f"{number}: {length:.2f}" for number, length in enumerate(fewer, 1))
    parts = [
        f"# Evaluation of {results['draft']} in {stage.run.path.name}",
        f"Prompts: {asked}. {draft_tokens} draft tokens, at most {settings.max_tokens} output tokens, "
        f"{settings.concurrency} requests in flight, sampled at temperature {settings.sampled_temperature:g}. "
        f"{results['date']}, {results['hardware']}. {version_list}.",
        "## Acceptance",
        f"Tokens a verifier step yields, its own included: 1 is no gain, {1 + draft_tokens} the ceiling. A position is "
        "accepted only if all before it were. The interval is a bootstrap over prompts.",
        by_set,
        f"![acceptance by position]({BY_POSITION})",
        f"With fewer draft tokens (greedy, the same chain cut short): {counts}.",
        *_sweep_part(results),
        "## Beside what stage 04 expected",
        *_expected_part(results["expected"]),
        "## In thinking and in the answer",
        by_section,
        "## By context position",
        by_context,
        f"![acceptance by context position]({BY_CONTEXT})",
        "## Is it still the verifier?",
        _identity_part(results),
        *_speed_part(results),
    ]
    return "\n\n".join(parts) + "\n"


def _expected_part(expected: dict[str, Any]) -> list[str]:
    if "left_out" in expected:
        return [f"Left out: {expected['left_out']}."]
    table = _table(
        ["decoding", "expected", f"measured, {expected['prompts']}", "difference"],
        [
            [way, f"{of['expected']:.3f}", f"{of['measured']:.3f}", f"{of['difference']:+.3f}"]
            for way, of in expected["by_decoding"].items()
        ],
    )
    return [
        f"Mean acceptance length with {expected['draft_tokens']} draft tokens: expected from the verifier's states of "
        "the validation questions, by the steps vLLM would take on those answers; measured on vLLM.",
        table,
    ]


def _identity_part(results: dict[str, Any]) -> str:
    scores = results["scores"]
    differing = "".join(
        f"\n- {prompt}: from output token {place} on" for prompt, place in results["greedy_apart_at_token"].items()
    )
    ours, theirs = (
        f"{scores[name]['mean']:.4f} (standard error {scores[name]['standard_error'] or float('nan'):.4f})"
        for name in ("with draft", "alone")
    )
    return (
        f"Greedy output identical with and without the draft: {results['greedy_identical']} of "
        f"{results['greedy_prompts']} prompts.{differing}\n\n"
        f"Sampled tokens scored by the verifier alone, mean log-prob of a token: {ours} with the draft, {theirs} "
        f"without: {results['standard_errors_apart']:.1f} standard errors apart."
    )


def _sweep_part(results: dict[str, Any]) -> list[str]:
    rows = results["sweep"]["rows"]
    if len(rows) < 2:
        return []
    table = _table(
        ["draft tokens", "mean acceptance length", "tok/s, one stream"],
        [
            [
                count,
                f"{row['mean_acceptance_length']:.3f}",
                f"{row['tokens_per_s']:.1f}" if row["tokens_per_s"] else "-",
            ]
            for count, row in rows.items()
        ],
    )
    fastest = results["sweep"]["fastest"]
    return ["## Number of draft tokens", table, *([f"Fastest for one stream: **{fastest}**."] if fastest else [])]


def _speed_part(results: dict[str, Any]) -> list[str]:
    speeds = _speeds(results)
    if not speeds:
        return []
    table = _table(
        ["requests in flight", "tok/s with draft", "alone", "speed-up", "time between tokens with draft", "alone"],
        [
            [
                concurrency,
                f"{ours['output_throughput']:.1f}",
                f"{theirs['output_throughput']:.1f}",
                f"{ours['output_throughput'] / theirs['output_throughput']:.2f}",
                f"{ours['median_tpot_ms']:.2f} ms",
                f"{theirs['median_tpot_ms']:.2f} ms",
            ]
            for concurrency, ours, theirs in speeds
        ],
    )
    return [
        "## Speed",
        "vLLM's own benchmark (`bench serve`, greedy), the same prompts; medians of the time per output token. On a "
        "CPU, or with a verifier hardly larger than its draft, the speed-up says nothing about a GPU.",
        table,
        f"![speed-up]({SPEED_UP})",
    ]


def compare_main(argv: list[str]) -> int:
    """`06_evaluate.py --compare A B ...`: evaluated runs, or evaluation folders of them, in one table."""
    parser = argparse.ArgumentParser(prog="06_evaluate.py", description=compare_main.__doc__)
    parser.add_argument("--compare", nargs="+", type=Path, metavar="DIR", required=True)
    paths = parser.parse_args(argv).compare
    try:
        print(comparison(paths))
    except PipelineError as error:
        print(f"06_evaluate.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def comparison(paths: list[Path]) -> str:
    """A Markdown table with a row for each evaluation, prompt set and way of decoding.

    Raises:
        ConfigError: a path holds no results.json.
    """
    rows = []
    for path in paths:
        folders = [path] if (path / RESULTS).exists() else sorted(path.glob("06_eval*"))
        found = [folder for folder in folders if (folder / RESULTS).exists()]
        if not found:
            raise ConfigError(f"--compare {path}: no {RESULTS} in it; run 06_evaluate.py there first")
        for folder in found:
            results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
            speed = _speeds(results)
            ratio = f"{speed[0][1]['output_throughput'] / speed[0][2]['output_throughput']:.2f}" if speed else "-"
            rows += [
                [
                    str(path if path != folder else folder),
                    Path(results["draft"]).name,
                    name,
                    way,
                    str(results["draft_tokens"]),
                    f"{values['mean_acceptance_length']:.3f}",
                    "{:.2f} - {:.2f}".format(*values["interval"]),
                    ratio,
                ]
                for name, way, values in _rows(results)
            ]
    head = [
        "run",
        "draft",
        "prompts",
        "decoding",
        "draft tokens",
        "mean acceptance length",
        "95 %",
        "speed-up, 1st load",
    ]
    return _table(head, rows)
