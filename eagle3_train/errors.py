"""The errors a user is meant to read, and the exit codes a shell can trust.

0  done, or already done          3    a gate failed: the result exists and is not good enough
1  refused, with the remedy       4    04 has trained on the states that are on disk: 02 makes the next ones
2  wrong arguments or preset      130  interrupted (Ctrl-C)
                                  143  terminated (SIGTERM)
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


class MoreStates(PipelineError):
    """Training has used the hidden states that are on disk; what it learnt is kept."""

    exit_code = 4


class Terminated(SystemExit):
    """SIGTERM, raised in the main thread so that servers are stopped and files closed on the way out.

    A SystemExit, because asyncio lets only that and KeyboardInterrupt out of its callbacks.
    """

    exit_code = 143
