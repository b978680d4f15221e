#!/usr/bin/env python3
"""Checks the log-prob engine on one CUDA GPU and prints achieved bandwidth and FLOP rates.

One call, a few minutes on an H200: first every backend against float64 on small odd shapes, then
the logits path (bandwidth), then the fused head (FLOP rate, memory). Exits 1 if a check fails.

    python scripts/bench_gpu.py                      # N = 16384, V = 151936, H = 2048, bf16
    python scripts/bench_gpu.py -n 4096 --peak-tbs 3.35 --peak-tflops 989
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl_loss.logprobs.forward_gradients import linear_loss_sum
from megatron_rl_loss.logprobs.lm_head import linear_log_probs
from megatron_rl_loss.logprobs.vocab_parallel import vocab_parallel_log_probs

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-6}


# --- checks -------------------------------------------------------------------------------------


def float64_results(logits: torch.Tensor, labels: torch.Tensor, g: torch.Tensor, h: torch.Tensor):
    """log-probs, entropy and gradient of sum(g * log_probs + h * entropy), in float64."""
    x = logits.double().requires_grad_()
    log_p = torch.log_softmax(x / 0.7, -1)
    log_probs = log_p.gather(1, labels[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (g * log_probs + h * entropy).sum().backward()
    return log_probs.detach(), entropy.detach(), x.grad


def check_logits(dtype: torch.dtype, backend: str, n: int, v: int) -> bool:
    torch.manual_seed(n)
    real = v - 3
    logits = (torch.randn(n, v, device="cuda") * 3).to(dtype)
    labels = torch.randint(0, real, (n,), device="cuda")
    g, h = torch.randn(2, n, device="cuda")
    if n > 1:
        g[0] = h[0] = 0
    want = float64_results(logits[:, :real], labels, g, h)
    leaf = logits.clone().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(
        leaf * 1, labels, with_entropy=True, temperature=0.7, vocab_size=real, backend=backend
    )
    (g * log_probs + h * entropy).sum().backward()
    errors = {
        "log-prob": (log_probs - want[0]).abs().max().item(),
        "entropy": (entropy - want[1]).abs().max().item(),
        "gradient": (leaf.grad[:, :real] - want[2]).abs().max().item() / want[2].abs().max().item(),
    }
    good = errors["log-prob"] < 1e-4 and errors["entropy"] < 1e-4
    good &= errors["gradient"] < TOLERANCE[dtype]
    good &= not leaf.grad[:, real:].any().item() and (n == 1 or not leaf.grad[0].any().item())
    return report(f"logits {backend} {dtype} N={n} V={v}", good, errors)


def check_head(dtype: torch.dtype, block_size: int, in_forward: bool, main_grad: bool) -> bool:
    torch.manual_seed(0)
    n, v, width = 384, 5000, 256
    hidden = torch.randn(n, width, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(v, width, device="cuda") * 0.1).to(dtype).requires_grad_()
    labels = torch.randint(0, v, (n,), device="cuda")
    g, h = torch.randn(2, n, device="cuda")
    x, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    log_p = torch.log_softmax(x @ w.t(), -1)
    want = log_p.gather(1, labels[:, None])[:, 0]
    (g * want - h * (log_p.exp() * log_p).sum(-1)).sum().backward()
    if main_grad:
        weight.main_grad = torch.zeros(v, width, device="cuda")
    if in_forward:
        loss, log_probs, _ = linear_loss_sum(
            hidden, weight, labels, lambda lp, e, at: g[at] * lp + h[at] * e,
            with_entropy=True, chunk_size=block_size,
        )  # fmt: skip
    else:
        log_probs, entropy = linear_log_probs(
            hidden, weight, labels, with_entropy=True, block_size=block_size,
            accumulate_main_grad=main_grad,
        )  # fmt: skip
        loss = (g * log_probs + h * entropy).sum()
    loss.backward()
    grad_weight = weight.main_grad if main_grad else weight.grad
    errors = {
        "log-prob": (log_probs - want).abs().max().item(),
        "grad hidden": relative(hidden.grad, x.grad),
        "grad weight": relative(grad_weight, w.grad),
    }
    limit = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-3}[dtype]
    name = "in forward" if in_forward else "main_grad" if main_grad else "blocks"
    return report(f"head {name} {block_size} {dtype}", max(errors.values()) < limit, errors)


def relative(x: torch.Tensor, want: torch.Tensor) -> float:
    return ((x - want).norm() / want.norm()).item()


def report(name: str, good: bool, errors: dict[str, float]) -> bool:
    figures = ", ".join(f"{k} {v:.1e}" for k, v in errors.items())
    print(f"{'ok  ' if good else 'FAIL'} {name}: {figures}", flush=True)
    return good


def run_checks() -> bool:
    results = []
    for backend in ("triton", "eager"):
        for dtype in TOLERANCE:
            for n, v in ((1, 50_257), (37, 151_936), (700, 5003)):
                results.append(check_logits(dtype, backend, n, v))
    for dtype in (torch.bfloat16, torch.float32):
        for block in (512, 5000):
            results.append(check_head(dtype, block, False, False))
        results.append(check_head(dtype, 512, False, True))
        results.append(check_head(dtype, 100, True, False))
    return all(results)


# --- timing -------------------------------------------------------------------------------------


def seconds(run: Callable[[], None], before: Callable[[], None], reps: int) -> float:
    """Median over `reps` runs after two warm-ups; `before` is not timed."""
    times = []
    for i in range(reps + 2):
        before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


class Handout(torch.autograd.Function):
    """Stands for the head: hands out logits that nobody else owns."""

    @staticmethod
    def forward(ctx, seed, make):
        return make()

    @staticmethod
    def backward(ctx, grad):
        return None, None


def time_logits(args: argparse.Namespace, entropy: bool, backend: str) -> None:
    labels = torch.randint(0, args.v, (args.n,), device="cuda")
    upstream = torch.randn(args.n, device="cuda")
    seed = torch.zeros((), device="cuda", requires_grad=True)
    source = torch.randn(args.n, args.v, device="cuda", dtype=torch.bfloat16)
    state: dict[str, torch.Tensor] = {}

    def before() -> None:
        state.clear()
        state["logits"] = Handout.apply(seed, source.clone)
        torch.cuda.reset_peak_memory_stats()
        state["base"] = torch.cuda.memory_allocated()

    def forward() -> None:
        log_probs, h = vocab_parallel_log_probs(
            state.pop("logits"), labels, with_entropy=entropy, backend=backend
        )
        state["loss"] = (upstream * log_probs).sum() + (h.sum() if entropy else 0)

    def both() -> None:
        forward()
        state.pop("loss").backward()

    t_forward, t = seconds(forward, before, args.reps), seconds(both, before, args.reps)
    extra = torch.cuda.max_memory_allocated() - state["base"]
    traffic, name = 6 * args.n * args.v, "log-prob + entropy" if entropy else "log-prob"
    rate = traffic / t / 1e12
    print(
        f"| logits, {backend}, {name} | {t_forward * 1e3:.2f} | {(t - t_forward) * 1e3:.2f} | "
        f"{t * 1e3:.2f} | {rate:.2f} TB/s of 6 B per logit, {rate / args.peak_tbs:.0%} of "
        f"{args.peak_tbs} | {extra / 1e9:.3f} |",
        flush=True,
    )


def time_head(args: argparse.Namespace, name: str, products: int, make_loss: Callable) -> None:
    hidden = torch.randn(args.n, args.hidden, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(args.v, args.hidden, device="cuda", dtype=torch.bfloat16) * 0.02
    hidden.requires_grad_(), weight.requires_grad_()
    labels = torch.randint(0, args.v, (args.n,), device="cuda")
    upstream = torch.randn(2, args.n, device="cuda")
    base = 0

    def before() -> None:
        nonlocal base
        hidden.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()

    t = seconds(lambda: make_loss(hidden, weight, labels, upstream).backward(), before, args.reps)
    grads = (hidden.numel() + weight.numel()) * 2
    extra = torch.cuda.max_memory_allocated() - base - grads
    rate = products * 2 * args.n * args.v * args.hidden / t / 1e12
    print(
        f"| head, {name} | | | {t * 1e3:.1f} | {rate:.0f} TFLOP/s in {products} products, "
        f"{rate / args.peak_tflops:.0%} of {args.peak_tflops} | {extra / 1e9:.3f} |",
        flush=True,
    )


def plain_loss(hidden, weight, labels, upstream, **kwargs):
    log_probs, entropy = linear_log_probs(hidden, weight, labels, with_entropy=True, **kwargs)
    return (upstream[0] * log_probs + upstream[1] * entropy).sum()


def forward_loss(hidden, weight, labels, upstream):
    return linear_loss_sum(
        hidden, weight, labels, lambda lp, h, at: upstream[0][at] * lp + upstream[1][at] * h,
        with_entropy=True,
    ).loss_sum  # fmt: skip


def run_timings(args: argparse.Namespace) -> None:
    print(f"\nN={args.n} V={args.v} H={args.hidden} bf16, median of {args.reps}")
    print("| path | forward ms | backward ms | total ms | rate | extra GB beside the grads |")
    print("|---|---|---|---|---|---|")
    for backend in ("triton", "eager"):
        for entropy in (True, False):
            time_logits(args, entropy, backend)
    for block in (1024, 2048, 4096, 8192):
        name = f"blocks of {block}, entropy"
        time_head(args, name, 4, lambda *a, b=block: plain_loss(*a, block_size=b))
    time_head(args, "kept", 3, lambda *a: plain_loss(*a, memory_budget_bytes=1 << 50))
    time_head(args, "gradients in forward", 3, forward_loss)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=16_384, help="tokens")
    parser.add_argument("-v", type=int, default=151_936, help="vocabulary")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--peak-tbs", type=float, default=4.3, help="memory bandwidth, TB/s")
    parser.add_argument("--peak-tflops", type=float, default=790, help="dense bf16, TFLOP/s")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_gpu.py needs a CUDA GPU; on CPU use bench_logprobs.py.", file=sys.stderr)
        return 2
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    good = run_checks()
    run_timings(args)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
