"""JSON lines as columns, read without a Python object per number.

Takes only what is plain: every line has the same fields with values of one type. Anything else, and
a missing simdjson, gives None; the rows then go one by one through `rollout_from_record`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from .columns import IDS, LOG_PROBS, NUMBERS, Lists
from .records import ALIASES, FIELDS
from .rollout import TOP_K

_MAX_INT64 = 2**63 - 1


class _NotPlain(ValueError):
    """The lines need a closer look."""


def json_columns(lines: Iterable[bytes]) -> dict[str, Any] | None:
    """Returns lists as `Lists`, numbers as a float64 array, group ids as a list, by field.

    Args:
        lines: one JSON object each; blank ones are skipped.
    """
    try:
        import simdjson
    except ImportError:
        return None
    parser, names, rows = simdjson.Parser(), None, []
    try:
        for line in lines:
            if line.isspace():
                continue
            record = parser.parse(line)
            names = names or _names(record)
            rows.append(_values(record, names))
            _check_depth(line, rows[-1])
            del record  # the parser reuses its memory
        return _columns(names, rows)
    except (ValueError, TypeError, AttributeError, RuntimeError):
        return None


def _names(record: Any) -> dict[str, str]:
    """Returns field by name; AttributeError if it is no object."""
    keys = list(record.keys())
    names = {name: ALIASES.get(name, name) for name in keys}
    known = set(names.values()) <= set(FIELDS) - {"metadata"}
    if not known or len(set(names.values())) < len(keys):
        raise _NotPlain
    return names


def _values(record: Any, names: dict[str, str]) -> list[Any]:
    if list(record.keys()) != list(names):
        raise _NotPlain
    return [_value(field, record[name]) for name, field in names.items()]


def _check_depth(line: bytes, values: Sequence[Any]) -> None:
    """Raises if a list holds lists that it should not: buffers are flat."""
    lists = (value for value in values if not isinstance(value, (int, float, str)))
    brackets = sum(1 + (len(value) if isinstance(value, np.ndarray) else 0) for value in lists)
    if line.count(b"[") != brackets:
        raise _NotPlain


def _value(field: str, value: Any) -> Any:
    """Returns numbers and texts as they are, and lists as buffers of int64, float64 or bools."""
    if field in IDS:
        return value.as_buffer(of_type="i")
    if field == "loss_mask":
        return value.as_list()
    if field in TOP_K:
        return _top_k(value, "i" if field == TOP_K[0] else "d")
    if field in LOG_PROBS or (field == "advantage" and hasattr(value, "as_buffer")):
        return value.as_buffer(of_type="d")
    return value


def _top_k(value: Any, kind: str) -> np.ndarray:
    """Returns a list of lists of one length as [n, k]."""
    widths = set(map(len, value))
    if len(widths) != 1 or widths == {0}:
        raise _NotPlain
    numbers = np.frombuffer(value.as_buffer(of_type=kind), np.int64 if kind == "i" else np.float64)
    return numbers.reshape(len(value), widths.pop())


def _columns(names: dict[str, str] | None, rows: Sequence[Sequence[Any]]) -> dict[str, Any] | None:
    if names is None:
        return None
    return {field: _column(field, column) for field, column in zip(names.values(), zip(*rows))}


def _column(field: str, values: Sequence[Any]) -> Any:
    types = set(map(type, values))
    if field == "loss_mask":
        flat = list(chain.from_iterable(values))
        if set(map(type, flat)) - {bool}:
            raise _NotPlain
        return _lists(np.array(flat, dtype=bool), map(len, values))
    if field in TOP_K:  # ValueError if k differs
        return _lists(np.concatenate(list(values)), map(len, values))
    if field in NUMBERS and types <= {int, float}:
        return np.array(values, dtype=np.float64)
    if field == "group_id":
        plain = types == {str} or (types == {int} and max(map(abs, values)) <= _MAX_INT64)
        if not plain:
            raise _NotPlain
        return list(values)
    dtype = np.int64 if field in IDS else np.float64
    sizes = (memoryview(value).nbytes // 8 for value in values)
    return _lists(np.frombuffer(b"".join(values), dtype=dtype), sizes)


def _lists(values: np.ndarray, lengths: Iterable[int]) -> Lists:
    return Lists(values, np.concatenate([[0], np.cumsum(list(lengths))]))
