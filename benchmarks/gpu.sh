#!/usr/bin/env bash
# Everything that needs a CUDA device, in one command: builds, runs `pytest -m gpu`, trains 7B parameters with host
# and with NVMe placement. Logs and JSON go to the folder given as the first argument (default: runs/gpu).
#   PYTHON=python3 NVME_DIR=/mnt/nvme benchmarks/gpu.sh runs/gpu
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/gpu}
python=${PYTHON:-python3}
nvme=${NVME_DIR:-.}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$out"
nvidia-smi --query-gpu=name,memory.total,pcie.link.gen.current,pcie.link.width.current --format=csv | tee "$out/gpu.csv"
"$python" setup.py --quiet build_ext --inplace
status=0
"$python" -m pytest -m gpu -q 2>&1 | tee "$out/pytest.log" || status=$?
for placement in host nvme; do
    "$python" benchmarks/large_model.py --model "${MODEL:-7b}" --placement "$placement" --nvme-dir "$nvme" \
        --batch-size "${BATCH_SIZE:-8}" --seq-len "${SEQ_LEN:-2048}" --steps "${STEPS:-6}" \
        2> >(tee "$out/$placement.log" >&2) | tee "$out/$placement.json" || status=$?
done
exit "$status"
