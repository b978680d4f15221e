"""The candidates of `bench_logprobs.py`: this package and its peers behind one signature.

A candidate returns (log_probs, entropy or None) from (logits, labels, entropy, group), or from
(hidden, weight, labels, entropy, group).
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Run = Callable[..., "tuple[torch.Tensor, torch.Tensor | None]"]


def ours(logits, labels, entropy, group, backend=None):
    from megatron_rl_loss.logprobs.vocab_parallel import vocab_parallel_log_probs

    return vocab_parallel_log_probs(
        logits, labels, tp_group=group, with_entropy=entropy, backend=backend
    )


def ours_eager(logits, labels, entropy, group):
    return ours(logits, labels, entropy, group, "eager")


def mcore(logits, labels, entropy, group):
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    return -vocab_parallel_cross_entropy(logits[:, None], labels[:, None])[:, 0], None


def mcore_fused(logits, labels, entropy, group):
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    loss = fused_vocab_parallel_cross_entropy(logits[:, None], labels[:, None], group)
    return -loss[:, 0], None


def verl(logits, labels, entropy, group):
    module = file_of_package("verl", "utils/megatron/tensor_parallel.py")
    if not entropy:
        return module.vocab_parallel_log_probs_from_logits(logits, labels), None
    copy = logits.clone()  # as verl's Megatron engine does: its entropy changes the logits
    return (
        module.vocab_parallel_log_probs_from_logits(copy, labels),
        module.vocab_parallel_entropy(logits),
    )


def trl(logits, labels, entropy, group):
    names = trl_functions()
    return (
        names["selective_log_softmax"](logits, labels),
        names["entropy_from_logits"](logits) if entropy else None,
    )


def torch_ce(logits, labels, entropy, group):
    return -torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none"), None


def torch_log_softmax(logits, labels, entropy, group):
    log_p = torch.log_softmax(logits.float(), -1)
    h = -(log_p.exp() * log_p).sum(-1) if entropy else None
    return log_p.gather(1, labels[:, None])[:, 0], h


def head_ours(hidden, weight, labels, entropy, group, **kwargs):
    from megatron_rl_loss.logprobs.lm_head import linear_log_probs

    return linear_log_probs(hidden, weight, labels, tp_group=group, with_entropy=entropy, **kwargs)


def head_ours_blocks(hidden, weight, labels, entropy, group):
    return head_ours(hidden, weight, labels, entropy, group, memory_budget_bytes=0, block_size=8192)


def head_ours_small_blocks(hidden, weight, labels, entropy, group):
    return head_ours(hidden, weight, labels, entropy, group, block_size=2048)


def head_ours_kept(hidden, weight, labels, entropy, group):
    return head_ours(hidden, weight, labels, entropy, group, memory_budget_bytes=1 << 50)


def head_ours_in_forward(hidden, weight, labels, entropy, group):
    from megatron_rl_loss.logprobs.forward_gradients import linear_loss_sum

    loss, log_probs, entropies = linear_loss_sum(
        hidden, weight, labels, lambda lp, h, at: lp if h is None else lp + h,
        tp_group=group, with_entropy=entropy, chunk_size=1024,
    )  # fmt: skip
    return log_probs + (loss - loss.detach()), entropies


def head_mcore(hidden, weight, labels, entropy, group):
    return mcore(hidden @ weight.t(), labels, entropy, group)


def head_torch(hidden, weight, labels, entropy, group, **options):
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    loss = torch.nn.functional.linear_cross_entropy(
        hidden, weight, labels, reduction="none", options=LinearCrossEntropyOptions(**options)
    )
    return -loss, None


def head_torch_compact(hidden, weight, labels, entropy, group):
    """torch's faster setting on CPUs with 16-bit matrix instructions; its default avoids them."""
    return head_torch(
        hidden, weight, labels, entropy, group, acc_policy="compact", batch_chunk_size=512
    )


def head_liger(hidden, weight, labels, entropy, group):
    from liger_kernel.ops import fused_linear_scaled_cross_entropy as liger

    result = liger._apply_tp_fallback(hidden, weight, labels, 1.0, -100, entropy, group)
    return (-result[0], result[1]) if entropy else (-result, None)


class _Floor(torch.autograd.Function):
    """The four matrix products of a recomputing head over blocks, and nothing else."""

    @staticmethod
    def forward(ctx, hidden, weight, block):
        ctx.save_for_backward(hidden, weight)
        ctx.block = block
        buffer = hidden.new_empty(hidden.shape[0] * block)
        for part in weight.split(block):
            _product(hidden, part, buffer)
        return hidden[:, 0].float()

    @staticmethod
    def backward(ctx, _):
        hidden, weight = ctx.saved_tensors
        grad_weight, grad_hidden = torch.empty_like(weight), torch.zeros_like(hidden)
        buffer = hidden.new_empty(hidden.shape[0] * ctx.block)
        for part, out in zip(weight.split(ctx.block), grad_weight.split(ctx.block), strict=True):
            z = _product(hidden, part, buffer)
            torch.mm(z.t(), hidden, out=out)
            grad_hidden.add_(z @ part)
        return grad_hidden, grad_weight, None


def _product(hidden, part, buffer):
    out = buffer[: hidden.shape[0] * len(part)].view(hidden.shape[0], len(part))
    return torch.mm(hidden, part.t(), out=out)


def floor(hidden, weight, labels, entropy, group):
    return _Floor.apply(hidden, weight, 8192), None


# name -> (function, knows entropy, knows tensor parallelism)
LOGITS: dict[str, tuple[Run, bool, bool]] = {
    "ours": (ours, True, True),
    "ours_eager": (ours_eager, True, True),
    "mcore": (mcore, False, True),
    "mcore_fused": (mcore_fused, False, True),
    "verl": (verl, True, True),
    "trl": (trl, True, False),
    "torch_ce": (torch_ce, False, False),
    "torch_log_softmax": (torch_log_softmax, True, False),
}
HIDDEN: dict[str, tuple[Run, bool, bool]] = {
    "ours_blocks": (head_ours_blocks, True, True),
    "ours_small_blocks": (head_ours_small_blocks, True, True),
    "ours_kept": (head_ours_kept, True, True),
    "ours_in_forward": (head_ours_in_forward, True, True),
    "floor": (floor, True, False),
    "torch_linear_ce": (head_torch, False, False),
    "torch_linear_ce_compact": (head_torch_compact, False, False),
    "mcore": (head_mcore, False, False),
    "liger_fallback": (head_liger, True, True),
}
SELF = (
    "ours ours_eager ours_blocks ours_small_blocks ours_kept ours_in_forward floor torch_ce "
    "torch_log_softmax"
)
NEEDS = {
    "mcore_fused": "megatron",
    "torch_linear_ce": "torch",
    "torch_linear_ce_compact": "torch",
    "liger_fallback": "liger_kernel",
}


@functools.cache
def file_of_package(package: str, path: str) -> Any:
    """One module of an installed package, loaded without the package's own imports."""
    root = Path(importlib.util.find_spec(package).origin).parent
    spec = importlib.util.spec_from_file_location("peer_" + package, root / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def trl_functions() -> dict[str, Any]:
    """TRL's two functions out of trainer/utils.py, whose other imports are not needed here."""
    root = Path(importlib.util.find_spec("trl").origin).parent
    tree = ast.parse((root / "trainer/utils.py").read_text())
    wanted = {"selective_log_softmax", "entropy_from_logits"}
    tree.body = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in wanted]
    names = {"torch": torch, "F": torch.nn.functional, "is_triton_available": lambda: False}
    exec(compile(ast.fix_missing_locations(tree), "trl", "exec"), names)
    return names


def is_ours(name: str) -> bool:
    return name in SELF.split()


def installed(name: str) -> bool:
    package = NEEDS.get(name, name)
    return (
        is_ours(name) or importlib.util.find_spec(package.replace("mcore", "megatron")) is not None
    )
