"""Megatron's settings of a mixture of experts, and which layouts can hold it."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import LayoutError
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


def check_expert_split(
    spec: ModelSpec, *, tp_size: int, ep_size: int, etp_size: int, sequence_parallel: bool
) -> None:
    """Raises `LayoutError` unless the parallel sizes can hold the model's experts.

    Args:
        spec: the architecture.
        tp_size, ep_size, etp_size: tensor, expert and expert-tensor parallel ranks.
        sequence_parallel: whether activations are split along the sequence.
    """
    moe = spec.moe
    if moe is None:
        if ep_size > 1:
            raise LayoutError(
                f"expert_model_parallel_size is {ep_size}, but {spec.architecture} has no "
                "experts; set it to 1."
            )
        return
    for name, size, divisor in (
        ("expert_model_parallel_size", ep_size, moe.num_experts),
        ("expert_tensor_parallel_size", etp_size, moe.ffn_hidden_size),
    ):
        if divisor % size:
            what = "experts" if divisor == moe.num_experts else "rows of an expert"
            raise LayoutError(f"{name} {size} does not divide {divisor} {what}; choose a divisor.")
    if tp_size > 1 and not sequence_parallel:
        raise LayoutError(
            f"tensor_model_parallel_size {tp_size} with experts needs sequence_parallel=True: "
            "Megatron refuses to train without."
        )
