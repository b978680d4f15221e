"""A block's columns as rollouts, checked a column at a time.

Nothing here explains what is wrong: where a check fails, the block's rows go one by one through
`rollout_from_record`, which names field and position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..types import MAX_TEACHER_MASS
from .records import ALIASES, FIELDS
from .rollout import MAX_LOG_PROB, MAX_NUMBER, MAX_TOKEN_ID, TOP_K, UNUSED_LOG_PROB, Rollout

IDS = ("prompt_ids", "response_ids")
LOG_PROBS = ("rollout_log_probs", "ref_log_probs")
NUMBERS = ("reward", "advantage")


class Lists(NamedTuple):
    """A column of lists: all values, and where each row's start; [num_rows + 1].

    Of fields with k entries per token, values are [number, k].
    """

    values: np.ndarray
    offsets: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def rows(self) -> list[np.ndarray]:
        bounds = self.offsets.tolist()
        values = self.values
        return [values[a:b] for a, b in zip(bounds, bounds[1:])]


def rollouts_from_columns(
    given: Mapping[str, Any],
    *,
    vocab_size: int | None = None,
    need_reward: bool = True,
    max_tokens: int | None = None,
) -> list[Rollout] | None:
    """Returns the rollouts of a block; None if any of them needs a closer look.

    The sequences of a rollout are read-only NumPy arrays, views of one array per column.

    Args:
        given: by field, as `table_columns` returns them.
        vocab_size, need_reward, max_tokens: as in `rollout_from_record`.
    """
    if not set(IDS) <= given.keys() or not _are_good(given, vocab_size, need_reward, max_tokens):
        return None
    return _make(given)


def table_columns(table: Any) -> dict[str, Any] | None:
    """Returns the columns of an Arrow table: `Lists`, an array or a list, by field.

    None if a name or type is not as expected.
    """
    columns = _columns(table)
    if columns is None:
        return None
    given = {name: _read(name, column) for name, column in columns.items()}
    return None if any(value is None for value in given.values()) else given


def _columns(table: Any) -> dict[str, Any] | None:
    """Returns the columns by field; None if a name is unknown, or two mean the same."""
    found: dict[str, Any] = {}
    for name in table.schema.names:
        field, column = ALIASES.get(name, name), table.column(name)
        if column.null_count == len(column):
            continue
        if field not in FIELDS or field in found or field == "metadata" or column.null_count:
            return None
        found[field] = column
    return found


def _read(name: str, column: Any) -> Any:
    """Returns the column as `Lists`, an array or a list; None if its type is not as expected."""
    from pyarrow import types

    kind = column.type
    if name in TOP_K:
        return _read_top_k(name, column)
    if name == "group_id":
        plain = types.is_int64(kind) or types.is_int32(kind) or types.is_string(kind)
        return column.to_pylist() if plain else None
    if not _is_list(kind):
        if name not in NUMBERS or not (types.is_floating(kind) or types.is_integer(kind)):
            return None
        return column.to_numpy(zero_copy_only=False).astype(np.float64)
    if name == "reward" or not _element_fits(name, kind.value_type):
        return None
    values = column.flatten()
    if values.null_count:
        return None
    lengths = column.value_lengths().to_numpy(zero_copy_only=False)
    return Lists(values.to_numpy(zero_copy_only=False), np.concatenate([[0], np.cumsum(lengths)]))


def _read_top_k(name: str, column: Any) -> Lists | None:
    """Returns lists of lists, all inner ones of one length, as `Lists` of [number, k]."""
    from pyarrow import types

    inner = column.flatten() if _is_list(column.type) else None
    if inner is None or not _is_list(inner.type) or inner.null_count or not len(inner):
        return None
    kind, values = inner.type.value_type, inner.flatten()
    fits = types.is_integer(kind) or (types.is_floating(kind) and name != TOP_K[0])
    widths = inner.value_lengths().to_numpy(zero_copy_only=False)
    if not fits or values.null_count or not widths[0] or (widths != widths[0]).any():
        return None
    lengths = column.value_lengths().to_numpy(zero_copy_only=False)
    numbers = values.to_numpy(zero_copy_only=False).reshape(-1, widths[0])
    return Lists(numbers, np.concatenate([[0], np.cumsum(lengths)]))


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind)


def _element_fits(name: str, kind: Any) -> bool:
    from pyarrow import types

    if name in IDS:
        return types.is_integer(kind)
    if name == "loss_mask":
        return types.is_boolean(kind)
    return types.is_floating(kind) or types.is_integer(kind)


def _are_good(
    given: Mapping[str, Any], vocab_size: int | None, need_reward: bool, max_tokens: int | None
) -> bool:
    prompts, responses = given["prompt_ids"], given["response_ids"]
    if need_reward and not set(NUMBERS) & given.keys():
        return False
    limit = MAX_TOKEN_ID + 1 if vocab_size is None else vocab_size
    if not _is_good_teacher(given, limit):
        return False
    for ids in (prompts, responses):
        if ids.lengths.min() < 1 or ids.values.min() < 0 or ids.values.max() >= limit:
            return False
    if max_tokens is not None and (prompts.lengths + responses.lengths).max() > max_tokens:
        return False
    for name, value in given.items():
        if isinstance(value, Lists):
            if name != "prompt_ids" and not np.array_equal(value.offsets, responses.offsets):
                return False
            value = value.values
        if name in NUMBERS and not _is_finite(value):
            return False
        if name in LOG_PROBS and not (_is_finite(value) and value.max() <= MAX_LOG_PROB):
            return False
    return True


def _is_good_teacher(given: Mapping[str, Any], limit: int) -> bool:
    """Tells whether all of a teacher's entries are fit, those of masked tokens too."""
    ids, log_probs = (given[name].values if name in given else None for name in TOP_K)
    if ids is not None and (ids.min() < 0 or ids.max() >= limit):
        return False
    if log_probs is not None and not log_probs.max() <= MAX_LOG_PROB:  # NaN too
        return False
    if log_probs is not None and np.exp(log_probs).sum(-1).max() > MAX_TEACHER_MASS:
        return False
    return ids is None or log_probs is None or ids.shape == log_probs.shape


def _is_finite(values: np.ndarray) -> bool:
    return bool(np.abs(values).max() <= MAX_NUMBER)  # False for NaN


def _make(given: Mapping[str, Any]) -> list[Rollout]:
    if "loss_mask" not in given:
        responses = given["response_ids"]
        all_trained = np.ones(len(responses.values), dtype=bool)
        given = {**given, "loss_mask": Lists(all_trained, responses.offsets)}
    given = {
        name: _without_masked(name, value, given["loss_mask"]) for name, value in given.items()
    }
    names = list(given)
    per_row = []
    for value in given.values():
        if isinstance(value, Lists):
            value.values.flags.writeable = False
            per_row.append(value.rows())
        else:
            per_row.append(value if isinstance(value, list) else value.tolist())
    return [Rollout.of_checked(dict(zip(names, row))) for row in zip(*per_row)]


def _without_masked(name: str, value: Any, mask: Lists) -> Any:
    """Returns a teacher's entries with those of masked tokens unused, all else as it is."""
    if name not in TOP_K or mask.values.all():
        return value
    unused = 0 if name == TOP_K[0] else UNUSED_LOG_PROB
    return value._replace(values=np.where(mask.values[:, None], value.values, unused))
