"""Reinforcement learning in a script that calls Megatron's `pretrain()`; see docs/pretrain.md.

    torchrun --nproc-per-node 8 scripts/pretrain_rl.py --mrl-rollouts rollouts/ \
        --mrl-config configs/loss/dapo.yaml loss.kl_coef=0 [Megatron's arguments]

On a machine without CUDA it runs on gloo CPU ranks; add `--mrl-cpu`.
"""

from __future__ import annotations

import functools
import sys

from megatron_rl_loss.mcore.cpu_training import CPU_ARGUMENTS, use_cpu_training
from megatron_rl_loss.mcore.pretrain import build_gpt, megatron_arguments, run_pretrain
from megatron_rl_loss.pretrain import (
    add_arguments,
    make_datasets,
    make_pretrain_step,
    start_model,
    write_metrics,
)


def model_provider(pre_process=True, post_process=True, vp_stage=None, **given):
    """Megatron's GPT, dense or mixture of experts; weights and adapters as the arguments say."""
    args = megatron_arguments()
    model = build_gpt(args, pre_process, post_process, vp_stage, **given)
    return start_model(args, model)


def datasets_provider(num_samples, vp_stage=None):
    """Our rollout files; Megatron's sampler counts what is consumed."""
    return make_datasets(megatron_arguments(), num_samples)


datasets_provider.is_distributed = True  # every rank reads


@functools.cache
def _forward_step():
    return make_pretrain_step(megatron_arguments())


def forward_step(data_iterator, model, return_schedule_plan=False):
    """Our loss; made on the first call, when Megatron has parsed its arguments."""
    return _forward_step()(data_iterator, model, return_schedule_plan)


def log(iteration, metrics):
    """Adds a line to metrics.jsonl."""
    write_metrics(megatron_arguments(), iteration, metrics)


if __name__ == "__main__":
    if "--mrl-cpu" in sys.argv:
        sys.argv.remove("--mrl-cpu")
        sys.argv += CPU_ARGUMENTS
        use_cpu_training()
    run_pretrain(
        datasets_provider,
        model_provider,
        forward_step,
        extra_args_provider=add_arguments,
        log=log,
    )
