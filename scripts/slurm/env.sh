# Sourced by the two .sbatch files: what a job of any kind needs. No hyper-parameters here: they
# are in the config, and behind it as key=value.
#
# Knobs, all environment variables:
#   RUN_DIR            run.dir of the config; on a file system that all nodes share
#   PYTHON             interpreter (default: .venv/bin/python of the project)
#   CONTAINER_IMAGE    run in a container; CONTAINER_RUNTIME says how: pyxis (default) or apptainer
#   CONTAINER_MOUNTS   FROM:TO[,FROM:TO]; the project and RUN_DIR are mounted anyway
#   PROCS_PER_NODE     ranks per node under torchrun (default: the node's GPUs)
#   MASTER_ADDR_OVERRIDE, MASTER_PORT_OVERRIDE   where the names that SLURM gives do not resolve
#   SRUN_EXTRA         more options for srun
#   MAX_RESTARTS       a job that requeues itself does so at most this often (default 50)

project=${PROJECT_DIR:-${SLURM_SUBMIT_DIR:-$PWD}}
python=${PYTHON:-$project/.venv/bin/python}
job=${SLURM_JOB_ID:-0}
life=${SLURM_RESTART_COUNT:-0}

fail() {
    echo "error: $*" >&2
    exit 2
}

read_arguments() { # sets config, settings, dry_run, RUN_DIR
    dry_run=
    if [ "${1:-}" = --dry-run ]; then
        dry_run=1
        shift
    fi
    [ $# -ge 1 ] || fail "no config given; usage: sbatch [options] $0 [--dry-run] CONFIG [key=value ...]"
    config=$1
    shift
    settings=("$@")
    RUN_DIR=${RUN_DIR:-$project/runs/job-$job}
    settings+=("run.dir=$RUN_DIR")
    logs=$RUN_DIR/logs/job-$job.$life
}

set_environment() {
    # rank 0's node. One job, one port: below the ports that the kernel hands out (32768 and up),
    # and another one in each life of a job, as the old socket may linger.
    local first
    first=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" 2>/dev/null | head -n 1) || true
    export MASTER_ADDR=${MASTER_ADDR_OVERRIDE:-${first:-localhost}}
    export MASTER_PORT=${MASTER_PORT_OVERRIDE:-$((20000 + (job + 1009 * life) % 10000))}
    # Megatron's overlap of tensor/context parallel communication relies on kernels starting in the
    # order they were issued, which one hardware queue guarantees. Never 1 with FSDP.
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
    # without it every rank takes all cores of the node for CPU work
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}
    # says why a network set-up fails, and nothing while it works
    export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
    # a rank whose peer is gone raises instead of waiting in a kernel for ever
    export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}
    # a crash in C code shows where it happened; logs appear as they are written
    export PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1
    # compiled kernels on the node's own disk: many nodes that write one cache on a shared one get
    # in each other's way
    export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/triton-$job}
    export PYTHON=$python PROJECT_DIR=$project RUN_DIR LOG_DIR=$logs
}

container_options() { # fills the arrays srun_options and prefix
    prefix=()
    [ -n "${CONTAINER_IMAGE:-}" ] || return 0
    local mounts="$project:$project,$RUN_DIR:$RUN_DIR${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
    case ${CONTAINER_RUNTIME:-pyxis} in
    pyxis)
        srun_options+=("--container-image=$CONTAINER_IMAGE" "--container-mounts=$mounts"
            "--container-workdir=$project" --no-container-mount-home)
        ;;
    apptainer) prefix=(apptainer exec --nv --pwd "$project" --bind "$mounts" "$CONTAINER_IMAGE") ;;
    *) fail "CONTAINER_RUNTIME must be pyxis or apptainer, got ${CONTAINER_RUNTIME:-}" ;;
    esac
}

launch() { # launch srun|torchrun: starts task.sh on all nodes, then decides about a restart
    srun_options+=(
        --kill-on-bad-exit=1 # a rank that fails ends the step: the others would wait for it
        --unbuffered
        "--output=$logs/task-%t.log" # a file for each task; rank order is task order
        --open-mode=append
    )
    # shellcheck disable=SC2206
    srun_options+=(${SRUN_EXTRA:-})
    container_options
    local command=(srun "${srun_options[@]}" "${prefix[@]}" bash "$project/scripts/slurm/task.sh"
        "$1" "$config" "${settings[@]}")
    if [ -n "$dry_run" ]; then
        printf '%q ' "${command[@]}"
        echo
        exit 0
    fi
    mkdir -p "$logs" || fail "cannot make $logs; set RUN_DIR to a folder that all nodes share"
    rm -f "$RUN_DIR/stopped.json" # of an earlier life
    cd "$project" || fail "no folder $project on this node"
    echo "$(date '+%F %T') job $job, start $life, $MASTER_ADDR:$MASTER_PORT, logs in $logs"
    local code=0
    "${command[@]}" || code=$?
    echo "$(date '+%F %T') srun ended with $code"
    after "$code"
}

after() { # after CODE: a stopped run starts again, a failed one says why
    if [ -f "$RUN_DIR/stopped.json" ]; then
        if [ "$life" -ge "${MAX_RESTARTS:-50}" ]; then
            echo "stopped by a signal; not restarted: MAX_RESTARTS=${MAX_RESTARTS:-50} are used up"
            exit 1
        fi
        echo "stopped by a signal: $(cat "$RUN_DIR/stopped.json"); back into the queue"
        exec scontrol requeue "$job"
    fi
    if [ "$1" -ne 0 ]; then
        echo "--- what the ranks said:"
        grep -rhs -A 25 'error:' "$logs" | tail -n 60
        exit "$1"
    fi
}
