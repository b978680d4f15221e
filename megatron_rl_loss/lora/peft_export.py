"""Writes adapters as a PEFT folder, which PEFT, Transformers and servers load.

All adapters have one scale s, whatever their rank: the config says lora_alpha = s * r, and the
same in its patterns for layers of another rank. So a reader that takes lora_alpha / r for all of
them, as some servers do, is right too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from ..errors import ConfigError
from ..mcore.hf_files import CheckpointWriter
from ..mcore.model_spec import ModelSpec
from ..mcore.weights import shared_failure
from ..mcore.weights_moe import NAMES
from .handles import check_has_lora
from .names import unwrapped
from .peft_tensors import HfAdapter, adapter_rules, hf_adapters

ADAPTER_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
PREFIX = "base_model.model."
LAYOUTS = ("per_expert", "stacked")

Layout = Literal["per_expert", "stacked"]


def save_peft(
    folder: str | Path,
    model_chunks: Sequence[Any],
    spec: ModelSpec,
    *,
    base_model: str | None = None,
    layout: Layout = "per_expert",
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> None:
    """Writes the adapters as `adapter_model.safetensors` and `adapter_config.json`.

    Layout "per_expert" has a layer for each expert and projection, as in Qwen3-MoE's checkpoints;
    "stacked" has the experts of a layer in one tensor, PEFT's `target_parameters` (0.19 and newer,
    with transformers 5): `mlp.experts.base_layer.lora_A` [E r, hidden] and `lora_B`
    [2 ffn, r E] for gate and up, `mlp.experts.lora_A` [E r, ffn] and `lora_B` [hidden, r E] for
    down; experts change slowest along A's rows, fastest along B's columns.

    Args:
        folder: to write; it appears when it is whole.
        model_chunks, spec: as in `hf_adapters`.
        base_model: path or name of the base model, for the config.
        layout: of the experts' adapters; no difference for a dense model.
        dtype: to cast to; by default the adapters' own.
        overwrite: replace an existing folder.

    Raises:
        ConfigError: the model has no adapters, or the layout is unknown.
        WeightsError: the folder exists, or writing failed; on every rank.

    Communicates: as `hf_adapters`; then all ranks wait for rank 0.
    """
    check_has_lora(model_chunks)
    if layout not in LAYOUTS:
        raise ConfigError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}.")
    writer: CheckpointWriter | None = None
    with shared_failure(f"cannot start writing {folder}"):
        if dist.get_rank() == 0:
            writer = CheckpointWriter(folder, overwrite=overwrite)
    with shared_failure(f"writing {folder} failed"):
        first_copy = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        # the experts of one copy may be on ranks of all data-parallel copies
        if first_copy or spec.moe is not None:
            found = _collected(hf_adapters(model_chunks, spec), keep=writer is not None)
        if writer is not None:
            scale = next(unwrapped(chunk).lora_config for chunk in model_chunks).scale
            config = adapter_config(found, spec, scale=scale, base_model=base_model, layout=layout)
            writer.write_file(ADAPTER_FILE, peft_tensors(found, spec, layout=layout, dtype=dtype))
            writer.write_json(CONFIG_FILE, config)
            writer.finish()


def _collected(stream: Iterator[HfAdapter], *, keep: bool) -> list[HfAdapter]:
    """Takes the stream to its end, and on one rank into host memory."""
    found = []
    for adapter in stream:
        if keep:
            found.append(
                HfAdapter(adapter.module, adapter.a.cpu(), adapter.b.cpu(), adapter.expert)
            )
    return found


def peft_tensors(
    found: Sequence[HfAdapter],
    spec: ModelSpec,
    *,
    layout: Layout = "per_expert",
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Returns the content of `adapter_model.safetensors`."""
    tensors = {}
    for adapter in found:
        if layout == "stacked" and adapter.expert is not None:
            continue
        for letter, tensor in (("A", adapter.a), ("B", adapter.b)):
            # the same A goes by several names, which safetensors refuses
            tensors[f"{PREFIX}{adapter.module}.lora_{letter}.weight"] = tensor.clone()
    if layout == "stacked":
        tensors |= _stacked([adapter for adapter in found if adapter.expert is not None], spec)
    return {name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()}


def _stacked(experts: Sequence[HfAdapter], spec: ModelSpec) -> dict[str, Tensor]:
    layers: dict[str, dict[str, list[HfAdapter]]] = {}
    for adapter in experts:
        block, projection = re.split(r"\.experts\.\d+\.", adapter.module)
        layers.setdefault(block, {}).setdefault(projection, []).append(adapter)
    tensors = {}
    for block, by_projection in layers.items():
        names = NAMES[spec.architecture]
        prefix = f"{PREFIX}{block.removesuffix(names.block)}mlp.experts"
        if names.gate in by_projection:
            gates, ups = by_projection[names.gate], by_projection[names.up]
            bs = [torch.cat([g.b, u.b]) for g, u in zip(gates, ups, strict=True)]
            tensors |= _stack(f"{prefix}.base_layer", [g.a for g in gates], bs)
        if names.down in by_projection:
            downs = by_projection[names.down]
            tensors |= _stack(prefix, [d.a for d in downs], [d.b for d in downs])
    return tensors


def _stack(name: str, a: Sequence[Tensor], b: Sequence[Tensor]) -> dict[str, Tensor]:
    return {
        f"{name}.lora_A.weight": torch.cat(list(a)),
        f"{name}.lora_B.weight": torch.stack(list(b), -1).flatten(1),
    }


def adapter_config(
    found: Sequence[HfAdapter],
    spec: ModelSpec,
    *,
    scale: float,
    base_model: str | None,
    layout: Layout = "per_expert",
) -> dict[str, Any]:
    """Returns the content of `adapter_config.json`.

    `r` is the experts' rank where they have adapters: PEFT 0.21 knows no pattern for them.
    """
    ranks = {adapter.module: adapter.a.shape[0] for adapter in found}
    experts = {a.module for a in found if a.expert is not None}
    r = next((ranks[module] for module in ranks if module in experts), max(ranks.values()))
    others = {_leaf(module): rank for module, rank in ranks.items() if rank != r}
    stacked = layout == "stacked" and bool(experts)
    dense = {module: rank for module, rank in ranks.items() if not stacked or module not in experts}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": r,
        "lora_alpha": scale * r,
        "rank_pattern": others,
        "alpha_pattern": {leaf: scale * rank for leaf, rank in others.items()},
        "target_modules": _targets(dense, spec),
        "target_parameters": _target_parameters(experts, spec) if stacked else None,
        "use_rslora": False,
        "use_dora": False,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def _targets(modules: Mapping[str, int], spec: ModelSpec) -> list[str]:
    """Returns the layers' last names, or whole names if not all layers of a name are there."""
    existing = {
        name.removesuffix(".weight") for rule in adapter_rules(spec).values()
        for name in rule.hf_shapes
    }  # fmt: skip
    leaves = {_leaf(module) for module in modules}
    if {module for module in existing if _leaf(module) in leaves} == set(modules):
        return sorted(leaves)
    return sorted(modules)


def _target_parameters(experts: set[str], spec: ModelSpec) -> list[str]:
    leaves, names = {_leaf(module) for module in experts}, NAMES[spec.architecture]
    wanted = {"mlp.experts.gate_up_proj": names.gate, "mlp.experts.down_proj": names.down}
    return [target for target, leaf in wanted.items() if leaf in leaves]


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]
