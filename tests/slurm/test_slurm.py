"""The SLURM scripts on a real SLURM: munged, slurmctld and four slurmd on this machine.

All of them: `bash scripts/slurm/test_local.sh`, about six minutes on 2 cores. Otherwise only the
first runs, and none where SLURM is not installed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.mcore.jobs import metrics
from tests.mcore.test_train import model_folder, rollout_file  # noqa: F401

ROOT = Path(__file__).parents[2]
STEPS = 30

pytestmark = [
    pytest.mark.skipif(
        shutil.which("slurmctld") is None or shutil.which("munged") is None,
        reason="needs SLURM: apt-get install -y --no-install-recommends slurm-wlm munge",
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="a SLURM of our own needs root"),
]

takes_long = pytest.mark.skipif(
    "ALL_SLURM_TESTS" not in os.environ, reason="takes long: bash scripts/slurm/test_local.sh"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    script = ROOT / "scripts/slurm/local_cluster.sh"
    os.environ["SLURM_CONF"] = str(folder / "etc/slurm.conf")
    try:
        subprocess.run(["bash", script, "up", folder, "4", "4"], check=True, timeout=60)
        yield folder
    finally:
        subprocess.run(["bash", script, "down", folder], timeout=60)
        del os.environ["SLURM_CONF"]


@pytest.fixture(scope="module")
def settings(model_folder, rollout_file):  # noqa: F811
    return [
        "configs/files_example.yaml",
        f"model.path={model_folder}",
        f"rollouts.path={rollout_file}",
        "rollouts.per_step=8",
        "batch.micro_batch_size=2",
        "batch.mini_batches_per_step=2",
        "optimizer.lr=1e-3",
        "optimizer.eps=1e-3",
        "logging.plot=false",
        f"run.steps={STEPS}",
        "checkpoint.interval=5",
    ]


class Job:
    """A job in the queue."""

    def __init__(
        self,
        folder: Path,
        arguments: list[str],
        *,
        script: str = "train_srun",
        nodes: int = 2,
        ranks: int = 1,
        options: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder
        self.log = folder / "job.log"
        tasks = ranks if script == "train_srun" else 1
        environment = {
            "PYTHON": sys.executable,
            "RUN_DIR": str(folder),
            "PROCS_PER_NODE": str(ranks),
            "MASTER_ADDR_OVERRIDE": "127.0.0.1",  # the nodes' names do not resolve
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        result = subprocess.run(
            [
                "sbatch", "--parsable", f"--nodes={nodes}", f"--ntasks-per-node={tasks}",
                "--cpus-per-task=1", "--gpus-per-node=0", f"--output={self.log}", "--time=10",
                *options, f"scripts/slurm/{script}.sbatch", *arguments,
            ],
            cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        self.id = result.stdout.strip()

    def state(self) -> str:
        text = control("show", "job", self.id)
        return re.search(r"JobState=(\w+)", text).group(1)

    def wait(self, timeout: float = 240) -> str:
        """Waits for the end of the job, restarts included, and returns its last state."""
        deadline = time.monotonic() + timeout
        while (state := self.state()) in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED"):
            assert time.monotonic() < deadline, self.said()
            if state == "PENDING" and self.restarts():
                # SLURM lets a requeued job wait; the test does not
                control("update", f"jobid={self.id}", "StartTime=now", check=False)
            time.sleep(0.3)
        return state

    def restarts(self) -> int:
        return int(re.search(r"Restarts=(\d+)", control("show", "job", self.id)).group(1))

    def nodes(self) -> list[str]:
        names = re.search(r"^\s+NodeList=(\S+)", control("show", "job", self.id), re.M).group(1)
        return control("show", "hostnames", names).split()

    def wait_for_step(self, step: int, timeout: float = 180) -> None:
        path = self.folder / "metrics.jsonl"
        deadline = time.monotonic() + timeout
        while not path.exists() or len(path.read_text().splitlines()) < step:
            assert time.monotonic() < deadline and self.state() != "FAILED", self.said()
            time.sleep(0.05)

    def said(self) -> str:
        logs = [self.log, *sorted((self.folder / "logs").rglob("*.log"))]
        return "\n".join(f"--- {p.name}\n{p.read_text()[-20000:]}" for p in logs if p.exists())

    def pids(self, node: str) -> list[int]:
        """Returns the job's processes on a node."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                environment = path.read_bytes().split(b"\0")
            except OSError:
                continue
            wanted = {f"SLURM_JOB_ID={self.id}".encode(), f"SLURMD_NODENAME={node}".encode()}
            if wanted <= set(environment):
                found.append(int(path.parent.name))
        return found


def control(*arguments: str, check: bool = True) -> str:
    result = subprocess.run(
        ["scontrol", *arguments], capture_output=True, text=True, timeout=30, check=check
    )
    return result.stdout


@pytest.fixture(scope="module")
def uninterrupted(cluster, settings, tmp_path_factory):
    """Two nodes with a rank each, a task per rank."""
    job = Job(tmp_path_factory.mktemp("uninterrupted"), settings)
    assert job.wait() == "COMPLETED", job.said()
    return job


def test_a_task_per_rank_on_two_nodes(uninterrupted):
    assert [row["step"] for row in metrics(uninterrupted.folder)] == list(range(1, STEPS + 1))
    logs = sorted(p.name for p in (uninterrupted.folder / "logs").rglob("task-*.log"))
    assert logs == ["task-0.log", "task-1.log"]
    steps = (uninterrupted.folder / "logs" / f"job-{uninterrupted.id}.0" / "task-0.log").read_text()
    assert f"step {STEPS}/{STEPS}" in steps


@takes_long
@pytest.mark.parametrize("script", ["train_srun", "train_torchrun"])
def test_two_nodes_with_two_ranks_give_the_same_numbers(uninterrupted, settings, tmp_path, script):
    job = Job(tmp_path, [*settings, "run.steps=4"], script=script, ranks=2)
    assert job.wait() == "COMPLETED", job.said()
    for a, b in zip(metrics(uninterrupted.folder), metrics(tmp_path), strict=False):
        for name in ("loss", "reward", "grad_norm", "entropy"):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), name
    assert len(metrics(tmp_path)) == 4


@takes_long
@pytest.mark.parametrize("way", ["rank_1_dies", "rank_1_aborts"])
def test_a_rank_that_crashes_ends_the_job_within_seconds_with_its_error(
    cluster,
    model_folder,  # noqa: F811
    tmp_path,
    way,
):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{i}"}) + "\n" for i in range(4)))
    job = Job(
        tmp_path,
        [
            "configs/base.yaml", f"model.path={model_folder}", f"task.path={prompts}",
            f"reward.fn=tests.mcore.jobs_rewards:{way}", "sampler.prompts_per_step=4",
            "sampler.prompts_per_batch=2", "sampler.max_new_tokens=5", "logging.plot=false",
        ],
    )  # fmt: skip
    task = tmp_path / "logs" / f"job-{job.id}.0" / "task-1.log"
    deadline = time.monotonic() + 120
    while not task.exists() or "the reward broke here" not in task.read_text():
        assert time.monotonic() < deadline, job.said()
        time.sleep(0.1)
    start = time.monotonic()
    assert job.wait() == "FAILED", job.said()
    seconds = time.monotonic() - start
    print(f"the job ended {seconds:.1f} s after the error")
    assert seconds < 15
    assert "the reward broke here" in job.log.read_text()
    assert job.restarts() == 0


@takes_long
@pytest.mark.parametrize("script", ["train_srun", "train_torchrun"])
def test_the_signal_before_the_time_limit_saves_and_the_requeued_job_goes_on(
    uninterrupted, settings, tmp_path, script
):
    job = Job(tmp_path, [*settings, "checkpoint.interval=1000"], script=script)
    job.wait_for_step(3)
    subprocess.run(["scancel", "--signal=USR1", job.id], check=True)  # as --signal=USR1@300 does
    assert job.wait() == "COMPLETED", job.said()
    assert job.restarts() == 1
    assert "back into the queue" in job.log.read_text()
    assert "resuming from" in job.said()
    assert metrics(tmp_path) == metrics(uninterrupted.folder)


@takes_long
def test_a_preempted_job_saves_and_goes_on_by_itself(uninterrupted, settings, tmp_path):
    job = Job(tmp_path, [*settings, "checkpoint.interval=1000"], nodes=2)
    job.wait_for_step(3)
    other = subprocess.run(
        ["sbatch", "--parsable", "--partition=high", "--nodes=4", "--exclusive",
         f"--output={tmp_path}/other.log", "--wrap=sleep 2"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    assert job.wait() == "COMPLETED", job.said()
    assert job.restarts() == 1 and "JobState=COMPLETED" in control("show", "job", other)
    assert "stopped by SIGTERM" in job.said() and "resuming from" in job.said()
    assert metrics(tmp_path) == metrics(uninterrupted.folder)


@takes_long
def test_a_job_that_loses_a_node_goes_on_from_the_last_checkpoint(
    cluster, uninterrupted, settings, tmp_path
):
    job = Job(tmp_path, settings)
    job.wait_for_step(7)
    node = job.nodes()[-1]  # the batch script runs on the first
    slurmd = int((cluster / f"run/slurmd-{node}.pid").read_text())
    ranks = job.pids(node)
    stepds = {parent(pid) for pid in ranks} - {slurmd, 1, *ranks}
    for pid in [slurmd, *stepds, *ranks]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    assert job.wait() == "COMPLETED", job.said()
    assert job.restarts() == 1
    assert "resuming from" in job.said()
    assert metrics(tmp_path) == metrics(uninterrupted.folder)


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 1


@takes_long
def test_two_jobs_on_the_same_nodes_do_not_collide(cluster, uninterrupted, settings, tmp_path):
    jobs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        jobs.append(
            Job(tmp_path / name, [*settings, "run.steps=10"], options=("--nodelist=n3,n4",))
        )
    assert [job.wait() for job in jobs] == ["COMPLETED"] * 2, jobs[0].said() + jobs[1].said()
    for job in jobs:
        assert metrics(job.folder) == metrics(uninterrupted.folder)[:10]
