"""Checks and choices of the fused LM head: shapes, memory budget, vocabulary blocks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import InputError
from .backends import choose_rows
from .inputs import VocabShard, check_loss_mask, check_temperature, check_token_ids, vocab_shard

logger = logging.getLogger(__name__)

# who makes log-probs in a model's forward step
LM_HEADS = ("auto", "logits", "fused", "fused_forward")
DEFAULT_BUDGET_BYTES = 2 << 30
MIN_BLOCK, MAX_BLOCK = 1024, 8192  # measured on CPU; 4096 is the H200 estimate, within the range
MIN_CHUNK = 256  # tokens


class HeadPlan(NamedTuple):
    """How one call of the fused head runs; constant.

    Attributes:
        shard: the vocabulary columns (rows of the weight) of this rank.
        block_size: columns per block; the logits are kept whole if it covers the shard.
        inv_temperature: 1 / T.
        with_entropy: whether the entropy is wanted.
        sequence_parallel: hidden states are split over the group along dimension 0.
        accumulate_main_grad: add the weight's gradient to `weight.main_grad`.
        rows: row backend.
    """

    shard: VocabShard
    block_size: int
    inv_temperature: float
    with_entropy: bool
    sequence_parallel: bool
    accumulate_main_grad: bool
    rows: ModuleType

    def blocks(self) -> Iterator[tuple[int, int]]:
        """(start, end) of each block of real columns of this shard."""
        for start in range(0, self.shard.num_valid, self.block_size):
            yield start, min(start + self.block_size, self.shard.num_valid)

    @property
    def keeps_logits(self) -> bool:
        return self.block_size >= self.shard.num_valid


def choose_block_size(
    num_tokens: int, num_columns: int, bytes_per_logit: int, memory_budget_bytes: int
) -> int:
    """Columns per block: the whole shard if its logits fit the budget, else a block that does.

    A block is a power of two between 1024 (less wastes the matrix units) and 8192 (more saves
    nothing), even if 1024 does not fit.

    >>> choose_block_size(2048, 151_936, 2, 2 << 30), choose_block_size(16_384, 151_936, 2, 1 << 28)
    (151936, 8192)
    """
    if num_tokens * num_columns * bytes_per_logit <= memory_budget_bytes:
        return num_columns
    block = MAX_BLOCK
    while block > MIN_BLOCK and num_tokens * block * bytes_per_logit > memory_budget_bytes:
        block //= 2
    return min(block, num_columns)


def choose_chunk_size(num_columns: int, bytes_per_logit: int, memory_budget_bytes: int) -> int:
    """Tokens at a time for gradients in forward: as many as have logits within the budget.

    At least 256 (fewer waste the matrix units, and add to the weight's gradient too often).

    >>> choose_chunk_size(151_936, 2, 2 << 30), choose_chunk_size(151_936, 2, 0)
    (7067, 256)
    """
    return max(MIN_CHUNK, memory_budget_bytes // max(num_columns * bytes_per_logit, 1))


@lru_cache(maxsize=16)
def report_choice(num_tokens: int, num_columns: int, block: int, budget: int, kept: str) -> None:
    """Logs once per shape which way the head runs."""
    if block >= num_columns:
        logger.info(
            "LM head: logits of %d tokens x %d columns are kept (%s), within the budget of %.2f GB",
            num_tokens, num_columns, kept, budget / 1e9,
        )  # fmt: skip
    else:
        logger.info(
            "LM head: %d tokens x %d columns would take %s, over the budget of %.2f GB; runs in "
            "blocks of %d columns and recomputes them in backward",
            num_tokens, num_columns, kept, budget / 1e9, block,
        )  # fmt: skip


def make_head_plan(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_mask: Tensor | None,
    *,
    tp_group: Any = None,
    sequence_parallel: bool = False,
    temperature: float = 1.0,
    with_entropy: bool = False,
    vocab_size: int | None = None,
    memory_budget_bytes: int = DEFAULT_BUDGET_BYTES,
    block_size: int | None = None,
    accumulate_main_grad: bool = False,
    backend: str | None = None,
) -> HeadPlan:
    """Checks one call's arguments (see `lm_head.linear_log_probs`) and decides how it runs.

    Raises:
        InputError: shapes, dtypes or settings do not fit.
    """
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise InputError(
            f"hidden must be [..., H] and weight [V_local, H], got {list(hidden.shape)} and "
            f"{list(weight.shape)}."
        )
    if hidden.dtype != weight.dtype:
        raise InputError(
            f"hidden is {hidden.dtype}, weight is {weight.dtype}; cast one (autocast does not "
            "reach into the fused head)."
        )
    shard = vocab_shard(weight.shape[0], vocab_size, tp_group)
    split = sequence_parallel and shard.group is not None
    shape = list(hidden.shape[:-1])
    if split:
        if not shape:
            raise InputError("sequence_parallel needs hidden [s / tp, ..., H], got [H].")
        shape[0] *= shard.group.size()
    check_token_ids("labels", labels, shape)
    check_loss_mask(loss_mask, shape)
    if accumulate_main_grad and weight.requires_grad and not hasattr(weight, "main_grad"):
        raise InputError(
            "accumulate_main_grad=True, but weight has no main_grad; wrap the model in Megatron's "
            "DistributedDataParallel or pass False."
        )
    if block_size is not None and block_size < 1:
        raise InputError(f"block_size must be at least 1, got {block_size}.")
    size = hidden.element_size()
    if block_size is None:
        block_size = choose_block_size(labels.numel(), weight.shape[0], size, memory_budget_bytes)
        kept = f"{labels.numel() * weight.shape[0] * size / 1e9:.2f} GB"
        report_choice(labels.numel(), weight.shape[0], block_size, memory_budget_bytes, kept)
    rows = choose_rows(_like_block(hidden, labels.numel(), weight.shape[0]), backend)
    return HeadPlan(
        shard, block_size, 1.0 / check_temperature(temperature), with_entropy, split,
        accumulate_main_grad, rows,
    )  # fmt: skip


def _like_block(hidden: Tensor, num_tokens: int, num_columns: int) -> Tensor:
    """A tensor with the logits' device, dtype and size that owns no memory of that size."""
    return hidden.new_empty(1, 1).expand(num_tokens, num_columns)
