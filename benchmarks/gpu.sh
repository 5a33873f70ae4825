#!/usr/bin/env bash
# Everything that needs a CUDA device, part by part: benchmarks/gpu.sh --help. Nothing is installed.
#   PYTHON=python3 NVME_DIR=/mnt/nvme OUT=runs/gpu benchmarks/gpu.sh host
set -euo pipefail
python=${PYTHON:-python3}
command -v "$python" >/dev/null || { echo "missing: $python (set PYTHON to an interpreter that has torch)" >&2; exit 2; }
exec "$python" "$(dirname "$0")/gpu.py" "$@"
