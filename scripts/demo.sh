#!/usr/bin/env bash
# Sets up .venv and runs GRPO on SmolLM2-135M-Instruct through Megatron-Core, on CPU or one GPU.
# Further arguments are settings: scripts/demo.sh optimizer.lr=1e-5 run.steps=4
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$("$root/scripts/setup_venv.sh" demo | tail -n 1)
cd "$root"
exec "$python" -m megatron_rl_loss.train configs/demo.yaml "$@"
