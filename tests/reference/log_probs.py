"""Log-probs, entropy and their gradients in float64, written out per row with Python's math."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def row(logits: list[float], temperature: float = 1.0) -> tuple[list[float], float]:
    """(log p of every column, entropy); -inf columns have p = 0."""
    x = [v / temperature for v in logits]
    top = max(x)
    log_total = top + math.log(math.fsum(math.exp(v - top) for v in x))
    log_p = [v - log_total for v in x]
    return log_p, -math.fsum(math.exp(v) * v for v in log_p if v > -math.inf)


def log_probs_and_entropy(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, vocab_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """float64 [...] each, of logits [..., V] and labels [...]."""
    width = logits.shape[-1] if vocab_size is None else vocab_size
    rows = logits.double().reshape(-1, logits.shape[-1])[:, :width].tolist()
    results = [row(r, temperature) for r in rows]
    picked = [log_p[y] for (log_p, _), y in zip(results, labels.flatten().tolist(), strict=True)]
    entropies = [h for _, h in results]
    shape = labels.shape
    return (
        torch.tensor(picked, dtype=torch.float64).reshape(shape),
        torch.tensor(entropies, dtype=torch.float64).reshape(shape),
    )


def gradient(
    logits: Tensor,
    labels: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> Tensor:
    """float64 gradient [..., V] of sum(g * log_probs) + sum(h * entropy), by its formula."""
    width = logits.shape[-1] if vocab_size is None else vocab_size
    flat = logits.double().reshape(-1, logits.shape[-1])
    out = torch.zeros_like(flat)
    entries = zip(
        flat[:, :width].tolist(),
        labels.flatten().tolist(),
        grad_log_probs.flatten().tolist(),
        grad_entropy.flatten().tolist(),
        strict=True,
    )
    for i, (values, y, g, h) in enumerate(entries):
        log_p, entropy = row(values, temperature)
        for j, lp in enumerate(log_p):
            p = math.exp(lp)
            d = g * ((j == y) - p) - (h * p * (lp + entropy) if p > 0 else 0.0)
            out[i, j] = d / temperature
    return out.reshape(logits.shape)
