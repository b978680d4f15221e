"""Rollouts from files that do not fit into memory: in order or shuffled, each once per pass.

Shuffled, the files come in a new order in each pass, and so do the groups within each stretch of
about `blocks.BLOCK_ROWS` rows; rows of different stretches are not mixed. Rollouts of one group
that follow each other in a file stay together.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import RolloutError
from .blocks import Block, Place, blocks
from .columns import rollouts_from_columns
from .files import Parser, Problems
from .rollout import Rollout
from .sources import Source, find_sources


class _Stretch(NamedTuple):
    """Whole groups: the rows from `head` of the block at `start`, and the next ones' first rows."""

    start: Place
    head: int
    rollouts: list[Rollout]


class RolloutStream:
    """Reads rollouts one mini-batch after another; memory does not grow with the files.

    Args:
        path: a file or a folder.
        shuffle_seed: of each pass; None: the files' order.
        vocab_size, drop_non_finite, need_reward, max_tokens: as in `RolloutFiles`.

    Raises:
        RolloutError: there are no files.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        shuffle_seed: int | None = None,
        vocab_size: int | None = None,
        drop_non_finite: bool = False,
        need_reward: bool = True,
        max_tokens: int | None = None,
    ) -> None:
        self._path = Path(path)
        self._sources = find_sources(path)
        self._seed = shuffle_seed
        self._checks: dict[str, Any] = {
            "vocab_size": vocab_size,
            "need_reward": need_reward,
            "max_tokens": max_tokens,
        }
        self._drop_non_finite = drop_non_finite
        self._parse = Parser(drop_non_finite=drop_non_finite, **self._checks)
        self._position: dict[str, int] = {}
        self._pending: deque[Rollout] = deque()
        self._used = 0  # rollouts of the running stretch that were given out
        self._starts: list[bool] = []  # of each rollout of the running stretch: a new group
        self._stretches = self._read(0, 0, Place(), 0)

    def take(self, num: int, *, whole_groups: bool = False) -> list[Rollout]:
        """Returns the next `num` rollouts; after the last one of a pass comes the next pass.

        Args:
            whole_groups: raise if the rollouts end within a group.

        Raises:
            RolloutError: names file and row of the bad ones, or the cut group's.
        """
        taken = []
        while len(taken) < num:
            if not self._pending:
                self._next_stretch()
            part = min(num - len(taken), len(self._pending))
            taken += [self._pending.popleft() for _ in range(part)]
            self._used += part
        if whole_groups and self._pending and not self._starts[self._used]:
            raise RolloutError(
                f"{self._path}: a mini-batch of {num} rollouts ends within the group "
                f"{self._pending[0].group_id!r}. Choose a size that whole groups add up to."
            )
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, small and made of plain numbers and text."""
        return {
            **self._position,
            "used": self._used,
            "shuffle_seed": self._seed,
            "files": _fingerprint(self._sources),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a position, so that `take` returns what comes after it.

        Raises:
            RolloutError: the files or the order are others than when the position was saved.
        """
        if state["files"] != _fingerprint(self._sources):
            raise RolloutError(
                f"{self._path}: the files' names or sizes changed since the position was saved; "
                "rows would be trained twice or not at all. Bring the files back, or start anew."
            )
        if state["shuffle_seed"] != self._seed:
            raise RolloutError(
                f"the position was saved with shuffle_seed {state['shuffle_seed']}, this reader "
                f"has {self._seed}; rows would be trained twice or not at all."
            )
        self._pending.clear()
        self._position, self._used = {}, 0
        if "epoch" not in state:
            self._stretches = self._read(0, 0, Place(), 0)
            return
        place = Place(state["key"], state["number"])
        self._stretches = self._read(state["epoch"], state["file"], place, state["head"])
        self._next_stretch()
        for _ in range(state["used"]):
            self._pending.popleft()
        self._used = state["used"]

    def _next_stretch(self) -> None:
        epoch, file, stretch = next(self._stretches)
        starts = _group_starts(stretch.rollouts)
        rollouts = stretch.rollouts
        if self._seed is not None:
            rng = np.random.default_rng([self._seed, epoch, file, stretch.start.key])
            rollouts, starts = _shuffled(rollouts, starts, rng)
        self._pending, self._starts, self._used = deque(rollouts), starts, 0
        self._position = {
            "epoch": epoch,
            "file": file,
            "key": stretch.start.key,
            "number": stretch.start.number,
            "head": stretch.head,
        }

    def _read(
        self, epoch: int, file: int, place: Place, head: int
    ) -> Iterator[tuple[int, int, _Stretch]]:
        """Yields (pass, place of the file in the pass, stretch), for ever."""
        while True:
            empty = file == 0 and place.key == 0 and head == 0
            order = self._file_order(epoch)
            for index in range(file, len(order)):
                for stretch in self._file_stretches(self._sources[order[index]], place, head):
                    empty = False
                    yield epoch, index, stretch
                place, head = Place(), 0
            if empty:
                raise RolloutError(f"{self._path}: has no rollouts.")
            epoch, file = epoch + 1, 0

    def _file_order(self, epoch: int) -> list[int]:
        if self._seed is None:
            return list(range(len(self._sources)))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._sources)).tolist()

    def _file_stretches(self, source: Source, place: Place, head: int) -> Iterator[_Stretch]:
        """Yields a file's stretches; each ends where a group ends."""
        running: _Stretch | None = None
        for block in blocks(source, place):
            rollouts = self._rollouts(block, source)
            if running is not None:
                head = _same_group(rollouts, running.rollouts[-1])
                running.rollouts.extend(rollouts[:head])
                if head == len(rollouts):
                    continue
                yield running
            running, head = _Stretch(block.start, head, rollouts[head:]), 0
        if running is not None:
            yield running

    def _rollouts(self, block: Block, source: Source) -> list[Rollout]:
        if block.columns is not None and not self._drop_non_finite:
            rollouts = rollouts_from_columns(block.columns, **self._checks)
            if rollouts and self._parse.first_kind in (None, rollouts[0].kind):
                place = f"{source.path}, {source.unit} {block.start.number}"
                self._parse.expect_kind(rollouts[0].kind, place)
                return rollouts
        problems = Problems()
        parsed = [problems.call(self._parse, r.record, source, r.number) for r in block.rows()]
        problems.raise_if_any(source.path)
        return parsed


def _same_group(rollouts: list[Rollout], last: Rollout) -> int:
    """Returns how many of the first rollouts belong to the group of `last`."""
    if last.group_id is None:
        return 0
    other = (i for i, rollout in enumerate(rollouts) if rollout.group_id != last.group_id)
    return next(other, len(rollouts))


def _group_starts(rollouts: list[Rollout]) -> list[bool]:
    ids = [rollout.group_id for rollout in rollouts]
    return [True, *(b is None or a != b for a, b in zip(ids, ids[1:]))]


def _shuffled(
    rollouts: list[Rollout], starts: list[bool], rng: np.random.Generator
) -> tuple[list[Rollout], list[bool]]:
    """Returns the groups in another order; within each group the order stays."""
    firsts = [i for i, is_start in enumerate(starts) if is_start]
    spans = list(zip(firsts, [*firsts[1:], len(rollouts)]))
    order = [i for k in rng.permutation(len(spans)) for i in range(*spans[k])]
    return [rollouts[i] for i in order], [starts[i] for i in order]


def _fingerprint(sources: list[Source]) -> str:
    """Returns a digest of the files' names and sizes."""
    files = [(source.path.name, source.path.stat().st_size) for source in sources]
    return hashlib.blake2b(repr(files).encode(), digest_size=16).hexdigest()
