"""Stacked experts of a transformers 5 model, under the names of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import Tensor

_STACKED = re.compile(r"(.+\.)mlp\.experts\.(gate_up_proj|down_proj)")
# block, then gate, up and down: Qwen3-MoE's and Mixtral's
_NAMES = (
    ("mlp", "gate_proj", "up_proj", "down_proj"),
    ("block_sparse_moe", "w1", "w3", "w2"),
)


def per_expert_views(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights with views of every expert in place of stacked experts.

    A view goes by all names that checkpoints have for it, and a router that lies beside stacked
    experts does so too; anything else stays.

    Args:
        weights: from names to tensors, as of `state_dict()`.
    """
    views: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        stacked = _STACKED.fullmatch(name)
        if stacked is None or tensor.ndim != 3:
            views[name] = tensor
            continue
        views.update(_expert_views(stacked[1], stacked[2], tensor))
        router = f"{stacked[1]}mlp.gate.weight"
        if router in weights:
            views[f"{stacked[1]}block_sparse_moe.gate.weight"] = weights[router]
    return views


def _expert_views(prefix: str, kind: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    for block, gate, up, down in _NAMES:
        parts = (down,) if kind == "down_proj" else (gate, up)
        for expert, weight in enumerate(tensor):
            for part, view in zip(parts, weight.chunk(len(parts)), strict=True):
                yield f"{prefix}{block}.experts.{expert}.{part}.weight", view
