"""Micro-batches of one forward_backward call, and the weights they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..checks import as_tensor, check_loss_mask, mapping_list
from ..errors import ContractError, InputError
from ..parallel.token_weights import token_weights
from ..types import MicroBatch, check_same_fields, glossary_names


class MicroBatchIterator:
    """Iterates over the micro-batches of one forward_backward call and knows their number.

    The forward step reads `num_microbatches` from it, so the number can differ from call to call.
    """

    def __init__(self, micro_batches: Sequence[Mapping[str, Any]]) -> None:
        micro_batches = mapping_list("micro_batches", micro_batches)
        self.num_microbatches = len(micro_batches)
        self._iterator = iter(micro_batches)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return self

    def __next__(self) -> Mapping[str, Any]:
        return next(self._iterator)


def resolve_num_microbatches(given: int | Callable[[], int] | None, data_iterator: Any) -> int:
    """Returns M of the running call: the argument, else the iterator's, else Megatron's calculator.

    Args:
        given: a number, or a function that is asked on every call.
        data_iterator: may carry `num_microbatches`.

    Raises:
        ContractError: none of the three knows.
    """
    if given is not None:
        return int(given() if callable(given) else given)
    if hasattr(data_iterator, "num_microbatches"):
        return int(data_iterator.num_microbatches)
    from megatron.core import num_microbatches_calculator as calculator

    if calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
        raise ContractError(
            "the number of micro-batches of this call is unknown: pass num_microbatches (a number "
            "or a function) to make_forward_step, iterate with MicroBatchIterator, or initialise "
            "Megatron's num_microbatches calculator."
        )
    return int(calculator.get_num_microbatches())


def with_loss_weights(
    micro_batches: Sequence[Mapping[str, Any]],
    reduction: str,
    *,
    dp_group: dist.ProcessGroup | None = None,
    max_seq_len: int | None = None,
    count_empty_sequences: bool = True,
) -> list[MicroBatch]:
    """Returns copies of a mini-batch's micro-batches with `loss_weights` added.

    Call it once per mini-batch, with all micro-batches of this rank, before the first one runs:
    the weights come from counts over all of them and over `dp_group`.

    Args:
        micro_batches: dicts with a bool `loss_mask` [rows, S] each (S may differ), and `group_ids`
            [rows] for "prompt_mean". Every row is a real sequence. With raw `advantages`.
        reduction, max_seq_len, count_empty_sequences: as in `token_weights`.
        dp_group: data-parallel group without context parallelism.

    Raises:
        InputError: there is no micro-batch, or one lacks `loss_mask` or has weights already.

    Communicates: as `token_weights`.
    """
    batches = [glossary_names(m) for m in mapping_list("micro_batches", micro_batches)]
    _check_weightless(batches)
    check_same_fields("micro-batch", batches)
    masks = [as_tensor("loss_mask", batch["loss_mask"]) for batch in batches]
    for mask in masks:
        check_loss_mask(mask)
    rows = [len(mask) for mask in masks]
    width = max(mask.shape[1] for mask in masks)
    group_ids = None
    if all("group_ids" in batch for batch in batches):
        group_ids = torch.cat([as_tensor("group_ids", batch["group_ids"]) for batch in batches])
    weights = token_weights(
        torch.cat([torch.nn.functional.pad(mask, (0, width - mask.shape[1])) for mask in masks]),
        reduction,
        group_ids=group_ids,
        max_seq_len=max_seq_len,
        micro_batch_ids=torch.arange(len(rows)).repeat_interleave(torch.tensor(rows)),
        count_empty_sequences=count_empty_sequences,
        dp_group=dp_group,
    )
    parts = weights.split(rows)
    return [
        dict(batch, loss_weights=part[:, : mask.shape[1]])
        for batch, part, mask in zip(batches, parts, masks)
    ]


def _check_weightless(batches: Sequence[MicroBatch]) -> None:
    if not batches:
        raise InputError(
            "a mini-batch needs at least one micro-batch on every rank, got none. A rank without "
            "data runs micro-batches whose mask is all False."
        )
    for i, batch in enumerate(batches):
        if "loss_mask" not in batch:
            raise InputError(f"micro-batch {i} has no 'loss_mask'; the weights are made from it.")
        if "cu_seqlens" in batch:
            raise InputError(
                f"micro-batch {i} is a packed row, whose sequences are not rows; make the weights "
                "before packing (mcore.collate.with_sequence_weights)."
            )
        if "loss_weights" in batch:
            raise InputError(f"micro-batch {i} already has 'loss_weights'; drop them or this call.")
