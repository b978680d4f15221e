"""From a plain dict to a checked micro-batch: one rank's slice, on its device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..checks import (
    as_tensor,
    check_finite,
    check_log_probs,
    check_loss_mask,
    check_same_shape,
    integers,
    per_token,
)
from ..errors import InputError
from ..types import (
    LOG_PROB_FIELDS,
    PER_ROW_OR_TOKEN_FIELDS,
    PER_TOKEN_FLOAT_FIELDS,
    TOKEN_IDS_FIELD,
    glossary_names,
)
from .context_parallel import zigzag_split
from .packed_row import PackedRow, packed_row
from .token_batch_checks import check_attention_mask, check_present, check_shifted, check_token_ids
from .token_set import token_set

# Checked at trained positions even if the loss does not read them, unless a comment says why not.
_FINITE_FIELDS = tuple(name for name in PER_TOKEN_FLOAT_FIELDS if name != "returns")


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch, [rows, S] each (this context-parallel rank's slice).

    Attributes:
        tokens, labels, position_ids: int64.
        attention_mask: as Megatron's attention takes it, or None for plain causal attention.
        loss_mask: bool, trained positions.
        loss_weights: fp32, w of the contract.
        weights_given: False if `loss_weights` is only the mask, because the advantages carry the
            weights or the loss is a plain sum.
        tensors: the other per-token tensors by name, fp32; of several tokens [rows, S, k].
        packed: offsets of the sequences of the whole row if it is packed.
        is_trained: False if no position of the whole rows is trained (looked at on the CPU only).
        token_ids: [rows, S, k] int64, the tokens whose log-probs the loss reads; None if it reads
            those of the labels only.
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
    is_trained: bool = True
    token_ids: Tensor | None = None


def make_token_batch(
    micro_batch: Mapping[str, Any],
    *,
    needs: Iterable[str] = (),
    device: torch.device | None = None,
    seq_multiple: int = 1,
    cp_rank: int = 0,
    cp_size: int = 1,
    vocab_size: int | None = None,
) -> TokenBatch:
    """Checks a micro-batch, fills in what can be derived, and takes this rank's slice of it.

    Derived when missing: `labels` (tokens shifted once, within each packed sequence),
    `position_ids`, `loss_mask` (where `loss_weights` is not 0), `loss_weights` (1 where the mask
    is True).

    Args:
        micro_batch: tensors by glossary name (or an alias), whole rows [rows, S];
            `PER_ROW_OR_TOKEN_FIELDS` may also be [rows], `PER_TOKEN_SET_FIELDS` are [rows, S, k].
            With `cu_seqlens` it is one packed row (see `pack_sequences`).
        needs: names that must be there for the loss.
        device: where the result goes; None leaves tensors where they are.
        seq_multiple: S must be a multiple of it (sequence and context parallelism).
        cp_rank, cp_size: which slice of the rows this context-parallel rank takes.
        vocab_size: token ids are below it (padding columns included); None: not checked.

    Raises:
        InputError: a tensor is missing, has a wrong shape or dtype, or (checked when it arrives on
            the CPU, so that no device is waited for) holds at a trained position what cannot be
            right: a value that is not finite, a log-prob above 0, labels that are not shifted.
    """
    given = {k: v for k, v in glossary_names(micro_batch).items() if v is not None}
    tokens = _tokens(given, seq_multiple, vocab_size)
    packed = packed_row(given, tokens)
    check_attention_mask(given, tokens, packed, cp_size)
    loss_mask, weights = _mask_and_weights(given, tokens)
    labels = _labels(given, tokens, loss_mask, packed)
    tensors = {
        name: _floats(name, given[name], loss_mask)
        for name in PER_TOKEN_FLOAT_FIELDS
        if name in given and name != "loss_weights"
    }
    needs = tuple(needs)
    sets = token_set(given, needs, loss_mask, vocab_size)
    check_present(needs, {**tensors, **sets})
    for name, tensor in {**tensors, "loss_weights": weights}.items():
        if name in _FINITE_FIELDS and tensor.device.type == "cpu":
            check_finite(name, tensor, loss_mask)
        if name in LOG_PROB_FIELDS and tensor.device.type == "cpu":
            check_log_probs(name, tensor, loss_mask)
    batch = TokenBatch(
        tokens, labels, _position_ids(given, tokens, packed), given.get("attention_mask"),
        loss_mask, weights, "loss_weights" in given,
        tensors | {name: value for name, value in sets.items() if name != TOKEN_IDS_FIELD}, packed,
        loss_mask.device.type != "cpu" or bool(loss_mask.any()), sets.get(TOKEN_IDS_FIELD),
    )  # fmt: skip
    if cp_size > 1:
        batch = _slice(batch, cp_rank, cp_size)
    return batch if device is None else _to(batch, device)


def _floats(name: str, value: Any, loss_mask: Tensor) -> Tensor:
    tensor = as_tensor(name, value)
    if name in PER_ROW_OR_TOKEN_FIELDS:
        return per_token(name, tensor, loss_mask).float()
    check_same_shape(name, tensor, "loss_mask", loss_mask)
    return tensor.float()


def _tokens(given: Mapping[str, Any], seq_multiple: int, vocab_size: int | None) -> Tensor:
    if "tokens" not in given:
        raise InputError(f"micro-batch has no 'tokens'; it has: {', '.join(given) or 'nothing'}.")
    tokens = integers("tokens", given["tokens"])
    if tokens.dim() != 2 or not tokens.numel():
        raise InputError(
            f"tokens must be [rows, S] with at least one row and one token, got "
            f"{tuple(tokens.shape)}. A rank without data runs a row whose mask is all False."
        )
    check_token_ids(tokens, vocab_size)
    if tokens.shape[1] % seq_multiple:
        raise InputError(
            f"the sequence length {tokens.shape[1]} is not a multiple of {seq_multiple}, which "
            "sequence (tp) or context (2 * cp) parallelism needs; pad rows on the right with mask "
            "False."
        )
    return tokens


def _mask_and_weights(given: Mapping[str, Any], tokens: Tensor) -> tuple[Tensor, Tensor]:
    names = [name for name in ("loss_mask", "loss_weights") if name in given]
    if not names:
        raise InputError("micro-batch needs 'loss_mask' (bool) or 'loss_weights' (float).")
    loss_mask = as_tensor(names[0], given[names[0]])
    check_same_shape(names[0], loss_mask, "tokens", tokens)
    if names[0] == "loss_weights":
        loss_mask = loss_mask.ne(0)
    check_loss_mask(loss_mask)
    if "loss_weights" not in given:
        return loss_mask, loss_mask.float()
    weights = as_tensor("loss_weights", given["loss_weights"])
    return loss_mask, per_token("loss_weights", weights, loss_mask).float()


def _labels(
    given: Mapping[str, Any], tokens: Tensor, loss_mask: Tensor, packed: PackedRow | None
) -> Tensor:
    if "labels" in given:
        labels = integers("labels", given["labels"])
        check_same_shape("labels", labels, "tokens", tokens)
        check_shifted(labels, tokens, loss_mask)
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
    position_ids = integers("position_ids", position_ids)
    check_same_shape("position_ids", position_ids, "tokens", tokens)
    return position_ids


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
