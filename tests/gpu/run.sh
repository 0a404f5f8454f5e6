#!/usr/bin/env bash
# All that a GPU has to show, in under ten minutes: the tests, the benchmark, and a short table last.
#
#   tests/gpu/run.sh [FOLDER]    # FOLDER (default: $OUT or /tmp) gets the logs and the figures
#
# On the machine of ../shared/gpu/README.md flash-attn comes as .fa/sm90: it is used if it is there.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-${OUT:-/tmp}}
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD/.fa/sm90:$PWD${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
summary=()

run() {  # name, seconds at most, command: its last lines go to the log and to the screen
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    echo "== $name: $*"
    timeout "$limit" "$@" > "$out/$name.log" 2>&1
    local status=$?
    tail -n "${lines:-30}" "$out/$name.log"
    summary+=("$(printf '%-28s %-8s %4d s   %s' "$name" \
        "$([ $status = 0 ] && echo ok || echo "rc $status")" $((SECONDS - began)) \
        "$(grep -oE 'output tokens/s +[0-9,.]+|limit of this device, % +[0-9.]+|device idle, % +[0-9.]+|[0-9]+ (passed|failed|skipped)[^.]*' \
            "$out/$name.log" | tr -s ' ' | tr '\n' ';')")")
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
"$python" -c 'import torch; print("torch", torch.__version__)'
[ -f .fa/check_flash_attn.py ] && lines=3 run flash-attn 60 "$python" .fa/check_flash_attn.py
lines=60 run tests 270 "$python" -m pytest -q -x --maxfail=8 -p no:cacheprovider tests/gpu
nano="bench.py --config qwen3-0.6b"
run nano-vllm-workload 100 "$python" $nano --json "$out/nano.json"
run nano-vllm-no-run-ahead 70 "$python" $nano --no-run-ahead --json "$out/sync.json"
run nano-vllm-eager 90 "$python" $nano --enforce-eager --json "$out/eager.json"
run batch-1 60 "$python" $nano --num-seqs 1 --min-output 512 --max-output 512 --temperature 0

echo
echo "-- summary ($(date -u +%F), $((SECONDS)) s) --"
printf '%s\n' "${summary[@]}"
