"""A token-level loss on the LM head whose gradients are made in forward: three products, not four.

A loss that is a sum over tokens, with weights known beforehand, can be differentiated as soon as a
token's logits are there. Then no logit is kept or computed twice. Losses that look at a whole
sequence (GSPO) need `lm_head.linear_log_probs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from .head_blocks import block_buffer, block_logits
from .head_plan import HeadPlan, make_head_plan
from .inputs import check_label_values
from .lm_head import gather_sequence, reduce_hidden_gradient
from .products import add_product, product_into
from .row_function import RowPlan, id_log_probs, reduce_statistics, shard_ids, write_gradients
from .rows_eager import compute_dtype

TokenLossFn = Callable[[Tensor, "Tensor | None", slice], Tensor]


class ForwardLoss(NamedTuple):
    """A loss and what it was made of.

    Attributes:
        loss_sum: sum of the token losses, fp32 scalar; gets the gradient.
        log_probs, entropy: shape of labels, constant (entropy None if not asked for).
    """

    loss_sum: Tensor
    log_probs: Tensor
    entropy: Tensor | None


def linear_loss_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_loss: TokenLossFn,
    *,
    tp_group: Any = None,
    sequence_parallel: bool = False,
    temperature: float = 1.0,
    with_entropy: bool = False,
    vocab_size: int | None = None,
    loss_mask: Tensor | None = None,
    chunk_size: int = 4096,
    backend: str | None = None,
) -> ForwardLoss:
    """Sum of a token-level loss over all tokens, its gradients computed in forward.

    Formula: loss_sum = sum over chunks c of token_loss(log_probs[c], entropy[c], c).sum(), the
    log-probs being those of `linear_log_probs`.

    Args:
        hidden, weight, labels, tp_group, sequence_parallel, temperature, with_entropy,
            vocab_size, backend: as in `linear_log_probs`.
        token_loss: (log_probs [n], entropy [n] or None, positions) -> weighted losses [n];
            `positions` is a slice of the flattened labels, to cut weights, advantages and masks
            with. Must not look beyond it, and must give the same on every rank of tp_group.
        loss_mask: [...] bool; only lets labels be checked. The loss applies it.
        chunk_size: tokens at a time; their logits are all that is held.

    Returns:
        ForwardLoss.

    Raises:
        InputError: as `linear_log_probs`; chunk_size below 1; fp16, whose gradients need a loss
            scale, which comes after forward.

    Communicates: in forward two all-reduces per chunk, and hidden's gradient as there; none in
        backward, which only scales by the gradient of loss_sum.
    Gradient: to hidden and weight through loss_sum, first order. Holds both gradients in their
        dtypes until backward; with several chunks the weight's is fp32 while it is made.
    """
    if chunk_size < 1:
        raise InputError(f"chunk_size must be at least 1, got {chunk_size}.")
    if hidden.dtype == torch.float16:
        raise InputError(
            "gradients in forward are made before a loss scale reaches them, and fp16 needs one; "
            "use bf16, or linear_log_probs."
        )
    plan = make_head_plan(
        hidden, weight, labels, loss_mask, tp_group=tp_group, sequence_parallel=sequence_parallel,
        temperature=temperature, with_entropy=with_entropy, vocab_size=vocab_size,
        memory_budget_bytes=0, block_size=weight.shape[0], accumulate_main_grad=False,
        backend=backend,
    )  # fmt: skip
    if loss_mask is not None and not labels.is_cuda:
        check_label_values(labels, loss_mask, plan.shard.vocab_size)
    ids = labels.long().reshape(-1, 1)
    loss, log_probs, entropy = LinearLossSum.apply(
        hidden, weight, ids, token_loss, plan, chunk_size
    )
    shape = labels.shape
    return ForwardLoss(
        loss, log_probs.view(shape), None if entropy is None else entropy.view(shape)
    )


class LinearLossSum(torch.autograd.Function):
    """Runs the chunks in forward and keeps the two gradients; backward scales them."""

    @staticmethod
    def forward(ctx, hidden, weight, ids, token_loss, plan: HeadPlan, chunk_size: int):
        rows = gather_sequence(hidden.detach(), plan).reshape(-1, hidden.shape[-1])
        wanted = ctx.needs_input_grad[:2]
        run = _Chunks(rows, weight.detach(), ids, token_loss, plan, chunk_size, wanted)
        for start in range(0, len(rows), chunk_size):
            run.add(slice(start, min(start + chunk_size, len(rows))))
        grad_hidden, grad_weight = run.grad_hidden, run.grad_weight
        if grad_hidden is not None:
            grad_hidden = reduce_hidden_gradient(grad_hidden, hidden, plan)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(run.log_probs)
        if run.entropy is not None:
            ctx.mark_non_differentiable(run.entropy)
        return run.loss, run.log_probs, run.entropy

    @staticmethod
    def backward(ctx, grad_loss: Tensor, *_):
        if torch.is_grad_enabled():
            raise InputError("linear_loss_sum has no second derivative; no create_graph here.")
        # a number without dimensions stays fp32: rounded to bf16, a dp_size of 257 would be 256
        grads = [None if g is None else g * grad_loss for g in ctx.saved_tensors]
        return *grads, None, None, None, None


class _Chunks:
    """The running sums over token chunks."""

    def __init__(
        self,
        rows: Tensor,
        weight: Tensor,
        ids: Tensor,
        token_loss: TokenLossFn,
        plan: HeadPlan,
        chunk_size: int,
        wanted: tuple[bool, bool],
    ) -> None:
        self.rows, self.weight, self.ids, self.token_loss = rows, weight, ids, token_loss
        self.plan, dtype = plan, compute_dtype(rows.dtype)
        self.loss = torch.zeros((), dtype=dtype, device=rows.device)
        self.log_probs = torch.empty(len(rows), dtype=dtype, device=rows.device)
        self.entropy = torch.empty_like(self.log_probs) if plan.with_entropy else None
        self.grad_hidden = torch.zeros_like(rows, dtype=dtype) if wanted[0] else None
        total = weight.dtype if len(rows) <= chunk_size else dtype
        self.grad_weight = torch.zeros_like(weight, dtype=total) if wanted[1] else None

    def add(self, chunk: slice) -> None:
        """Forward, loss and gradients of one chunk of tokens."""
        plan, rows = self.plan, self.rows[chunk]
        valid = plan.shard.num_valid
        z = block_logits(rows, self.weight, 0, valid, block_buffer(rows, plan))
        m, s, t = plan.rows.row_statistics(z, plan.inv_temperature, plan.with_entropy)
        ids = shard_ids(self.ids[chunk], plan.shard, max(valid, 1))
        z_ids = torch.zeros(ids.ids.shape, dtype=m.dtype, device=m.device)
        if valid:
            z_ids = z.gather(1, ids.columns).to(m.dtype).masked_fill(~ids.here, 0)
        softmax, z_ids = reduce_statistics(m, s, t, z_ids, plan.inv_temperature, plan.shard.group)
        log_probs = id_log_probs(softmax, z_ids, ids.exists, plan.inv_temperature)
        g, h = self._loss_gradients(log_probs[:, 0], softmax.entropy, chunk)
        if self.grad_hidden is None and self.grad_weight is None:
            return
        row_plan = RowPlan(
            None, plan.shard, plan.inv_temperature, plan.with_entropy, True, plan.rows
        )
        g = None if g is None else g[:, None]
        write_gradients(z, z, softmax, ids, log_probs, g, h, row_plan)
        if self.grad_hidden is not None:
            add_product(self.grad_hidden[chunk], z, self.weight[:valid])
        if self.grad_weight is not None:
            self._add_grad_weight(self.grad_weight[:valid], z, rows)

    def _add_grad_weight(self, total: Tensor, z: Tensor, rows: Tensor) -> None:
        if len(rows) == len(self.rows):  # all tokens are one chunk
            product_into(z.t(), rows, total)
        else:
            add_product(total, z.t(), rows)

    def _loss_gradients(
        self, log_probs: Tensor, entropy: Tensor | None, chunk: slice
    ) -> tuple[Tensor | None, Tensor | None]:
        self.log_probs[chunk] = log_probs
        leaves = [log_probs.detach().requires_grad_()]
        if entropy is not None:
            self.entropy[chunk] = entropy
            leaves.append(entropy.detach().requires_grad_())
        with torch.enable_grad():
            losses = self.token_loss(leaves[0], leaves[1] if entropy is not None else None, chunk)
            loss = losses.sum()
        self.loss += loss.detach()
        if not loss.requires_grad:
            return None, None
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        return grads[0], grads[1] if entropy is not None else None
