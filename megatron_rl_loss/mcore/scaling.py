"""The one place where a loss is scaled for Megatron's schedule.

With M micro-batches of this call, D data-parallel ranks without context parallelism and C
context-parallel ranks, Megatron multiplies a returned 2-tuple loss by C and divides it by M,
whatever `calculate_per_token_loss` says. What follows depends on that flag:

    off: DDP averages gradients over D * C ranks, so the loss, a sum S over this rank's own
         tokens, must be returned times M * D:   S * (M * D) * C / M / (D * C) = S
    on:  DDP sums, and finalizing divides by the token count, which a 2-tuple leaves at 0 (0 is
         not divided by), so it must be returned times M / C:   S * (M / C) * C / M = S
"""

from __future__ import annotations

from ..errors import ContractError


def schedule_factor(
    num_microbatches: int,
    dp_size: int,
    cp_size: int = 1,
    *,
    calculate_per_token_loss: bool = False,
) -> float:
    """Returns what the local loss sum is multiplied by before it is handed to the schedule.

    Formula: num_microbatches * dp_size, or num_microbatches / cp_size with the flag, for a 2-tuple
    `(loss, metrics)`. It holds in every Megatron-Core release from 0.13 on.

    Args:
        num_microbatches: M, of this forward_backward call.
        dp_size: D, data-parallel ranks **without** context parallelism.
        cp_size: C, context-parallel ranks.
        calculate_per_token_loss: the flag of the config that the schedule and DDP read.

    Raises:
        ContractError: a size is not positive.

    >>> schedule_factor(4, 2, 2), schedule_factor(4, 2, 2, calculate_per_token_loss=True)
    (8, 2.0)
    """
    if num_microbatches < 1 or dp_size < 1 or cp_size < 1:
        raise ContractError(
            "num_microbatches, dp_size and cp_size must be at least 1, got "
            f"{num_microbatches}, {dp_size} and {cp_size}. A rank without data still runs as many "
            "(zero-weight) micro-batches as the others."
        )
    if calculate_per_token_loss:
        return num_microbatches / cp_size
    return num_microbatches * dp_size


def micro_batch_share(num_microbatches: int, dp_size: int, cp_size: int) -> float:
    """Returns 1 / (M * D * C): what one rank's micro-batch is of all that the metrics add up.

    >>> micro_batch_share(4, 2, 1)
    0.125
    """
    return 1.0 / (num_microbatches * dp_size * cp_size)
