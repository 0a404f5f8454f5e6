#!/usr/bin/env bash
# All that a GPU has to show, in under ten minutes: the tests, the benchmark, and a short table last.
#
#   tests/gpu/run.sh [FOLDER]    # FOLDER (default: $OUT or /tmp) gets the logs and the figures
#
# What the machine lacks can be brought along in two folders that git ignores, and is used if there:
# .fa/sm90 with flash-attn (../shared/gpu/README.md), and .whl with wheels, made on a machine with a network:
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_17_x86_64 \
#       --platform manylinux2014_x86_64 -d .whl pydantic pydantic-core==VERSION annotated-types typing-inspection
# (VERSION: the one that `unzip -p .whl/pydantic-2*.whl '*/METADATA' | grep pydantic-core` names).
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-${OUT:-/tmp}}
python=${PYTHON:-python3}
site=$(mktemp -d)
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD/.fa/sm90:$site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
[ -d .whl ] && "$python" -m pip install -q --no-index --no-deps --target "$site" .whl/*.whl
summary=()

run() {  # name, seconds at most, command: the end of its output is shown, all of it is in the log
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    echo "== $name: $*"
    timeout "$limit" "$@" > "$out/$name.log" 2>&1
    local status=$?
    tail -n "${lines:-30}" "$out/$name.log"
    summary+=("$(printf '%-24s %-7s %4d s  %s' "$name" \
        "$([ $status = 0 ] && echo ok || echo "rc $status")" $((SECONDS - began)) \
        "$(grep -oE '(output tokens per second|limit percent|idle percent) +[0-9,.]+|[0-9]+ (passed|failed|skipped)' \
            "$out/$name.log" | tr -s ' ' | tr '\n' ';')")")
    echo "-- ${summary[-1]}"
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
"$python" -c 'import torch, nanoengine; print("torch", torch.__version__)' || exit 1
[ -f .fa/check_flash_attn.py ] && lines=3 run flash-attn 50 "$python" .fa/check_flash_attn.py
lines=60 run tests 230 "$python" -m pytest -q -o addopts= --maxfail=8 -p no:cacheprovider tests/gpu
lines=15 run kernels 60 "$python" -m pytest -q -o addopts= --maxfail=8 -p no:cacheprovider \
    tests/gpu_kernels/interpreted.py
nano="bench.py --config qwen3-0.6b --max-model-len 2048"
run nano-vllm-workload 80 "$python" $nano --json "$out/nano.json"
run no-run-ahead 60 "$python" $nano --no-run-ahead --json "$out/sync.json"
run eager 70 "$python" $nano --enforce-eager --json "$out/eager.json"
run batch-1 45 "$python" $nano --num-seqs 1 --min-output 512 --max-output 512 --temperature 0

echo
echo "-- summary ($(date -u +%F), $SECONDS s) --"
printf '%s\n' "${summary[@]}"
