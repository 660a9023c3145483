#!/usr/bin/env bash
# From questions to a draft model that vLLM serves, and the proof that it speeds the verifier up.
#
#   bash run_pipeline.sh                                   the embedded default, on any machine
#   MAX_SAMPLES=64 RUN=runs/mine bash run_pipeline.sh --prompts.source my.jsonl
#   PRESET=presets/tiny.yaml RUN=runs/big FROM=02 TO=04 bash run_pipeline.sh
#   bash run_pipeline.sh --box b300x8 --price 48 --max-hours 18 --max-usd 900   refuses what would be dearer
#   bash run_pipeline.sh --dry-run                         prints the commands
#
# Every stage skips what is done and goes on where it stopped; any --section.field value is passed to all of them.
# Paths are relative to this directory.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

RUN=${RUN:-runs/tiny}                # where everything of this run is kept
PRESET=${PRESET:-}                   # left out: the run's own run.yaml, or presets/tiny.yaml for a new run
MAX_SAMPLES=${MAX_SAMPLES:-}         # questions used; left out: as the preset says
FROM=${FROM:-00}                     # first stage: 00 01 01b 02 03 04 05 06
TO=${TO:-06}                         # last stage

DRY_RUN=
ARGUMENTS=()
for argument in "$@"; do
    case $argument in
        --dry-run) DRY_RUN=1 ;;
        -h | --help) sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) ARGUMENTS+=("$argument") ;;
    esac
done
[ -n "$PRESET" ] || [ -f "$RUN/run.yaml" ] || PRESET=presets/tiny.yaml
COMMON=(--run "$RUN" ${PRESET:+--preset "$PRESET"} ${MAX_SAMPLES:+--max-samples "$MAX_SAMPLES"} "${ARGUMENTS[@]}")

STAGES=(00 01 01b 02 03 04 05 06)
position() {
    local number
    for number in "${!STAGES[@]}"; do [ "${STAGES[$number]}" = "$1" ] && { echo "$number"; return; }; done
    echo "run_pipeline.sh: no stage $1; the stages are ${STAGES[*]}" >&2
    exit 2
}
FIRST=$(position "$FROM")
LAST=$(position "$TO")

# stage NUMBER SCRIPT INTENT: one line of intent, one command; the first failure ends the run with its message last.
stage() {
    local number=$1 script=$2 intent=$3 place
    place=$(position "$number")
    [ "$place" -ge "$FIRST" ] && [ "$place" -le "$LAST" ] || return 0
    printf '\n== %s  %s\n' "$number" "$intent"
    run python "$script" "${COMMON[@]}"
}

run() {
    if [ -n "$DRY_RUN" ]; then printf '   %s\n' "$*"; return; fi
    shift
    "$VENV_PYTHON" "$@"
}

if [ -z "$DRY_RUN" ]; then
    printf '== set-up  what this machine needs, in .venv\n'
    # shellcheck source=setup.sh
    source ./setup.sh
    set_up
fi
printf '\n== plan  what it will take, and whether the budgets allow it\n'
run python plan.py "${COMMON[@]}" --brief
printf '\n== verifier  the model whose answers are captured\n'
run python -m eagle3_train.verifier "${COMMON[@]}"

stage 00  00_preflight.py          "is this box fit for this run"
stage 01  01_prepare_data.py       "which questions to ask"
stage 01b 01b_generate_synthetic.py "the verifier thinks and answers"
stage 02  02_extract_hidden.py     "its hidden states for every token it said"
stage 03  03_build_vocab_map.py    "which tokens the draft may propose"
# 04 ends with 4 where the states on disk do (extraction.disk_budget_gb): 02 makes the next ones in their place.
until stage 04 04_train.py         "the draft learns to guess them"; do
    ended=$?
    [ "$ended" = 4 ] && [ "$FIRST" -le "$(position 02)" ] || exit "$ended"
    stage 02  02_extract_hidden.py "the states of the next steps"
done
stage 05  05_export_vllm.py        "the draft as vLLM serves it"
stage 06  06_evaluate.py           "how many of its guesses vLLM accepts"
