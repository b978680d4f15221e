"""Trains one mini-batch from the same weights behind each backend and writes docs/backends.md.

    python scripts/compare_backends.py

Model, mini-batch and runners are those of the tests.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.dist.test_torch_backend import train  # noqa: E402
from tests.mcore.harness import Layout, replace, train_once  # noqa: E402
from tests.spawn import run_ranks  # noqa: E402

BASE = Layout(settings={"kl_coef": 0.1, "entropy_coef": 0.01})
MEGATRON = {
    "Megatron-Core, 1 rank": BASE,
    "Megatron-Core, DP 2": replace(BASE, dp=2),
    "Megatron-Core, TP 2": replace(BASE, tp=2),
    "Megatron-Core, PP 2": replace(BASE, pp=2),
}
TORCH = {"DistributedDataParallel, 2 ranks": "ddp", "fully_shard (FSDP2), 2 ranks": "fsdp2"}
HEAD = """# The same mini-batch behind each backend

Made by `scripts/compare_backends.py`: a two-layer Llama, 8 sequences, dual-clip PPO with KL and
entropy terms, fp32 in Megatron and fp64 in the torch model. *Gradient error* is the largest
|g - g1| / |g1| over the parameters, g1 from Megatron on one rank.

| backend | loss | KL | gradient norm | gradient error |
|---|---|---|---|---|
"""


def results() -> dict[str, tuple]:
    """Returns metrics and gradients by backend."""
    found = {}
    for name, layout in MEGATRON.items():
        outcome = train_once(layout)
        found[name] = (outcome.metrics, outcome.gradients)
    for name, kind in TORCH.items():
        found[name] = run_ranks(train, 2, replace(BASE, dp=2), kind)[0]
    return found


def table(found: dict[str, tuple]) -> str:
    _, first = next(iter(found.values()))
    lines = []
    for name, (metrics, gradients) in found.items():
        errors = [
            (gradients[k].double() - g.double()).norm() / g.double().norm()
            for k, g in first.items()
        ]
        lines.append(
            f"| {name} | {metrics['loss']:.7f} | {metrics['kl']:.6f} | "
            f"{metrics['grad_norm']:.6f} | {float(max(errors)):.1e} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    text = table(results())
    print(text)
    (ROOT / "docs" / "backends.md").write_text(HEAD + text)


if __name__ == "__main__":
    main()
