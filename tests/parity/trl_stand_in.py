"""Stand-ins for TRL's trainers: settings, log-probs and data, without a model."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import torch

ARGS = {
    "delta": None,
    "use_bias_correction_kl": False,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "steps_per_generation": 1,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing_kwargs": None,
    "per_device_train_batch_size": 8,
    "entropy_target": 1.0,
    "entropy_coef_delta": 0.25,
    "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0,
}
SETTINGS = {
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "epsilon_low": 0.15,
    "epsilon_high": 0.3,
    "beta": 0.0,
    "off_policy_mask_threshold": None,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "_last_world_entropy": float("inf"),
    "_entropy_window_stats": None,
    "top_entropy_quantile": 1.0,
    "max_completion_length": 13,
    "current_gradient_accumulation_steps": 1,
    "aux_loss_enabled": False,
}


def grpo_trainer():
    from trl.trainer.grpo_trainer import GRPOTrainer  # not above: it may not be there

    return GRPOTrainer


def same(x, **_):
    return x


def trainer(log_probs=None, entropy=None, **settings):
    """A GRPOTrainer (or RLOOTrainer) without its checks, model and data."""
    args = SimpleNamespace(**{k: settings.pop(k, v) for k, v in ARGS.items()})
    made = SimpleNamespace(**SETTINGS | settings, args=args, _metrics=metrics_store())
    made._entropy_bonus_enabled = bool(made.entropy_coef or made.use_adaptive_entropy)
    made.get_off_policy_mask = grpo_trainer().get_off_policy_mask
    made.model = SimpleNamespace(training=True)
    made.accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        process_index=0,
        sync_gradients=True,
        reduce=same,
        gather=same,
        gather_for_metrics=same,
    )
    made._get_per_token_logps_and_entropies = lambda *_, **__: (log_probs, entropy, None)
    return made


def metrics_store():
    return defaultdict(lambda: defaultdict(list))


def trl_inputs(tensors, mask, num_items=None):
    return {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": tensors["advantages"],
        "old_per_token_logps": tensors["old_log_probs"],
        "ref_per_token_logps": tensors["ref_log_probs"],
        "sampling_per_token_logps": tensors["rollout_log_probs"],
        "importance_sampling_ratio": tensors.get("rollout_is_weights"),
        "num_items_in_batch": mask.sum() if num_items is None else num_items,
    }


def trl_step(tensors, mask, compute_loss=None, entropy=None, num_items=None, **settings):
    """Returns TRL's loss, its gradient, and its metrics."""
    log_probs = tensors["log_probs"].clone().requires_grad_()
    entropy = torch.zeros_like(log_probs) if entropy is None else entropy
    made = trainer(log_probs, entropy, **settings)
    compute_loss = compute_loss or grpo_trainer()._compute_loss
    loss = compute_loss(made, None, trl_inputs(tensors, mask, num_items))
    loss.backward()
    return loss.detach(), log_probs.grad, made._metrics["train"]


def scored(trainer_class, rewards, group_size, log_probs=None, mask=None, **settings):
    """What a trainer makes of sampled completions: advantages and importance weights.

    log_probs: `old_log_probs`, `ref_log_probs` and `rollout_log_probs` by name, and `mask` with
    each row's trained tokens first; None: one token each.
    """
    mask = torch.ones(len(rewards), 1, dtype=torch.bool) if mask is None else mask
    lengths = mask.sum(1).tolist()
    zeros = {name: torch.zeros(mask.shape) for name in ("old", "ref", "rollout")}
    given = zeros | {k.removesuffix("_log_probs"): v for k, v in (log_probs or {}).items()}
    made = trainer(**SCORING | settings)
    made.num_generations = group_size
    made.reward_weights = torch.ones(1)
    made.reward_funcs, made.reward_func_names = [None], ["reward"]
    made.model, made.ref_model = (
        SimpleNamespace(training=True, is_gradient_checkpointing=False, name=name)
        for name in ("old", "ref")
    )
    made._logs = {"advantages": [], "prompt": [], "completion": [], "rewards": {"reward": []}}
    made._tokenizer = SimpleNamespace(pad_token_id=0)
    made._calculate_rewards = lambda *_: rewards[:, None].clone()
    made._get_per_token_logps_and_entropies = lambda of, *_, **__: (given[of.name], None, None)
    completions = [[1] * n for n in lengths]
    sampled = [row[:n].tolist() for row, n in zip(given["rollout"], lengths)]
    texts = [""] * len(rewards)
    made._generate = lambda _: GENERATED[trainer_class.__name__](completions, texts, sampled)
    prompts = [{"prompt": ""}] * len(rewards)
    return trainer_class._generate_and_score_completions(made, prompts)


GENERATED = {
    "GRPOTrainer": lambda completions, texts, sampled: (
        [[1]] * len(texts),
        completions,
        None,
        texts,
        sampled,
        {},
        None,
        None,
    ),
    "RLOOTrainer": lambda completions, texts, _: ([[1]] * len(texts), completions, texts),
}
SCORING = {
    "environment_factories": None,
    "environments": None,
    "tools": None,
    "mask_truncated_completions": False,
    "pad_to_multiple_of": None,
    "num_iterations": 1,
    "multi_objective_aggregation": "sum_then_normalize",
    "scale_rewards": "group",
    "reward_clip_range": None,
    "normalize_advantages": False,
    "log_multimodal": False,
    "_pending_extra_logs": {},
    "_pending_metrics": {},
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_clip_max": 2.0,
}


def dpo_trainer(beta):
    made = trainer(beta=beta)
    settings = {"loss_types": ["sigmoid"], "loss_weights": [1.0], "f_divergence_type": "reverse_kl"}
    settings |= {"ld_alpha": None, "precompute_ref_logps": True, "use_weighting": False}
    made.__dict__.update(settings, _total_train_tokens=0, _tp_size=1)
    return made


def dpo_model(log_probs):
    """A model whose log-probs are given; the other outputs only feed metrics."""
    zeros = torch.zeros_like(log_probs)
    return lambda **_: SimpleNamespace(
        log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
    )
