"""A made-up mini-batch, and its loss and gradient computed slowly, token by token, in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import tiny_llama

Row = dict[str, Any]


def make_rows(seed: int = 0, lengths: tuple[int, ...] = (5, 9, 12, 7, 12, 4, 10, 6)) -> list[Row]:
    """Returns sequences with prompts, masks with holes, advantages, old and reference log-probs.

    One row has no trained token. Per-token lists are indexed like labels: entry t of a row of n
    tokens belongs to token t + 1, so they have n entries of which the last is never trained.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i, length in enumerate(lengths):
        tokens = torch.randint(0, tiny_llama.SIZES["vocab"], (length,), generator=generator)
        mask = torch.rand(length, generator=generator) < 0.7
        mask[0] = False
        mask[-1] = False
        if i == 3:
            mask[:] = False
        rows.append(
            {
                "tokens": tokens,
                "loss_mask": mask,
                "advantages": torch.randn(length, generator=generator),
                "old_log_probs": -4 + torch.randn(length, generator=generator),
                "ref_log_probs": -4 + torch.randn(length, generator=generator),
                "rollout_log_probs": -4 + torch.randn(length, generator=generator),
                "group_id": i // 3,
            }
        )
    return rows


def weights(
    rows: list[Row], reduction: str, plan: list[list[int]], max_seq_len: int
) -> list[Tensor]:
    """Returns w for each row as the contract's table says, in plain Python."""
    lengths = [int(row["loss_mask"].sum()) for row in rows]
    groups: dict[int, int] = {}
    for row, length in zip(rows, lengths):
        groups[row["group_id"]] = groups.get(row["group_id"], 0) + length
    result = []
    for i, row in enumerate(rows):
        if reduction == "token_mean":
            w = 1 / sum(lengths)
        elif reduction == "token_mean_legacy":
            mine = next(micro for micro in plan if i in micro)
            w = 1 / (len(plan) * max(1, sum(lengths[j] for j in mine)))
        elif reduction == "sequence_mean":
            w = 1 / (len(rows) * max(1, lengths[i]))
        elif reduction == "seq_mean_token_sum_norm":
            w = 1 / (len(rows) * max_seq_len)
        elif reduction == "prompt_mean":
            w = 1 / (len(groups) * max(1, groups[row["group_id"]]))
        else:
            w = 1.0
        result.append(row["loss_mask"].double() * w)
    return result


def loss_and_gradient(
    hf_weights: dict[str, Tensor],
    rows: list[Row],
    row_weights: list[Tensor],
    *,
    clip: float = 0.2,
    dual: float = 3.0,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    temperature: float = 1.0,
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Returns the metrics and d loss / d weight of dual-clip PPO + k3 KL - entropy."""
    params = {n: w.double().requires_grad_() for n, w in hf_weights.items()}
    total, sums = torch.zeros((), dtype=torch.float64), {"n": 0, "entropy": 0.0, "kl": 0.0}
    ratio_max = 0.0
    for row, w in zip(rows, row_weights):
        logits = tiny_llama.logits(params, row["tokens"]) / temperature
        for t in row["loss_mask"].nonzero().flatten().tolist():
            log_p = logits[t] - torch.logsumexp(logits[t], 0)
            log_prob = log_p[row["tokens"][t + 1]]
            entropy = -(log_p.exp() * log_p).sum()
            ratio = (log_prob - float(row["old_log_probs"][t])).exp()
            advantage = float(row["advantages"][t])
            loss = torch.maximum(-ratio * advantage, -ratio.clamp(1 - clip, 1 + clip) * advantage)
            if advantage < 0:
                loss = torch.minimum(loss, torch.tensor(-dual * advantage, dtype=torch.float64))
            d = log_prob - float(row["ref_log_probs"][t])
            kl = (-d).exp() - 1 + d
            total = total + w[t] * (loss + kl_coef * kl - entropy_coef * entropy)
            sums["n"] += 1
            sums["entropy"] += entropy.item()
            sums["kl"] += kl.item()
            ratio_max = max(ratio_max, ratio.item())
    if total.requires_grad:
        total.backward()
    n = max(1, sums["n"])
    metrics = {
        "loss": total.item(),
        "num_tokens": float(sums["n"]),
        "entropy": sums["entropy"] / n,
        "kl": sums["kl"] / n,
        "ratio_max": ratio_max,
    }
    grads = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in params.items()}
    metrics["grad_norm"] = math.sqrt(sum(float(g.pow(2).sum()) for g in grads.values()))
    return metrics, grads
