#!/usr/bin/env bash
# Sets up what is missing in .venv and runs the tests, two files at a time. Further arguments go to
# pytest.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$("$root/scripts/setup_venv.sh" test | tail -n 1)
cd "$root"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONDONTWRITEBYTECODE= # tests start hundreds of processes, which need not compile anew
"$python" -m ruff check megatron_rl_loss tests scripts setup.py
exec "$python" -m pytest -n 2 --dist loadfile "$@"
