"""Between a record of a file (a plain dict) and a `Rollout`."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .. import types
from ..errors import RolloutError
from .rollout import TOP_K, Rollout, as_list, check_rewarded, field_error, is_finite

FIELDS = tuple(f.name for f in fields(Rollout))

# Foreign spelling -> field. The names of tensors are in `types.ALIASES`.
ALIASES: Mapping[str, str] = {
    **{theirs: ours for theirs, ours in types.ALIASES.items() if ours in FIELDS},
    "prompt_token_ids": "prompt_ids",
    "prompt_tokens": "prompt_ids",
    "response_token_ids": "response_ids",
    "response_tokens": "response_ids",
    "completion_ids": "response_ids",
    "completion_token_ids": "response_ids",
    "rewards": "reward",
    "score": "reward",
    "advantages": "advantage",
    "rollout_logprobs": "rollout_log_probs",
    "sampling_logprobs": "rollout_log_probs",
    "response_logprobs": "rollout_log_probs",
    "ref_log_prob": "ref_log_probs",
    "prompt_id": "group_id",
    "uid": "group_id",
    "extra_info": "metadata",
}

_LOG_PROBS = ("rollout_log_probs", "ref_log_probs")


def rollout_from_record(
    record: Any,
    *,
    vocab_size: int | None = None,
    drop_non_finite: bool = False,
    need_reward: bool = True,
    max_tokens: int | None = None,
) -> Rollout:
    """Returns the rollout of one line or row; null means that a field is not given.

    Args:
        record: a dict by field name (or alias).
        vocab_size: token ids must be below it.
        drop_non_finite: take trained tokens whose log-probs are NaN, inf or null out of the loss
            mask, instead of raising.
        need_reward: `reward` or `advantage` must be given; supervised losses read neither.
        max_tokens: prompt and response together must not be longer.

    Raises:
        RolloutError: an unknown or missing field, or a wrong value; the message starts with the
            field's name.
    """
    given = _renamed(record)
    for name in ("prompt_ids", "response_ids"):
        if name not in given:
            raise field_error(name, f"is missing; the record has: {', '.join(record)}.")
    if isinstance(given.get("metadata"), str):  # Parquet has no column type for free-form objects
        given["metadata"] = _json_object(given["metadata"])
    if drop_non_finite:
        given["loss_mask"] = _finite_mask(given)
    rollout = Rollout(**given)
    if need_reward:
        check_rewarded(rollout)
    if vocab_size is not None:
        _check_vocabulary(rollout, vocab_size)
    if max_tokens is not None and rollout.num_tokens > max_tokens:
        raise field_error(
            "response_ids",
            f"{len(rollout.prompt_ids)} prompt and {len(rollout.response_ids)} response tokens "
            f"are more than the sequence length, {max_tokens}.",
        )
    return rollout


def record_from_rollout(rollout: Rollout) -> dict[str, Any]:
    """Returns the fields that are given, as plain lists and numbers."""
    record: dict[str, Any] = {}
    for name in FIELDS:
        value = getattr(rollout, name)
        if value is not None and not (name == "metadata" and not value):
            is_list = isinstance(value, tuple) or hasattr(value, "tolist")
            record[name] = as_list(name, value) if is_list else value
            if name in TOP_K:
                record[name] = [list(entries) for entries in record[name]]
    if all(record["loss_mask"]):
        del record["loss_mask"]
    return record


def _renamed(record: Any) -> dict[str, Any]:
    if not isinstance(record, Mapping):
        raise RolloutError(f"expected an object with the rollout's fields, got {str(record)[:40]}.")
    given: dict[str, Any] = {}
    for name, value in record.items():
        field = ALIASES.get(name, name)
        if field not in FIELDS:
            raise _unknown(name)
        if field in given:
            raise field_error(field, "is given twice (once as an alias); keep one.")
        if value is not None:
            given[field] = value
    return given


def _unknown(name: str) -> RolloutError:
    if types.ALIASES.get(name, name) == "old_log_probs":
        return field_error(
            name,
            "is not read: the trainer computes old_log_probs itself. The log-probs of the sampler "
            "go into 'rollout_log_probs'.",
        )
    near = difflib.get_close_matches(name, [*FIELDS, *ALIASES], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    known = ", ".join(FIELDS)
    return field_error(name, f"unknown; {hint}Fields: {known}; put anything else into 'metadata'.")


def _json_object(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise field_error("metadata", f"not a JSON object ({error}).") from error


def _finite_mask(given: Mapping[str, Any]) -> list[Any]:
    """Returns the loss mask without the positions where a log-prob is not finite."""
    length = len(as_list("response_ids", given["response_ids"]))
    mask = as_list("loss_mask", given.get("loss_mask", [True] * length))
    for name in _LOG_PROBS:
        values = as_list(name, given.get(name, []))
        mask = [
            False if i < len(values) and _not_finite(values[i]) else kept
            for i, kept in enumerate(mask)
        ]
    teacher = as_list(TOP_K[1], given.get(TOP_K[1], []))
    unknown = [any(map(_is_no_log_prob, as_list(TOP_K[1], x))) for x in teacher]
    return [kept and not any(unknown[i : i + 1]) for i, kept in enumerate(mask)]


def _is_no_log_prob(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != -math.inf and _not_finite(value))


def _not_finite(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not is_finite(value))


def _check_vocabulary(rollout: Rollout, vocab_size: int) -> None:
    for name in ("prompt_ids", "response_ids"):
        ids = getattr(rollout, name)
        if max(ids) >= vocab_size:
            raise field_error(
                name,
                f"token id {max(ids)} at position {ids.index(max(ids))}, but the vocabulary has "
                f"{vocab_size} tokens; made with another tokenizer?",
            )
    for i, ids in enumerate(rollout.teacher_top_ids or ()):
        if max(ids) >= vocab_size:
            raise field_error(
                "teacher_top_ids",
                f"token id {max(ids)} at response position {i}, but the vocabulary has "
                f"{vocab_size} tokens; does the teacher have another one?",
            )
