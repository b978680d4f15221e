"""Checks of shapes, dtypes and values, with messages that name row and position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import InputError

MAX_LOG_PROB = 1e-3  # rounding of 16-bit log-probs, no more


def as_tensor(name: str, value: Any) -> Tensor:
    """Returns `value` (a tensor, array or nested list of numbers) as a tensor.

    Raises:
        InputError: it is something else, such as a string.
    """
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name} must be a tensor or numbers, got {type(value).__name__}: {error}"
        ) from None


def integers(name: str, value: Any) -> Tensor:
    """Returns `value` as int64. Raises `InputError` for floats and bools; nothing is rounded."""
    tensor = as_tensor(name, value)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
        raise InputError(f"{name} must be integers, got {tensor.dtype}.")
    return tensor.long()


def mapping_list(name: str, values: Any) -> list[Any]:
    """Returns `values` as a list of dicts.

    Raises:
        InputError: it is a single dict, not a sequence, or an element is not a dict.
    """
    if isinstance(values, (dict, str, Tensor)) or not hasattr(values, "__iter__"):
        raise InputError(
            f"{name} must be a sequence of dicts, got {type(values).__name__}"
            f"{'; put it into a list' if isinstance(values, dict) else ''}."
        )
    values = list(values)
    for i, value in enumerate(values):
        if not hasattr(value, "items"):
            raise InputError(f"{name}: element {i} must be a dict, got {type(value).__name__}.")
    return values


def check_loss_mask(loss_mask: Tensor) -> None:
    """Raises `InputError` unless the mask is a [rows, S] bool tensor.

    A float mask is refused: soft or negative weights belong into `loss_weights`.
    """
    if loss_mask.dtype is not torch.bool:
        raise InputError(
            f"loss_mask must be bool, got {loss_mask.dtype}. Use loss_mask.bool(); weights that "
            "are not 0 or 1 belong into loss_weights."
        )
    if loss_mask.dim() != 2:
        raise InputError(f"loss_mask must be [rows, S], got shape {tuple(loss_mask.shape)}.")


def check_same_shape(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """Raises `InputError` unless both tensors have one shape; nothing is ever broadcast."""
    if tensor.shape != like.shape:
        raise InputError(
            f"{name} has shape {tuple(tensor.shape)}, but {like_name} has {tuple(like.shape)}; "
            "they must be equal (one entry per label)."
        )


def per_token(name: str, tensor: Tensor, loss_mask: Tensor) -> Tensor:
    """Returns `tensor` as [rows, S]: a [rows] tensor is one value per sequence.

    Raises:
        InputError: the shape is neither that of the mask nor [rows].
    """
    if tensor.shape == loss_mask.shape:
        return tensor
    if tensor.dim() == 1 and tensor.shape[0] == loss_mask.shape[0]:
        return tensor.unsqueeze(1).expand_as(loss_mask)
    raise InputError(
        f"{name} has shape {tuple(tensor.shape)}; expected {tuple(loss_mask.shape)} (like "
        f"loss_mask) or ({loss_mask.shape[0]},) (one per row)."
    )


def at_entries(loss_mask: Tensor, tensor: Tensor) -> Tensor:
    """Returns the mask for a tensor of its shape, or with k entries per position: [rows, S, k]."""
    return loss_mask if tensor.dim() == loss_mask.dim() else loss_mask.unsqueeze(-1)


def check_log_probs(name: str, tensor: Tensor, loss_mask: Tensor) -> None:
    """Raises `InputError` naming the first trained position whose log-prob is above 0.

    Reads a value, so it waits for the device; call it on CPU tensors.
    """
    bad = at_entries(loss_mask, tensor) & (tensor > MAX_LOG_PROB)
    if not bool(bad.any()):
        return
    at = bad.nonzero()[0]
    raise InputError(
        f"{name} is {tensor[tuple(at)].item():.6g} at {place(at)}, but a "
        "log-prob is at most 0. Pass natural logarithms of probabilities, not probabilities, "
        "negated log-probs or logits."
    )


def place(at: Tensor) -> str:
    """Says where an entry of [rows, S] or [rows, S, k] is.

    >>> place(torch.tensor([2, 5])), place(torch.tensor([2, 5, 0]))
    ('row 2, position 5', 'row 2, position 5, entry 0')
    """
    names = ("row", "position", "entry")
    return ", ".join(f"{name} {i}" for name, i in zip(names, at.tolist()))


def check_finite(name: str, tensor: Tensor, loss_mask: Tensor) -> None:
    """Raises `InputError` naming the first trained position where `tensor` is NaN or inf.

    Reads a value, so it waits for the device; call it on CPU tensors or before training starts.
    """
    bad = loss_mask & ~torch.isfinite(tensor)
    if not bool(bad.any()):
        return
    row, position = (int(x) for x in bad.nonzero()[0])
    raise InputError(
        f"{name} is {tensor[row, position].item()} at row {row}, position {position}, which is "
        f"trained ({int(bad.sum())} such positions). Fix it, or mask the position in loss_mask."
    )
