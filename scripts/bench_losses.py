"""Measures what each loss costs, as a share of the log-probs' forward and backward pass.

    python scripts/bench_losses.py [--num-tokens 16384] [--vocab-size 32000]

The log-probs from logits are the smallest part of a step that every step has (no model at all), so
the true share of a step is smaller than the number printed. All are measured in turn, round after
round, and compared by their medians; the exit status is 1 if a loss takes more than the limit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from megatron_rl_loss.logprobs.vocab_parallel import vocab_parallel_log_probs
from megatron_rl_loss.losses.objective import Objective, is_of_set
from megatron_rl_loss.losses.presets import PRESETS, preset_objective
from megatron_rl_loss.losses.value import ValueObjective

ROWS = 16
PIECE = 1024  # tokens whose logits are held at a time; those of 16k x 32k tokens take 2 GB
TOP_K = 64  # a teacher's tokens per position
LIMIT = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-tokens", type=int, default=16384)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    pieces = args.num_tokens / PIECE
    runs = {name: loss_run(preset_objective(name), args.num_tokens) for name in PRESETS}
    runs["value"] = value_run(args.num_tokens)
    base = log_probs_run(args.vocab_size)
    times = rounds({"log-probs": base, **runs}, args.rounds)
    step = pieces * times.pop("log-probs")
    print(f"log-probs forward + backward, {args.num_tokens} tokens: {step:.2f} s")
    for name, seconds in times.items():
        print(f"{name:32s} {1e3 * seconds:8.2f} ms  {100 * seconds / step:6.2f} %")
    worst = max(times, key=times.__getitem__)
    share = times[worst] / step
    print(f"worst: {worst}, {100 * share:.2f} % (limit {100 * LIMIT:.0f} %)")
    return int(share > LIMIT)


def rounds(runs: dict[str, Callable[[], None]], number: int) -> dict[str, float]:
    """Median seconds of each, measured in turn; one round before that warms up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(number + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if i:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def log_probs_run(vocab_size: int) -> Callable[[], None]:
    logits = torch.randn(PIECE, vocab_size, requires_grad=True)
    labels = torch.randint(0, vocab_size, (PIECE,))

    def run() -> None:
        log_probs, entropy = vocab_parallel_log_probs(logits * 1.0, labels, with_entropy=True)
        (log_probs.sum() + entropy.sum()).backward()
        logits.grad = None

    return run


def loss_run(objective: Objective, num_tokens: int) -> Callable[[], None]:
    shape, loss_mask, weights = made_batch(num_tokens)
    log_probs = (-1.5 + 0.3 * torch.randn(shape)).requires_grad_()
    tensors = {
        name: -1.5 + 0.3 * torch.randn((*shape, TOP_K) if is_of_set(name) else shape)
        for name in objective.needs
    }
    others: dict = {}
    if objective.spec.reads_token_set:
        others["token_log_probs"] = torch.randn(*shape, TOP_K).sub(8.0).requires_grad_()
    step = partial(objective, log_probs, None, tensors, loss_mask, weights, **others)
    return lambda: step()[0].backward()


def value_run(num_tokens: int) -> Callable[[], None]:
    shape, loss_mask, weights = made_batch(num_tokens)
    values = torch.randn(shape).requires_grad_()
    objective = ValueObjective()
    tensors = {name: torch.randn(shape) for name in objective.needs}
    return lambda: objective(values, tensors, loss_mask, weights)[0].backward()


def made_batch(num_tokens: int) -> tuple[tuple[int, int], torch.Tensor, torch.Tensor]:
    shape = (ROWS, num_tokens // ROWS)
    loss_mask = torch.rand(shape) < 0.7
    return shape, loss_mask, torch.where(loss_mask, 1.0 / num_tokens, 0.0)


if __name__ == "__main__":
    sys.exit(main())
