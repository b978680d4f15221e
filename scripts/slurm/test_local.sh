#!/usr/bin/env bash
# Tests the SLURM scripts on a real SLURM of four nodes on this machine (see local_cluster.sh), and
# writes docs/logs/slurm_local.log. Further arguments go to pytest, e.g. -k preempted
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
command -v slurmctld >/dev/null && command -v munged >/dev/null || {
    echo "error: apt-get install -y --no-install-recommends slurm-wlm munge" >&2
    exit 2
}
log=docs/logs/slurm_local.log
mkdir -p "$(dirname "$log")"
export ALL_SLURM_TESTS=1
{
    echo "# $(slurmctld -V), $(getconf _NPROCESSORS_ONLN) CPUs, $("$python" -c 'import torch, sys; print("torch", torch.__version__, "Python", sys.version.split()[0])')"
    "$python" -m pytest tests/slurm -v -s --durations=0 -p no:cacheprovider "$@"
} 2>&1 | sed -uE "s#$PWD/?##g; s#/tmp/[^ ]*pytest-[0-9]+/##g; s#\b$(hostname)\b#host#g; s#(Writing model shards|Loading weights):.*##; /^(rootdir|plugins|cachedir|platform|configfile|hypothesis|timeout)/d" | tee "$log"
exit "${PIPESTATUS[0]}"
