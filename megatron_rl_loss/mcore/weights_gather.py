"""Where a model's tensors are, and how every rank gets them: pipeline stages and experts' ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor


@dataclass(frozen=True)
class Owner:
    """The first pipeline rank, and in it the first expert-parallel rank, that has something.

    Attributes:
        stage, expert_rank: those ranks.
        info: what the owner says about it.
    """

    stage: int
    expert_rank: int
    info: Any

    @property
    def in_stage(self) -> bool:
        """This rank is in the owner's pipeline stage."""
        return parallel_state.get_pipeline_model_parallel_rank() == self.stage


def find_owners(own: Mapping[str, Any]) -> dict[str, Owner]:
    """Returns the owner of each name, the same on every rank of the model.

    Args:
        own: what this rank has, by global name, with what to say about it (small, pickled).

    Communicates: gathers `own` over the expert-parallel and then the pipeline ranks.
    """
    experts = _from_all(dict(own), parallel_state.get_expert_model_parallel_group())
    stages = _from_all(_first(experts), parallel_state.get_pipeline_model_parallel_group())
    return {
        name: Owner(stage, expert_rank, info)
        for name, (stage, (expert_rank, info)) in _first(stages).items()
    }


def share(tensors: Sequence[Tensor], owner: Owner, *, is_expert: bool) -> None:
    """Fills the tensors, which have the right shapes, with the owner's on every rank.

    Communicates: broadcasts, an expert's over the expert-parallel ranks first, over the pipeline.
    """
    if is_expert and owner.in_stage:
        experts = parallel_state.get_expert_model_parallel_group()
        _broadcast(tensors, owner.expert_rank, experts)
    _broadcast(tensors, owner.stage, parallel_state.get_pipeline_model_parallel_group())


def all_shards(shard: Tensor, *, is_expert: bool) -> list[Tensor]:
    """Returns the tensors of all (expert-)tensor-parallel ranks, by rank.

    Communicates: an all-gather over them.
    """
    if is_expert:
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    size = dist.get_world_size(group)
    if size == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(size)]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards


def device() -> Any:
    """Returns the device of this rank's tensors."""
    return torch.cuda.current_device() if torch.cuda.is_available() else "cpu"


def _first(by_rank: list[dict[str, Any]]) -> dict[str, tuple[int, Any]]:
    """Returns each name's first rank, and what it has there."""
    found: dict[str, tuple[int, Any]] = {}
    for rank, named in reversed(list(enumerate(by_rank))):
        found.update({name: (rank, value) for name, value in named.items()})
    return found


def _from_all(item: Any, group: Any) -> list[Any]:
    items: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(items, item, group=group)
    return items


def _broadcast(tensors: Sequence[Tensor], source: int, group: Any) -> None:
    if dist.get_world_size(group) > 1:
        for tensor in tensors:
            dist.broadcast(tensor, dist.get_global_rank(group, source), group=group)
