"""Tells whether a tensor saved for backward has any other owner, so that it may be overwritten.

Backward can put the gradient where the logits lie, but only if nobody reads the logits again: not
the caller, not another operation's backward, not a second backward of ours. References tell: the
Python object, the tensor, its storage and (for a view) its base are counted in backward and
compared with the counts of a tensor known to have no other owner, taken once in the same way.
"""

from __future__ import annotations

import sys
from functools import lru_cache

import torch
from torch import Tensor


def may_overwrite(saved: Tensor) -> bool:
    """Whether `saved`, just unpacked in a backward and held by one local name, is unowned.

    False when in doubt: leaf tensors, views of leaves, retained graphs, unknown torch internals.
    """
    baseline = _sole_owner_counts()
    if baseline is None or saved.is_leaf or _graph_is_kept():
        return False
    base = saved._base
    if base is not None and base.is_leaf and base.requires_grad:
        return False
    counts = _owner_counts(saved, base)
    return all(n <= limit for n, limit in zip(counts, baseline[base is not None], strict=True))


def calibrate() -> None:
    """Takes the reference counts; call it in forward, for a backward must not run another one."""
    _sole_owner_counts()


def _graph_is_kept() -> bool:
    return torch._C._autograd._get_current_graph_task_keep_graph()


def _owner_counts(saved: Tensor, base: Tensor | None) -> tuple[int, ...]:
    storage = torch._C._storage_Use_Count(saved.untyped_storage()._cdata)
    of_base = (0, 0) if base is None else (sys.getrefcount(base), base._use_count())
    return (sys.getrefcount(saved), saved._use_count(), storage, *of_base)


class _Probe(torch.autograd.Function):
    """Counts its input's owners in backward, through the same calls as `may_overwrite`."""

    @staticmethod
    def forward(ctx, x: Tensor, found: list) -> Tensor:
        ctx.save_for_backward(x)
        ctx.found = found
        return x.sum()

    @staticmethod
    def backward(ctx, _: Tensor) -> tuple[None, None]:
        (x,) = ctx.saved_tensors
        ctx.found.append(_probe_counts(x))
        return None, None


def _probe_counts(saved: Tensor) -> tuple[int, ...]:
    base = saved._base
    return _owner_counts(saved, base)


@lru_cache(maxsize=1)
def _sole_owner_counts() -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The counts of an unowned tensor and of an unowned view, or None if they tell nothing."""
    try:
        unowned, unowned_view, owned = [], [], []
        with torch.enable_grad():
            leaf = torch.zeros(2, 2, requires_grad=True)
            _Probe.apply(leaf * 1, unowned).backward()
            _Probe.apply((leaf * 1).view(4), unowned_view).backward()
            held = leaf * 1
            _Probe.apply(held, owned).backward()
        _graph_is_kept()
    except (AttributeError, RuntimeError, TypeError):
        return None
    if not any(n > limit for n, limit in zip(owned[0], unowned[0], strict=True)):
        return None
    return unowned[0], unowned_view[0]
