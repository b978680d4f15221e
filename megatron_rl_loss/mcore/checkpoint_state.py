"""What a checkpoint holds: models, optimizers, schedulers and random states, as Megatron shards."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..errors import CheckpointError
from . import compat

_SHOWN = 4
# what a config sets for the optimizer; everything else in a parameter group is its state
_STATE_KEYS = ("params", "step", "lr")


@dataclass(frozen=True)
class Trained:
    """A model that is trained, with what belongs to it.

    Attributes:
        chunks, optimizer, scheduler: Megatron's.
        prefix: of its tensors' names in the checkpoint, e.g. "critic."; none for the policy, so
            that Megatron's own tools find the names they know.
        extra: more state, with `state_dict()` of plain numbers and `load_state_dict(state)`.
    """

    chunks: Sequence[Any]
    optimizer: Any
    scheduler: Any
    prefix: str = ""
    extra: Any = None


def sharded_state(
    models: Mapping[str, Trained], *, is_loading: bool = False, rng: bool = True
) -> dict[str, Any]:
    """Returns the sharded state dict of this rank, for `megatron.core.dist_checkpointing`.

    Args:
        rng: with this rank's random states, which only a run with as many ranks can load.

    Communicates: with the distributed optimizer, Megatron gathers its state when saving.
    """
    state: dict[str, Any] = {name: _model_state(m, is_loading) for name, m in models.items()}
    if rng:
        state["rng"] = _sharded_rng()
    return state


def _model_state(trained: Trained, is_loading: bool) -> dict[str, Any]:
    metadata = compat.checkpoint_metadata()
    if is_loading:
        compat.fill_adam_state(trained.optimizer)
    chunks = {
        f"chunk{i}": _bare(chunk).sharded_state_dict(prefix=trained.prefix, metadata=dict(metadata))
        for i, chunk in enumerate(trained.chunks)
    }
    optimizer = trained.optimizer.sharded_state_dict(
        chunks, is_loading=is_loading, metadata=dict(metadata)
    )
    return {
        "chunks": chunks,
        "optimizer": optimizer,
        "scheduler": trained.scheduler.state_dict(),
        "extra": {} if trained.extra is None else trained.extra.state_dict(),
    }


def _bare(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def wanted_state(folder: Path, models: Mapping[str, Trained], *, rng: bool) -> dict[str, Any]:
    """Returns what `load_state` has to load, on a rank.

    Raises:
        CheckpointError: the checkpoint holds other tensors than this run needs.
    """
    wanted = sharded_state(models, is_loading=True, rng=rng)
    _check_tensors(folder, wanted)
    return wanted


def load_state(folder: Path, wanted: Mapping[str, Any], models: Mapping[str, Trained]) -> None:
    """Loads models, optimizers, schedulers and random states from a checked folder.

    Learning rate, betas and other settings of the optimizer stay as they are in this run.

    Communicates: every rank must call it, after `wanted_state` has passed on all of them.
    """
    from megatron.core import dist_checkpointing

    settings = {name: _settings(trained.optimizer) for name, trained in models.items()}
    loaded = dist_checkpointing.load(dict(wanted), str(folder))
    for name, trained in models.items():
        part = loaded[name]
        for i, chunk in enumerate(trained.chunks):
            _bare(chunk).load_state_dict(_without_prefix(part["chunks"][f"chunk{i}"], trained))
        compat.load_optimizer_state(trained.optimizer, part["optimizer"])
        for group, kept in zip(trained.optimizer.param_groups, settings[name], strict=True):
            group.update(kept)
        _load_scheduler(trained.scheduler, part["scheduler"])
        if trained.extra is not None:
            trained.extra.load_state_dict(part["extra"])
    if "rng" in wanted:
        _set_rng(loaded["rng"])


def _without_prefix(state: Mapping[str, Any], trained: Trained) -> dict[str, Any]:
    return {name.removeprefix(trained.prefix): value for name, value in state.items()}


def _settings(optimizer: Any) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key not in _STATE_KEYS}
        for group in optimizer.param_groups
    ]


def _load_scheduler(scheduler: Any, state: Mapping[str, Any]) -> None:
    scheduler.override_opt_param_scheduler = True  # this run's settings, the checkpoint's position
    scheduler.num_steps = 0
    scheduler.load_state_dict(dict(state))


def _check_tensors(folder: Path, wanted: Mapping[str, Any]) -> None:
    """Compares names and whole shapes with the checkpoint's."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    found = {
        key: tuple(tensor.global_shape)
        for key, tensor in dist_checkpointing.load_tensors_metadata(str(folder)).items()
    }
    tensors = [t for t in nested_values(dict(wanted)) if isinstance(t, ShardedTensor)]
    missing = sorted({t.key for t in tensors if t.key not in found})
    other = sorted(
        {
            f"{t.key}: {list(found[t.key])} in the checkpoint, {list(t.global_shape)} in this run"
            for t in tensors
            if t.key in found
            and not t.allow_shape_mismatch
            and found[t.key] != tuple(t.global_shape)
        }
    )
    problems = [f"{name}: not in the checkpoint" for name in missing] + other
    if problems:
        shown = "; ".join(problems[:_SHOWN])
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(
            f"{folder} is a checkpoint of another model: {shown}{more}. Use the model.path (and "
            "LoRA settings) it was saved with, or another run.dir."
        )


def _sharded_rng() -> Any:
    from megatron.core.dist_checkpointing import ShardedObject

    return ShardedObject("rng", _get_rng(), (dist.get_world_size(),), (dist.get_rank(),))


def _get_rng() -> dict[str, Any]:
    from megatron.core import tensor_parallel

    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng(state: Mapping[str, Any]) -> None:
    from megatron.core import tensor_parallel

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
