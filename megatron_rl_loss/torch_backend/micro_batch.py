"""From a plain dict to a checked micro-batch of padded rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_finite, check_loss_mask, check_same_shape, per_token
from ..errors import InputError
from ..types import PACKING_FIELDS, PER_TOKEN_FLOAT_FIELDS, glossary_names


class PaddedBatch(NamedTuple):
    """One micro-batch, [rows, S] each; see `mcore.batch.TokenBatch` for the names."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    loss_weights: Tensor
    weights_given: bool
    tensors: dict[str, Tensor]


def padded_batch(
    micro_batch: Mapping[str, Any], needs: Sequence[str], device: torch.device | None = None
) -> PaddedBatch:
    """Checks a micro-batch and fills in labels, mask or weights that can be derived.

    Args:
        micro_batch: tensors by glossary name (or an alias), [rows, S]; padded on the right.
        needs: names that the loss reads.
        device: where the result goes; None leaves it.

    Raises:
        InputError: a tensor is missing, has a wrong shape or dtype, or is not finite where trained;
            or the rows are packed.
    """
    given = {k: v for k, v in glossary_names(micro_batch).items() if v is not None}
    packed = [name for name in (*PACKING_FIELDS, "attention_mask") if name in given]
    if packed or "tokens" not in given:
        have = packed or "no 'tokens'"
        raise InputError(f"micro-batch has {have}; this backend takes rows padded on the right.")
    tokens = torch.as_tensor(given["tokens"]).long()
    mask, weights = _mask_and_weights(given, tokens)
    tensors = {
        name: per_token(name, torch.as_tensor(given[name]), mask).float()
        for name in PER_TOKEN_FLOAT_FIELDS
        if name in given and name != "loss_weights"
    }
    missing = [name for name in needs if name not in tensors]
    if missing:
        raise InputError(f"micro-batch lacks {', '.join(missing)}, which the loss reads.")
    for name, tensor in {**tensors, "loss_weights": weights}.items():
        if name != "returns" and tensor.device.type == "cpu":
            check_finite(name, tensor, mask)
    labels = _labels(given, tokens, mask)
    moved = [x.to(device, non_blocking=True) for x in (tokens, labels, mask, weights)]
    tensors = {name: x.to(device, non_blocking=True) for name, x in tensors.items()}
    return PaddedBatch(*moved, "loss_weights" in given, tensors)


def _mask_and_weights(given: Mapping[str, Any], tokens: Tensor) -> tuple[Tensor, Tensor]:
    weights = given.get("loss_weights")
    if "loss_mask" not in given and weights is None:
        raise InputError("micro-batch needs 'loss_mask' (bool) or 'loss_weights' (float).")
    mask = torch.as_tensor(given["loss_mask"] if "loss_mask" in given else weights != 0)
    check_loss_mask(mask)
    check_same_shape("loss_mask", mask, "tokens", tokens)
    if weights is None:
        return mask, mask.float()
    return mask, per_token("loss_weights", torch.as_tensor(weights), mask).float()


def _labels(given: Mapping[str, Any], tokens: Tensor, mask: Tensor) -> Tensor:
    if "labels" in given:
        labels = torch.as_tensor(given["labels"]).long()
        check_same_shape("labels", labels, "tokens", tokens)
        return labels
    if mask.device.type == "cpu" and bool(mask[:, -1].any()):
        raise InputError(
            "loss_mask is True at the last position, which has no label; entry t of per-token "
            "tensors belongs to token t + 1: shift the mask left by one, or pass 'labels'."
        )
    return torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], dim=1)
