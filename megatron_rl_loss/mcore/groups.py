"""The process groups and sizes that the loss needs, read from Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class ParallelGroups:
    """Megatron's groups for this rank. `dp` excludes context parallelism, `dp_cp` includes it."""

    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    pp: dist.ProcessGroup
    dp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup

    @property
    def is_last_pipeline_stage(self) -> bool:
        return self.pp.rank() == self.pp.size() - 1

    @property
    def vocab_group(self) -> dist.ProcessGroup | None:
        """The group that shares the vocabulary, None if this rank has all of it."""
        return self.tp if self.tp.size() > 1 else None


def parallel_groups(pg_collection: Any = None) -> ParallelGroups:
    """Returns the groups of `pg_collection` (Megatron's ProcessGroupCollection) or, without one,
    those of Megatron's `parallel_state`, which must be initialised."""
    if pg_collection is not None:
        return ParallelGroups(
            *(getattr(pg_collection, name) for name in ("tp", "cp", "pp", "dp", "dp_cp"))
        )
    from megatron.core import parallel_state as state

    return ParallelGroups(
        tp=state.get_tensor_model_parallel_group(),
        cp=state.get_context_parallel_group(),
        pp=state.get_pipeline_model_parallel_group(),
        dp=state.get_data_parallel_group(with_context_parallel=False),
        dp_cp=state.get_data_parallel_group(with_context_parallel=True),
    )
