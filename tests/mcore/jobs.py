"""The main job in processes that come up at once: forked from one that has imported everything.

A run has as many processes as ranks, so that tests can signal or kill any of them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

_PRELOAD = ["megatron_rl_loss.build", "megatron_rl_loss.train", "tests.mcore.jobs_imports"]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOAD)
TIMES = ("rollout_seconds", "train_seconds", "seconds", "tokens_per_second")


def start(arguments: list[str], log: Path, ranks: int = 1) -> list[BaseProcess]:
    """Starts the main job; what it says is appended to `log`."""
    os.environ["OMP_NUM_THREADS"] = "1"
    port = _free_port()
    processes = [
        _context.Process(target=_job, args=(arguments, rank, ranks, port, str(log)))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return processes


def finish(processes: list[BaseProcess], timeout: float = 90) -> list[int | None]:
    """Returns the exit codes; processes that are still there after `timeout` are killed: None."""
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    kill(processes)
    return codes


def kill(processes: list[BaseProcess]) -> None:
    """Ends processes as `kill -9` does."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join(10)


def run(arguments: list[str], log: Path, ranks: int = 1) -> None:
    """Runs the main job to its end, which must be a good one."""
    codes = finish(start(arguments, log, ranks))
    assert codes == [0] * ranks, f"{codes}\n{log.read_text()[-4000:]}"


def wait_for(log: Path, text: str, timeout: float = 60) -> None:
    """Waits until a log has a text."""
    deadline = time.monotonic() + timeout
    while not (log.exists() and text in log.read_text()):
        assert time.monotonic() < deadline, f"no {text!r} in:\n{log.read_text()[-4000:]}"
        time.sleep(0.02)


def metrics(folder: Path) -> list[dict]:
    """Returns the lines of a run's metrics, without the times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def _job(arguments: list[str], rank: int, ranks: int, port: int, log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    if ranks > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
    import torch

    from megatron_rl_loss.train import main

    torch.set_num_threads(1)
    sys.exit(main(arguments))


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
