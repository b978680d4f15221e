"""The one place where a loss is scaled for Megatron's schedule.

Megatron multiplies a returned 2-tuple loss by C and divides it by M; DDP then averages gradients
over D * C ranks (M micro-batches of this call, D data-parallel ranks without context parallelism,
C context-parallel ranks). A loss that is a sum over this rank's own tokens must therefore be
returned times M * D, so that the gradient that arrives is that of the sum over all ranks:

    S * (M * D) * C / M / (D * C) = S
"""

from __future__ import annotations

from ..errors import ContractError


def schedule_factor(
    num_microbatches: int, dp_size: int, *, calculate_per_token_loss: bool = False
) -> int:
    """Returns what the local loss sum is multiplied by before it is handed to the schedule.

    Formula: num_microbatches * dp_size, for a 2-tuple `(loss, metrics)`. It holds in every
    Megatron-Core release from 0.13 on.

    Args:
        num_microbatches: M, of this forward_backward call.
        dp_size: D, data-parallel ranks **without** context parallelism.
        calculate_per_token_loss: the flag of the config that the schedule reads.

    Raises:
        ContractError: M or D is not positive, or the flag is on.

    >>> schedule_factor(4, 2)
    8
    """
    if num_microbatches < 1 or dp_size < 1:
        raise ContractError(
            f"num_microbatches and dp_size must be at least 1, got {num_microbatches} and "
            f"{dp_size}. A rank without data still runs as many (zero-weight) micro-batches as "
            "the others."
        )
    if calculate_per_token_loss:
        raise ContractError(
            "config.calculate_per_token_loss is True: DDP would sum gradients instead of averaging "
            "them, and the gradient would come out dp_size * cp_size times too large. Set "
            "calculate_per_token_loss=False (some model providers switch it on when context "
            "parallelism is used; without a config file: drop --calculate-per-token-loss)."
        )
    return num_microbatches * dp_size
