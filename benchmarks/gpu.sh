#!/usr/bin/env bash
# The first minutes on a GPU: benchmarks/gpu.sh --help. Nothing is installed.
#   PYTHON=python3 NVME_DIR=/mnt/nvme OUT=runs/gpu benchmarks/gpu.sh first
set -euo pipefail
python=${PYTHON:-python3}
command -v "$python" >/dev/null || { echo "missing: $python (set PYTHON to an interpreter that has torch)" >&2; exit 2; }
exec "$python" "$(dirname "$0")/gpu.py" "$@"
