"""What happens between two steps of a run: checkpoints, and the end if a signal asks for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from .mcore.checkpoint import Checkpointer
from .signals import Agreement, StopSignals, Watchdog

STOPPED_FILE = "stopped.json"
GIVE_WAY_S = 60.0


class BetweenSteps:
    """Saves when it is time, and stops all ranks after the same step.

    Args:
        run_dir: of the run; rank 0 writes `stopped.json` there when a signal ended the run.
        total_steps: of the run.
        checkpoints: None: nothing is saved.
        signals, watchdog: of this process.

    Communicates: see `Agreement`; every rank must construct it.
    """

    def __init__(
        self,
        run_dir: str | Path,
        total_steps: int,
        checkpoints: Checkpointer | None,
        signals: StopSignals,
        watchdog: Watchdog,
    ) -> None:
        self._run_dir = Path(run_dir)
        self._total = total_steps
        self._checkpoints = checkpoints
        self._signals = signals
        self._watchdog = watchdog
        self._agreement = Agreement()

    def must_stop(self, done: int) -> bool:
        """Tells whether any rank was asked to stop; then the run is saved after `done` steps.

        Raises:
            CheckpointError: on every rank, if a checkpoint could not be written.
        """
        self._watchdog.reset()
        failed = self._checkpoints is not None and self._checkpoints.failed
        stop, failed = self._agreement.any_rank(self._signals.received is not None, failed)
        if failed:
            self.finish()
        if stop:
            self._stop(done)
        return stop

    def progress(self) -> None:
        """Says that the run has got on within a step."""
        self._watchdog.reset()

    def after_step(self, done: int) -> None:
        """Saves after `done` steps if it is time."""
        checkpoints = self._checkpoints
        if checkpoints is None or not (checkpoints.is_due(done) or done == self._total):
            return
        seconds = checkpoints.save(done)
        self._say(f"checkpoint of step {done}: held up training for {seconds:.2f} s")

    def finish(self) -> None:
        """Waits for the last checkpoint.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._checkpoints is not None:
            self._checkpoints.finish()

    def give_way(self) -> None:
        """Before an error ends the run: lets a checkpoint that is being written get to the disk.

        The wait has a bound, for the other ranks may not have met the error.
        """
        if self._checkpoints is not None:
            self._checkpoints.wait(GIVE_WAY_S)

    def _stop(self, done: int) -> None:
        saved = "no checkpoint, as checkpoint.interval is not set"
        if self._checkpoints is not None:
            self._checkpoints.save(done)
            self.finish()
            saved = "the checkpoint is saved; the same command goes on from there"
        if dist.get_rank() == 0:
            about = {"step": done, "steps": self._total, "saved": self._checkpoints is not None}
            (self._run_dir / STOPPED_FILE).write_text(json.dumps(about) + "\n")
        reason = self._signals.received or "a signal to another rank"
        self._say(f"stopped by {reason} after step {done} of {self._total}: {saved}")

    def _say(self, text: str) -> None:
        if dist.get_rank() == 0:
            print(text, file=sys.stderr, flush=True)
