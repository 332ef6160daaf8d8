#!/bin/sh
# Run all tests that need a GPU. Where there is none they would all be skipped, which must not look like success.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
"$python" - <<'EOF'
import sys

import torch

if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no CUDA device: nothing is tested")
names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
print(f"torch {torch.__version__} cuda {torch.version.cuda} nccl {nccl} devices {names}")
EOF
exec "$python" -m pytest -m 'gpu and not bench and not vllm' -rs "$@"
