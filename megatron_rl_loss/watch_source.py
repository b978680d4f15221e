"""Rollouts from an engine that runs beside the trainer and loads the weights it exports."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .parallel.agreement import raise_together
from .rollouts.inbox import Inbox
from .rollouts.rollout import Rollout

LATEST_FILE = "latest"
JOURNAL_FILE = "rollouts_taken.jsonl"
_KEPT_EXPORTS = 2
_SLICE_SECONDS = 30.0


class WeightExport:
    """Writes the weights for the engine: the folder `v<steps done>`, and the file `latest`.

    `latest` is a text file with the newest folder's name; it is replaced when the folder is
    complete. The two newest folders are kept.

    Args:
        folder: shared with the engine.
        interval: steps between two exports; the first is before the first step.
        save: writes a checkpoint in one piece, on every rank, over one that is there.
    """

    def __init__(self, folder: str | Path, *, interval: int, save: Callable[[Path], None]) -> None:
        self._folder = Path(folder)
        self._interval = interval
        self._save = save

    def before_step(self, step: int) -> None:
        """Exports if it is time, with `step` steps done.

        Communicates: what `save` does; every rank must call it.
        """
        if step % self._interval:
            return
        name = f"v{step}"
        self._save(self._folder / name)
        raise_together(lambda: self._announce(name), dist.group.WORLD)

    def _announce(self, name: str) -> None:
        if dist.get_rank() != 0:
            return
        unfinished = self._folder / f".{LATEST_FILE}.tmp"
        unfinished.write_text(name + "\n")
        os.replace(unfinished, self._folder / LATEST_FILE)
        exports = sorted(self._folder.glob("v*"), key=lambda path: int(path.name[1:]))
        for old in exports[:-_KEPT_EXPORTS]:
            shutil.rmtree(old)


class WatchedRollouts:
    """A rollout source: exports weights, waits for rollouts, hands them to all ranks.

    Args:
        inbox: on rank 0; None on the others.
        per_step: rollouts in a step, over all ranks.
        export: None: the engine gets its weights in another way.
    """

    def __init__(self, inbox: Inbox | None, *, per_step: int, export: WeightExport | None) -> None:
        self._inbox = inbox
        self._per_step = per_step
        self._export = export

    def rollouts(self, step: int) -> list[Rollout]:
        """Returns all rollouts of a step (counted from 0), the same on every rank.

        Communicates: the export's gathers, and a broadcast of the rollouts from rank 0.
        """
        if self._export is not None:
            self._export.before_step(step)
        box: list[list[Rollout] | None] = [None]
        while box[0] is None:  # in slices, as no collective may wait as long as an engine may need
            box = [raise_together(lambda: self._read(step), dist.group.WORLD)]
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def _read(self, step: int) -> list[Rollout] | None:
        if self._inbox is None:
            return None
        return self._inbox.rollouts(step, self._per_step, patience=_SLICE_SECONDS)

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: the inbox's journal, in the run's folder, is the position."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` returned."""
