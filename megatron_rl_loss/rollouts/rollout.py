"""One sampled response, checked when it is made."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import RolloutError
from ..types import MAX_TEACHER_MASS

OPTIONAL_FIELDS = (
    "reward",
    "advantage",
    "rollout_log_probs",
    "ref_log_probs",
    "teacher_top_ids",
    "teacher_top_log_probs",
    "group_id",
)

# of a teacher, [n, k]: ids first
TOP_K = ("teacher_top_ids", "teacher_top_log_probs")

# Training is in fp32 and int64.
MAX_NUMBER = 3.4e38
MAX_TOKEN_ID = 2**31 - 1
_MAX_GROUP_ID = 2**63 - 1

# A log-prob is <= 0; engines that round in bf16 may end a little above.
MAX_LOG_PROB = 1e-3

# of a teacher's entry that has no token: JSON has no -inf
UNUSED_LOG_PROB = -1000.0

_NO_METADATA: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Rollout:
    """A prompt, one response to it, and what is known about the response.

    Sequences may be given as lists, NumPy arrays or tensors; they are kept as tuples. A
    non-finite log-prob or advantage where `loss_mask` is False is kept as 0, a teacher's entries
    there as unused.

    Attributes:
        prompt_ids: token ids of the prompt, at least one.
        response_ids: token ids of the response, at least one; an end-of-sequence token counts.
        loss_mask: one bool per response token, True where it is trained; default: all True.
        reward: of the whole response.
        advantage: of the whole response, or one value per response token.
        rollout_log_probs: log-prob of each response token where it was sampled, nats, at the
            sampling temperature.
        ref_log_probs: the same under the frozen reference, at the same temperature.
        teacher_top_ids: a teacher's k most probable tokens at each response token, [n, k].
        teacher_top_log_probs: their log-probs under it, [n, k], nats; -inf: the place is unused.
        group_id: responses to the same prompt share it.
        metadata: anything else; not read by training.

    Raises:
        RolloutError: a field has a wrong type, length or value; the message starts with its name.

    >>> Rollout([1, 2], [3, 4], reward=1.0).loss_mask
    (True, True)
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    loss_mask: Sequence[bool] | None = None
    reward: float | None = None
    advantage: float | Sequence[float] | None = None
    rollout_log_probs: Sequence[float] | None = None
    ref_log_probs: Sequence[float] | None = None
    teacher_top_ids: Sequence[Sequence[int]] | None = None
    teacher_top_log_probs: Sequence[Sequence[float]] | None = None
    group_id: int | str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("prompt_ids", "response_ids"):
            self._set(name, _token_ids(name, getattr(self, name)))
        length = len(self.response_ids)
        mask = (True,) * length if self.loss_mask is None else _mask(self.loss_mask, length)
        self._set("loss_mask", mask)
        if self.reward is not None:
            self._set("reward", _finite_number("reward", self.reward))
        if self.advantage is not None:
            self._set("advantage", _advantage(self.advantage, mask))
        for name in ("rollout_log_probs", "ref_log_probs"):
            if getattr(self, name) is not None:
                self._set(name, _log_probs(name, getattr(self, name), mask))
        self._set_teacher(mask)
        _check_group_id(self.group_id)
        if not isinstance(self.metadata, Mapping):
            raise field_error("metadata", f"expected an object, got {_shown(self.metadata)}.")

    @classmethod
    def of_checked(cls, fields: dict[str, Any]) -> Rollout:
        """Returns a rollout of fields that were checked already, `loss_mask` included, as they are.

        Sequences may stay NumPy arrays. Such rollouts must not be compared with ==.
        """
        rollout = cls.__new__(cls)
        rollout.__dict__.update(fields)
        rollout.__dict__.setdefault("metadata", _NO_METADATA)
        return rollout

    def _set_teacher(self, mask: tuple[bool, ...]) -> None:
        checks = (_top_id, 0), (_top_log_prob, UNUSED_LOG_PROB)
        for name, (check, fill) in zip(TOP_K, checks, strict=True):
            if getattr(self, name) is not None:
                self._set(name, _entries(name, getattr(self, name), mask, check, fill))
        widths = [self.kind[name] for name in TOP_K if name in self.kind]
        if len(set(widths)) > 1:
            raise field_error(
                TOP_K[0],
                f"has {widths[0]} entries per token, but {TOP_K[1]!r} has {widths[1]}; they are "
                "pairs.",
            )
        for i, row in enumerate(self.teacher_top_log_probs or ()):
            mass = math.fsum(map(math.exp, row))
            if mask[i] and mass > MAX_TEACHER_MASS:
                raise field_error(
                    TOP_K[1],
                    f"log-probs of {mass:.4g} in all at response position {i}, but the "
                    "probabilities of different tokens sum to at most 1. Give log-probs over the "
                    "whole vocabulary, and each token once.",
                )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the only writes to the frozen fields

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def kind(self) -> dict[str, int]:
        """The optional fields that are there, and of a teacher's the number of entries per token.

        All rollouts trained together have the same kind.
        """
        given = [name for name in OPTIONAL_FIELDS if getattr(self, name) is not None]
        return {name: len(getattr(self, name)[0]) if name in TOP_K else 1 for name in given}


def check_rewarded(rollout: Rollout) -> None:
    """Raises `RolloutError` if there is nothing to train on: neither reward nor advantage."""
    if rollout.reward is None and rollout.advantage is None:
        raise field_error("reward", "neither it nor 'advantage' is given; add one of them.")


def field_error(name: str, text: str) -> RolloutError:
    """Returns the error about one field; readers put file and line before it."""
    return RolloutError(f"field {name!r}: {text}")


def group_number(group_id: int | str) -> int:
    """Returns a group id as an int64 that is the same on every rank and in every run.

    >>> group_number(7), group_number("prompt-7") == group_number("prompt-7")
    (7, True)
    """
    if isinstance(group_id, int):
        return group_id
    digest = hashlib.blake2b(group_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def is_finite(number: float) -> bool:
    """Tells whether a number is finite in fp32."""
    return abs(number) <= MAX_NUMBER


def as_list(name: str, value: Any) -> list[Any]:
    """Returns a list, tuple, array or tensor as a plain list of Python numbers."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, (list, tuple)):
        raise field_error(name, f"expected a list, got {_shown(value)}.")
    return list(value)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = as_list(name, value)
    if not ids:
        raise field_error(name, "is empty; it needs at least one token id.")
    for i, token in enumerate(ids):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise field_error(
                name, f"expected token ids (integers >= 0), got {_shown(token)} at position {i}."
            )
    return tuple(ids)


def _mask(value: Any, length: int) -> tuple[bool, ...]:
    mask = _of_length("loss_mask", value, length)
    for i, kept in enumerate(mask):
        if kept not in (0, 1):
            raise field_error(
                "loss_mask",
                f"expected true or false (or 1 or 0), got {_shown(kept)} at response position {i}.",
            )
    return tuple(map(bool, mask))


def _advantage(value: Any, mask: tuple[bool, ...]) -> float | tuple[float, ...]:
    if isinstance(value, (int, float)):
        return _finite_number("advantage", value)
    if getattr(value, "ndim", 1) == 0:
        return _finite_number("advantage", value.item())
    return _finite_where("advantage", value, mask)


def _log_probs(name: str, value: Any, mask: tuple[bool, ...]) -> tuple[float, ...]:
    numbers = _finite_where(name, value, mask)
    for i, (number, kept) in enumerate(zip(numbers, mask, strict=True)):
        if kept and number > MAX_LOG_PROB:
            raise field_error(
                name,
                f"a log-prob is at most 0, got {number} at response position {i}; probabilities or "
                "negative log-likelihoods?",
            )
    return numbers


def _finite_where(name: str, value: Any, mask: tuple[bool, ...]) -> tuple[float, ...]:
    """Returns floats that are finite where the mask is True, and 0 where not finite elsewhere."""
    numbers, values = [], _of_length(name, value, len(mask))
    for i, (number, kept) in enumerate(zip(values, mask, strict=True)):
        number = _number(name, math.nan if number is None else number, i)
        if not is_finite(number):
            if kept:
                raise field_error(
                    name,
                    f"is {number} at response position {i}, which is trained. Fix it, or set "
                    "loss_mask to false there.",
                )
            number = 0.0
        numbers.append(number)
    return tuple(numbers)


def _entries(
    name: str,
    value: Any,
    mask: tuple[bool, ...],
    check: Callable[[str, Any, int], Any],
    fill: Any,
) -> tuple[tuple[Any, ...], ...]:
    """Returns [n, k] as tuples, each entry checked where the mask is True and `fill` elsewhere."""
    rows = [as_list(name, row) for row in _of_length(name, value, len(mask))]
    for i, row in enumerate(rows):
        if not row or len(row) != len(rows[0]):
            raise field_error(
                name,
                f"has {len(row)} entries at response position {i} and {len(rows[0])} at position "
                "0; it needs the same number, at least 1, for each response token.",
            )
    return tuple(
        tuple(check(name, x, i) for x in row) if kept else (fill,) * len(row)
        for i, (row, kept) in enumerate(zip(rows, mask, strict=True))
    )


def _top_id(name: str, token: Any, position: int) -> int:
    if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
        raise field_error(
            name,
            f"expected token ids (integers >= 0), got {_shown(token)} at response position "
            f"{position}, which is trained.",
        )
    return token


def _top_log_prob(name: str, value: Any, position: int) -> float:
    number = _number(name, math.nan if value is None else value, position)
    if not number <= MAX_LOG_PROB:  # NaN too
        raise field_error(
            name, f"a log-prob is at most 0, got {number} at response position {position}."
        )
    return number


def _of_length(name: str, value: Any, length: int) -> list[Any]:
    values = as_list(name, value)
    if len(values) != length:
        raise field_error(
            name,
            f"has {len(values)} entries, but 'response_ids' has {length}; it needs one per "
            "response token (none for the prompt).",
        )
    return values


def _finite_number(name: str, value: Any) -> float:
    is_scalar = getattr(value, "ndim", None) == 0  # of NumPy or torch
    number = _number(name, value.item() if is_scalar else value)
    if not is_finite(number):
        raise field_error(name, f"must be finite, got {number}.")
    return number


def _number(name: str, value: Any, position: int | None = None) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        where = "" if position is None else f" at response position {position}"
        raise field_error(name, f"expected a number, got {_shown(value)}{where}.")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _check_group_id(group_id: Any) -> None:
    if group_id is None or isinstance(group_id, str):
        return
    if type(group_id) is not int or abs(group_id) > _MAX_GROUP_ID:
        raise field_error(
            "group_id", f"expected an integer (int64) or a string, got {_shown(group_id)}."
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
