"""Megatron's DistributedDataParallel and optimizer around model chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError
from .guard import model_config


def wrap_with_ddp(
    chunks: Sequence[Any],
    *,
    use_distributed_optimizer: bool = False,
    overlap_grad_reduce: bool = False,
    average_in_collective: bool = False,
) -> list[Any]:
    """Returns the chunks (bf16 and fp16 ones as Float16Module) in Megatron's DDP.

    Gradients are accumulated and reduced in fp32. Sets `finalize_model_grads_func` (and, with
    overlap, the hooks) on the config that the schedule reads.

    Raises:
        ConfigError: `chunks` is not a list of models, or they are wrapped already.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer.module import Float16Module

    _check_bare(chunks, DistributedDataParallel)
    config = model_config(chunks[0])
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=use_distributed_optimizer,
        overlap_grad_reduce=overlap_grad_reduce,
        average_in_collective=average_in_collective,
    )
    if config.bf16 or config.fp16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    if overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in wrapped]
        if len(wrapped) == 1:
            config.no_sync_func = config.no_sync_func[0]
    return wrapped


def _check_bare(chunks: Any, wrapper: type) -> None:
    if not isinstance(chunks, (list, tuple)) or not chunks:
        raise ConfigError(
            "expected a list of model chunks, one per virtual pipeline stage, got "
            f"{type(chunks).__name__}; put a single model into a list."
        )
    if any(isinstance(chunk, wrapper) for chunk in chunks):
        raise ConfigError("the chunks are wrapped in DistributedDataParallel already; do it once.")


def build_optimizer(
    chunks: Sequence[Any],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    clip_grad: float = 1.0,
    **overrides: Any,
) -> Any:
    """Returns Megatron's Adam for chunks wrapped by `wrap_with_ddp`.

    FusedAdam of Transformer Engine or NVIDIA Apex is used where Megatron finds it.

    Args:
        lr: learning rate; a scheduler may change it.
        clip_grad: largest global gradient norm, 0 for no clipping.
        **overrides: other fields of Megatron's OptimizerConfig.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = model_config(chunks[0])
    settings = dict(
        optimizer="adam",
        lr=lr,
        adam_beta1=betas[0],
        adam_beta2=betas[1],
        adam_eps=eps,
        weight_decay=weight_decay,
        clip_grad=clip_grad,
        bf16=config.bf16,
        fp16=config.fp16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=chunks[0].ddp_config.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(OptimizerConfig(**settings | overrides), list(chunks))
    config.grad_scale_func = optimizer.scale_loss if config.fp16 else None
    return optimizer


def build_scheduler(optimizer: Any, *, lr: float, warmup_steps: int, total_steps: int) -> Any:
    """Returns Megatron's scheduler: linear warm-up from 0, then constant `lr`.

    It counts optimizer steps: call `.step(increment=1)` once after each.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=lr,
        min_lr=0.0,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=max(total_steps, warmup_steps + 1),
        lr_decay_style="constant",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=max(total_steps, 1),
        wd_incr_style="constant",
    )
