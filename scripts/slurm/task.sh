#!/usr/bin/env bash
# One task of a job: task.sh srun|torchrun CONFIG [key=value ...]. Started by the .sbatch files.
set -euo pipefail
# Until the trainer has its own handler, the signal before the time limit must not kill anything.
# Ignored signals stay ignored in what is started from here; torchrun leaves them so.
trap '' USR1
kind=$1
shift
cd "$PROJECT_DIR"
case $kind in
srun)
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
    # exec: the signals of SLURM reach the trainer, not a shell around it
    exec "$PYTHON" -m megatron_rl_loss.train "$@"
    ;;
torchrun)
    procs=${PROCS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
    host=0
    [ "$SLURM_NODEID" -ne 0 ] || host=1
    exec "$PYTHON" -m torch.distributed.run \
        --nnodes="$SLURM_NNODES" --nproc-per-node="$procs" --max-restarts=0 \
        --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \
        --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" --rdzv-conf="is_host=$host" \
        --log-dir="$LOG_DIR/node-$SLURM_NODEID" --tee=3 \
        -m megatron_rl_loss.train "$@"
    ;;
*)
    echo "error: expected srun or torchrun, got $kind" >&2
    exit 2
    ;;
esac
