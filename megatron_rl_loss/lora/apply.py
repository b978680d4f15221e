"""Freezes a model and gives its linear layers adapters."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from .adapter import Adapter, sharding_of
from .config import LoRAConfig
from .init import initial_a
from .layers import GroupedAdapter, put_adapter
from .names import Linear, linears, unwrapped
from .refusals import check_grouped, check_model, check_target, raise_everywhere
from .report import Report, report


def apply_lora(model_chunks: Sequence[Any], config: LoRAConfig) -> Report:
    """Freezes the model (router included) and adds an adapter to each target layer.

    Call it after the weights are loaded and before DDP and the optimizer are built: both leave out
    what is frozen when they are made. All checks come first; on an error nothing has changed.

    Args:
        model_chunks: this rank's chunks, not in DDP.
        config: ranks, scale, targets.

    Returns:
        The counts of this rank, as `report(model_chunks)`.

    Raises:
        ConfigError, LayoutError: the model, its layout or a target is not supported; on every rank.

    Communicates: one small gather over all ranks, of the targets that each found.
    """
    check_model(model_chunks)
    found = list(linears(model_chunks))
    targets = _selected(found, config)
    problems = [problem for target in targets for problem in check_target(target, config)]
    problems += check_grouped(found, targets)
    _agree(found, config, problems)

    for chunk in model_chunks:
        chunk.requires_grad_(False)
        unwrapped(chunk).lora_config = config
        _keep_graph(unwrapped(chunk))
    for _, parts in groupby(targets, key=lambda target: id(target.module)):
        _put_adapters(list(parts), config)
    return report(model_chunks)


def matches(linear: Linear, patterns: Iterable[str]) -> list[str]:
    """Returns the patterns that are the layer's own name or match its global name."""
    return [p for p in patterns if p == linear.leaf or fnmatch.fnmatchcase(linear.name, p)]


def _selected(found: Sequence[Linear], config: LoRAConfig) -> list[Linear]:
    return [
        linear
        for linear in found
        if matches(linear, config.patterns) and not matches(linear, config.exclude)
    ]


def _agree(found: Sequence[Linear], config: LoRAConfig, problems: list[str]) -> None:
    """Raises on every rank if a pattern matches on none, or any rank has a problem."""
    patterns = [*config.patterns, *config.exclude]
    mine = (
        {pattern for linear in found for pattern in matches(linear, patterns)},
        {linear.leaf for linear in found},
        problems,
    )
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, mine)
    matched = set().union(*(part[0] for part in everybodys))
    leaves = set().union(*(part[1] for part in everybodys))
    # a named set ("all-linear") need not match as a whole
    asked = [*(() if isinstance(config.targets, str) else config.targets), *config.exclude]
    unmatched = [pattern for pattern in asked if pattern not in matched]
    raise_everywhere(unmatched, leaves, [p for part in everybodys for p in part[2]])


def _put_adapters(parts: list[Linear], config: LoRAConfig) -> None:
    made = [make_adapter(part, config) for part in parts]
    module = parts[0].module
    if parts[0].local_expert is None:
        put_adapter(module, made[0])
    else:
        put_adapter(
            module, GroupedAdapter(made, parts[0].expert or 0, module.config.num_moe_experts)
        )


def make_adapter(linear: Linear, config: LoRAConfig) -> Adapter:
    """Returns a fresh adapter for the layer, on its device and in its dtype."""
    is_expert = linear.expert is not None
    sharding = sharding_of(
        linear.kind,
        is_expert=is_expert,
        sequence_parallel=linear.module.config.sequence_parallel,
    )
    rank = (config.expert_rank if is_expert else None) or config.rank
    weight = linear.weight
    rows, columns = weight.shape
    fan_in = columns * (sharding.size if linear.kind == "row" else 1)
    a = initial_a(linear.name, (rank, fan_in), init=config.init, seed=config.seed)
    if sharding.a_dim is not None:
        a = a.chunk(sharding.size, sharding.a_dim)[sharding.rank]
    own_rank = rank // sharding.size if sharding.b_dim == 1 else rank
    return Adapter(
        a.to(weight.device, weight.dtype, copy=True).contiguous(),
        torch.zeros(rows, own_rank, device=weight.device, dtype=weight.dtype),
        scale=config.scale,
        kind=linear.kind,
        sharding=sharding,
        in_expert_group=is_expert and _has_expert_groups(),
    )


def _has_expert_groups() -> bool:
    """Tells whether experts are reduced over other ranks than the rest of the model.

    Megatron up to 0.18 asks for expert parallelism only, and leaves out expert-tensor sizes that
    differ from the tensor size.
    """
    ep_size = parallel_state.get_expert_model_parallel_world_size()
    etp_size = parallel_state.get_expert_tensor_parallel_world_size()
    return ep_size > 1 or etp_size != parallel_state.get_tensor_model_parallel_world_size()


def _keep_graph(model: Any) -> None:
    """Makes the frozen embedding's output require grad where a graph must start there.

    Recomputed layers give no gradient to anything if no input of theirs requires one; and a first
    pipeline stage without adapters must still have something to run backward.
    """
    config = model.config
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    needed = config.recompute_granularity is not None or stages > 1
    if needed and getattr(model, "pre_process", False):
        model.embedding.register_forward_hook(_require_grad)


def _require_grad(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)
    return output
