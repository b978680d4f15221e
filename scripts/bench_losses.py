"""Measures what each loss costs, as a share of the log-probs' forward and backward pass.

    python scripts/bench_losses.py [--num-tokens 16384] [--vocab-size 32000]

The log-probs from logits are the smallest part of a step that every step has (no model at all), so
the true share of a step is smaller than the number printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from megatron_rl_loss.logprobs.vocab_parallel import vocab_parallel_log_probs
from megatron_rl_loss.losses.objective import Objective
from megatron_rl_loss.losses.presets import PRESETS, preset_objective

ROWS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-tokens", type=int, default=16384)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    step = log_probs_time(args.num_tokens, args.vocab_size)
    print(f"log-probs forward + backward, {args.num_tokens} tokens: {step:.2f} s")
    worst = 0.0
    for name in PRESETS:
        seconds = loss_time(preset_objective(name), args.num_tokens, args.repeats)
        worst = max(worst, seconds / step)
        print(f"{name:32s} {1e3 * seconds:8.2f} ms  {100 * seconds / step:6.2f} %")
    print(f"worst: {100 * worst:.2f} %")


def log_probs_time(num_tokens: int, vocab_size: int, piece: int = 1024) -> float:
    """Seconds for all tokens, from a piece of them (logits of 16k x 32k tokens take 2 GB)."""
    logits = torch.randn(piece, vocab_size, requires_grad=True)
    labels = torch.randint(0, vocab_size, (piece,))

    def run() -> None:
        log_probs, entropy = vocab_parallel_log_probs(logits * 1.0, labels, with_entropy=True)
        (log_probs.sum() + entropy.sum()).backward()

    return fastest(run, 3) * num_tokens / piece


def loss_time(objective: Objective, num_tokens: int, repeats: int) -> float:
    shape = (ROWS, num_tokens // ROWS)
    log_probs = (-1.5 + 0.3 * torch.randn(shape)).requires_grad_()
    tensors = {name: -1.5 + 0.3 * torch.randn(shape) for name in objective.needs}
    loss_mask = torch.rand(shape) < 0.7
    weights = torch.where(loss_mask, 1.0 / num_tokens, 0.0)

    def run() -> None:
        objective(log_probs, None, tensors, loss_mask, weights)[0].backward()

    return fastest(run, repeats)


def fastest(run: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
