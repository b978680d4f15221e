#!/usr/bin/env bash
# Compares losses, advantages and data with verl, TRL and tinker-cookbook on the same inputs. Their
# packages (400 MB) go into build/peers, apart from .venv. Further arguments go to pytest.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$("$root/scripts/setup_venv.sh" test | tail -n 1)
cd "$root"
peers=${PEERS:-build/peers}
list=requirements/parity.txt
if ! cmp -s "$list" "$peers/installed.txt"; then
  rm -rf "$peers"
  "$python" -m pip install --quiet --no-deps --target "$peers" -r "$list"
  cp "$list" "$peers/installed.txt"
fi
export PYTHONPATH=$peers OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# the tests skip what cannot be imported; here everything must be there
"$python" -W ignore -c "import tinker_cookbook.rl.metrics, trl.trainer.grpo_trainer
import verl.trainer.ppo.core_algos" > /dev/null
exec "$python" -m pytest tests/parity "$@"
