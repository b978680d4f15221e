"""What adapters do not support, said before anything changes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from ..errors import ConfigError, LayoutError
from .config import LoRAConfig
from .names import Linear, unwrapped

# names of other libraries, and where their weights are here
_FOREIGN = {
    "q_proj": "linear_qkv",
    "k_proj": "linear_qkv",
    "v_proj": "linear_qkv",
    "o_proj": "linear_proj",
    "gate_proj": "linear_fc1",
    "up_proj": "linear_fc1",
    "down_proj": "linear_fc2",
}
_UNADAPTED = ("router", "word_embeddings", "embedding", "output_layer", "lm_head", "gate")


def check_model(model_chunks: Any) -> None:
    """Raises unless the chunks are bare, unadapted, and of a supported kind."""
    if not isinstance(model_chunks, (list, tuple)) or not model_chunks:
        raise ConfigError(
            "expected a list of model chunks, one per virtual pipeline stage, got "
            f"{type(model_chunks).__name__}; put a single model into a list."
        )
    for chunk in model_chunks:
        if _is_in_ddp(chunk):
            raise ConfigError(
                "the model is in DistributedDataParallel already, whose gradient buffers hold the "
                "whole model; call apply_lora before wrap_with_ddp and build_optimizer."
            )
        if hasattr(unwrapped(chunk), "lora_config"):
            raise ConfigError("the model has LoRA adapters already; apply_lora runs once.")
        _check_config(unwrapped(chunk).config)
        _check_experts(unwrapped(chunk))


def _is_in_ddp(chunk: Any) -> bool:
    while chunk is not None:
        if isinstance(chunk, DistributedDataParallel):
            return True
        chunk = getattr(chunk, "module", None)
    return False


def _check_config(config: Any) -> None:
    for name in ("fp8", "fp4"):
        if getattr(config, name, None):
            raise ConfigError(
                f"config.{name} is {getattr(config, name)!r}: adapters were not tested with "
                f"{name} weights; use bf16 or fp32 (set {name}=None)."
            )
    rate = getattr(config, "moe_router_bias_update_rate", 0.0)
    if getattr(config, "moe_router_enable_expert_bias", False) and rate:
        raise ConfigError(
            f"config.moe_router_bias_update_rate is {rate}: the router's bias would move although "
            "the base model is frozen; set it to 0."
        )


def _check_experts(model: Any) -> None:
    for name, module in model.named_modules():
        if type(module).__name__ == "GroupedMLP":
            raise ConfigError(
                f"{name} is Megatron's GroupedMLP, which packs its experts into two weights "
                "and has no linear layers; build the model with moe_grouped_gemm=False "
                "(SequentialMLP) or with Transformer Engine's grouped layers (TEGroupedMLP)."
            )


def check_target(linear: Linear, config: LoRAConfig) -> Iterator[str]:
    """Says what is wrong with an adapter on this layer in this layout."""
    model_config = linear.module.config
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    if linear.kind == "qkv" and tp_size > (model_config.num_query_groups or tp_size):
        yield (
            f"tensor_model_parallel_size {tp_size} is larger than num_query_groups "
            f"{model_config.num_query_groups}, which copies key and value heads: adapters on "
            f"linear_qkv need at most {model_config.num_query_groups} tensor-parallel ranks, or "
            "exclude=['linear_qkv']."
        )
    if linear.expert is not None:
        yield from _expert_problems(config)
    if ".shared_experts." in linear.name and model_config.moe_shared_expert_overlap:
        yield (
            "moe_shared_expert_overlap is on: shared experts then communicate on their own, and "
            "adapters would be counted several times. Set it to False, or "
            "exclude=['*.shared_experts.*']."
        )
    yield from _communication_problems(linear)


def _expert_problems(config: LoRAConfig) -> Iterator[str]:
    etp_size = parallel_state.get_expert_tensor_parallel_world_size()
    rank = config.expert_rank or config.rank
    if rank % etp_size:
        yield (
            f"the experts' rank {rank} is no multiple of expert_tensor_parallel_size {etp_size}, "
            f"over which it is cut; set lora.expert_rank to a multiple of {etp_size}."
        )


def _communication_problems(linear: Linear) -> Iterator[str]:
    if linear.kind == "row" and not getattr(linear.module, "input_is_parallel", True):
        yield f"{linear.name} splits its input itself (input_is_parallel=False); exclude it."
    if linear.kind != "row" and getattr(linear.module, "gather_output", False):
        yield f"{linear.name} gathers its output (gather_output=True); exclude it."


def check_grouped(found: Sequence[Linear], targets: Sequence[Linear]) -> list[str]:
    """Says which grouped layers would get adapters for some of their experts only."""
    chosen = {target.name for target in targets}
    adapted = {id(t.module) for t in targets if t.local_expert is not None}
    left_out = [x.name for x in found if id(x.module) in adapted and x.name not in chosen]
    if not left_out:
        return []
    return [
        "a grouped linear layer takes adapters for all of its experts or none; targets and exclude "
        f"leave out {', '.join(left_out[:4])}."
    ]


def raise_everywhere(
    unmatched: Sequence[str], leaves: Iterable[str], problems: Sequence[str]
) -> None:
    """Raises one error for all ranks' problems; every rank must pass the same ones."""
    known = sorted(leaves)
    if unmatched:
        raise ConfigError("\n".join(_unmatched(name, known) for name in unmatched))
    if problems:
        raise LayoutError("\n".join(dict.fromkeys(problems)))


def _unmatched(name: str, known: Sequence[str]) -> str:
    where = _FOREIGN.get(name.rpartition(".")[2])
    near = difflib.get_close_matches(name, [*known, *_FOREIGN], n=1, cutoff=0.6)
    if near and where is None:
        where = _FOREIGN.get(near[0], near[0])
    hint = f"did you mean {where!r}? " if where else ""
    if name.rpartition(".")[2] in _UNADAPTED:
        hint = "router, embeddings and output layer take no adapters. "
    return (
        f"lora: no layer matches {name!r}; {hint}Valid names: {', '.join(known)}; or patterns of "
        "global names, such as 'decoder.layers.0.*'."
    )
