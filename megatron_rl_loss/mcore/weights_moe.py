"""The experts' part of the weight map: names of either side, and fused checkpoints seen per expert.

Checkpoints hold one tensor per expert and projection. In memory, transformers 5 stacks a layer's
experts: `mlp.experts.gate_up_proj` [E, 2 ffn, hidden], gate rows first, and `down_proj`
[E, hidden, ffn]. Both load; what is exported is the checkpoints' layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .model_spec import ModelSpec

_FUSED = re.compile(r"(model\.layers\.\d+\.)mlp\.experts\.(gate_up_proj|down_proj)")
_FUSED_ROUTER = re.compile(r"(model\.layers\.\d+\.)mlp\.gate\.weight")


@dataclass(frozen=True)
class ExpertNames:
    """What a checkpoint calls the experts of a layer.

    Attributes:
        block: the module that has router and experts.
        gate, up, down: the projections.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


NAMES = {
    "qwen3_moe": ExpertNames(),
    "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
}


class PerExpert(Mapping[str, Tensor]):
    """A checkpoint with one tensor per expert and projection, whichever way `source` has them.

    Args:
        source: from Hugging Face names to tensors, as in `load_hf_weights`.
        spec: the checkpoint's architecture.
    """

    def __init__(self, source: Mapping[str, Tensor], spec: ModelSpec) -> None:
        self._source = source
        # name -> (name in the source, expert, half of its rows); the last two None for all of it
        self._places: dict[str, tuple[str, int | None, int | None]] = {}
        names = NAMES[spec.architecture]
        for name in source:
            self._places.update(self._expanded(name, names))

    def _expanded(self, name: str, names: ExpertNames) -> dict[str, Any]:
        router = _FUSED_ROUTER.fullmatch(name)
        if router:
            return {f"{router[1]}{names.block}.gate.weight": (name, None, None)}
        fused = _FUSED.fullmatch(name)
        shape = source_header(self._source, name)[0] if fused else ()
        if fused is None or len(shape) != 3:
            return {name: (name, None, None)}
        prefix = f"{fused[1]}{names.block}.experts."
        if fused[2] == "down_proj":
            parts: tuple[tuple[str, int | None], ...] = ((names.down, None),)
        else:
            parts = ((names.gate, 0), (names.up, 1))
        return {
            f"{prefix}{expert}.{projection}.weight": (name, expert, half)
            for expert in range(shape[0])
            for projection, half in parts
        }

    def __getitem__(self, name: str) -> Tensor:
        place, expert, half = self._places[name]
        if expert is None:
            return self._source[place]
        read = getattr(self._source, "row", None)
        tensor = read(place, expert) if read else self._source[place][expert]
        return tensor if half is None else tensor.chunk(2)[half]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def header(self, name: str) -> tuple[tuple[int, ...], Any]:
        """Returns a tensor's shape and dtype, unread if the source can tell."""
        place, expert, half = self._places[name]
        shape, dtype = source_header(self._source, place)
        if expert is None:
            return shape, dtype
        rows, columns = shape[1:]
        return (rows if half is None else rows // 2, columns), dtype


def source_header(source: Mapping[str, Tensor], name: str) -> tuple[tuple[int, ...], Any]:
    """Returns a tensor's shape and dtype."""
    if hasattr(source, "header"):
        return source.header(name)
    tensor = source[name]
    return tuple(tensor.shape), tensor.dtype
