"""Lists the adapters of a model: the one way for other code to reach A and B."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .adapter import Adapter, Sharding
from .names import Kind, Linear, linears


@dataclass(frozen=True)
class AdapterHandle:
    """One adapter of this rank, y = W x + scale * B (A x).

    Attributes:
        name: global name of the linear layer, `decoder.layers.0.self_attention.linear_qkv`, the
            same for sequential and grouped experts.
        kind: what the rows of B (and of the weight) are, see `names.Linear`: "qkv", "gate_up",
            "column" or "row".
        expert: the expert's number over all ranks, None outside the experts.
        a, b: this rank's parameters, [r, in] and [out, r] cut as `sharding` says. For "gate_up"
            each rank's rows of B are its gate rows, then its up rows; for "qkv" they go by query
            group, as in the weight.
        scale: alpha / rank (alpha / sqrt(rank) with rsLoRA), the same for all adapters.
        sharding: how A and B are cut.
        linear: the layer, with its weight.
        module: the adapter.
    """

    name: str
    kind: Kind
    expert: int | None
    a: torch.nn.Parameter
    b: torch.nn.Parameter
    scale: float
    sharding: Sharding
    linear: Linear
    module: Adapter


def adapters(model_chunks: Sequence[Any]) -> Iterator[AdapterHandle]:
    """Yields this rank's adapters in the order of the layers; DDP and Float16Module are looked
    through."""
    for linear in linears(model_chunks):
        module = getattr(linear.module, "adapter", None)
        if module is None:
            continue
        if linear.local_expert is not None:
            module = module.experts[linear.local_expert]
        yield AdapterHandle(
            linear.name,
            linear.kind,
            linear.expert,
            module.lora_a,
            module.lora_b,
            module.scale,
            module.sharding,
            linear,
            module,
        )


def adapter_parameters(model_chunks: Sequence[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yields (global name, parameter): `...linear_qkv.lora_a`, then `...linear_qkv.lora_b`."""
    for handle in adapters(model_chunks):
        yield f"{handle.name}.lora_a", handle.a
        yield f"{handle.name}.lora_b", handle.b


def check_has_lora(model_chunks: Sequence[Any]) -> None:
    """Raises `ConfigError` unless `apply_lora` was called; a stage may be without adapters."""
    from .names import unwrapped

    if not any(hasattr(unwrapped(chunk), "lora_config") for chunk in model_chunks):
        raise ConfigError("the model has no LoRA adapters; call apply_lora(model_chunks, ...).")


def whole_shapes(handle: AdapterHandle) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the shapes of A and B over all ranks."""

    def whole(tensor: Tensor, dim: int | None) -> tuple[int, int]:
        shape = list(tensor.shape)
        if dim is not None:
            shape[dim] *= handle.sharding.size
        return (shape[0], shape[1])

    return whole(handle.a, handle.sharding.a_dim), whole(handle.b, handle.sharding.b_dim)
