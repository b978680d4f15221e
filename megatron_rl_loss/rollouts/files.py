"""Rollout files: JSON lines or Parquet, one rollout per line or row, one file or a folder of them.

| field | type | |
|---|---|---|
| `prompt_ids` | list of int | required; at least one token id |
| `response_ids` | list of int | required; at least one token id; the end-of-sequence token counts |
| `loss_mask` | list of bool (or 0 / 1) | one per response token; default: all trained |
| `reward` | number | of the response; this or `advantage` is required (not for `cross_entropy`) |
| `advantage` | number, or list of numbers | of the response, or one per response token |
| `rollout_log_probs` | list of numbers | one per response token, nats, as sampled |
| `ref_log_probs` | list of numbers | one per response token, nats, of the frozen reference |
| `teacher_top_ids` | list of lists of int | a teacher's k tokens for each response token |
| `teacher_top_log_probs` | list of lists of numbers | their log-probs, nats; unused: -1000 |
| `group_id` | int or string | the prompt: responses to one prompt share it |
| `metadata` | object (Parquet: also JSON text) | not read by training |

Null counts as not given. The optional fields must be the same in every rollout. Log-probs that are
NaN, inf or null are an error where the token is trained, and are not looked at elsewhere. Common
foreign names are understood (`records.ALIASES`); an unknown field is an error.

    {"prompt_ids": [1, 22], "response_ids": [7, 2], "reward": 1.0, "group_id": "q1"}
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from ..errors import RolloutError
from .records import ALIASES, record_from_rollout, rollout_from_record
from .rollout import OPTIONAL_FIELDS, Rollout, field_error
from .sources import Row, Source, find_sources, is_parquet, write_json_lines, write_parquet

# Up to this size everything is checked before the first mini-batch.
CHECK_ALL_BYTES = 256 * 2**20
_SHOWN_ERRORS = 10
_GROUP_NAMES = ("group_id", *(theirs for theirs, ours in ALIASES.items() if ours == "group_id"))


@dataclass(frozen=True)
class RolloutSummary:
    """What `validate_rollouts` found.

    Attributes:
        num_rollouts, num_groups: rollouts, and different group ids (0 without).
        max_prompt_tokens, max_response_tokens: the longest.
        fields: the optional fields that are given.
    """

    num_rollouts: int
    num_groups: int
    max_prompt_tokens: int
    max_response_tokens: int
    fields: tuple[str, ...]


class RolloutFiles(Sequence[Rollout]):
    """Rollouts by index, in the order of files and lines; only an index is kept in memory.

    Rollouts of one group that follow each other stay together when shuffled.

    Args:
        path: a file or a folder.
        vocab_size: token ids must be below it.
        drop_non_finite: take tokens with non-finite log-probs out of the loss mask, instead of
            raising.
        need_reward: `reward` or `advantage` must be given; supervised losses read neither.
        max_tokens: prompt and response together must not be longer.
        check_all: check every rollout now; None: if the files have at most `CHECK_ALL_BYTES`.
            Otherwise each mini-batch is checked when it is read, before any of it is returned.

    Raises:
        RolloutError: no rollouts, or (up to ten of) the bad ones with file, line and field.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        vocab_size: int | None = None,
        drop_non_finite: bool = False,
        need_reward: bool = True,
        max_tokens: int | None = None,
        check_all: bool | None = None,
    ) -> None:
        self._path = Path(path)
        self._sources = find_sources(path)
        self._parse = Parser(
            vocab_size=vocab_size,
            drop_non_finite=drop_non_finite,
            need_reward=need_reward,
            max_tokens=max_tokens,
        )
        if check_all is None:
            size = sum(source.path.stat().st_size for source in self._sources)
            check_all = size <= CHECK_ALL_BYTES
        self._index, self._group_starts = self._scan(check_all)
        self._order: tuple[Any, np.ndarray] = (None, np.empty(0))

    def _scan(self, check_all: bool) -> tuple[np.ndarray, np.ndarray]:
        """Returns [n, 3] (source, key, number) and the indices where a new group starts."""
        index: list[tuple[int, int, int]] = []
        starts: list[int] = []
        problems = Problems()
        group: Any = None
        for i, source, row in _rows(self._sources):
            if check_all or not index:
                problems.call(self._parse, row.record, source, row.number)
            new_group = (i, _raw_group(row.record))
            if new_group[1] is None or new_group != group:
                starts.append(len(index))
            group = new_group
            index.append((i, row.key, row.number))
        problems.raise_if_any(self._path)
        _check_not_empty(len(index), self._path)
        return np.array(index, dtype=np.int64), np.array(starts, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, index: int) -> Rollout: ...

    @overload
    def __getitem__(self, index: slice) -> list[Rollout]: ...

    def __getitem__(self, index: int | slice) -> Rollout | list[Rollout]:
        if isinstance(index, slice):
            return self._read(range(*index.indices(len(self))))
        return self._read([range(len(self))[index]])[0]

    def _read(self, indices: Iterable[int]) -> list[Rollout]:
        problems = Problems()
        rollouts = []
        for i in indices:
            source_index, key, number = (int(x) for x in self._index[i])
            source = self._sources[source_index]
            rollouts.append(problems.call(self._parse, source.read(key), source, number))
        problems.raise_if_any(self._path)
        return rollouts

    def order(self, *, shuffle_seed: int | None = None, epoch: int = 0) -> np.ndarray:
        """Returns the indices of one pass over the files; shuffled by (seed, epoch) if given."""
        if shuffle_seed is None:
            return np.arange(len(self))
        if self._order[0] != (shuffle_seed, epoch):
            groups = np.split(np.arange(len(self)), self._group_starts[1:])
            permuted = np.random.default_rng([shuffle_seed, epoch]).permutation(len(groups))
            self._order = ((shuffle_seed, epoch), np.concatenate([groups[i] for i in permuted]))
        return self._order[1]

    def mini_batch(
        self, step: int, size: int, *, shuffle_seed: int | None = None, whole_groups: bool = False
    ) -> list[Rollout]:
        """Returns the rollouts of optimizer step `step`, counted from 0; all of them are checked.

        Passes over the files follow each other without a gap, so every rollout is used equally
        often; the result is a function of the arguments alone, whatever was read before.

        Args:
            size: rollouts in a mini-batch, over all ranks.
            shuffle_seed: each pass in a new order; None: in the files' order.
            whole_groups: raise if the mini-batch cuts a group, as advantages relative to the group
                need all of it.

        Raises:
            RolloutError: a rollout is bad, there are fewer than `size`, or a group is cut.
        """
        if not 1 <= size <= len(self):
            raise RolloutError(
                f"{self._path}: a mini-batch of {size} rollouts was asked for, but there are "
                f"{len(self)}; ask for 1 to {len(self)}."
            )
        indices = [self._at(i, shuffle_seed) for i in range(step * size, (step + 1) * size)]
        if whole_groups:
            self._check_cut(self._at(step * size, shuffle_seed), step, size)
            self._check_cut(self._at((step + 1) * size, shuffle_seed), step, size)
        return self._read(indices)

    def _at(self, position: int, shuffle_seed: int | None) -> int:
        epoch, place = divmod(position, len(self))
        return int(self.order(shuffle_seed=shuffle_seed, epoch=epoch)[place])

    def _check_cut(self, first: int, step: int, size: int) -> None:
        place = int(np.searchsorted(self._group_starts, first, side="right")) - 1
        start = int(self._group_starts[place])
        if start != first:
            raise RolloutError(
                f"{self._path}: step {step} with {size} rollouts cuts the group that starts at "
                f"{self._where(start)}. Choose a size that whole groups add up to."
            )

    def _where(self, index: int) -> str:
        source_index, _, number = (int(x) for x in self._index[index])
        source = self._sources[source_index]
        return f"{source.path}, {source.unit} {number}"


def read_rollouts(
    path: str | Path,
    *,
    shuffle_seed: int | None = None,
    epoch: int = 0,
    **checks: Any,
) -> Iterator[Rollout]:
    """Yields the rollouts of a file or folder, each checked when its turn comes.

    In order, nothing is kept in memory; shuffled by (seed, epoch), an index is.

    Args:
        shuffle_seed, epoch: as in `RolloutFiles.order`.
        **checks: `vocab_size`, `drop_non_finite`, `need_reward` of `RolloutFiles`.

    Raises:
        RolloutError: names file, line and field.
    """
    if shuffle_seed is None:
        parse = Parser(**checks)
        for _, source, row in _rows(find_sources(path)):
            yield parse(row.record, source, row.number)
        return
    files = RolloutFiles(path, **checks)
    for i in files.order(shuffle_seed=shuffle_seed, epoch=epoch):
        yield files[int(i)]


def validate_rollouts(path: str | Path, **checks: Any) -> RolloutSummary:
    """Reads everything and says what is there.

    Args:
        **checks: `vocab_size`, `drop_non_finite`, `need_reward` of `RolloutFiles`.

    Raises:
        RolloutError: lists (up to ten of) the bad rollouts with file, line and field.
    """
    parse, problems = Parser(**checks), Problems()
    num_rollouts, prompt, response = 0, 0, 0
    groups: set[int | str | None] = set()
    for _, source, row in _rows(find_sources(path)):
        num_rollouts += 1
        rollout = problems.call(parse, row.record, source, row.number)
        if rollout is not None:
            prompt = max(prompt, len(rollout.prompt_ids))
            response = max(response, len(rollout.response_ids))
            groups.add(rollout.group_id)
    problems.raise_if_any(path)
    _check_not_empty(num_rollouts, path)
    return RolloutSummary(
        num_rollouts, len(groups - {None}), prompt, response, tuple(parse.first_kind or ())
    )


def write_rollouts(path: str | Path, rollouts: Iterable[Rollout]) -> None:
    """Writes a rollout file (JSON lines or Parquet by its suffix) in one piece or not at all.

    Raises:
        RolloutError: the suffix is not known, or Parquet cannot hold the rollouts.
    """
    path = Path(path)
    write = write_parquet if is_parquet(path) else write_json_lines
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(unfinished, map(record_from_rollout, rollouts))
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


class Parser:
    """Makes rollouts of records, all of one kind, and says where a bad one is."""

    def __init__(self, **checks: Any) -> None:
        self._checks = checks
        self.first_kind: dict[str, int] | None = None
        self._first_place = ""

    def __call__(self, record: Any, source: Source, number: int) -> Rollout:
        place = f"{source.path}, {source.unit} {number}"
        try:
            if isinstance(record, RolloutError):
                raise record
            rollout = rollout_from_record(record, **self._checks)
            self._check_kind(rollout, place)
        except RolloutError as error:
            raise RolloutError(f"{place}, {error}") from None
        return rollout

    def expect_kind(self, kind: dict[str, int], place: str) -> None:
        """Makes `kind` what later rollouts are compared with, unless there is one already."""
        if self.first_kind is None:
            self.first_kind, self._first_place = kind, place

    def _check_kind(self, rollout: Rollout, place: str) -> None:
        self.expect_kind(rollout.kind, place)
        assert self.first_kind is not None
        for name in OPTIONAL_FIELDS:
            if (name in self.first_kind) != (name in rollout.kind):
                here, there = ("is", "is not") if name in rollout.kind else ("is not", "is")
                raise field_error(
                    name,
                    f"{here} given here, but {there} in {self._first_place}; rollouts that are "
                    "trained together need the same fields.",
                )
            if rollout.kind.get(name) != self.first_kind.get(name):
                raise field_error(
                    name,
                    f"has {rollout.kind[name]} entries per token, but {self.first_kind[name]} in "
                    f"{self._first_place}; fill up with any token and the log-prob -1000.",
                )


class Problems:
    """Collects errors, so that one run shows all of them."""

    def __init__(self) -> None:
        self._messages: list[str] = []
        self._number = 0

    def call(self, parse: Parser, record: Any, source: Source, number: int) -> Any:
        try:
            return parse(record, source, number)
        except RolloutError as error:
            self._number += 1
            if len(self._messages) < _SHOWN_ERRORS:
                self._messages.append(str(error))
            return None

    def raise_if_any(self, path: str | Path) -> None:
        if not self._messages:
            return
        if self._number == 1:
            raise RolloutError(self._messages[0])
        more = self._number - len(self._messages)
        rest = [f"... and {more} more"] if more else []
        raise RolloutError(
            "\n".join([f"{path}: {self._number} bad rollouts:", *self._messages, *rest])
        )


def _rows(sources: Sequence[Source]) -> Iterator[tuple[int, Source, Row]]:
    for i, source in enumerate(sources):
        for row in source.rows():
            yield i, source, row


def _raw_group(record: Any) -> Any:
    if not isinstance(record, dict):
        return None
    return next((record[name] for name in _GROUP_NAMES if name in record), None)


def _check_not_empty(num_rollouts: int, path: str | Path) -> None:
    if not num_rollouts:
        raise RolloutError(f"{path}: has no rollouts.")
