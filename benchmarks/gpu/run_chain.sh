#!/usr/bin/env bash
# The project's own stages, end to end, on one GPU, and a check of what they made against transformers in float32.
#
#   bash benchmarks/gpu/run_chain.sh OUT [CHAIN ...]     OUT/results.json, OUT/logs.tar.gz; the tables are printed last
#
# Chains, side by side on the GPU; left out, all of them:
#   mla        every stage; MLA kernels, CUDA graphs, asynchronous scheduling: the code paths of a real run
#   attention  every stage; the verifier's attention without MLA, nothing compiled
#   one-pass   01 to 02; states saved while the verifier answers
#   fp8        01 to 02; states stored as float8_e4m3
#   connectors 01 and 01b, then our connector against vLLM's own, and asynchronous scheduling in one pass
# PYTHON= names the interpreter (left out: .gpu/venv of unpack.sh), LIMIT= the patience with all of it [s].
set -uo pipefail
export LC_ALL=C # of the stages, 01_ comes before 01b_
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=$(mkdir -p "${1:?usage: run_chain.sh OUT [CHAIN ...]}" && cd "$1" && pwd)
shift
python=$(realpath -s "${PYTHON:-.gpu/venv/bin/python}")
chains=("${@:-}")
[ -n "${chains[0]}" ] || chains=(mla attention one-pass fp8 connectors)
limit=${LIMIT:-480}
runs=${RUNS:-runs/gpu} # a new folder, or one to go on with
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 PYTHONUNBUFFERED=1

# stages CHAIN LAST CHECK ARGUMENTS...: the numbered scripts up to LAST; CHECK is a module, called when it has its input.
stages() {
    local chain=$1 last=$2 check=$3 run=$runs/$1 script number
    shift 3
    # vLLM's compile cache is not made for several servers that start at once.
    export VLLM_CACHE_ROOT
    VLLM_CACHE_ROOT=$(realpath -m "$run.cache")
    for script in 0[1-6]*.py; do
        number=${script%%_*}
        echo "== $chain $script"
        "$python" "$script" --run "$run" --preset benchmarks/gpu/tiny-gpu.yaml "$@" || return
        [ "$check $number" = "check 02" ] || [ "$check $number" = "connectors 01b" ] && {
            echo "== $chain $check"
            "$python" -m "benchmarks.gpu.$check" "$run" || return
        }
        [ "$number" = "$last" ] && break
    done
    touch "$run/chain_done"
}

chain() {
    case $1 in
        mla) stages mla 06 check ;;
        attention) stages attention 06 check --verifier.path tiny --server.env VLLM_MLA_DISABLE=1 \
            --server.env VLLM_USE_FLASHINFER_SAMPLER=0 --evaluation.server_args=--enforce-eager \
            --generation.server_args=--enforce-eager --extraction.server_args=--enforce-eager ;;
        one-pass) stages one-pass 02 check --generation.capture one_pass ;;
        fp8) stages fp8 02 check --extraction.storage_dtype float8_e4m3 ;;
        connectors) stages connectors 01b connectors ;;
        *) echo "run_chain.sh: no chain $1" >&2; return 2 ;;
    esac
}

for name in tiny-kimi-k2.5-mla:128 tiny-kimi-k2.5:32; do
    "$python" -m eagle3_train.tiny verifier "models/${name%:*}" --head-dim "${name#*:}" || exit
done
export -f stages chain
export python runs
started=$SECONDS
mkdir -p "$runs"
for name in "${chains[@]}"; do
    timeout -k 20 "$limit" bash -c "chain $name" >"$runs/$name.log" 2>&1 &
done
wait
tar -czf "$out/logs.tar.gz" -C "$runs" --exclude='*.cache' --exclude='*.safetensors' --exclude='*.pt' .
"$python" -m benchmarks.gpu.results "$runs" "$out/results.json" "${chains[@]}"
code=$?
echo "$((SECONDS - started)) s"
exit $code
