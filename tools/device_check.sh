#!/usr/bin/env bash
# Builds against the torch that is installed (no network) and runs parity, one GRPO step and the benches on the
# accelerator found, with plain LibTorch operators. Usage: tools/device_check.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
device=$("$python" - <<'PY'
import torch

if torch.cuda.is_available():
    print("cuda")
else:
    try:
        import torch_npu  # noqa: F401  registers the device

        print("npu" if torch.npu.is_available() else "cpu")
    except ImportError:
        print("cpu")
PY
)
echo "device: $device, torch $("$python" -c 'import torch; print(torch.__version__)')"
cmake -S . -B build/device -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v "$python")"
cmake --build build/device --target _C -j "$(nproc)"
PYTHONPATH=python BANYAN_TEST_DEVICE=$device "$python" -m pytest tests/device -q
