"""Adapter checkpoints in Megatron's distributed format, which load in other layouts.

Tensors are named globally (`decoder.layers.3.mlp.linear_fc1.lora_a`, and behind it `.main`,
`.exp_avg`, `.exp_avg_sq`), so neither the pipeline, nor the experts' ranks, nor the kind of
optimizer that wrote them matters to the one that reads them. The base model is not in there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from torch import Tensor

from ..errors import WeightsError
from ..mcore.checkpoint_write import stage
from ..parallel.agreement import raise_together
from .adapter import sharded
from .handles import AdapterHandle, adapters, check_has_lora
from .names import unwrapped
from .optimizer_state import MOMENTS, ParameterState, parameter_states, part_of, whole_of

_COMMON = "lora"
# what must be the same for the numbers to mean the same
_SETTINGS = ("rank", "alpha", "expert_rank", "use_rslora")


def save_adapter(folder: str | Path, model_chunks: Sequence[Any], optimizer: Any = None) -> None:
    """Writes the adapters and, with an optimizer, its fp32 weights, moments and step count.

    Args:
        folder: new, or empty.
        model_chunks: with `apply_lora`.
        optimizer: Megatron's; None writes the weights alone, which only
            `load_adapter_weights` reads.

    Raises:
        WeightsError: the folder holds something.

    Communicates: all ranks write together; with the distributed optimizer the states are summed
    up over data-parallel ranks first.
    """
    check_has_lora(model_chunks)
    tensors = _weights(model_chunks)
    common: dict[str, Any] = {"config": _settings(model_chunks), "step": None}
    if optimizer is not None:
        states = parameter_states(model_chunks, optimizer)
        tensors |= _optimizer_tensors(model_chunks, states)
        common["step"] = _common_step(states)
    write_state({"tensors": tensors, _COMMON: common}, Path(folder))


def load_adapter(folder: str | Path, model_chunks: Sequence[Any], optimizer: Any) -> None:
    """Resumes: loads adapters, fp32 weights, moments and step count, in any parallel layout.

    Raises:
        WeightsError: the checkpoint has other adapters, shapes or settings, or no optimizer
            state; the message names them, on every rank, and nothing has changed.

    Communicates: all ranks read together.
    """
    states = parameter_states(model_chunks, optimizer)
    step = _checked(folder, model_chunks)["step"]
    if step is None:
        raise WeightsError(
            f"{folder} holds adapter weights without optimizer state, so training cannot resume "
            "from it; start anew from its weights with load_adapter_weights."
        )
    tensors = _weights(model_chunks) | _optimizer_tensors(model_chunks, states)
    loaded = _read(folder, tensors)
    with torch.no_grad():
        _copy_weights(model_chunks, loaded)
        for state in states:
            _resume(state, loaded, step)


def load_adapter_weights(
    folder: str | Path, model_chunks: Sequence[Any], optimizer: Any = None
) -> None:
    """Loads the adapters' weights only; an optimizer's fp32 copies follow, its moments start anew.

    Raises:
        WeightsError: as `load_adapter`, but for the optimizer state.

    Communicates: all ranks read together.
    """
    states = [] if optimizer is None else parameter_states(model_chunks, optimizer)
    _checked(folder, model_chunks)
    loaded = _read(folder, _weights(model_chunks))
    with torch.no_grad():
        _copy_weights(model_chunks, loaded)
        for state in states:
            _set_main(state, state.parameter.detach())
            state.set_state({})
            state.set_step(0)


def write_state(state: dict[str, Any], folder: Path) -> None:
    """Writes a sharded state dict beside the final folder and renames when all ranks are done."""
    group = dist.new_group(backend="gloo")
    writing = folder.with_name(f".{folder.name}.writing")
    try:
        raise_together(lambda: _make_folder(folder, writing, group), group)
        staged = stage(state, writing, validate=True)
        torch_checkpoint.save(
            dict(staged),
            storage_writer=torch_checkpoint.FileSystemWriter(writing),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=group,
        )
        raise_together(lambda: _publish(writing, folder, group), group)
    finally:
        dist.destroy_process_group(group)


def _make_folder(folder: Path, writing: Path, group: dist.ProcessGroup) -> None:
    if group.rank() != 0:
        return
    if folder.exists() and any(folder.iterdir()):
        raise WeightsError(f"{folder} is not empty; choose a new folder.")
    if writing.exists():  # of a run that was killed
        shutil.rmtree(writing)
    writing.mkdir(parents=True)


def _publish(writing: Path, folder: Path, group: dist.ProcessGroup) -> None:
    if group.rank() != 0:
        return
    save_config(CheckpointingConfig("torch_dist", 1), str(writing))
    if folder.exists():
        folder.rmdir()
    writing.rename(folder)


def _settings(model_chunks: Sequence[Any]) -> dict[str, Any]:
    return asdict(unwrapped(model_chunks[0]).lora_config)


def _weights(model_chunks: Sequence[Any]) -> dict[str, Any]:
    return {
        f"{handle.name}.{which}": sharded(f"{handle.name}.{which}", parameter, which, handle.module)
        for handle in adapters(model_chunks)
        for which, parameter in _both(handle)
    }


def _both(handle: AdapterHandle) -> Iterable[tuple[str, torch.nn.Parameter]]:
    return (("lora_a", handle.a), ("lora_b", handle.b))


def _optimizer_tensors(
    model_chunks: Sequence[Any], states: Sequence[ParameterState]
) -> dict[str, Any]:
    """Returns fp32 weights and moments, shaped and cut like the parameters."""
    by_name = {state.name: state for state in states}
    tensors = {}
    for handle in adapters(model_chunks):
        for which, _ in _both(handle):
            state = by_name[f"{handle.name}.{which}"]
            for kind, values in _values(state).items():
                key = f"{state.name}.{kind}"
                tensors[key] = sharded(key, values, which, handle.module)
    return tensors


def _values(state: ParameterState) -> dict[str, Tensor]:
    values = {"main": whole_of(state, state.main)}
    for moment in MOMENTS:
        part = state.state.get(moment)
        if part is None and state.main is not None:
            part = torch.zeros_like(state.main)
        values[moment] = whole_of(state, part)
    # the parameter itself may be the main tensor: the checkpoint must not alias it
    return {kind: value.detach().clone() for kind, value in values.items()}


def _common_step(states: Sequence[ParameterState]) -> int:
    """Returns the number of steps, which all ranks agree on; some may hold no parameter."""
    steps: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(steps, max((state.step for state in states), default=0))
    return max(steps)


def _checked(folder: str | Path, model_chunks: Sequence[Any]) -> dict[str, Any]:
    """Returns the checkpoint's common part, if the checkpoint fits the model on every rank."""
    check_has_lora(model_chunks)
    if not dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        raise WeightsError(f"{folder} is no distributed checkpoint.")
    common = dist_checkpointing.load_common_state_dict(str(folder)).get(_COMMON)
    if common is None:
        raise WeightsError(f"{folder} is a checkpoint, but save_adapter did not write it.")
    _check_settings(common["config"], _settings(model_chunks))
    stored = {
        key: tuple(meta.global_shape)
        for key, meta in dist_checkpointing.load_tensors_metadata(str(folder)).items()
        if key.endswith((".lora_a", ".lora_b"))
    }
    _check_names(stored, _all_shapes(model_chunks))
    return common


def _check_settings(stored: dict[str, Any], own: dict[str, Any]) -> None:
    differ = [
        f"lora.{name}: {stored.get(name)!r} in the checkpoint, {own[name]!r} here"
        for name in _SETTINGS
        if stored.get(name) != own[name]
    ]
    if differ:
        raise WeightsError(
            "the adapters are of another configuration, nothing was loaded:\n  "
            + "\n  ".join(differ)
        )


def _all_shapes(model_chunks: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    mine = {key: _global_shape(value) for key, value in _weights(model_chunks).items()}
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, mine)
    return {key: shape for part in everybodys for key, shape in part.items()}


def _global_shape(entry: Any) -> tuple[int, ...]:
    built = entry.build() if hasattr(entry, "build") else [entry]
    return tuple(built[0].global_shape)


def _check_names(stored: dict[str, tuple[int, ...]], own: dict[str, tuple[int, ...]]) -> None:
    problems = _listed("missing from the checkpoint", set(own) - set(stored))
    problems += _listed("only in the checkpoint", set(stored) - set(own))
    problems += [
        f"{key} has shape {stored[key]} in the checkpoint and {own[key]} here"
        for key in sorted(set(stored) & set(own))
        if stored[key] != own[key]
    ]
    if problems:
        raise WeightsError(
            "the checkpoint's adapters are not the model's, nothing was loaded:\n  "
            + "\n  ".join(problems)
            + "\nUse the same targets, exclude and ranks as when it was written."
        )


def _listed(what: str, names: set[str]) -> list[str]:
    shown = sorted(names)
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return [f"{what}: {', '.join(shown[:8])}{more}"] if shown else []


def _read(folder: str | Path, tensors: dict[str, Any]) -> dict[str, Tensor]:
    return dist_checkpointing.load({"tensors": tensors}, str(folder))["tensors"]


def _copy_weights(model_chunks: Sequence[Any], loaded: dict[str, Tensor]) -> None:
    for handle in adapters(model_chunks):
        for which, parameter in _both(handle):
            parameter.copy_(loaded[f"{handle.name}.{which}"])


def _resume(state: ParameterState, loaded: dict[str, Tensor], step: int) -> None:
    _set_main(state, loaded[f"{state.name}.main"])
    state.set_step(step)
    if state.main is None or step == 0:
        state.set_state({})
        return
    values: dict[str, Any] = {
        moment: part_of(state, loaded[f"{state.name}.{moment}"]).clone()  # type: ignore[union-attr]
        for moment in MOMENTS
    }
    if "step" not in (state.group or {}):
        values["step"] = torch.tensor(float(step))
    state.set_state(values)


def _set_main(state: ParameterState, whole: Tensor) -> None:
    part = part_of(state, whole)
    if part is not None and state.main is not None:
        state.main.copy_(part)
