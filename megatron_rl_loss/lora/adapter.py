"""One adapter, y + scale * B (A x), cut over tensor-parallel ranks like its linear layer.

The rule: the adapter's output is in the same state as the layer's own (whole, a shard, or one
rank's part of a sum), and what ranks exchange is the rank-r tensor h = A x, never anything as wide
as the model. With T ranks in the group (tensor parallel; for experts expert-tensor parallel):

    layer                          A            B            exchange of h           summed later
    column                         whole        rows         copy                    -
    column, sequence parallel      whole        rows         gather the sequence     A, over TP
    row                            columns      whole        reduce                  -
    row, sequence parallel         columns      whole        reduce-scatter          B, over TP
    expert column, T > 1           rows (of r)  rows         gather r                -
    expert row, T > 1              columns      columns (r)  reduce-scatter r        -
    expert, T = 1                  whole        whole        none                    -

The dispatcher gathers an expert's tokens over its tensor-parallel ranks and sums their outputs, so
an expert's row-parallel adapter returns a part of that sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel import mappings, set_tensor_model_parallel_attributes
from torch import Tensor

from .names import Kind

Exchange = Literal[
    "none", "copy", "gather_sequence", "reduce", "scatter_sequence", "gather_rank", "scatter_rank"
]


@dataclass(frozen=True)
class Sharding:
    """How A and B are cut.

    Attributes:
        is_expert: the ranks are those of expert-tensor parallelism, else of tensor parallelism.
        size, rank: of that group.
        a_dim, b_dim: dimension of A [r, in] and of B [out, r] that is cut, None if whole.
        exchange: what happens to h = A x.
        partial: "a" or "b" if each rank has the gradient of its part of the sequence only, which
            `finalize_model_grads` sums over tensor-parallel ranks.
    """

    is_expert: bool
    size: int
    rank: int
    a_dim: int | None = None
    b_dim: int | None = None
    exchange: Exchange = "none"
    partial: Literal["a", "b"] | None = None


def sharding_of(kind: Kind, *, is_expert: bool, sequence_parallel: bool) -> Sharding:
    """Returns the row of the table above for a layer of this rank."""
    if is_expert:
        size = parallel_state.get_expert_tensor_parallel_world_size()
        rank = parallel_state.get_expert_tensor_parallel_rank()
    else:
        size = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
    if size == 1:
        return Sharding(is_expert, size, rank)
    if is_expert and kind == "row":
        return Sharding(is_expert, size, rank, 1, 1, "scatter_rank")
    if is_expert:
        return Sharding(is_expert, size, rank, 0, 0, "gather_rank")
    if kind == "row" and sequence_parallel:
        return Sharding(is_expert, size, rank, 1, None, "scatter_sequence", "b")
    if kind == "row":
        return Sharding(is_expert, size, rank, 1, None, "reduce")
    if sequence_parallel:
        return Sharding(is_expert, size, rank, None, 0, "gather_sequence", "a")
    return Sharding(is_expert, size, rank, None, 0, "copy")


class Adapter(torch.nn.Module):
    """A and B of one linear layer.

    Args:
        a: this rank's part of A, [r, in].
        b: this rank's part of B, [out, r].
        scale: what B (A x) is multiplied by.
        kind: of the layer.
        sharding: how A and B are cut.
        in_expert_group: gradients are averaged over expert-data-parallel ranks, not over all.
    """

    def __init__(
        self,
        a: Tensor,
        b: Tensor,
        *,
        scale: float,
        kind: Kind,
        sharding: Sharding,
        in_expert_group: bool,
    ) -> None:
        super().__init__()
        self.lora_a = torch.nn.Parameter(a)
        self.lora_b = torch.nn.Parameter(b)
        self.scale = scale
        self.kind = kind
        self.sharding = sharding
        self.num_disabled = 0
        for parameter, name, dim in (
            (self.lora_a, "a", sharding.a_dim),
            (self.lora_b, "b", sharding.b_dim),
        ):
            # an expert of one rank is not a copy of another rank's, whatever the dense group is
            sharded = dim is not None or sharding.is_expert
            set_tensor_model_parallel_attributes(parameter, sharded, dim or 0, 1)
            parameter.allreduce = not in_expert_group  # type: ignore[attr-defined]
            parameter.sequence_parallel = sharding.partial == name  # type: ignore[attr-defined]

    @property
    def enabled(self) -> bool:
        return self.num_disabled == 0

    def forward(self, x: Tensor, output: Tensor) -> Tensor:
        """Returns `output` + scale * B (A x).

        Args:
            x: what the linear layer got, [..., in].
            output: what it returned, [..., out].

        Communicates: see the table; r numbers per token.
        """
        h = self.exchange(torch.nn.functional.linear(x, self.lora_a))
        flat = torch.addmm(
            output.flatten(0, -2), h.flatten(0, -2), self.lora_b.t(), alpha=self.scale
        )
        return flat.view_as(output)

    def exchange(self, h: Tensor) -> Tensor:
        """Returns h as B needs it on this rank."""
        if self.sharding.exchange == "none":
            return h
        return _EXCHANGES[self.sharding.exchange](h, group=_group(self.sharding))

    @torch.no_grad()
    def weight_delta(self) -> Tensor:
        """Returns this rank's part of scale * B A, shaped like the layer's weight; fp32 or wider.

        Communicates: for an expert cut over ranks, gathers A or B over them.
        """
        wide = torch.promote_types(self.lora_a.dtype, torch.float32)
        a, b = self.lora_a.detach().to(wide), self.lora_b.detach().to(wide)
        group = _group(self.sharding)
        if self.sharding.exchange == "gather_rank":
            a = _gathered(a, group, dim=0)
        if self.sharding.exchange == "scatter_rank":
            b = _gathered(b, group, dim=1)
        return self.scale * (b @ a)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Returns A and B for Megatron's distributed checkpoints; they load in other layouts."""
        return {
            f"{prefix}{name}": sharded(f"{prefix}{name}", parameter, name, self, sharded_offsets)
            for name, parameter in (("lora_a", self.lora_a), ("lora_b", self.lora_b))
        }


def sharded(key: str, tensor: Tensor, which: str, adapter: Adapter, offsets: tuple = ()) -> Any:
    """Returns the entry of a distributed checkpoint for a tensor that is cut like A or B.

    Args:
        key: name in the checkpoint.
        tensor: this rank's part.
        which: "lora_a" or "lora_b".
        offsets: of outer axes (layers, experts), by Megatron.
    """
    sharding = adapter.sharding
    if which == "lora_a":
        return _sharded_tensor(key, tensor, sharding.a_dim, offsets, sharding)
    if adapter.kind == "gate_up" and sharding.b_dim == 0:
        return _gate_up_factory(key, tensor, sharding.b_dim, offsets, sharding)
    return _sharded_tensor(key, tensor, sharding.b_dim, offsets, sharding)


def _sharded_tensor(
    key: str, tensor: Tensor, dim: int | None, offsets: tuple, sharding: Sharding
) -> ShardedTensor:
    own = [] if dim is None else [(len(offsets) + dim, sharding.rank, sharding.size)]
    return ShardedTensor.from_rank_offsets(
        key,
        tensor,
        *offsets,
        *own,
        replica_id=_replica(dim, sharding),
        prepend_axis_num=len(offsets),
    )


def _replica(dim: int | None, sharding: Sharding) -> tuple[int, int, int]:
    if sharding.is_expert:
        data_rank = parallel_state.get_expert_data_parallel_rank()
    else:
        data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return (0, 0 if dim is not None else sharding.rank, data_rank)


def _gate_up_factory(
    key: str, tensor: Tensor, dim: int, offsets: tuple, sharding: Sharding
) -> ShardedTensorFactory:
    """Gate rows and up rows of all ranks lie apart in the whole tensor."""

    def build(
        key: str, tensor: Tensor, replica_id: Any, flattened_range: slice | None = None
    ) -> list[ShardedTensor]:
        halves = tensor.chunk(2, dim)
        return [
            ShardedTensor.from_rank_offsets(
                key,
                half,
                *offsets,
                (len(offsets) + dim, i * sharding.size + sharding.rank, 2 * sharding.size),
                replica_id=replica_id,
                prepend_axis_num=len(offsets),
            )
            for i, half in enumerate(halves)
        ]

    def merge(halves: list[Tensor]) -> Tensor:
        return torch.cat(halves, dim)

    return ShardedTensorFactory(key, tensor, build, merge, _replica(dim, sharding))


def _gathered(x: Tensor, group: Any, *, dim: int) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    torch.distributed.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def _group(sharding: Sharding) -> Any:
    if sharding.is_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


_EXCHANGES: dict[str, Callable[..., Tensor]] = {
    "copy": mappings.copy_to_tensor_model_parallel_region,
    "gather_sequence": mappings.gather_from_sequence_parallel_region,
    "reduce": mappings.reduce_from_tensor_model_parallel_region,
    "scatter_sequence": mappings.reduce_scatter_to_sequence_parallel_region,
    "gather_rank": mappings.all_gather_last_dim_from_tensor_parallel_region,
    "scatter_rank": mappings.reduce_scatter_last_dim_to_tensor_parallel_region,
}
