"""Megatron's settings of a mixture of experts."""

from __future__ import annotations

from typing import Any

import torch

from . import compat
from .model_spec import ModelSpec


def moe_settings(spec: ModelSpec, etp_size: int, aux_loss_coef: float) -> dict[str, Any]:
    """Returns fields of Megatron's `TransformerConfig`; none for a dense model.

    Formula: with `norm_topk_prob`, p = softmax(top-k logits), which is the softmax over all
    experts scaled to a sum of 1; else p = top-k of softmax(all logits).

    The router's arithmetic is fp32: a token that the trainer routes otherwise than the sampler did
    has other log-probs. No token is dropped.

    Args:
        spec: the architecture.
        etp_size: expert-tensor-parallel ranks.
        aux_loss_coef: of the load-balancing loss, 0 for none.
    """
    moe = spec.moe
    if moe is None:
        return {}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_router_topk": moe.top_k,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not moe.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if aux_loss_coef else "none",
        "moe_aux_loss_coeff": aux_loss_coef,
        "moe_token_dispatcher_type": _dispatcher(etp_size),
        # without Transformer Engine, grouped GEMM packs the experts into one weight
        "moe_grouped_gemm": compat.has_transformer_engine(),
    }


def _dispatcher(etp_size: int) -> str:
    # gloo cannot gather the unequal parts that alltoall gathers over expert-tensor ranks
    return "allgather" if etp_size > 1 and not torch.cuda.is_available() else "alltoall"
