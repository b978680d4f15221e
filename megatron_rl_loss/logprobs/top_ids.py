"""The most probable tokens of each row of sharded logits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .inputs import VocabShard


def top_ids(z: Tensor, top_k: int, shard: VocabShard) -> Tensor:
    """Returns the global ids [N, top_k] of each row's largest real columns, descending.

    Args:
        z: [N, V_local] logits of this shard, constant.

    Communicates: two all-gathers of [N, top_k] where the vocabulary is sharded.
    """
    values, columns = z[:, : shard.num_valid].topk(min(top_k, shard.num_valid), dim=1)
    missing = top_k - values.shape[1]
    values = torch.nn.functional.pad(values.float(), (0, missing), value=-torch.inf)
    ids = torch.nn.functional.pad(columns + shard.start, (0, missing))
    if shard.group is None:
        return ids
    values, ids = _gather_columns(values, shard), _gather_columns(ids, shard)
    return ids.gather(1, values.topk(top_k, dim=1).indices)


def _gather_columns(x: Tensor, shard: VocabShard) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(shard.group.size())]
    dist.all_gather(parts, x.contiguous(), group=shard.group)
    return torch.cat(parts, 1)
