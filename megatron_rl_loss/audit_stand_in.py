"""The audit's stand-in: the smallest model that every parallel size of a config divides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .config.schema import Config
from .lora import adapters, apply_lora
from .lora.init import initial_a
from .mcore.model import build_gpt_model, transformer_config
from .mcore.model_spec import ModelSpec, MoESpec
from .mcore.optimizer import wrap_with_ddp
from .recipe import lora_settings, parallel_sizes


def stand_in_chunks(
    config: Config, spec: ModelSpec, *, mark_experts: bool = True, **overrides: Any
) -> list[Any]:
    """Returns the random model in Megatron's DDP, with the config's adapters.

    Args:
        config: its parallel sizes, dtype, adapters and optimizer.use_distributed_optimizer.
        spec: from `stand_in_spec`.
        mark_experts: tell DDP which weights are experts'; False is a mistake to plant.
        overrides: of Megatron's TransformerConfig.

    Raises:
        LayoutError, ConfigError: the sizes or the adapters cannot be had.
    """
    megatron_config = transformer_config(
        spec,
        **parallel_sizes(config),
        sequence_parallel=config.parallel.sequence_parallel,
        bf16=config.model.dtype == "bf16",
        **overrides,
    )
    bare = build_gpt_model(spec, megatron_config)
    lora = lora_settings(config)
    if lora is not None:
        apply_lora(bare, lora)
    if not mark_experts:
        for parameter in (p for chunk in bare for p in chunk.parameters()):
            parameter.allreduce = True
    return wrap_with_ddp(bare, use_distributed_optimizer=config.optimizer.use_distributed_optimizer)


def stand_in_spec(config: Config) -> ModelSpec:
    """Returns its architecture: a mixture of experts if the config has sizes for experts."""
    sizes = config.parallel
    tp, pp = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size
    chunks = pp * (sizes.virtual_pipeline_model_parallel_size or 1)
    heads = max(2, tp)
    moe = _experts(config, heads)
    return ModelSpec(
        architecture="llama" if moe is None else "mixtral",
        num_layers=max(2, chunks),
        hidden_size=16 * heads,
        ffn_hidden_size=24 * heads,
        num_attention_heads=heads,
        num_query_groups=heads,
        head_dim=16,
        vocab_size=61,
        max_position_embeddings=4096,
        tied_embeddings=True,
        moe=moe,
    )


def _experts(config: Config, heads: int) -> MoESpec | None:
    sizes = config.parallel
    ep, etp = sizes.expert_model_parallel_size, sizes.expert_tensor_parallel_size
    if ep == 1 and etp is None:
        return None
    # every token goes to all experts: no rounding can send it to others in another cut
    return MoESpec(
        num_experts=2 * ep,
        top_k=2 * ep,
        ffn_hidden_size=24 * max(heads, etp or 1),
        norm_topk_prob=True,
    )


@torch.no_grad()
def fill_adapters(chunks: Sequence[Any]) -> None:
    """Gives every B random values: at a fresh adapter's B = 0 the gradient of A is 0.

    Copies on other ranks get the same values, shards other ones. Nothing to do without adapters.
    """
    for handle in adapters(chunks):
        shard = 0 if handle.sharding.b_dim is None else handle.sharding.rank
        shape = (handle.b.shape[0], handle.b.shape[1])
        handle.b.copy_(initial_a(f"{handle.name}.lora_b", shape, init="kaiming", seed=shard))
