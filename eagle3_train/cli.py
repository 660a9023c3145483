"""What every numbered script does around its one call into the library."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from eagle3_train.config import Config, parse
from eagle3_train.errors import PipelineError, Terminated
from eagle3_train.run import STAGES, Result, Run, Stage, StageSpec, record_timing


def stage_main(
    spec: StageSpec,
    work: Callable[[Stage], Result],
    description: str | None,
    *,
    choose: Callable[[Config], StageSpec] | None = None,
    wants_more: Callable[[Stage], bool] | None = None,
    afterwards: Callable[[Stage], None] | None = None,
) -> NoReturn:
    """Parse the arguments, skip or do the stage's `work`, keep its manifest and timing, exit with its code.

    `choose` picks another spec by the configuration; `wants_more` says of a stage that is done whether there is more
    to do; `afterwards` is called on the finished stage, also when it was done already.
    """
    exit_with(spec.script, lambda: _run_stage(spec, work, description or "", choose, wants_more, afterwards))


def exit_with(script: str, main: Callable[[], int]) -> NoReturn:
    """Call `main` and exit with what it returns, or with the code and message of the error it is ended by."""
    signal.signal(signal.SIGTERM, _terminate)
    # A closed terminal must stop the server we started just as well.
    signal.signal(signal.SIGHUP, _terminate)
    try:
        sys.exit(main())
    except PipelineError as error:
        print(f"\n{script}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print(f"\n{script}: interrupted; what was made is kept, the same command goes on", file=sys.stderr)
        sys.exit(130)
    except Terminated:
        print(f"\n{script}: terminated; what was made is kept, the same command goes on", file=sys.stderr)
        sys.exit(Terminated.exit_code)


def _terminate(*_signal: object) -> NoReturn:
    raise Terminated


def _run_stage(
    spec: StageSpec,
    work: Callable[[Stage], Result],
    description: str,
    choose: Callable[[Config], StageSpec] | None,
    wants_more: Callable[[Stage], bool] | None,
    afterwards: Callable[[Stage], None] | None,
) -> int:
    arguments, config = parse(None, description)
    spec = choose(config) if choose else spec
    run = Run(arguments.run, config)
    stage = Stage(run, spec)
    with stage.locked():
        if stage.begin(force=arguments.force, wants_more=wants_more):
            _work(stage, work)
        else:
            manifest = stage.manifest or {}
            print(f"{spec.folder}: done already ({_brief(manifest['summary'])})")
        if afterwards is not None:
            afterwards(stage)
    return 0


def _work(stage: Stage, work: Callable[[Stage], Result]) -> None:
    run, spec = stage.run, stage.spec
    # What measures someone else's draft is not part of the pipeline, and must not change what the run is.
    for line in run.keep_config() if spec.folder in STAGES else []:
        print(f"run.yaml: {line}")
    started = time.monotonic()
    try:
        result = work(stage)
    except BaseException as error:
        record_timing(run, spec, type(error).__name__, time.monotonic() - started, {})
        raise
    stage.finish(result)
    seconds = time.monotonic() - started
    record_timing(run, spec, "done", seconds, result.summary)
    for line in result.lines:
        print(line)
    print(f"{spec.folder}: done in {seconds:.0f} s")


def _brief(summary: dict[str, Any]) -> str:
    shown = [f"{name} {value}" for name, value in summary.items() if isinstance(value, int | float | str)]
    return ", ".join(shown[:4])
