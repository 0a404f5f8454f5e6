#!/usr/bin/env bash
# One of the two calls on a machine with a GPU: see README.md, which says what to bring along.
#   tests/gpu/run.sh call1                          # at most 245 s
#   tests/gpu/run.sh call2 --only FAILED-STEPS      # at most 570 s
nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used --format=csv,noheader
exec "${PYTHON:-python3}" "$(dirname "$0")/day.py" "$@"
