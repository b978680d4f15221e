"""Finds the linear layers of a model that can carry an adapter, by global name.

A global name is the module's name in a model of a single rank and chunk, with layers and experts
numbered over the whole model: `decoder.layers.7.mlp.experts.local_experts.3.linear_fc1`. A grouped
linear layer, which holds one weight per local expert, counts as one layer per expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron.core import parallel_state
from torch import Tensor

Kind = Literal["qkv", "gate_up", "column", "row"]

# By class name: Transformer Engine need not be there. (parallelism, one weight per local expert)
_CLASSES = {
    "ColumnParallelLinear": ("column", False),
    "RowParallelLinear": ("row", False),
    "TEColumnParallelLinear": ("column", False),
    "TELayerNormColumnParallelLinear": ("column", False),
    "TERowParallelLinear": ("row", False),
    "TEColumnParallelGroupedLinear": ("column", True),
    "TERowParallelGroupedLinear": ("row", True),
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"\bexperts\.local_experts\.(\d+)\.")
_GROUPED = re.compile(r"\bexperts\.(\w+)$")


@dataclass(frozen=True)
class Linear:
    """A linear layer of this rank, or one expert's part of a grouped one.

    Attributes:
        name: global name.
        module: Megatron's.
        kind: what its rows are: "qkv" (fused, by query group), "gate_up" (each rank's gate rows,
            then its up rows), another column-parallel layer, or a row-parallel layer.
        expert: number over all ranks, None outside the experts.
        local_expert: index of the weight in a grouped layer, None elsewhere.
    """

    name: str
    module: Any
    kind: Kind
    expert: int | None = None
    local_expert: int | None = None

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def weight_name(self) -> str:
        return "weight" if self.local_expert is None else f"weight{self.local_expert}"

    @property
    def weight(self) -> Tensor:
        return getattr(self.module, self.weight_name)


def unwrapped(chunk: Any) -> Any:
    """Returns the model inside DDP and Float16Module."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def linears(chunks: Sequence[Any]) -> Iterator[Linear]:
    """Yields this rank's linear layers inside the decoder's layers, first to last."""
    for chunk in chunks:
        model = unwrapped(chunk)
        for name, module in model.named_modules():
            match = _LAYER.fullmatch(name)
            found = _class_of(module)
            if match is None or found is None:
                continue
            layer = model.decoder.layers[int(match[1])].layer_number - 1
            name = f"decoder.layers.{layer}.{match[2]}"
            yield from _entries(name, module, *found, model.config)


def _class_of(module: Any) -> tuple[str, bool] | None:
    for base in type(module).__mro__:
        if base.__name__ in _CLASSES:
            return _CLASSES[base.__name__]
    return None


def _entries(name: str, module: Any, parallel: str, grouped: bool, config: Any) -> Iterator[Linear]:
    kind = _kind(name, parallel, config)
    expert = _EXPERT.search(name)
    if not grouped and expert is None:
        yield Linear(name, module, kind)
        return
    num_local = config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    first = parallel_state.get_expert_model_parallel_rank() * num_local
    if expert is not None:
        number = first + int(expert[1])
        name = name.replace(expert[0], f"experts.local_experts.{number}.")
        yield Linear(name, module, kind, number)
        return
    for local in range(num_local):
        part = _GROUPED.sub(rf"experts.local_experts.{first + local}.\1", name)
        yield Linear(part, module, kind, first + local, local)


def _kind(name: str, parallel: str, config: Any) -> Kind:
    if name.endswith(".linear_qkv"):
        return "qkv"
    if name.endswith(".linear_fc1") and config.gated_linear_unit:
        return "gate_up"
    return "row" if parallel == "row" else "column"
