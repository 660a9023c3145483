"""What every numbered script does around its one call into the library."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from eagle3_train.config import parse
from eagle3_train.errors import GateFailed, PipelineError, Terminated
from eagle3_train.run import Result, Run, Stage, StageSpec, record_timing


def stage_main(spec: StageSpec, work: Callable[[Stage], Result], description: str | None) -> NoReturn:
    """Parse the arguments, skip or do the stage's `work`, keep its manifest and timing, exit with its code."""
    signal.signal(signal.SIGTERM, _terminate)
    # A closed terminal must stop the server we started just as well.
    signal.signal(signal.SIGHUP, _terminate)
    try:
        sys.exit(_run_stage(spec, work, description or ""))
    except PipelineError as error:
        print(f"\n{spec.script}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print(f"\n{spec.script}: interrupted; what was made is kept, the same command goes on", file=sys.stderr)
        sys.exit(130)
    except Terminated:
        print(f"\n{spec.script}: terminated; what was made is kept, the same command goes on", file=sys.stderr)
        sys.exit(Terminated.exit_code)


def _terminate(*_signal: object) -> NoReturn:
    raise Terminated


def _run_stage(spec: StageSpec, work: Callable[[Stage], Result], description: str) -> int:
    arguments, config = parse(None, description)
    run = Run(arguments.run, config)
    stage = Stage(run, spec)
    with stage.locked():
        if not stage.begin(force=arguments.force):
            manifest = stage.manifest or {}
            print(f"{spec.folder}: done already ({_brief(manifest['summary'])})")
            return 0
        for line in run.keep_config():
            print(f"run.yaml: {line}")
        started = time.monotonic()
        try:
            result = work(stage)
        except GateFailed as failure:
            record_timing(run, spec, "gate failed", time.monotonic() - started, {})
            raise failure
        except BaseException as error:
            record_timing(run, spec, type(error).__name__, time.monotonic() - started, {})
            raise
        stage.finish(result)
        seconds = time.monotonic() - started
        record_timing(run, spec, "done", seconds, result.summary)
        for line in result.lines:
            print(line)
        print(f"{spec.folder}: done in {seconds:.0f} s")
    return 0


def _brief(summary: dict[str, Any]) -> str:
    shown = [f"{name} {value}" for name, value in summary.items() if isinstance(value, int | float | str)]
    return ", ".join(shown[:4])
