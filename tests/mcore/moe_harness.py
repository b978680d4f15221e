"""Trains a tiny mixture-of-experts model in any layout; gradients come back whole, by name.

Experts are named by their number over all ranks. A tensor that several ranks hold must be the same
on all of them; shards are put together along the dimension that Megatron splits.
"""

from __future__ import annotations

import re
import warnings
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.mcore import harness
from tests.mcore.harness import PADDED_VOCAB, Layout
from tests.spawn import run_ranks

NUM_EXPERTS = 4
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}

BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}


@dataclass(frozen=True)
class MoeLayout:
    """`base.dp` counts the data-parallel ranks, which expert parallelism shares out anew."""

    base: Layout
    ep: int = 1
    etp: int = 1
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    zero_advantages: bool = False
    only_rows: tuple[int, ...] | None = None  # a single micro-batch, of these rows
    fillers: int = 0  # micro-batches without a trained token, on each rank
    expert_bias: bool = False
    recompute: bool = False
    top_k: int = 2
    weights_in_bf16: bool = False  # the weights' values, whatever dtype the model runs in


@dataclass
class MoeOutcome:
    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def train_moe(layout: MoeLayout) -> MoeOutcome:
    """Runs the layout on its ranks and puts the shards together."""
    results = run_ranks(run_moe, layout.base.world_size, layout)
    metrics = results[0][0]
    assert all(other[0] == metrics for other in results)
    return MoeOutcome(metrics, _whole([r[1] for r in results]), _whole([r[2] for r in results]))


def _whole(ranks: list[dict[str, tuple[int, int, Tensor]]]) -> dict[str, Tensor]:
    shards: dict[str, dict[int, Tensor]] = {}
    dims: dict[str, int] = {}
    for rank in ranks:
        for name, (index, dim, value) in rank.items():
            dims[name] = dim
            kept = shards.setdefault(name, {}).setdefault(index, value)
            torch.testing.assert_close(value, kept, rtol=1e-6, atol=1e-7, msg=f"copies of {name}")
    return {
        name: torch.cat([parts[i] for i in range(len(parts))], dim=dims[name])
        for name, parts in shards.items()
    }


def run_moe(layout: MoeLayout) -> tuple[dict[str, float], dict, dict]:
    """On each rank: one training step; returns metrics, gradient shards and parameter shards."""
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state

    from megatron_rl_loss.mcore.groups import parallel_groups
    from megatron_rl_loss.mcore.optimizer import build_optimizer, wrap_with_ddp
    from megatron_rl_loss.mcore.train_step import run_forward_backward, share_metrics

    try:
        chunks = wrap_with_ddp(
            [build_moe(layout)],
            use_distributed_optimizer=layout.base.distributed_optimizer,
        )
        optimizer = build_optimizer(chunks, lr=1e-2, eps=1e-3, clip_grad=1e9)
        groups = parallel_groups()
        batches = micro_batches(layout, groups)
        collected = run_forward_backward(harness.make_step(layout.base), chunks, batches)
        metrics = share_metrics(collected, groups)
        named = named_parameters(chunks[0])
        gradients = {n: (i, d, p.main_grad.float().clone()) for n, (i, d, p) in named.items()}
        if layout.base.distributed_optimizer:
            gradients = {}  # a rank's are reduced in its own part only
        _, grad_norm, _ = optimizer.step()
        metrics["grad_norm"] = float(grad_norm)
        return (
            metrics,
            gradients,
            {n: (i, d, p.detach().float().clone()) for n, (i, d, p) in named.items()}
            | expert_biases(chunks[0]),
        )
    finally:
        parallel_state.destroy_model_parallel()


def micro_batches(layout: MoeLayout, groups: Any) -> list[dict[str, Any]]:
    if layout.only_rows is None:
        batches = harness.weighted(layout.base, groups)
    else:
        rows = harness.rows_of(layout.base)
        batch = harness.collate([rows[i] for i in layout.only_rows], layout.base.pad_to)
        batches = [batch | {"loss_weights": batch["loss_mask"].float()}]
    filler = {name: torch.zeros_like(value) for name, value in batches[0].items()}
    batches += [dict(filler) for _ in range(layout.fillers)]
    if layout.zero_advantages:
        for batch in batches:
            batch["advantages"] = torch.zeros_like(batch["advantages"])
    return batches


def build_moe(layout: MoeLayout) -> Any:
    """Returns a GPT model with two layers, one of them with experts, and weights made by name."""
    from megatron.core.models.gpt import GPTModel

    from megatron_rl_loss.mcore.ranks import start_ranks

    base = layout.base
    start_ranks(
        tensor_model_parallel_size=base.tp,
        context_parallel_size=base.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    config = moe_config(layout)
    model = GPTModel(
        config=config,
        transformer_layer_spec=moe_spec(config),
        vocab_size=PADDED_VOCAB,
        max_sequence_length=64,
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    for name, (index, dim, parameter) in named_parameters(model).items():
        parameter.data.copy_(made_weight(name, index, dim, parameter, layout))
    return model


def moe_config(layout: MoeLayout) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    base = layout.base
    return TransformerConfig(
        num_layers=2,
        hidden_size=16,
        ffn_hidden_size=32,
        moe_ffn_hidden_size=24,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        tensor_model_parallel_size=base.tp,
        context_parallel_size=base.cp,
        sequence_parallel=base.sequence_parallel,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        num_moe_experts=NUM_EXPERTS,
        moe_layer_freq=[0, 1],
        moe_router_topk=layout.top_k,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=layout.aux_loss_coef,
        moe_z_loss_coeff=layout.z_loss_coef or None,
        # gloo cannot gather the unequal parts that alltoall gathers over expert-TP ranks
        moe_token_dispatcher_type="allgather" if layout.etp > 1 else "alltoall",
        moe_grouped_gemm=False,
        moe_router_enable_expert_bias=layout.expert_bias,
        moe_router_score_function="sigmoid" if layout.expert_bias else "softmax",
        moe_router_bias_update_rate=0.01,
        **BF16 if base.bf16 else {},
        **RECOMPUTE if layout.recompute else {},
    )


def moe_spec(config: Any) -> Any:
    """Megatron's local layers, the second with experts, with this package's norm and attention."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from megatron_rl_loss.mcore.cpu_attention import CoreAttention
    from megatron_rl_loss.mcore.layer_spec import RMSNorm

    layers = [
        get_gpt_layer_local_spec(qk_layernorm=False),
        get_gpt_layer_local_spec(num_experts=NUM_EXPERTS, moe_grouped_gemm=False),
    ]
    for layer in layers:
        layer.submodules.input_layernorm = RMSNorm
        layer.submodules.pre_mlp_layernorm = RMSNorm
        layer.submodules.self_attention.submodules.core_attention = CoreAttention
    return TransformerBlockSubmodules(layers, layer_norm=RMSNorm)


def named_parameters(model: Any) -> dict[str, tuple[int, int, Any]]:
    """Returns {global name: (shard, split dimension, parameter)} of this rank's parameters."""
    from megatron.core import parallel_state as state

    first_expert = state.get_expert_model_parallel_rank() * (
        NUM_EXPERTS // state.get_expert_model_parallel_world_size()
    )
    found = {}
    for name, parameter in model.named_parameters():
        name = re.sub(r"^(module\.)+", "", name)
        expert = re.search(r"local_experts\.(\d+)\.", name)
        rank = state.get_tensor_model_parallel_rank()
        if expert:
            number = int(expert[1]) + first_expert
            name = name.replace(expert[0], f"local_experts.{number}.")
            rank = state.get_expert_tensor_parallel_rank()
        split = getattr(parameter, "tensor_model_parallel", False)
        dim = parameter.partition_dim if split else 0
        found[name] = (rank if split else 0, dim, parameter)
    return found


def expert_biases(model: Any) -> dict[str, tuple[int, int, Tensor]]:
    return {
        name: (0, 0, value.clone())
        for name, value in model.named_buffers()
        if name.endswith("expert_bias")
    }


def made_weight(name: str, index: int, dim: int, parameter: Any, layout: MoeLayout) -> Tensor:
    """Returns this shard of the weight that `name` has in every layout."""
    shards = 1
    if getattr(parameter, "tensor_model_parallel", False):
        shards = layout.etp if "local_experts" in name else layout.base.tp
    shape = list(parameter.shape)
    shape[dim] *= shards
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    whole = torch.randn(shape, generator=generator) * 0.2
    if "norm" in name:
        whole = 1 + whole
    if layout.weights_in_bf16:
        whole = whole.bfloat16()
    return whole.chunk(shards, dim=dim)[index]
