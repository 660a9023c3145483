#!/usr/bin/env bash
# Packs vLLM and all else that the stages need, but the GPU machine has not, into parts that a narrow way lets through.
#
#   bash benchmarks/gpu/pack.sh WORKDIR          WORKDIR/part.00, part.01, ... of at most 58 MB
#
# Needs Python 3.12 (PYTHON= names it), a package index and 9 GB in WORKDIR. About 10 minutes on 2 cores, of which
# 5 are the download; a second call downloads nothing. On the GPU machine: unpack.sh.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$(mkdir -p "${1:?usage: pack.sh WORKDIR}" && cd "$1" && pwd)
python=${PYTHON:-$(command -v python3.12 || true)}
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null || {
    echo "pack.sh: the GPU machine has Python 3.12, so one is needed here: PYTHON=/path/to/python3.12" >&2
    exit 2
}
venv=$work/venv
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install -q --only-binary=:all: -r "$here/requirements.txt"
"$venv/bin/python" "$here/select_packages.py" "$work/site"
rm -f "$work"/part.*
tar -C "$work" -cf - site | xz -T0 -6 | split -b 58000000 -d - "$work/part."
ls -l "$work"/part.*
