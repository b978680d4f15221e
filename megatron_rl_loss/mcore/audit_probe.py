"""The made-up mini-batch of the audit, its cuts, and the weights that wrong set-ups would use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..types import MicroBatch
from .groups import ParallelGroups
from .micro_batches import with_loss_weights
from .token_log_probs import token_log_probs

ROWS_PER_MICRO_BATCH = 2
SEQ_LENGTH = 24
_PRIMES = (3, 5, 7, 11, 13)


def probe_num_microbatches(dp_size: int, cp_size: int, multiple: int = 1) -> int:
    """Returns an M that cannot be mistaken for dp_size or cp_size: a prime that divides neither.

    Args:
        multiple: what the schedule wants (the pipeline size, with virtual stages).

    >>> probe_num_microbatches(2, 1), probe_num_microbatches(3, 2, multiple=2)
    (3, 10)
    """
    prime = next(p for p in _PRIMES if (dp_size * cp_size) % p or p == _PRIMES[-1])
    return prime * multiple


def make_probe(
    groups: ParallelGroups, num_microbatches: int, vocab_size: int, *, seed: int = 0
) -> list[MicroBatch]:
    """Returns this rank's micro-batches, without weights and old log-probs.

    Each trains another number of tokens, on each data-parallel rank, and one row trains none: so
    that counts of one micro-batch or one rank cannot pass for counts of the mini-batch.
    """
    rank = groups.dp.rank()
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    unit = 2 * groups.cp.size() * groups.tp.size()
    width = unit * -(-SEQ_LENGTH // unit)
    return [
        _micro_batch(rank, k, num_microbatches, width, vocab_size, generator)
        for k in range(num_microbatches)
    ]


def _micro_batch(
    rank: int, k: int, num_microbatches: int, width: int, vocab_size: int, generator: Any
) -> MicroBatch:
    rows = ROWS_PER_MICRO_BATCH
    tokens = torch.randint(vocab_size, (rows, width), generator=generator)
    # longer responses on later ranks and in later micro-batches
    first = [(rank * num_microbatches + k) * rows + j for j in range(rows)]
    lengths = torch.tensor([4 + (5 * i + 7 * rank) % (width - 7) for i in first])
    lengths[0] = 0 if k == 1 and rank == 0 else lengths[0]
    positions = torch.arange(width).expand(rows, width)
    return {
        "tokens": tokens,
        "labels": tokens.roll(-1, dims=1),
        "position_ids": positions.clone(),
        "loss_mask": (positions >= 2) & (positions < 2 + lengths.unsqueeze(1)),
        "advantages": _advantages(rows, width, generator),
        "group_ids": torch.full((rows,), rank * num_microbatches + k),
    }


def _advantages(rows: int, width: int, generator: Any) -> Tensor:
    """Returns values of both signs whose mean is not 0, one per row."""
    return (0.5 + torch.randn(rows, 1, generator=generator)).expand(rows, width).clone()


def with_policy_log_probs(
    micro_batches: Sequence[MicroBatch], chunks: Sequence[Any], parts: int, **settings: Any
) -> list[MicroBatch]:
    """Returns copies with the model's own log-probs as old and rollout log-probs.

    All ratios are then 1 and no clip binds, so any policy loss has the gradient -w A at a
    log-prob, whatever its formula. Reference log-probs are a constant away, for a KL term.

    Args:
        parts: micro-batches of the forward pass, as in `merged`.
        settings: `temperature` and `vocab_size`.
    """
    values = token_log_probs(chunks, merged(micro_batches, parts), **settings)
    rows = torch.cat(values).split([len(m["tokens"]) for m in micro_batches])
    return [
        dict(m, old_log_probs=row, rollout_log_probs=row.clone(), ref_log_probs=row - 0.1)
        for m, row in zip(micro_batches, rows, strict=True)
    ]


def merged(micro_batches: Sequence[MicroBatch], parts: int = 1) -> list[MicroBatch]:
    """Returns the same rows in `parts` micro-batches (the fewest the schedule can run)."""
    whole = {name: torch.cat([m[name] for m in micro_batches]) for name in micro_batches[0]}
    size = len(whole["tokens"]) // parts
    return [
        {name: value[i * size : (i + 1) * size] for name, value in whole.items()}
        for i in range(parts)
    ]


def weighted_as(
    mistake: str, micro_batches: Sequence[MicroBatch], groups: ParallelGroups, **reduction: Any
) -> list[MicroBatch]:
    """Returns copies with the weights that a set-up with the mistake would use.

    Args:
        mistake: "" for the right weights; "local counts": counts of this data-parallel rank only;
            "micro-batch mean": a mean over each micro-batch; "loss_weights ignored": 1 per token.
        reduction: arguments of `with_loss_weights` for the first two.

    Communicates: as `with_loss_weights`, for "" only.
    """
    if mistake == "":
        return with_loss_weights(micro_batches, dp_group=groups.dp, **reduction)
    if mistake == "local counts":
        return with_loss_weights(micro_batches, dp_group=None, **reduction)
    if mistake == "micro-batch mean":
        return [w for m in micro_batches for w in with_loss_weights([m], "token_mean")]
    assert mistake == "loss_weights ignored", mistake
    return with_loss_weights(micro_batches, "sum")
