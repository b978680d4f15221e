"""How a run ends when it is asked to, or when it hangs.

SIGTERM and SIGUSR1 (what SLURM and other schedulers send before they take a node away) only set a
flag. The main loop looks at it between two steps, so that all ranks stop after the same one.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

HANG_EXIT_CODE = 124
_GRACE_SECONDS = 5.0  # for the other ranks to dump their stacks, before the launcher ends them


class StopSignals:
    """Catches the stop signals while it is entered; outside the main thread it does nothing.

    SIGTERM only after `arm`: while a run starts there is nothing to save, and a rank that waits
    for another one that will not come must end when the launcher says so. (A handler in Python
    would run only after the wait.)
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._catch(signal.SIGUSR1)
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def arm(self) -> None:
        """Catches SIGTERM too: the steps begin."""
        self._catch(signal.SIGTERM)

    def _catch(self, number: signal.Signals) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before[number] = signal.signal(number, self._set)

    def _set(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name


class Agreement:
    """Tells between two steps whether any rank wants to stop, or has failed to save.

    Communicates: makes a gloo group, and all-reduces two small integers per call; it neither
    waits for the GPU nor disturbs it.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")

    def any_rank(self, *flags: bool) -> list[bool]:
        """Returns each flag, True if it is on any rank."""
        values = torch.tensor([int(flag) for flag in flags])
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(value) for value in values.tolist()]


class Watchdog:
    """Ends this process, with the stacks of all its threads, when nothing has happened for long.

    Every rank has its own; ranks that wait for a hanging one dump their stacks too.

    Args:
        seconds: without a `reset`; None: never.
        rank: shown.
    """

    def __init__(self, seconds: float | None, rank: int = 0) -> None:
        self._seconds = seconds
        self._rank = rank
        self._last = time.monotonic()
        self._closed = threading.Event()

    def __enter__(self) -> Watchdog:
        if self._seconds is not None:
            self.reset()
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()

    def reset(self) -> None:
        """Says that the run has got on."""
        self._last = time.monotonic()
        if self._seconds is not None:
            # comes to pass where a thread holds the interpreter's lock, and _watch cannot run
            faulthandler.dump_traceback_later(self._seconds + 2 * _GRACE_SECONDS, exit=True)

    def _watch(self) -> None:
        assert self._seconds is not None
        while not self._closed.wait(min(1.0, self._seconds / 10)):
            if time.monotonic() - self._last > self._seconds:
                _say(f"{_who(self._rank)}: no progress for {self._seconds:g} s; its stacks:")
                _say(_stacks())
                time.sleep(_GRACE_SECONDS)
                os._exit(HANG_EXIT_CODE)


def exit_now(code: int) -> None:
    """Ends a rank without waiting for others.

    The usual end waits for process groups and threads, which wait for the other ranks; those are
    ended by the launcher only when this one is gone.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def rank_name() -> str:
    """Returns this process's rank and node, e.g. "rank 3 (node n2)", or "" where it is alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ""
    return _who(int(os.environ.get("RANK", "0")))


def _who(rank: int) -> str:
    return f"rank {rank} (node {os.environ.get('SLURMD_NODENAME') or os.uname().nodename})"


def _say(text: str) -> None:
    """Writes in one piece, so that ranks that share a log do not mix their lines."""
    os.write(2, (text.rstrip("\n") + "\n").encode())


def _stacks() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
