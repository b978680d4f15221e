"""All ranks fail together, so that none waits for one that has raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from ..errors import InputError

T = TypeVar("T")


def raise_together(action: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Calls `action` and returns its result, unless it raised on any rank of `group`.

    Then every rank raises: its own error where it has one, elsewhere an `InputError` that quotes
    the other ranks' errors. `action` must not communicate over `group` itself.

    Communicates: one small MAX all-reduce; the messages only after a failure.
    """
    result, error = None, None
    try:
        result = action()
    except Exception as caught:
        error = caught
    if group is None:
        if error is not None:
            raise error
        return result
    failed = torch.tensor([0 if error is None else 1], device=_device_of(group))
    dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    if not int(failed):
        return result
    messages: list[str | None] = [None] * group.size()
    dist.all_gather_object(messages, None if error is None else str(error), group=group)
    if error is not None:
        raise error
    raise InputError(
        "; ".join(
            f"rank {dist.get_global_rank(group, i)}: {text}"
            for i, text in enumerate(messages)
            if text is not None
        )
    )


def _device_of(group: dist.ProcessGroup) -> torch.device:
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
