"""From a plain dict to a checked micro-batch on the model's device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..checks import check_finite, check_loss_mask, check_same_shape, per_token
from ..errors import InputError
from ..parallel.context_parallel import sequence_multiple, zigzag_split
from ..types import PER_TOKEN_FLOAT_FIELDS, glossary_names
from . import compat
from .groups import ParallelGroups
from .guard import model_config
from .packed import PackedRow, packed_row

# Checked at trained positions even if the loss does not read them, unless a comment says why not.
_FINITE_FIELDS = tuple(name for name in PER_TOKEN_FLOAT_FIELDS if name != "returns")


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch, [rows, S] each (this context-parallel rank's slice), on the model's device.

    Attributes:
        tokens, labels, position_ids: int64.
        attention_mask: as Megatron's attention takes it, or None for plain causal attention.
        loss_mask: bool, trained positions.
        loss_weights: fp32, w of the contract.
        weights_given: False if `loss_weights` is only the mask, because the advantages carry the
            weights or the loss is a plain sum.
        tensors: the other per-token tensors by name, fp32.
        packed: offsets of the sequences of the whole row if it is packed.
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    loss_mask: Tensor
    loss_weights: Tensor
    weights_given: bool
    tensors: dict[str, Tensor]
    packed: PackedRow | None = None

    def run(self, model: Any) -> Tensor:
        """Returns the model's output for this micro-batch."""
        inputs = (self.tokens, self.position_ids, self.attention_mask)
        if self.packed is None:
            return compat.call_model(model, *inputs)
        params = self.packed.seq_params(self.tokens.device)
        return compat.call_model(model, *inputs, packed_seq_params=params)


def make_rank_batch(
    micro_batch: Mapping[str, Any], model: Any, groups: ParallelGroups, *, needs: Iterable[str] = ()
) -> TokenBatch:
    """Returns this rank's part of a micro-batch that has whole rows, checked, on its device.

    Raises:
        InputError: as `make_token_batch`.
    """
    tp_size = groups.tp.size() if model_config(model).sequence_parallel else 1
    return make_token_batch(
        micro_batch,
        needs=needs,
        device=next(model.parameters()).device,
        seq_multiple=sequence_multiple(tp_size, groups.cp.size()),
        cp_rank=groups.cp.rank(),
        cp_size=groups.cp.size(),
    )


def make_token_batch(
    micro_batch: Mapping[str, Any],
    *,
    needs: Iterable[str] = (),
    device: torch.device | None = None,
    seq_multiple: int = 1,
    cp_rank: int = 0,
    cp_size: int = 1,
) -> TokenBatch:
    """Checks a micro-batch, fills in what can be derived, and takes this rank's slice of it.

    Derived when missing: `labels` (tokens shifted once, within each packed sequence),
    `position_ids`, `loss_mask` (where `loss_weights` is not 0), `loss_weights` (1 where the mask
    is True).

    Args:
        micro_batch: tensors by glossary name (or an alias), whole rows [rows, S]; per-token floats
            may also be [rows]. With `cu_seqlens` it is one packed row (see `pack_sequences`).
        needs: names that must be there for the loss.
        device: where the result goes; None leaves tensors where they are.
        seq_multiple: S must be a multiple of it (sequence and context parallelism).
        cp_rank, cp_size: which slice of the rows this context-parallel rank takes.

    Raises:
        InputError: a tensor is missing, has a wrong shape or dtype, or (checked when it arrives on
            the CPU, so that no device is waited for) is not finite at a trained position.
    """
    given = {k: v for k, v in glossary_names(micro_batch).items() if v is not None}
    tokens = _tokens(given, seq_multiple)
    packed = packed_row(given, tokens)
    _check_attention_mask(given, packed, cp_size)
    loss_mask, weights = _mask_and_weights(given, tokens)
    labels = _labels(given, tokens, loss_mask, packed)
    tensors = {
        name: per_token(name, torch.as_tensor(given[name]), loss_mask).float()
        for name in PER_TOKEN_FLOAT_FIELDS
        if name in given and name != "loss_weights"
    }
    _check_present(needs, tensors)
    for name, tensor in {**tensors, "loss_weights": weights}.items():
        if name in _FINITE_FIELDS and tensor.device.type == "cpu":
            check_finite(name, tensor, loss_mask)
    batch = TokenBatch(
        tokens, labels, _position_ids(given, tokens, packed), given.get("attention_mask"),
        loss_mask, weights, "loss_weights" in given, tensors, packed,
    )  # fmt: skip
    if cp_size > 1:
        batch = _slice(batch, cp_rank, cp_size)
    return batch if device is None else _to(batch, device)


def _tokens(given: Mapping[str, Any], seq_multiple: int) -> Tensor:
    if "tokens" not in given:
        raise InputError(f"micro-batch has no 'tokens'; it has: {', '.join(given) or 'nothing'}.")
    tokens = torch.as_tensor(given["tokens"])
    if tokens.dim() != 2 or tokens.is_floating_point():
        raise InputError(
            f"tokens must be integer [rows, S], got {tokens.dtype} {tuple(tokens.shape)}."
        )
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


def _check_attention_mask(given: Mapping[str, Any], packed: PackedRow | None, cp_size: int) -> None:
    if "attention_mask" in given and (packed is not None or cp_size > 1):
        raise InputError(
            "attention_mask works neither with packed sequences nor with context parallelism; "
            "leave it out: padding on the right needs none under causal attention."
        )


def _labels(
    given: Mapping[str, Any], tokens: Tensor, loss_mask: Tensor, packed: PackedRow | None
) -> Tensor:
    if "labels" in given:
        labels = torch.as_tensor(given["labels"]).long()
        check_same_shape("labels", labels, "tokens", tokens)
        return labels
    last = [tokens.shape[1] - 1] if packed is None else packed.last_positions
    if loss_mask.device.type == "cpu" and bool(loss_mask[:, last].any()):
        row, i = (int(x) for x in loss_mask[:, last].nonzero()[0])
        where = f"row {row}" if packed is None else f"packed sequence {i}"
        raise InputError(
            f"loss_mask is True at the last position of {where}, whose label would be the token "
            "after it. Per-token tensors are indexed like labels (entry t belongs to token "
            "t + 1): shift the mask left by one, or pass 'labels'."
        )
    labels = torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], dim=1)
    labels[:, last] = 0
    return labels


def _position_ids(given: Mapping[str, Any], tokens: Tensor, packed: PackedRow | None) -> Tensor:
    position_ids = given.get("position_ids")
    if position_ids is None and packed is not None:
        return packed.position_ids(tokens.device)
    if position_ids is None:
        return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    check_same_shape("position_ids", position_ids, "tokens", tokens)
    return position_ids


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


def _slice(batch: TokenBatch, cp_rank: int, cp_size: int) -> TokenBatch:
    offsets = None if batch.packed is None else batch.packed.offsets
    return _map_tensors(batch, lambda x: zigzag_split(x, cp_rank, cp_size, cu_seqlens=offsets))


def _to(batch: TokenBatch, device: torch.device) -> TokenBatch:
    return _map_tensors(batch, lambda x: x.to(device, non_blocking=True))


def _map_tensors(batch: TokenBatch, change: Callable[[Tensor], Tensor]) -> TokenBatch:
    fields: dict[str, Any] = {
        name: change(value) for name, value in vars(batch).items() if isinstance(value, Tensor)
    }
    fields["tensors"] = {name: change(value) for name, value in batch.tensors.items()}
    return replace(batch, **fields)
