"""Several given tokens per position, [rows, S, k]: a teacher's ids and log-probs, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..checks import as_tensor, check_log_probs, integers, place
from ..errors import InputError
from ..types import MAX_TEACHER_MASS, PER_TOKEN_SET_FIELDS, TOKEN_IDS_FIELD


def token_set(
    given: Mapping[str, Any], needs: Iterable[str], loss_mask: Tensor, vocab_size: int | None
) -> dict[str, Tensor]:
    """Returns the fields [rows, S, k] that the loss reads: ids int64, the others fp32.

    Raises:
        InputError: a shape or dtype is wrong, or (on the CPU) a trained position has an id outside
            the vocabulary, log-probs that are not a distribution's, NaN or +inf.
    """
    found = {
        name: _entries(name, given[name], loss_mask)
        for name in PER_TOKEN_SET_FIELDS
        if name in needs and name in given
    }
    _check_one_k(found)
    for name, tensor in found.items():
        if tensor.device.type == "cpu" and name == TOKEN_IDS_FIELD:
            _check_ids(name, tensor, loss_mask, vocab_size)
        elif tensor.device.type == "cpu":
            _check_no_nan(name, tensor, loss_mask)
            check_log_probs(name, tensor, loss_mask)
            _check_mass(name, tensor, loss_mask)
    return found


def _entries(name: str, value: Any, loss_mask: Tensor) -> Tensor:
    is_ids = name == TOKEN_IDS_FIELD
    tensor = integers(name, value) if is_ids else as_tensor(name, value).float()
    if tensor.dim() != 3 or tensor.shape[:2] != loss_mask.shape or not tensor.shape[2]:
        rows, length = loss_mask.shape
        raise InputError(
            f"{name} has shape {tuple(tensor.shape)}, expected ({rows}, {length}, k): k >= 1 "
            "entries per label."
        )
    return tensor


def _check_one_k(found: Mapping[str, Tensor]) -> None:
    if len({tensor.shape for tensor in found.values()}) > 1:
        shapes = " and ".join(f"{name} {tuple(x.shape)}" for name, x in found.items())
        raise InputError(f"{shapes} must have one shape, (rows, S, k): an id for each log-prob.")


def _check_ids(name: str, ids: Tensor, loss_mask: Tensor, vocab_size: int | None) -> None:
    wrong = ids < 0 if vocab_size is None else (ids < 0) | (ids >= vocab_size)
    bad = wrong & loss_mask.unsqueeze(-1)
    if bool(bad.any()):
        at = bad.nonzero()[0]
        bound = "" if vocab_size is None else f" and below the vocabulary of {vocab_size}"
        raise InputError(
            f"{name} is {int(ids[tuple(at)])} at {place(at)}, which is trained; token ids must be "
            f"at least 0{bound}. Fill up with any token and the log-prob -inf."
        )


def _check_no_nan(name: str, log_probs: Tensor, loss_mask: Tensor) -> None:
    bad = log_probs.isnan() & loss_mask.unsqueeze(-1)
    if bool(bad.any()):
        raise InputError(
            f"{name} is nan at {place(bad.nonzero()[0])}, which is trained ({int(bad.sum())} such "
            "entries). Fix it, or mask the position in loss_mask."
        )


def _check_mass(name: str, log_probs: Tensor, loss_mask: Tensor) -> None:
    mass = torch.where(loss_mask, log_probs.exp().sum(-1), 0.0)
    if bool((mass > MAX_TEACHER_MASS).any()):
        at = (mass > MAX_TEACHER_MASS).nonzero()[0]
        raise InputError(
            f"{name} are log-probs of {float(mass[tuple(at)]):.4g} in all at {place(at)}, but the "
            "probabilities of different tokens sum to at most 1. Pass log-probs over the whole "
            "vocabulary, and each token once."
        )
