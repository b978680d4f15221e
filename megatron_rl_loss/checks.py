"""Checks of shapes, dtypes and values, with messages that name row and position."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import InputError


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
