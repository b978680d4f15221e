"""The model with its adapters in its weights, made while it is read; the model stays as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .adapter import Adapter
from .handles import AdapterHandle, adapters, check_has_lora
from .names import unwrapped


def merged(model_chunks: Sequence[Any]) -> list[MergedChunk]:
    """Returns views of the chunks for `export_hf_weights`, with W + scale * B A for each weight.

    A weight is added up in fp32 (fp64 for fp64 weights) and cast once, when it is read, so that
    no second model is ever in memory.
    """
    check_has_lora(model_chunks)
    return [MergedChunk(chunk) for chunk in model_chunks]


class MergedChunk:
    """A chunk without adapters, whose `named_parameters()` yields `MergedWeight` where there was
    one; anything else is the chunk's own."""

    def __init__(self, chunk: Any) -> None:
        self._wrapped = chunk
        self._model = unwrapped(chunk)

    def __getattr__(self, name: str) -> Any:
        if name == "module":
            raise AttributeError(name)
        if name == "ddp_config":
            return getattr(self._wrapped, name)
        return getattr(self._model, name)

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        by_weight = {id(handle.linear.weight): handle for handle in adapters([self._model])}
        own = {id(p) for handle in by_weight.values() for p in (handle.a, handle.b)}
        for name, parameter in self._model.named_parameters():
            if id(parameter) in own:
                continue
            handle = by_weight.get(id(parameter))
            yield name, parameter if handle is None else MergedWeight.of(handle)

    def parameters(self) -> Iterator[Any]:
        return (parameter for _, parameter in self.named_parameters())


@dataclass(frozen=True)
class MergedWeight:
    """A weight with its adapter, which becomes a tensor by `to`."""

    weight: Tensor
    adapter: Adapter

    @staticmethod
    def of(handle: AdapterHandle) -> MergedWeight:
        return MergedWeight(handle.linear.weight, handle.module)

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    def detach(self) -> MergedWeight:
        return self

    @torch.no_grad()
    def to(self, dtype: torch.dtype) -> Tensor:
        """Returns W + scale * B A, new memory.

        Communicates: see `Adapter.weight_delta`.
        """
        delta = self.adapter.weight_delta()
        return (self.weight.detach().to(delta.dtype) + delta).to(dtype)
