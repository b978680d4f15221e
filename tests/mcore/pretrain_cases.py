"""Runs scripts/pretrain_rl.py on the ranks of several cases, in forks of one process.

    python tests/mcore/pretrain_cases.py CASES.json

CASES.json: [{"name": ..., "ranks": N, "arguments": [...], "log": FILE, "port": N}, ...]. The
imports, most of the time of a small run, happen once. Prints a line per case: name and exit
statuses.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain_rl.py"
CASE_SECONDS = 120


def run_case(case: dict[str, Any]) -> list[int]:
    """Returns the exit status of each rank."""
    pids = [_fork(case, rank) for rank in range(case["ranks"])]
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + CASE_SECONDS
    while len(statuses) < len(pids):
        for pid in set(pids) - set(statuses):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[pid] = os.waitstatus_to_exitcode(status)
                if statuses[pid]:
                    deadline = min(deadline, time.monotonic() + 3)  # the others wait for it
        if time.monotonic() > deadline:
            for pid in set(pids) - set(statuses):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # Megatron leaves a process that writes checkpoints
    return [statuses[pid] for pid in pids]


def _fork(case: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    log = os.open(case["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case["ranks"]),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(case["port"]),
    )  # fmt: skip
    sys.argv = [str(SCRIPT), "--mrl-cpu", *case["arguments"]]
    status = 1
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    import megatron_rl_loss.pretrain  # noqa: F401
    from megatron_rl_loss.mcore import compat

    compat.bind_typing_override()
    import megatron.training.training  # noqa: F401

    for case in json.loads(Path(sys.argv[1]).read_text()):
        print(json.dumps([case["name"], run_case(case)]), flush=True)


if __name__ == "__main__":
    main()
