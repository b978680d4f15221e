#!/usr/bin/env bash
# A real SLURM on one machine, for tests: munged, slurmctld and several slurmd under one folder.
#   scripts/slurm/local_cluster.sh up FOLDER [NODES=4] [CPUS=4]; export SLURM_CONF=FOLDER/etc/slurm.conf
#   scripts/slurm/local_cluster.sh down FOLDER
# Needs root and: apt-get install -y --no-install-recommends slurm-wlm munge (Debian 12: 22.05)
set -euo pipefail

write_config() { # write_config FOLDER NODES CPUS
    local host memory port=${SLURM_TEST_PORT:-16817} # slurmctld; the nodes take the next ones
    host=$(hostname -s)
    memory=$(awk '/MemTotal/ { print int($2 / 1024 * 0.8) }' /proc/meminfo)
    # No cgroups, no accounting; short times, so that a lost node or a requeue is a matter of
    # seconds; config_overrides: nodes may claim more CPUs than there are.
    cat >"$1/etc/slurm.conf" <<CONF
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$1/run/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation=$1/state
SlurmdSpoolDir=$1/spool/%n
SlurmctldPidFile=$1/run/slurmctld.pid
SlurmdPidFile=$1/run/slurmd-%n.pid
SlurmctldLogFile=$1/log/slurmctld.log
SlurmdLogFile=$1/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=100000
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=5
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[1-$2] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + $2))] CPUs=$3 Boards=1 SocketsPerBoard=1 CoresPerSocket=$3 ThreadsPerCore=1 RealMemory=$memory State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
CONF
}

up() { # up FOLDER NODES CPUS
    mkdir -p "$1"/{etc,run,log,spool,state}
    [ -s "$1/etc/munge.key" ] || (umask 077 && head -c 1024 /dev/urandom >"$1/etc/munge.key")
    write_config "$1" "$2" "$3"
    export SLURM_CONF=$1/etc/slurm.conf
    munged --socket="$1/run/munge.sock" --key-file="$1/etc/munge.key" --force --num-threads=2 \
        --pid-file="$1/run/munged.pid" --log-file="$1/log/munged.log" \
        --seed-file="$1/run/munged.seed" 2>/dev/null
    slurmctld -f "$SLURM_CONF" -c
    local i
    for i in $(seq 1 "$2"); do slurmd -f "$SLURM_CONF" -N "n$i"; done
    for i in $(seq 1 300); do
        [ "$(sinfo -h -N -p main -o %T 2>/dev/null | grep -c '^idle$')" = "$2" ] && return 0
        sleep 0.1
    done
    tail -n 20 "$1/log/slurmctld.log" >&2
    echo "error: the nodes did not come up within 30 s" >&2
    return 1
}

down() { # down FOLDER: ends only what `up FOLDER` started
    export SLURM_CONF=$1/etc/slurm.conf
    timeout 10 scancel --user="$(id -un)" 2>/dev/null || true
    sleep 1
    local file
    for file in "$1"/run/slurmd-*.pid "$1/run/slurmctld.pid" "$1/run/munged.pid"; do
        if [ -f "$file" ]; then kill "$(cat "$file")" 2>/dev/null || true; fi
    done
}

action=${1:-} folder=$(realpath -m "${2:-.}")
umask 022
case $action in
up) up "$folder" "${3:-4}" "${4:-4}" ;;
down) down "$folder" ;;
*)
    sed -n '2,5p' "$0" >&2
    exit 2
    ;;
esac
