"""Tiny random Hugging Face models, and what the real GPTModel makes of their weights on ranks."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.spawn import run_ranks

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 32,
}
# Every setting that changes the output differs from what Megatron would take by default.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rms_norm_eps": 1e-3},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama3 rope": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "llama without query groups": {"model_type": "llama", "num_key_value_heads": 8},
    "llama wide heads": {"model_type": "llama", "head_dim": 16},
    "qwen2": {
        "model_type": "qwen2",
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "qwen2 tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    # the wide MLP's size is unused: every layer has experts
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "intermediate_size": 80,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "head_dim": 16,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3 tied": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
}
CONFIGS["qwen3_moe unscaled"] = CONFIGS["qwen3_moe"] | {"norm_topk_prob": False}


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    sequence_parallel: bool = False
    ep: int = 1
    etp: int = 1
    padded_vocab: int = 128
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.pp * max(self.tp, self.ep * self.etp)


def hf_config(name: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**{**SIZES, **CONFIGS[name]})


@functools.cache
def hf_model(name: str) -> Any:
    """Returns the random model; its norms and biases are random too, not ones and zeros."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(hf_config(name)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.1 * noise + (1.0 if parameter.ndim == 1 else 0.0))
    return model


def tokens() -> Tensor:
    return torch.randint(
        0, SIZES["vocab_size"], (2, 48), generator=torch.Generator().manual_seed(1)
    )


@functools.cache
def hf_logits(name: str) -> Tensor:
    with torch.no_grad():
        return hf_model(name)(tokens()).logits


def start(layout: Layout, config: Any, **overrides: Any) -> tuple[list[Any], Any]:
    """On a rank: sets up Megatron and returns the random chunks and the spec."""
    warnings.simplefilter("ignore")
    from megatron_rl_loss.mcore.model import build_gpt_model, transformer_config
    from megatron_rl_loss.mcore.model_spec import model_spec_from_hf
    from megatron_rl_loss.mcore.ranks import start_ranks

    sizes = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }
    start_ranks(**sizes)
    spec = model_spec_from_hf(config)
    settings = {**sizes, "sequence_parallel": layout.sequence_parallel, **layout.config}
    config = transformer_config(spec, **{**settings, **overrides})
    return build_gpt_model(spec, config, padded_vocab_size=layout.padded_vocab), spec


def stop() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def pipeline_logits(chunks: list[Any], batch: Tensor) -> Tensor | None:
    """Returns the last stage's logits `[B, S, V / tp]` through the real schedule."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    positions = torch.arange(batch.shape[1]).expand(1, -1)

    def forward_step(data: Any, model: Any) -> Any:
        return model(next(data), positions, None), lambda logits, non_loss_data=True: logits

    collected = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batch.split(1)) for _ in chunks]
        if len(chunks) > 1
        else iter(batch.split(1)),
        model=chunks,
        num_microbatches=len(batch),
        seq_length=batch.shape[1],
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    return torch.cat(collected).detach() if collected else None


@dataclass
class RankResult:
    logits: Tensor | None
    exported: dict[str, Tensor]
    names: list[str]


def load_and_run(layout: Layout, config: Any, weights: dict[str, Tensor]) -> RankResult:
    """On a rank: loads the weights, runs the model and exports the weights again."""
    from megatron_rl_loss.mcore.weights import export_hf_weights, load_hf_weights

    chunks, spec = start(layout, config)
    try:
        load_hf_weights(chunks, weights, spec)
        logits = pipeline_logits(chunks, tokens())
        stream = list(export_hf_weights(chunks, spec))
        return RankResult(logits, dict(stream), [name for name, _ in stream])
    finally:
        stop()


def run_model(name: str, layout: Layout) -> list[RankResult]:
    weights = dict(hf_model(name).state_dict())
    return run_ranks(load_and_run, layout.world_size, layout, hf_config(name).to_dict(), weights)


def whole_logits(results: list[RankResult]) -> Tensor:
    """Returns the logits of the last stage's tensor-parallel ranks side by side, unpadded."""
    shards = [result.logits for result in results if result.logits is not None]
    return torch.cat(shards, -1)[..., : SIZES["vocab_size"]]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())
