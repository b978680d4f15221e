"""How many adapters and parameters there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .handles import adapters, whole_shapes
from .names import unwrapped


@dataclass
class Count:
    """Adapters of one kind of layer on this rank; parameters here, and over the ranks they are
    cut over."""

    num_adapters: int = 0
    num_parameters: int = 0
    num_whole_parameters: int = 0


@dataclass(frozen=True)
class Report:
    """What this rank trains and what it does not.

    Attributes:
        kinds: by layer, `self_attention.linear_qkv` or `mlp.experts.linear_fc1`.
        num_trained: parameters that are trained on this rank.
        num_frozen: parameters that are not.
    """

    kinds: dict[str, Count]
    num_trained: int
    num_frozen: int

    def __str__(self) -> str:
        width = max([len(kind) for kind in self.kinds], default=0)
        lines = [
            f"{kind:<{width}}  {count.num_adapters:>6} adapters  "
            f"{count.num_parameters:>13,} parameters here  {count.num_whole_parameters:>13,} whole"
            for kind, count in self.kinds.items()
        ]
        lines.append(f"trained {self.num_trained:,}, frozen {self.num_frozen:,} parameters here")
        return "\n".join(lines)


def report(model_chunks: Sequence[Any]) -> Report:
    """Counts this rank's adapters by kind of layer; nothing is communicated."""
    kinds: dict[str, Count] = {}
    for handle in adapters(model_chunks):
        count = kinds.setdefault(_kind(handle.name), Count())
        count.num_adapters += 1
        count.num_parameters += handle.a.numel() + handle.b.numel()
        (r, columns), (rows, _) = whole_shapes(handle)
        count.num_whole_parameters += r * columns + rows * r
    parameters = {id(p): p for chunk in model_chunks for p in unwrapped(chunk).parameters()}
    trained = sum(p.numel() for p in parameters.values() if p.requires_grad)
    frozen = sum(p.numel() for p in parameters.values() if not p.requires_grad)
    return Report(kinds, trained, frozen)


def _kind(name: str) -> str:
    """Returns the name without the layer's and the expert's number."""
    parts = [part for part in name.split(".")[2:] if not part.isdigit()]
    return ".".join(part for part in parts if part != "local_experts")
