"""Megatron's layer spec for a `ModelSpec`, with or without Transformer Engine.

The local spec gets an RMSNorm and a core attention of ours: Megatron's own `WrappedTorchNorm`
refuses sequence parallelism, because it cannot tag its weight, and its `DotProductAttention`
refuses context parallelism and packed sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from .cpu_attention import CoreAttention


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm whose weight works under sequence parallelism.

    Formula: y = x / sqrt(mean(x^2) + eps) * weight.

    Args:
        config: Megatron's; `sequence_parallel` is copied to the weight as a tag, by which
            `finalize_model_grads` knows that the ranks' gradients must be summed.
        hidden_size: width of the last dimension.
        eps: added to the mean square.
        ignored: arguments that Megatron passes to some of its norms.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **ignored: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def decoder_spec(
    config: TransformerConfig, vp_stage: int | None, *, transformer_engine: bool
) -> ModuleSpec | TransformerBlockSubmodules:
    """Returns what `GPTModel` builds this rank's layers from.

    Args:
        config: Megatron's; `qk_layernorm` and the experts are read from it.
        vp_stage: index of the model chunk on this rank, None without a virtual pipeline.
        transformer_engine: Transformer Engine's layers, or else Megatron's local ones with our
            norms.
    """
    if transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(**_layer_settings(config))
    num_layers = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules([_local_layer_spec(config)] * num_layers, layer_norm=RMSNorm)


def _layer_settings(config: TransformerConfig) -> dict[str, Any]:
    return {
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
    }


def _local_layer_spec(config: TransformerConfig) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(**_layer_settings(config))
    attention = layer.submodules.self_attention.submodules
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention.core_attention = CoreAttention
    attention.q_layernorm = RMSNorm if config.qk_layernorm else IdentityOp
    attention.k_layernorm = RMSNorm if config.qk_layernorm else IdentityOp
    return layer
