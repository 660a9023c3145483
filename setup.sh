# Sourced by run_pipeline.sh and tests/run.sh: makes .venv with what this machine needs, and sets VENV_PYTHON.
#
#   PLATFORM=cpu|cuda     overrides what is found out
#   PYTHON=/path/python   the interpreter to build on (3.11 or 3.12)
#   VENV=.venv            where
#
# A few milliseconds when all is there: the stamp in the venv holds the requirements it was made from.

_say() { printf '%s\n' "$*" >&2; }

_find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.11 python3.12}; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
            2>/dev/null; then
            printf '%s' "$candidate"
            return
        fi
    done
    _say "set-up: no Python 3.11 or 3.12 with venv found (tried: ${PYTHON:-python3 python3.11 python3.12})."
    _say "Install one (on Debian: apt-get install python3 python3-venv), or name it: PYTHON=/path/to/python"
    return 1
}

_platform() {
    if [ -n "${PLATFORM:-}" ]; then
        printf '%s' "$PLATFORM"
    elif command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
        printf cuda
    else
        printf cpu
    fi
}

# pip_install WHAT ARGUMENTS...: pip with its last words made into advice.
_pip_install() {
    local what=$1 log
    shift
    log=$(mktemp)
    if ! "$VENV_PYTHON" -m pip install --disable-pip-version-check --no-input -q "$@" >"$log" 2>&1; then
        grep -v -e 'is ignored: it is neither' "$log" | tail -n 5 >&2
        _say
        _say "set-up: $what could not be installed (whole log: $log)."
        if grep -q 'torch==[0-9.]*+cpu' "$log"; then
            _say "torch's CPU build is not among the packages pip finds for this Python. It is in PyTorch's own CPU"
            _say "wheel index: set PIP_EXTRA_INDEX_URL to that index (its address is on PyTorch's 'Get Started' page,"
            _say "platform CPU) and run this again, or try another Python: PYTHON=python3.11"
        else
            _say "If the network or a package is the cause, mend it and run this again: what is installed is kept."
        fi
        return 1
    fi
    rm -f "$log"
}

# set_up [dev]: what the pipeline needs, and with `dev` what the tests need as well.
set_up() {
    local root platform requirements python
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || return 1
    platform=$(_platform)
    case $platform in
        cpu) requirements=requirements-cpu.txt ;;
        cuda) requirements=requirements.txt ;;
        *) _say "set-up: PLATFORM is $platform; it must be cpu or cuda"; return 2 ;;
    esac
    VENV=${VENV:-$root/.venv}
    VENV_PYTHON=$VENV/bin/python
    if ! _is_ready base "$root/$requirements" "$root/constraints-$platform.txt" "$root/pyproject.toml"; then
        if ! "$VENV_PYTHON" -c '' 2>/dev/null; then
            python=$(_find_python) || return 1
            "$python" -m venv --clear "$VENV" || { _say "set-up: $python could not make $VENV"; return 1; }
        fi
        _say "set-up: $platform machine, $("$VENV_PYTHON" --version), into $VENV (4 GB; some minutes the first time)"
        _pip_install "$requirements" -r "$root/$requirements" || return 1
        # A torchvision built for another torch breaks the import of vLLM and transformers; nothing here needs it.
        if ! "$VENV_PYTHON" -c 'import torchvision' 2>/dev/null; then
            "$VENV_PYTHON" -m pip uninstall -q -y torchvision torchaudio torchcodec >/dev/null 2>&1
        fi
        # Installed, so that vLLM finds our plugin in every process it starts.
        _pip_install "eagle3-train itself" --no-deps --no-build-isolation -e "$root" || return 1
        _mark_ready base
        _say "set-up: done"
    fi
    if [ "${1:-}" = dev ] && ! _is_ready dev "$root/requirements-dev.txt"; then
        _pip_install requirements-dev.txt -r "$root/requirements-dev.txt" || return 1
        _mark_ready dev
    fi
}

# The stamp of a part holds what it was made from: these files, the platform, and the venv's own path, for a venv
# does not survive a move.
_is_ready() {
    local part=$1
    shift
    _WANTED=$(printf '%s\n' "$VENV" "$platform" | cat - "$@" | sha256sum)
    [ -x "$VENV_PYTHON" ] && [ "$(cat "$VENV/.eagle3-train-$part" 2>/dev/null)" = "$_WANTED" ]
}

_mark_ready() { printf '%s\n' "$_WANTED" >"$VENV/.eagle3-train-$1"; }
