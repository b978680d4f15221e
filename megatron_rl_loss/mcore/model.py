"""Megatron's configuration and `GPTModel` for a `ModelSpec`, on GPUs or CPU ranks."""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import Any, Literal

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..errors import ConfigError, LayoutError
from . import compat
from .layer_spec import decoder_spec
from .model_layout import (
    UNEVEN_PIPELINE_SETTINGS,
    check_expert_split,
    check_pipeline_split,
    check_tensor_split,
    padded_vocab_size,
)
from .model_moe import moe_settings
from .model_spec import ModelSpec
from .value_model import put_value_head


def transformer_config(
    spec: ModelSpec,
    *,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    sequence_parallel: bool = False,
    moe_aux_loss_coef: float = 0.0,
    bf16: bool = False,
    fp16: bool = False,
    recompute: Literal["selective", "full"] | None = None,
    **overrides: Any,
) -> TransformerConfig:
    """Returns Megatron's configuration of a model, with settings that this machine can run.

    Fused kernels are switched on only where they are there: none without CUDA; gradient
    accumulation fusion with NVIDIA Apex's kernel; fused rotary embeddings with Transformer
    Engine. Dropout is 0: the log-probs of a step must not change between two forward passes.

    Args:
        spec: the architecture.
        tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size: ranks.
        virtual_pipeline_model_parallel_size: model chunks per pipeline rank, None for one.
        expert_model_parallel_size: ranks that share out a layer's experts.
        expert_tensor_parallel_size: ranks that cut each expert; None: the tensor-parallel size.
        sequence_parallel: split activations outside the tensor-parallel layers along the sequence;
            Megatron asks for it where there are experts and tensor parallelism.
        moe_aux_loss_coef: of the load-balancing loss; 0, as usual in RL: none.
        bf16, fp16: dtype of the weights; fp32 if neither.
        recompute: "selective" recomputes the core attention in backward, "full" each layer.
        overrides: any other field of Megatron's `TransformerConfig`, taken as it is.

    Raises:
        LayoutError: the sizes do not divide the model.
        ConfigError: an unknown field, both dtypes, or an unknown kind of recomputation.
    """
    if bf16 and fp16:
        raise ConfigError("bf16 and fp16 are both on; choose one.")
    _check_overrides(overrides)
    chunks = pipeline_model_parallel_size * (virtual_pipeline_model_parallel_size or 1)
    check_tensor_split(spec, tensor_model_parallel_size, sequence_parallel)
    expert_tp_size = expert_tensor_parallel_size or tensor_model_parallel_size
    check_expert_split(
        spec,
        tp_size=tensor_model_parallel_size,
        ep_size=expert_model_parallel_size,
        etp_size=expert_tp_size,
        sequence_parallel=sequence_parallel,
    )
    if not any(overrides.get(name) for name in UNEVEN_PIPELINE_SETTINGS):
        check_pipeline_split(spec, chunks)
    dtype = torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32
    settings = {
        **_architecture_settings(spec),
        **moe_settings(spec, expert_tp_size, moe_aux_loss_coef),
        **_machine_settings(),
        **_recompute_settings(recompute),
        "tensor_model_parallel_size": tensor_model_parallel_size,
        "pipeline_model_parallel_size": pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": virtual_pipeline_model_parallel_size,
        **_transfer_settings(virtual_pipeline_model_parallel_size),
        "context_parallel_size": context_parallel_size,
        "expert_model_parallel_size": expert_model_parallel_size,
        "expert_tensor_parallel_size": expert_tp_size,
        "sequence_parallel": sequence_parallel,
        "bf16": bf16,
        "fp16": fp16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        **overrides,
    }
    return TransformerConfig(**settings)


def _architecture_settings(spec: ModelSpec) -> dict[str, Any]:
    return {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_hidden_size,
        "num_attention_heads": spec.num_attention_heads,
        "num_query_groups": spec.num_query_groups,
        "kv_channels": spec.head_dim,
        "layernorm_epsilon": spec.rms_norm_eps,
        "normalization": "RMSNorm",
        "qk_layernorm": spec.qk_norm,
        "add_bias_linear": False,
        "add_qkv_bias": spec.qkv_bias,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _machine_settings() -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "use_cpu_initialization": not cuda,
        "gradient_accumulation_fusion": compat.has_gradient_accumulation_fusion(),
        "bias_activation_fusion": cuda,
        "bias_dropout_fusion": cuda,
        "apply_rope_fusion": compat.has_transformer_engine(),
        "masked_softmax_fusion": False,
    }


def _transfer_settings(vpp_size: int | None) -> dict[str, Any]:
    """Unbatched transfers for the interleaved schedule: see `check_interleaved_transfers`."""
    interleaved = vpp_size is not None
    return {"overlap_p2p_comm": interleaved, "batch_p2p_comm": not interleaved}


def _recompute_settings(recompute: str | None) -> dict[str, Any]:
    kinds: dict[str | None, dict[str, Any]] = {
        None: {},
        "selective": {"recompute_granularity": "selective"},
        "full": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    }
    if recompute not in kinds:
        raise ConfigError(f"recompute must be 'selective', 'full' or None, got {recompute!r}.")
    return kinds[recompute]


def _check_overrides(overrides: dict[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    for name in overrides:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigError(f"Megatron's TransformerConfig has no field {name!r}{hint}")


def build_gpt_model(
    spec: ModelSpec,
    config: TransformerConfig,
    *,
    padded_vocab_size: int | None = None,
    transformer_engine: bool | None = None,
) -> list[GPTModel]:
    """Builds this rank's chunks of the model, with random weights.

    The logits stay split over the tensor-parallel ranks: `[B, S, padded_vocab_size / tp]`.

    Args:
        spec: the architecture.
        config: from `transformer_config` for the same architecture.
        padded_vocab_size: rows of the embedding over all shards; by default the next multiple of
            128 x tp. The added rows are no tokens: keep their logits out of every softmax.
        transformer_engine: use Transformer Engine's layers; by default where it is there.

    Returns:
        One chunk, or one per virtual pipeline stage, in order; not wrapped in DDP.

    Raises:
        LayoutError: Megatron's parallel state or random states are not initialised, or do not fit
            `config`.

    Communicates: with tied embeddings, all-reduces the embedding over the first and last stage.
    """
    vocab_size = _checked_vocab_size(spec, config, padded_vocab_size)
    if transformer_engine is None:
        transformer_engine = compat.has_transformer_engine()
    _check_parallel_state(config)
    vp_size = config.virtual_pipeline_model_parallel_size
    stages = [None] if vp_size is None else list(range(vp_size))
    chunks = [_build_chunk(spec, config, vocab_size, stage, transformer_engine) for stage in stages]
    if spec.value_head:
        put_value_head(chunks)
    return chunks


def _build_chunk(
    spec: ModelSpec,
    config: TransformerConfig,
    vocab_size: int,
    vp_stage: int | None,
    transformer_engine: bool,
) -> GPTModel:
    last_vp_stage = (config.virtual_pipeline_model_parallel_size or 1) - 1
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=decoder_spec(
            config, vp_stage, transformer_engine=transformer_engine
        ),
        vocab_size=vocab_size,
        max_sequence_length=spec.max_position_embeddings,
        pre_process=pp_rank == 0 and vp_stage in (None, 0),
        post_process=pp_rank == config.pipeline_model_parallel_size - 1
        and vp_stage in (None, last_vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=spec.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=spec.rope_theta,
        vp_stage=vp_stage,
    )
    # Megatron's own llama3 scaling fixes three of its four constants
    chunk.rotary_pos_emb.inv_freq = rotary_inv_freq(spec).to(chunk.rotary_pos_emb.inv_freq.device)
    compat.mark_expert_parameters(chunk)
    for parameter in chunk.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return chunk.to(torch.cuda.current_device()) if torch.cuda.is_available() else chunk


def rotary_inv_freq(spec: ModelSpec) -> Tensor:
    """Returns the angle per position of each pair of a head's dimensions.

    Formula: f_i = theta^(-2i / head_dim); with Llama 3's scaling
    f_i * (s + (1 - s) / factor), s = clamp((L f_i / (2 pi) - low) / (high - low), 0, 1), where
    L is the context length before the scaling.

    Returns:
        fp32, [head_dim / 2], radians per token.

    Source: Su et al., "RoFormer" (2021), eq. 15; Meta's Llama 3.1 reference code.
    """
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    frequencies = 1.0 / (spec.rope_theta**exponents)
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (smooth + (1.0 - smooth) / scaling.factor)


def _checked_vocab_size(spec: ModelSpec, config: TransformerConfig, requested: int | None) -> int:
    tp_size = config.tensor_model_parallel_size
    if requested is None:
        return padded_vocab_size(spec.vocab_size, tp_size)
    if requested < spec.vocab_size or requested % tp_size:
        raise LayoutError(
            f"padded_vocab_size must be at least the vocabulary ({spec.vocab_size}) and a "
            f"multiple of tensor_model_parallel_size ({tp_size}), got {requested}."
        )
    return requested


def _check_parallel_state(config: TransformerConfig) -> None:
    if not parallel_state.model_parallel_is_initialized():
        raise LayoutError(
            "Megatron's parallel state is not initialised; call "
            "megatron.core.parallel_state.initialize_model_parallel(...) first."
        )
    actual = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
    }
    if config.num_moe_experts is not None:
        actual |= {
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        }
    for name, size in actual.items():
        if size != getattr(config, name):
            raise LayoutError(
                f"the config has {name} {getattr(config, name)}, but Megatron's parallel state "
                f"was initialised with {size}; make them equal."
            )
    if not tensor_parallel.get_cuda_rng_tracker().is_initialized():
        raise LayoutError(
            "Megatron's random states are not seeded; call "
            "megatron.core.tensor_parallel.model_parallel_cuda_manual_seed(seed) first."
        )
