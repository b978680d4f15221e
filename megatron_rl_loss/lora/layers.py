"""Puts adapters into Megatron's linear layers.

The layer becomes an instance of a subclass made on the fly, with the adapter as a submodule: its
own parameters keep their names, and everything that asks `isinstance(layer, ColumnParallelLinear)`
gets the same answer as before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .adapter import Adapter


class GroupedAdapter(torch.nn.Module):
    """One adapter per local expert, for a grouped linear layer.

    Args:
        experts: this rank's.
        first: number over all ranks of the first of them.
        num_experts: over all ranks.
    """

    def __init__(self, experts: Sequence[Adapter], first: int, num_experts: int) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(experts)
        self.first = first
        self.num_experts = num_experts

    @property
    def enabled(self) -> bool:
        return all(expert.enabled for expert in self.experts)

    def forward(self, x: Tensor, output: Tensor, m_splits: Any) -> Tensor:
        """Returns the adapted output of tokens sorted by expert, `m_splits` for each."""
        sizes = m_splits.tolist() if isinstance(m_splits, Tensor) else list(m_splits)
        parts = zip(self.experts, x.split(sizes), output.split(sizes), strict=True)
        return torch.cat([expert(tokens, out) for expert, tokens, out in parts])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Returns the entries that SequentialMLP makes: one tensor, with an axis of experts."""
        axis = len(sharded_offsets)
        entries = {}
        for i, expert in enumerate(self.experts):
            offsets = (*sharded_offsets, (axis, self.first + i, self.num_experts))
            own = expert.sharded_state_dict(prefix, offsets, metadata)
            inner = f"{prefix}experts.{i}."
            entries |= {key.replace(prefix, inner, 1): entry for key, entry in own.items()}
        return entries


class _WithAdapter:
    """Mixed into the class of a linear layer that has an `adapter`."""

    adapter: Any

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        output, *rest = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        if not self.adapter.enabled:
            return (output, *rest)
        return (self.adapter(normed_input(self, x), output, *args), *rest)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Returns the layer's entries as without an adapter, and the adapter's own."""
        whole = super().sharded_state_dict(  # type: ignore[misc]
            prefix, sharded_offsets, metadata
        )
        inner = f"{prefix}adapter."
        # the layer takes its adapter's parameters for whole ones
        base = {key: value for key, value in whole.items() if not key.startswith(inner)}
        return base | self.adapter.sharded_state_dict(inner, sharded_offsets, metadata)


def put_adapter(layer: Any, adapter: torch.nn.Module) -> None:
    """Makes `layer` add its adapter's output to its own."""
    layer.adapter = adapter
    layer.__class__ = _with_adapter(type(layer))


@functools.cache
def _with_adapter(cls: type) -> type:
    return type(f"{cls.__name__}WithAdapter", (_WithAdapter, cls), {})


def normed_input(layer: Any, x: Tensor) -> Tensor:
    """Returns what the layer's weight is multiplied with.

    Transformer Engine fuses a norm into the layer after it and keeps the result to itself. It is
    computed again here: a pass over x, but no dependence on which of its outputs are returned.
    """
    weight = getattr(layer, "layer_norm_weight", None)
    if weight is None:
        return x
    if getattr(layer, "zero_centered_gamma", False):
        weight = weight + 1
    if getattr(layer, "normalization", "LayerNorm") == "RMSNorm":
        return torch.nn.functional.rms_norm(x, weight.shape, weight, layer.eps)
    return torch.nn.functional.layer_norm(x, weight.shape, weight, layer.layer_norm_bias, layer.eps)
