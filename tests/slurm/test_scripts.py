"""What the SLURM scripts start, seen without SLURM."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts/slurm"


def bash(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    return subprocess.run(
        ["bash", *map(str, arguments)],
        cwd=ROOT, env=clean | environment, capture_output=True, text=True, timeout=20,
    )  # fmt: skip


def dry_run(script: str, *settings: str, **environment: str) -> list[str]:
    environment = {"RUN_DIR": "/shared/run"} | environment
    result = bash(SCRIPTS / f"{script}.sbatch", "--dry-run", "my.yaml", *settings, **environment)
    assert result.returncode == 0, result.stderr
    return shlex.split(result.stdout)


@pytest.mark.parametrize("kind", ["srun", "torchrun"])
def test_dry_run_shows_the_command_with_its_settings(kind):
    command = dry_run(f"train_{kind}", "task.suffix= Say it.", SLURM_JOB_ID="12345678")
    assert command[0] == "srun" and "--kill-on-bad-exit=1" in command
    assert "--output=/shared/run/logs/job-12345678.0/task-%t.log" in command
    end = [kind, "my.yaml", "task.suffix= Say it.", "run.dir=/shared/run"]
    assert command[-len(end) :] == end


def test_containers():
    image = {"CONTAINER_IMAGE": "nemo.sqsh", "CONTAINER_MOUNTS": "/data:/data"}
    mounts = f"{ROOT}:{ROOT},/shared/run:/shared/run,/data:/data"
    pyxis = dry_run("train_srun", **image)
    assert "--container-image=nemo.sqsh" in pyxis and f"--container-mounts={mounts}" in pyxis
    apptainer = dry_run("train_torchrun", CONTAINER_RUNTIME="apptainer", **image)
    start = apptainer.index("apptainer")
    assert apptainer[start : start + 2] == ["apptainer", "exec"]
    assert apptainer[start + 2 : start + 8] == [
        "--nv", "--pwd", str(ROOT), "--bind", mounts, "nemo.sqsh",
    ]  # fmt: skip
    assert apptainer[start + 8] == "bash"
    wrong = bash(
        SCRIPTS / "train_srun.sbatch", "--dry-run", "x", CONTAINER_RUNTIME="docker", **image
    )
    assert wrong.returncode == 2 and "must be pyxis or apptainer, got docker" in wrong.stderr


def test_a_submission_without_a_config_or_from_elsewhere_says_what_to_do(tmp_path):
    result = bash(SCRIPTS / "train_srun.sbatch")
    assert result.returncode == 2 and "no config given; usage: sbatch" in result.stderr
    result = bash(SCRIPTS / "train_torchrun.sbatch", "x", PROJECT_DIR=str(tmp_path))
    assert result.returncode == 2 and "is not the project's folder" in result.stderr


def test_ports_differ_between_jobs_and_between_the_lives_of_a_job():
    show = "source scripts/slurm/env.sh; threads=1; RUN_DIR=x; set_environment; echo $MASTER_PORT"
    ports = [
        int(bash("-c", show, SLURM_JOB_ID=job, SLURM_RESTART_COUNT=life).stdout)
        for job, life in [("7", "0"), ("8", "0"), ("7", "1")]
    ]
    assert len(set(ports)) == 3
    assert all(20000 <= port < 30000 for port in ports)


@pytest.fixture
def python(tmp_path) -> Path:
    """Stands for the interpreter: prints how it was started."""
    path = tmp_path / "python"
    path.write_text('#!/bin/bash\necho "$RANK $WORLD_SIZE $LOCAL_RANK"\nprintf "%s\\n" "$@"\n')
    path.chmod(0o755)
    return path


def test_a_task_takes_its_rank_from_slurm(python):
    result = bash(
        SCRIPTS / "task.sh", "srun", "my.yaml", "a=b c", PYTHON=str(python), PROJECT_DIR=str(ROOT),
        SLURM_PROCID="5", SLURM_NTASKS="8", SLURM_LOCALID="1",
    )  # fmt: skip
    assert result.stdout.splitlines() == [
        "5 8 1",
        "-m",
        "megatron_rl_loss.train",
        "my.yaml",
        "a=b c",
    ]


def test_torchrun_meets_at_the_first_node(python):
    hosts = []
    for node in ("0", "1"):
        result = bash(
            SCRIPTS / "task.sh", "torchrun", "my.yaml", PYTHON=str(python), PROJECT_DIR=str(ROOT),
            LOG_DIR="logs", MASTER_ADDR="n1", MASTER_PORT="20007", SLURM_JOB_ID="7",
            SLURM_NNODES="2", SLURM_NODEID=node, SLURM_GPUS_ON_NODE="8",
        )  # fmt: skip
        lines = result.stdout.splitlines()
        assert "--nnodes=2" in lines and "--nproc-per-node=8" in lines
        assert "--rdzv-endpoint=n1:20007" in lines and "--rdzv-id=7.0" in lines
        hosts += [line for line in lines if line.startswith("--rdzv-conf")]
    assert hosts == ["--rdzv-conf=is_host=1", "--rdzv-conf=is_host=0"]


def test_a_stopped_job_requeues_itself_up_to_its_cap(tmp_path):
    (tmp_path / "scontrol").write_text('#!/bin/bash\necho "scontrol $*"\n')
    (tmp_path / "scontrol").chmod(0o755)
    (tmp_path / "stopped.json").write_text('{"step": 3}')
    after = "source scripts/slurm/env.sh; logs=/nowhere; after 0"
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN_DIR": str(tmp_path)}
    for life, expected in [("1", "scontrol requeue 7"), ("2", "MAX_RESTARTS=2 are used up")]:
        result = bash(
            "-c", after, SLURM_JOB_ID="7", SLURM_RESTART_COUNT=life, MAX_RESTARTS="2", **path
        )
        assert expected in result.stdout
    (tmp_path / "stopped.json").unlink()
    assert bash("-c", after.replace("after 0", "after 3"), **path).returncode == 3
