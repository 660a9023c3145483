"""The errors a user is meant to read, and the exit codes a shell can trust.

0  done, or already done          3    a gate failed: the result exists and is not good enough
1  refused, with the remedy       130  interrupted (Ctrl-C)
2  wrong arguments or preset      143  terminated (SIGTERM)
"""

from __future__ import annotations


class PipelineError(Exception):
    """What is wrong, where, and what to do about it; shown without a traceback."""

    exit_code = 1


class ConfigError(PipelineError):
    """An argument or a preset that cannot be used."""

    exit_code = 2


class GateFailed(PipelineError):
    """A measured result below the preset's floor; everything made is kept."""

    exit_code = 3


class Terminated(SystemExit):
    """SIGTERM, raised in the main thread so that servers are stopped and files closed on the way out.

    A SystemExit, because asyncio lets only that and KeyboardInterrupt out of its callbacks.
    """

    exit_code = 143
