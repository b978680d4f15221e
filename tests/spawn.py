"""Runs a function on several gloo CPU ranks, with a time-out that prints every rank's stacks.

The processes of a world size are started once and kept, so that a case costs its own work and
not the imports. A case that raises or hangs takes its processes with it; the next case gets new.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class RankError(AssertionError):
    """A rank raised, died or hung; the text holds the ranks' own words."""


# what a case leaves behind (gloo's threads, above all) slows the next ones down
MAX_CASES = 40

_pools: dict[int, RankPool] = {}


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120) -> list:
    """Calls `fn(*args)` on each rank of a gloo world and returns the results, by rank.

    `fn` and `args` are pickled: a module-level function. Results are pickled too.

    Raises:
        RankError: with the traceback of every failed rank, or all ranks' stacks after `timeout`.
    """
    pool = _pools.get(world_size)
    if pool is not None and pool.num_cases >= MAX_CASES:
        pool.kill()
        pool = None
    if pool is None:
        pool = _pools[world_size] = RankPool(world_size)
    try:
        return pool.run(fn, args, timeout)
    except BaseException:
        pool.kill()
        del _pools[world_size]
        raise


@atexit.register
def _kill_pools() -> None:
    for pool in _pools.values():
        pool.kill()


class RankPool:
    def __init__(self, world_size: int) -> None:
        self.num_cases = 0
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, world_size, port, theirs, self._stacks(rank)),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _stacks(self, rank: int) -> Path:
        return self._folder / f"stacks-{rank}.txt"

    def run(self, fn: Callable[..., Any], args: tuple, timeout: float) -> list:
        self.num_cases += 1
        for pipe in self._pipes:
            pipe.send((fn, args))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(self._pipes):
            for rank, pipe in enumerate(self._pipes):
                if rank not in answers and pipe.poll(0.005):
                    answers[rank] = self._receive(rank, pipe)
                    if not answers[rank][0]:
                        # the others may now wait for this rank for ever
                        deadline = min(deadline, time.monotonic() + 5)
            if time.monotonic() > deadline:
                break
        return self._results(answers, timeout)

    @staticmethod
    def _receive(rank: int, pipe: Connection) -> tuple[bool, Any]:
        try:
            return pipe.recv()
        except EOFError:
            return False, f"rank {rank} died without a word"

    def _results(self, answers: dict[int, tuple[bool, Any]], timeout: float) -> list:
        failed = {rank: text for rank, (ok, text) in answers.items() if not ok}
        if failed:
            raise RankError("\n".join(f"--- rank {r} ---\n{text}" for r, text in failed.items()))
        if len(answers) < len(self._pipes):
            raise RankError(f"no answer after {timeout:.0f} s; stacks:\n{self._dump_stacks()}")
        return [answers[rank][1] for rank in range(len(self._pipes))]

    def _dump_stacks(self) -> str:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)
        texts = []
        for rank in range(len(self._processes)):
            path = self._stacks(rank)
            text = path.read_text() if path.exists() else ""
            texts.append(f"--- rank {rank} ---\n{text}")
        return "\n".join(texts)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(5)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _serve(rank: int, world_size: int, port: int, pipe: Connection, stacks: Path) -> None:
    stacks_file = open(stacks, "w")
    faulthandler.register(signal.SIGUSR1, file=stacks_file, all_threads=True)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=300)
    )
    while True:
        try:
            fn, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, fn(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        finally:
            _leave_groups()


def _leave_groups() -> None:
    """Ends the groups that a case left: each holds three threads that keep waking up."""
    if "megatron.core.parallel_state" in sys.modules:
        from megatron_rl_loss.mcore.ranks import stop_ranks

        _free_dispatchers()
        stop_ranks()


def _free_dispatchers() -> None:
    """Drops the last tensors of Megatron's token dispatchers, which keep a model alive for ever.

    They hold the graph, whose hooks hold DDP, whose module holds them; the garbage collector does
    not see through the graph.
    """
    import torch

    for found in gc.get_objects():
        if type(found).__name__.endswith("TokenDispatcher"):
            for name, value in vars(found).items():
                if isinstance(value, torch.Tensor):
                    setattr(found, name, None)
