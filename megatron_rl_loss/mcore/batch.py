"""From a plain dict to a checked micro-batch on the model's device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterable, Mapping

import torch
from torch import Tensor

from ..checks import check_finite, check_loss_mask, check_same_shape, per_token
from ..errors import InputError
from ..types import PER_TOKEN_FLOAT_FIELDS, glossary_names

# Checked at trained positions even if the loss does not read them, unless a comment says why not.
_FINITE_FIELDS = tuple(name for name in PER_TOKEN_FLOAT_FIELDS if name != "returns")


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch, [rows, S] each, on the model's device.

    Attributes:
        tokens, labels, position_ids: int64.
        attention_mask: as Megatron's attention takes it, or None for plain causal attention.
        loss_mask: bool, trained positions.
        loss_weights: fp32, w of the contract.
        weights_given: False if `loss_weights` is only the mask, because the advantages carry the
            weights or the loss is a plain sum.
        tensors: the other per-token tensors by name, fp32.
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    loss_mask: Tensor
    loss_weights: Tensor
    weights_given: bool
    tensors: dict[str, Tensor]


def make_token_batch(
    micro_batch: Mapping[str, Any],
    *,
    needs: Iterable[str] = (),
    device: torch.device | None = None,
    seq_multiple: int = 1,
) -> TokenBatch:
    """Checks a micro-batch and fills in what can be derived.

    Derived when missing: `labels` (tokens shifted once), `position_ids`, `loss_mask` (where
    `loss_weights` is not 0), `loss_weights` (1 where the mask is True).

    Args:
        micro_batch: tensors by glossary name (or an alias), [rows, S]; per-token floats may also
            be [rows].
        needs: names that must be there for the loss.
        device: where the result goes; None leaves tensors where they are.
        seq_multiple: S must be a multiple of it (sequence and context parallelism).

    Raises:
        InputError: a tensor is missing, has a wrong shape or dtype, or (checked when it arrives on
            the CPU, so that no device is waited for) is not finite at a trained position.
    """
    given = {k: v for k, v in glossary_names(micro_batch).items() if v is not None}
    tokens = _tokens(given, seq_multiple)
    loss_mask, weights = _mask_and_weights(given, tokens)
    labels = _labels(given, tokens, loss_mask)
    tensors = {
        name: per_token(name, torch.as_tensor(given[name]), loss_mask).float()
        for name in PER_TOKEN_FLOAT_FIELDS
        if name in given and name != "loss_weights"
    }
    _check_present(needs, tensors)
    for name, tensor in {**tensors, "loss_weights": weights}.items():
        if name in _FINITE_FIELDS and tensor.device.type == "cpu":
            check_finite(name, tensor, loss_mask)
    position_ids = given.get("position_ids")
    if position_ids is None:
        position_ids = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    check_same_shape("position_ids", position_ids, "tokens", tokens)
    batch = TokenBatch(
        tokens, labels, position_ids, given.get("attention_mask"), loss_mask, weights,
        "loss_weights" in given, tensors,
    )  # fmt: skip
    return batch if device is None else _to(batch, device)


def _tokens(given: Mapping[str, Any], seq_multiple: int) -> Tensor:
    if "tokens" not in given:
        raise InputError(f"micro-batch has no 'tokens'; it has: {', '.join(given) or 'nothing'}.")
    tokens = torch.as_tensor(given["tokens"])
    if tokens.dim() != 2 or tokens.is_floating_point():
        raise InputError(f"tokens must be integer [rows, S], got {tokens.dtype} {tuple(tokens.shape)}.")
    if tokens.shape[1] % seq_multiple:
        raise InputError(
            f"the sequence length {tokens.shape[1]} is not a multiple of {seq_multiple}, which "
            "sequence (tp) or context (2 * cp) parallelism needs; pad rows on the right with mask "
            "False."
        )
    return tokens.long()


def _mask_and_weights(given: Mapping[str, Any], tokens: Tensor) -> tuple[Tensor, Tensor]:
    weights = given.get("loss_weights")
    if "loss_mask" not in given and weights is None:
        raise InputError("micro-batch needs 'loss_mask' (bool) or 'loss_weights' (float).")
    loss_mask = torch.as_tensor(given["loss_mask"] if "loss_mask" in given else weights != 0)
    check_loss_mask(loss_mask)
    check_same_shape("loss_mask", loss_mask, "tokens", tokens)
    if weights is None:
        return loss_mask, loss_mask.float()
    return loss_mask, per_token("loss_weights", torch.as_tensor(weights), loss_mask).float()


def _labels(given: Mapping[str, Any], tokens: Tensor, loss_mask: Tensor) -> Tensor:
    if "labels" in given:
        labels = torch.as_tensor(given["labels"]).long()
        check_same_shape("labels", labels, "tokens", tokens)
        return labels
    if loss_mask.device.type == "cpu" and bool(loss_mask[:, -1].any()):
        row = int(loss_mask[:, -1].nonzero()[0])
        raise InputError(
            f"loss_mask is True at the last position of row {row}, whose label would be the token "
            "after the row. Per-token tensors are indexed like labels (entry t belongs to token "
            "t + 1): shift the mask left by one, or pass 'labels'."
        )
    return torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], dim=1)


def _check_present(needs: Iterable[str], tensors: Mapping[str, Tensor]) -> None:
    missing = [name for name in needs if name not in tensors]
    if not missing:
        return
    hint = ""
    if "old_log_probs" in missing:
        hint = (
            " old_log_probs are the trainer's log-probs before the first step on this batch; "
            "on_policy=True takes the current ones when a batch is used for one step only."
        )
    raise InputError(
        f"micro-batch lacks {', '.join(map(repr, missing))}, which the loss reads; it has: "
        f"{', '.join(tensors) or 'no per-token floats'}.{hint}"
    )


def _to(batch: TokenBatch, device: torch.device) -> TokenBatch:
    def move(value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

    fields = {name: move(value) for name, value in vars(batch).items()}
    fields["tensors"] = {name: move(value) for name, value in batch.tensors.items()}
    return TokenBatch(**fields)
