"""Adapters as PEFT has them: one A and one B per Hugging Face linear layer, whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..mcore.model_spec import ModelSpec
from ..mcore.weights_gather import Owner, all_shards, device, find_owners, share
from ..mcore.weights_map import WeightRule, weight_rules
from .handles import AdapterHandle, adapters, check_has_lora, whole_shapes

FUSED_KINDS = ("qkv", "gate_up")


@dataclass(frozen=True)
class HfAdapter:
    """The adapter of one Hugging Face linear layer.

    Attributes:
        module: the layer's name, `model.layers.0.self_attn.q_proj`.
        a: [r, in].
        b: [out, r].
        expert: the expert's number, None outside the experts.
    """

    module: str
    a: Tensor
    b: Tensor
    expert: int | None


def adapter_rules(spec: ModelSpec) -> dict[str, WeightRule]:
    """Returns, by the layer's global name, the rule of each weight that can have an adapter."""
    return {
        name.removesuffix(".weight"): rule
        for name, rule in weight_rules(spec, spec.vocab_size).items()
        if ".linear_" in name and name.endswith(".weight")
    }


def hf_adapters(model_chunks: Sequence[Any], spec: ModelSpec) -> Iterator[HfAdapter]:
    """Yields all adapters of the model on every rank, in the order of the layers.

    Query, key and value (and gate and up) share their A; B is cut into their rows.

    Args:
        model_chunks: this rank's chunks; DDP and Float16Module are looked through.
        spec: the model's architecture.

    Raises:
        ConfigError: the model has no adapters.

    Communicates: gathers each adapter over the (expert-)tensor-parallel ranks and broadcasts it
    over the expert-parallel and pipeline ranks. Every rank of the model (with experts: of the
    world) must take the stream to its end, at the same time.
    """
    check_has_lora(model_chunks)
    own = {handle.name: handle for handle in adapters(model_chunks)}
    owners = find_owners({name: (*whole_shapes(h), h.a.dtype) for name, h in own.items()})
    for name, rule in adapter_rules(spec).items():
        if name in owners:
            a, bs = _on_every_rank(rule, own.get(name), owners[name])
            for hf_name, b in zip(rule.hf_shapes, bs, strict=True):
                yield HfAdapter(hf_name.removesuffix(".weight"), a, b, rule.expert)


def _on_every_rank(
    rule: WeightRule, handle: AdapterHandle | None, owner: Owner
) -> tuple[Tensor, list[Tensor]]:
    if handle is not None and owner.in_stage:
        a, bs = _whole(rule, handle)
    else:
        a_shape, (_, rank), dtype = owner.info
        a = torch.empty(a_shape, dtype=dtype, device=device())
        rows = [shape[0] for shape in rule.hf_shapes.values()]
        bs = [torch.empty(n, rank, dtype=dtype, device=device()) for n in rows]
    share([a, *bs], owner, is_expert=rule.expert is not None)
    return a, bs


def _whole(rule: WeightRule, handle: AdapterHandle) -> tuple[Tensor, list[Tensor]]:
    """Returns A, and B's rows of each Hugging Face layer; new memory."""
    sharding = handle.sharding
    a, b = handle.a.detach(), handle.b.detach()
    if sharding.a_dim is not None:
        a = torch.cat(all_shards(a, is_expert=sharding.is_expert), sharding.a_dim)
    shards = [b] if sharding.b_dim is None else all_shards(b, is_expert=sharding.is_expert)
    if sharding.b_dim == 1:
        shards = [torch.cat(shards, 1)]
    bs = rule.layout.merge(shards) if handle.kind in FUSED_KINDS else [shards[0].clone()]
    return a.clone(), [part.contiguous() for part in bs]
