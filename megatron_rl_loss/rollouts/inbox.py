"""A folder that an external engine writes rollout files into while the trainer reads them.

What the two agree on:

* a file is complete when it has its name: the engine writes `.NAME.tmp` and renames it. Where a
  rename is not atomic, ask for done markers: an empty `NAME.done` beside each complete `NAME`.
* names start with the version of the weights that sampled the rollouts, `v12-anything.parquet`;
  the version is the number of steps that were done when the weights were exported.
* used files move to `used/`. So the files that are left are the backlog, by which the engine knows
  when to wait (`wait_for_room`).

The journal, a file of the run, says which rows each step trained on. A step that is run again after
a restart gets the same rows.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import RolloutError
from .files import RolloutFiles
from .rollout import Rollout
from .sources import JSON_SUFFIXES, PARQUET_SUFFIXES

USED_FOLDER = "used"
DONE_SUFFIX = ".done"
_NAME = re.compile(r"v(\d+)-.*")
_POLL_SECONDS = 0.2

Rows = list[list[Any]]  # [file name, first row, end], in order


def version_of(name: str) -> int:
    """Returns the version in a file's name.

    Raises:
        RolloutError: the name has none.

    >>> version_of("v12-engine0-3.parquet")
    12
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise RolloutError(
            f"{name}: the name of a rollout file must start with the version of the weights that "
            "sampled it, v<number>-, as in v12-engine0-3.parquet."
        )
    return int(match[1])


def rollout_files(folder: Path, *, done_markers: bool = False) -> list[str]:
    """Returns the names of the complete files, oldest version first, then by name."""
    names = {entry.name for entry in os.scandir(folder) if entry.is_file()}
    complete = [
        name
        for name in names
        if not name.startswith(".")
        and name.endswith(JSON_SUFFIXES + PARQUET_SUFFIXES)
        and (not done_markers or name + DONE_SUFFIX in names)
    ]
    return sorted(complete, key=lambda name: (version_of(name), name))


def wait_for_room(
    folder: str | Path, max_files: int, *, timeout: float, poll: float = _POLL_SECONDS
) -> None:
    """For the engine: returns when fewer than `max_files` files wait for the trainer.

    Raises:
        RolloutError: that took longer than `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while len(rollout_files(Path(folder))) >= max_files:
        if time.monotonic() > deadline:
            raise RolloutError(
                f"{folder}: the trainer took no file for {timeout:g} s while {max_files} or more "
                "were waiting; is it still running?"
            )
        time.sleep(poll)


class Inbox:
    """The trainer's side, on one rank only.

    Args:
        folder: made if missing.
        journal: file that says which rows each step was given; made if missing.
        max_staleness: files whose version is more steps behind are put aside unused.
        timeout: seconds to wait for enough rollouts.
        done_markers: see above.
        whole_groups: refuse to end a step within a group.
        **checks: of `RolloutFiles`.
    """

    def __init__(
        self,
        folder: str | Path,
        journal: str | Path,
        *,
        max_staleness: int,
        timeout: float,
        done_markers: bool = False,
        whole_groups: bool = False,
        poll: float = _POLL_SECONDS,
        **checks: Any,
    ) -> None:
        self._folder, self._journal = Path(folder), Path(journal)
        self._max_staleness, self._timeout, self._poll = max_staleness, timeout, poll
        self._done_markers, self._whole_groups = done_markers, whole_groups
        self._checks = checks
        self._used_folder = self._folder / USED_FOLDER
        self._used_folder.mkdir(parents=True, exist_ok=True)
        self._journal.parent.mkdir(parents=True, exist_ok=True)
        self._given: dict[int, Rows] = self._read_journal()
        self._used: dict[str, int] = {}  # rows of each file that belong to a step
        for rows in self._given.values():
            self._count(rows)
        self._open: dict[str, RolloutFiles] = {}
        self._deadline: float | None = None  # of the running wait

    def rollouts(self, step: int, num: int, *, patience: float = math.inf) -> list[Rollout] | None:
        """Returns the rollouts of a step, counted from 0; waits for them if it is a new one.

        Args:
            num: rollouts in the step.
            patience: seconds after which to return None, and be asked again.

        Raises:
            RolloutError: a file is bad or was removed, or the wait took longer than `timeout`.
        """
        if step in self._given:
            rollouts = [r for rows in self._given[step] for r in self._read(*rows)]
            self._open.clear()
            return rollouts
        rows = self._wait(step, num, patience)
        if rows is None:
            return None
        rollouts = [r for part in rows for r in self._read(*part)]
        self._check_whole(rows[-1])
        self._write_journal(step, rows)
        self._put_used_aside()
        return rollouts

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of steps that were given rollouts; the rest is in the journal."""
        return {"steps": len(self._given)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Checks that the journal knows the steps that were done.

        Raises:
            RolloutError: it does not.
        """
        if len(self._given) < state["steps"]:
            raise RolloutError(
                f"{self._journal} has {len(self._given)} steps, but {state['steps']} were done; "
                "rows could be trained twice. Bring the journal back, or start anew."
            )

    def _wait(self, step: int, num: int, patience: float) -> Rows | None:
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._timeout
        deadline = self._deadline
        while True:
            rows = self._fresh_rows(step, num)
            there = sum(end - first for _, first, end in rows)
            if there == num:
                self._deadline = None
                return rows
            if time.monotonic() > min(deadline, now + patience):
                if time.monotonic() <= deadline:
                    return None
                raise RolloutError(
                    f"{self._folder}: waited {self._timeout:g} s for the {num} rollouts of step "
                    f"{step}; {there} are there that are at most {self._max_staleness} steps old. "
                    "Is the engine running, and does it load the exported weights?"
                )
            time.sleep(self._poll)

    def _fresh_rows(self, step: int, num: int) -> Rows:
        rows: Rows = []
        for name in rollout_files(self._folder, done_markers=self._done_markers):
            if step - version_of(name) > self._max_staleness:
                self._put_aside(name)
                continue
            first = self._used.get(name, 0)
            end = min(len(self._file(name)), first + num)
            num -= end - first
            if end > first:
                rows.append([name, first, end])
            if not num:
                break
        return rows

    def _file(self, name: str) -> RolloutFiles:
        if name not in self._open:
            here = self._folder / name
            path = here if here.exists() else self._used_folder / name
            if not path.exists():
                raise RolloutError(f"{here}: the journal names this file, but it was removed.")
            self._open[name] = RolloutFiles(path, **self._checks)
        return self._open[name]

    def _read(self, name: str, first: int, end: int) -> list[Rollout]:
        return self._file(name)[first:end]

    def _check_whole(self, last: list[Any]) -> None:
        name, _, end = last
        if not self._whole_groups or end == len(self._file(name)):
            return
        group = self._file(name)[end].group_id
        if group is not None and group == self._file(name)[end - 1].group_id:
            raise RolloutError(
                f"{self._folder / name}: row {end} is the last one of a step, but its group "
                f"{group!r} goes on. Choose rollouts.per_step so that whole groups add up to it."
            )

    def _count(self, rows: Rows) -> None:
        for name, _, end in rows:
            self._used[name] = max(end, self._used.get(name, 0))

    def _put_used_aside(self) -> None:
        for name in list(self._open):
            if self._used.get(name, 0) >= len(self._open[name]):
                self._put_aside(name)

    def _put_aside(self, name: str) -> None:
        self._open.pop(name, None)
        for part in (name, name + DONE_SUFFIX):
            if (self._folder / part).exists():
                os.replace(self._folder / part, self._used_folder / part)

    def _read_journal(self) -> dict[int, Rows]:
        if not self._journal.exists():
            return {}
        lines = self._journal.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]  # half a line: killed while writing
        if whole != lines:
            self._journal.write_text("".join(whole))
        entries = map(json.loads, whole)
        return {entry["step"]: entry["rows"] for entry in entries}

    def _write_journal(self, step: int, rows: Rows) -> None:
        with self._journal.open("a") as file:
            file.write(json.dumps({"step": step, "rows": rows}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._given[step] = rows
        self._count(rows)
