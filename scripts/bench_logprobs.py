#!/usr/bin/env python3
"""Times log-probs (with or without entropy, forward and backward) of this package and its peers.

Every candidate runs in its own process (one per tensor-parallel rank); one run at a time, the
candidates taking turns, the order reversed every other round. Inputs are made anew, untimed,
before each run. Peak memory is the kernel's high-water mark (VmHWM) during the run minus the
resident size just before it: what the operation needs beyond its inputs. CPU time says more than
the clock where other programs share the machine; then also pass --threads 1, for waiting threads
spin.

    python scripts/bench_logprobs.py logits -n 2048 -v 151936 --entropy
    python scripts/bench_logprobs.py logits -n 512 -v 151936 --entropy --tp 2
    python scripts/bench_logprobs.py hidden -n 2048 -v 151936 --hidden 512
    python scripts/bench_logprobs.py logits --candidates ours,mcore --dtype fp32

Peers that are not installed are left out. Two of them need only one file each, so that their
packages can be installed without dependencies, for example into a folder on PYTHONPATH:
    pip install --no-deps --target peers verl==0.9.1 trl liger-kernel
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_logprobs_candidates import HIDDEN, LOGITS, Run, installed, is_ours

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


# --- worker: one process of one candidate ------------------------------------------------------


class Handout(torch.autograd.Function):
    """Stands for the LM head: hands out fresh logits and notes the gradient that comes back."""

    @staticmethod
    def forward(ctx, seed, make, note):
        ctx.note = note
        return make()

    @staticmethod
    def backward(ctx, grad):
        ctx.note.update(grad_dtype=str(grad.dtype)[6:])
        return None, None, None


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def reset_high_water_mark() -> int:
    """Resets VmHWM and returns the resident size."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def worker(args: argparse.Namespace) -> None:
    torch.set_num_threads(max(1, args.threads // args.tp))
    rank = int(os.environ["RANK"])
    store = "file://" + os.environ["BENCH_STORE"]  # a port could be taken by another candidate
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=args.tp)
    if not is_ours(args.worker):
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.tp)
    run = (LOGITS if args.path == "logits" else HIDDEN)[args.worker][0]
    count = count_collectives()
    for line in sys.stdin:
        if line.strip() != "run":
            return
        count.clear()
        result = measure(args, run, rank)
        result["collectives"] = len(count)
        print("RESULT " + json.dumps(result), flush=True)


def count_collectives() -> list[str]:
    calls: list[str] = []
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
        real = getattr(dist, name)

        def counted(*args, _real=real, _name=name, **kwargs):
            calls.append(_name)
            return _real(*args, **kwargs)

        setattr(dist, name, counted)
    return calls


def measure(args: argparse.Namespace, run: Run, rank: int) -> dict[str, Any]:
    dtype, local = DTYPES[args.dtype], args.v // args.tp
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, args.v, (args.n,), generator=generator)
    note: dict[str, Any] = {"grad_dtype": "-"}
    upstream = torch.randn(2, args.n, generator=generator) / args.n
    if args.path == "logits":
        seed = torch.zeros((), requires_grad=True)
        operands = [Handout.apply(seed, lambda: make_logits(args, rank, dtype, local), note)]
    else:
        hidden = torch.randn(args.n, args.hidden, generator=generator).to(dtype)
        weight = (torch.randn(local, args.hidden, generator=generator) * 0.1).to(dtype)
        operands = [hidden.requires_grad_(), weight.requires_grad_()]
    resident, cpu = reset_high_water_mark(), cpu_seconds()
    dist.barrier()
    start = time.perf_counter()
    log_probs, entropy = run(*operands, labels, args.entropy, dist.group.WORLD)
    operands.clear()  # nobody but the graph holds the logits, as in a model
    middle = time.perf_counter()
    loss = (upstream[0] * log_probs).sum()
    if entropy is not None:
        loss = loss + (upstream[1] * entropy).sum()
    loss.backward()
    end = time.perf_counter()
    peak = status("VmHWM") - resident
    return {
        "forward": middle - start, "backward": end - middle, "total": end - start,
        "cpu": cpu_seconds() - cpu, "peak": peak, "log_probs": log_probs[:8].tolist(),
        "entropy": None if entropy is None else entropy[:8].tolist(), **note,
    }  # fmt: skip


def make_logits(args: argparse.Namespace, rank: int, dtype: torch.dtype, local: int):
    """This rank's [N, V / tp], filled in pieces so that no larger copy was ever resident."""
    generator = torch.Generator().manual_seed(1 + rank)
    logits = torch.empty(args.n, local, dtype=dtype)
    base = torch.randn(64, local, generator=generator) * 2
    for i in range(0, args.n, 64):
        logits[i : i + 64] = base.roll(i, 1)[: args.n - i]
    return logits


def reference(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 log-probs and entropy of the first 8 rows."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, args.v, (args.n,), generator=generator)[:8]
    dtype = DTYPES[args.dtype]
    if args.path == "logits":
        parts = []
        for rank in range(args.tp):
            g = torch.Generator().manual_seed(1 + rank)
            parts.append((torch.randn(64, args.v // args.tp, generator=g) * 2).to(dtype)[:8])
        logits = torch.cat(parts, 1)
    else:
        torch.randn(2, args.n, generator=generator)
        hidden = torch.randn(args.n, args.hidden, generator=generator).to(dtype)[:8]
        weight = (torch.randn(args.v, args.hidden, generator=generator) * 0.1).to(dtype)
        logits = hidden @ weight.t()
    log_p = torch.log_softmax(logits.double(), -1)
    return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


# --- parent: takes turns, prints the table -----------------------------------------------------


class Candidate:
    """The worker processes of one candidate."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.results, self.warm = name, [], False
        self.folder = tempfile.TemporaryDirectory(prefix="bench-")
        store = Path(self.folder.name) / "store"
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", name]
        env = {**os.environ, "BENCH_STORE": str(store), "WORLD_SIZE": str(args.tp)}
        self.processes = [
            subprocess.Popen(
                command, env={**env, "RANK": str(rank)}, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for rank in range(args.tp)
        ]  # fmt: skip

    def run(self) -> bool:
        """One run on all ranks; the slowest rank counts. False if a process failed."""
        try:
            for p in self.processes:
                p.stdin.write("run\n")
                p.stdin.flush()
            answers = [self._answer(p) for p in self.processes]
        except (BrokenPipeError, EOFError):
            errors = self.processes[0].communicate()[1].strip().splitlines()
            print(f"{self.name}: left out: {errors[-1] if errors else 'failed'}", file=sys.stderr)
            return False
        self.results.append(max(answers, key=lambda a: a["total"]))
        return True

    @staticmethod
    def _answer(process: subprocess.Popen) -> dict[str, Any]:
        for line in process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line[7:])
        raise EOFError

    def stop(self) -> None:
        for p in self.processes:
            p.kill()
            p.wait()
        self.folder.cleanup()

    def median(self, key: str) -> float:
        return statistics.median(r[key] for r in self.results)


def take_turns(names: list[str], args: argparse.Namespace) -> list[Candidate]:
    candidates = [Candidate(name, args) for name in names]
    try:
        for c in candidates:
            c.warm = c.run()  # compilation included
            c.results.clear()
        candidates = [c for c in candidates if c.warm]
        for i in range(args.reps):
            for c in candidates if i % 2 == 0 else reversed(candidates):
                c.run()
    except KeyboardInterrupt:
        print("stopped early; medians of the runs so far", file=sys.stderr)
    finally:
        for c in candidates:
            c.stop()
    return [c for c in candidates if c.results]


def print_table(candidates: list[Candidate], args: argparse.Namespace) -> None:
    tokens = f"N={args.n} V={args.v}" + (f" H={args.hidden}" if args.path == "hidden" else "")
    print(
        f"\n#### {args.path}, {tokens}, {args.dtype}, "
        f"{'log-prob + entropy' if args.entropy else 'log-prob only'}, TP {args.tp}, "
        f"{len(candidates[0].results)} interleaved runs, {args.threads} threads in all"
    )
    print(
        "| candidate | forward ms | backward ms | total ms | min..max | CPU ms | x first | x CPU | "
        "extra MB | extra B per logit | collectives | grad | error log-prob | error entropy |"
    )
    print("|" + "---|" * 14)
    log_p, h = reference(args)
    first, first_cpu = candidates[0].median("total"), candidates[0].median("cpu")
    for c in sorted(candidates, key=lambda c: c.median("total")):
        totals = [r["total"] * 1e3 for r in c.results]
        peak, last = c.median("peak"), c.results[-1]
        print(
            f"| {c.name} | {c.median('forward') * 1e3:.0f} | {c.median('backward') * 1e3:.0f} | "
            f"{c.median('total') * 1e3:.0f} | {min(totals):.0f}..{max(totals):.0f} | "
            f"{c.median('cpu') * 1e3:.0f} | {c.median('total') / first:.2f} | "
            f"{c.median('cpu') / first_cpu:.2f} | {peak / 1e6:.0f} | "
            f"{peak / (args.n * args.v / args.tp):.2f} | {last['collectives']} | "
            f"{last['grad_dtype']} | {error(last['log_probs'], log_p, c.name)} | "
            f"{error(last['entropy'], h, c.name)} |"
        )


def error(values: list[float] | None, want: torch.Tensor, name: str) -> str:
    if values is None or name == "floor":
        return "-"
    return f"{(torch.tensor(values, dtype=torch.float64) - want).abs().max().item():.1e}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", choices=("logits", "hidden"))
    parser.add_argument("-n", type=int, default=2048, help="tokens")
    parser.add_argument("-v", type=int, default=151_936, help="vocabulary, all ranks")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size of the head")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--entropy", action="store_true", help="with entropy and its gradient")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="over all ranks")
    parser.add_argument("--candidates", help="comma-separated; the first is the ratio's base")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.worker:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers
        return worker(args)
    table = LOGITS if args.path == "logits" else HIDDEN
    names = args.candidates.split(",") if args.candidates else list(table)
    if unknown := set(names) - set(table):
        sys.exit(f"no such candidates: {', '.join(sorted(unknown))}; there are {', '.join(table)}.")
    names = [
        n for n in names
        if (table[n][1] or not args.entropy) and (table[n][2] or args.tp == 1) and installed(n)
    ]  # fmt: skip
    candidates = take_turns(names, args)
    if candidates:
        print_table(candidates, args)


if __name__ == "__main__":
    main()
