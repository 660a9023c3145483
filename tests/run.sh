#!/usr/bin/env bash
# Sets up as run_pipeline.sh does, then checks style and types and runs the tests; arguments go to pytest.
#
#   bash tests/run.sh                     everything (vLLM servers included)
#   bash tests/run.sh -m "not engine"     what needs no server
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ./setup.sh
set_up dev
"$VENV_PYTHON" -m ruff check .
"$VENV_PYTHON" -m ruff format --check .
"$VENV_PYTHON" -m mypy
# Its threads wait for each other asleep: on cores that others use as well, spinning costs ten times the work.
OMP_WAIT_POLICY=PASSIVE "$VENV_PYTHON" -m eagle3_train.tiny verifier models/tiny-kimi-k2.5
# Two processes: a vLLM server starts on one core, its tests' process waits, and the tests without one fill the other.
exec "$VENV_PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
