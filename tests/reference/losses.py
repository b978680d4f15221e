"""Every loss once more, one token at a time in Python floats, with the gradient worked out by hand.

A reference takes the trained tokens of the whole micro-batch as a list of sequences; a token is a
dict of floats. It returns, for each token, the loss l_t and the gradient of sum_t w_t l_t with
respect to its log-prob.
"""

from __future__ import annotations

import math


def per_token(rule):
    """rule(token, **settings) -> (l, dl / d log_prob)."""

    def reference(sequences, **settings):
        losses, gradients = [], []
        for sequence in sequences:
            results = [rule(t, **settings) for t in sequence]
            losses.append([loss for loss, _ in results])
            gradients.append(
                [t["w"] * slope for t, (_, slope) in zip(sequence, results, strict=True)]
            )
        return losses, gradients

    return reference


def clip(x, low, high):
    return min(max(x, low), high)


def ratio(t, old="old_log_probs"):
    return math.exp(t["log_probs"] - t[old])


def surrogate(r, a, low, high):
    """Returns max(-r a, -clip(r) a) and its derivative with respect to r."""
    if a >= 0:
        return (-r * a, -a) if r <= high else (-high * a, 0.0)
    return (-r * a, -a) if r >= low else (-low * a, 0.0)


@per_token
def ppo_clip(t, clip_ratio_low=0.2, clip_ratio_high=0.2):
    r = ratio(t)
    loss, slope = surrogate(r, t["advantages"], 1 - clip_ratio_low, 1 + clip_ratio_high)
    return loss, slope * r


@per_token
def dual_clip(t, clip_ratio_low=0.2, clip_ratio_high=0.2, dual_clip_ratio=3.0):
    r, a = ratio(t), t["advantages"]
    if a < 0 and r > dual_clip_ratio:
        return -dual_clip_ratio * a, 0.0
    loss, slope = surrogate(r, a, 1 - clip_ratio_low, 1 + clip_ratio_high)
    return loss, slope * r


@per_token
def policy_gradient(t):
    return -t["log_probs"] * t["advantages"], -t["advantages"]


@per_token
def importance_sampling(t):
    value = -ratio(t) * t["advantages"]
    return value, value


@per_token
def cross_entropy(t):
    return -t["log_probs"], -1.0


@per_token
def cispo(t, clip_ratio_low=1.0, clip_ratio_high=4.0):
    slope = -clip(ratio(t), 1 - clip_ratio_low, 1 + clip_ratio_high) * t["advantages"]
    return slope * t["log_probs"], slope


@per_token
def sapo(t, tau_positive=1.0, tau_negative=1.05):
    r, a = ratio(t), t["advantages"]
    tau = tau_positive if a > 0 else tau_negative
    p = 1 / (1 + math.exp(-tau * (r - 1)))
    return -4 / tau * p * a, -4 * p * (1 - p) * r * a


@per_token
def dro(t, beta):
    d = t["log_probs"] - t["old_log_probs"]
    a = t["advantages"]
    return -a * t["log_probs"] + beta / 2 * d * d, -a + beta * d


def dppo(divergence):
    @per_token
    def reference(t, divergence_max):
        r, a = ratio(t), t["advantages"]
        p, q = math.exp(t["old_log_probs"]), math.exp(t["log_probs"])
        if divergence(p, q) > divergence_max and a * (r - 1) > 0:
            return 0.0, 0.0
        return -r * a, -r * a

    return reference


dppo_tv = dppo(lambda p, q: abs(p - q))
dppo_kl = dppo(lambda p, q: p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)))


@per_token
def on_policy_distillation(t):
    value = ratio(t) * (t["old_log_probs"] - t["teacher_log_probs"])
    return value, value


def gspo(sequences, clip_ratio_low=3e-4, clip_ratio_high=4e-4):
    losses, gradients = [], []
    for tokens in sequences:
        n = max(1, len(tokens))
        s = math.exp(sum(t["log_probs"] - t["old_log_probs"] for t in tokens) / n)
        pairs = [
            surrogate(s, t["advantages"], 1 - clip_ratio_low, 1 + clip_ratio_high) for t in tokens
        ]
        losses.append([loss for loss, _ in pairs])
        total_slope = sum(t["w"] * slope for t, (_, slope) in zip(tokens, pairs, strict=True))
        gradients.append([total_slope * s / n for _ in tokens])
    return losses, gradients


def gspo_token(sequences, clip_ratio_low=3e-4, clip_ratio_high=4e-4):
    losses, gradients = [], []
    for tokens in sequences:
        n = max(1, len(tokens))
        s = math.exp(sum(t["log_probs"] - t["old_log_probs"] for t in tokens) / n)
        pairs = [
            surrogate(s, t["advantages"], 1 - clip_ratio_low, 1 + clip_ratio_high) for t in tokens
        ]
        losses.append([loss for loss, _ in pairs])
        gradients.append([t["w"] * slope * s for t, (_, slope) in zip(tokens, pairs, strict=True)])
    return losses, gradients


def gmpo(sequences, log_clip_low=0.4, log_clip_high=0.4):
    losses, gradients = [], []
    for tokens in sequences:
        n = max(1, len(tokens))
        kept, moves = [], []
        for t in tokens:
            d = t["log_probs"] - t["old_log_probs"]
            bound = max(d, -log_clip_low) if t["advantages"] < 0 else min(d, log_clip_high)
            kept.append(bound)
            moves.append(1.0 if bound == d else 0.0)
        s = math.exp(sum(kept) / n)
        losses.append([-s * t["advantages"] for t in tokens])
        total_slope = -sum(t["w"] * t["advantages"] for t in tokens)
        gradients.append([total_slope * s / n * move for move in moves])
    return losses, gradients


def topr(sequences, truncate_positive=None):
    losses, gradients = [], []
    for tokens in sequences:
        rho = math.exp(sum(t["log_probs"] - t["old_log_probs"] for t in tokens))
        good = 1.0 if truncate_positive is None else min(rho, truncate_positive)
        slopes = [
            -(min(rho, 1.0) if t["advantages"] < 0 else good) * t["advantages"] for t in tokens
        ]
        losses.append([slope * t["log_probs"] for slope, t in zip(slopes, tokens, strict=True)])
        gradients.append([slope * t["w"] for slope, t in zip(slopes, tokens, strict=True)])
    return losses, gradients


def covariances(sequences):
    tokens = [t for sequence in sequences for t in sequence]
    n = len(tokens)
    mean_p = sum(t["log_probs"] for t in tokens) / n
    mean_a = sum(t["advantages"] for t in tokens) / n
    return [
        [(t["log_probs"] - mean_p) * (t["advantages"] - mean_a) for t in sequence]
        for sequence in sequences
    ]


def clip_cov(
    sequences,
    clip_ratio_low=0.2,
    clip_ratio_high=0.2,
    cov_fraction=2e-4,
    cov_min=1.0,
    cov_max=5.0,
):
    candidates = []
    for i, covs in enumerate(covariances(sequences)):
        for j, cov in enumerate(covs):
            t = sequences[i][j]
            a, r = t["advantages"], ratio(t)
            binds = (a > 0 and r > 1 + clip_ratio_high) or (a < 0 and r < 1 - clip_ratio_low)
            if not binds and cov_min < cov < cov_max:
                candidates.append((i, j))
    wanted = max(1, math.floor(cov_fraction * sum(map(len, sequences))))
    share = min(1.0, wanted / max(1, len(candidates)))
    chosen = [
        at
        for k, at in enumerate(candidates)
        if math.floor((k + 1) * share + 1e-9) > math.floor(k * share + 1e-9)
    ]
    losses, gradients = ppo_clip(
        sequences, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high
    )
    for i, j in chosen:
        losses[i][j] = gradients[i][j] = 0.0
    return losses, gradients


def kl_cov(sequences, cov_fraction=2e-4, cov_kl_coef=1.0):
    covs = covariances(sequences)
    ranked = sorted(
        ((i, j) for i, row in enumerate(covs) for j in range(len(row))),
        key=lambda at: -covs[at[0]][at[1]],
    )
    chosen = ranked[: max(1, math.floor(cov_fraction * len(ranked)))]
    losses, gradients = importance_sampling(sequences)
    for i, j in chosen:
        t = sequences[i][j]
        d = t["log_probs"] - t["old_log_probs"]
        losses[i][j] += cov_kl_coef * abs(d)
        gradients[i][j] += t["w"] * cov_kl_coef * (1 if d > 0 else -1)
    return losses, gradients


def on_rollout(reference):
    """The same loss, anchored at the rollout policy."""

    def anchored(sequences, **settings):
        renamed = [
            [{**t, "old_log_probs": t["rollout_log_probs"]} for t in sequence]
            for sequence in sequences
        ]
        return reference(renamed, **settings)

    return anchored


def tinker_ppo(sequences, clip_low_threshold=0.8, clip_high_threshold=1.2):
    return on_rollout(ppo_clip)(
        sequences, clip_ratio_low=1 - clip_low_threshold, clip_ratio_high=clip_high_threshold - 1
    )


def tinker_cispo(sequences, clip_low_threshold=0.0, clip_high_threshold=4.0):
    return on_rollout(cispo)(
        sequences, clip_ratio_low=1 - clip_low_threshold, clip_ratio_high=clip_high_threshold - 1
    )


tinker_importance_sampling = on_rollout(importance_sampling)
tinker_dro = on_rollout(dro)
