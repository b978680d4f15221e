"""One block of the fused LM head's vocabulary: its logits, their gradient, the products behind."""

from __future__ import annotations

import torch
from torch import Tensor

from .head_plan import HeadPlan
from .inputs import VocabShard
from .products import add_product, product_into
from .row_function import RowPlan, ShardIds, Softmax, id_log_probs, shard_ids, write_gradients
from .rows_eager import compute_dtype


def block_buffer(rows: Tensor, plan: HeadPlan) -> Tensor:
    """Memory for one block's logits, in hidden's dtype."""
    columns = min(plan.block_size, plan.shard.num_valid)
    return torch.empty(rows.shape[0] * columns, dtype=rows.dtype, device=rows.device)


def block_logits(rows: Tensor, weight: Tensor, start: int, end: int, buffer: Tensor) -> Tensor:
    """[N, end - start] logits in `buffer`."""
    out = buffer[: rows.shape[0] * (end - start)].view(rows.shape[0], end - start)
    return product_into(rows, weight[start:end].t(), out)


def block_ids(ids: Tensor, start: int, end: int, plan: HeadPlan) -> ShardIds:
    """The ids as seen by one block of columns."""
    return shard_ids(ids, block_shard(start, end, plan), end - start)


def block_shard(start: int, end: int, plan: HeadPlan) -> VocabShard:
    """The shard that consists of one block of columns."""
    return plan.shard._replace(start=plan.shard.start + start, num_valid=end - start)


class HeadBackward:
    """Turns the gradients of log-probs and entropy into those of hidden and weight."""

    def __init__(
        self,
        rows: Tensor,
        weight: Tensor,
        ids: Tensor,
        softmax: Softmax,
        z_ids: Tensor,
        plan: HeadPlan,
    ) -> None:
        self.rows, self.weight, self.ids = rows, weight, ids
        self.softmax, self.z_ids, self.plan = softmax, z_ids, plan

    def __call__(
        self,
        grad_log_probs: Tensor | None,
        grad_entropy: Tensor | None,
        logits: Tensor | None,
        wants_hidden: bool,
        wants_weight: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns ([N, H] fp32 partial sums over this shard, weight gradient); None if unwanted.

        Args:
            logits: this shard's logits if they were kept, overwritten; None: recompute them.
        """
        grad_hidden = torch.zeros(
            self.rows.shape, dtype=compute_dtype(self.rows.dtype), device=self.rows.device
        )
        grad_weight = WeightGradient(self.weight, self.plan) if wants_weight else None
        buffer = block_buffer(self.rows, self.plan) if logits is None else None
        for start, end in self.plan.blocks():
            z = logits
            if z is None:
                z = block_logits(self.rows, self.weight.detach(), start, end, buffer)
            self._to_gradient(z, start, end, grad_log_probs, grad_entropy)
            if wants_hidden:
                add_product(grad_hidden, z, self.weight.detach()[start:end])
            if grad_weight is not None:
                grad_weight.put(start, end, z, self.rows)
        return grad_hidden if wants_hidden else None, grad_weight and grad_weight.finish()

    def _to_gradient(
        self, z: Tensor, start: int, end: int, g: Tensor | None, h: Tensor | None
    ) -> None:
        plan = self.plan
        local = block_ids(self.ids, start, end, plan)
        log_probs = id_log_probs(self.softmax, self.z_ids, local.exists, plan.inv_temperature)
        shard = block_shard(start, end, plan)
        row_plan = RowPlan(None, shard, plan.inv_temperature, plan.with_entropy, True, plan.rows)
        write_gradients(z, z, self.softmax, local, log_probs, g, h, row_plan)


class WeightGradient:
    """Takes the weight's gradient block by block, into a new tensor or into `main_grad`."""

    def __init__(self, weight: Tensor, plan: HeadPlan) -> None:
        self.weight, self.plan = weight, plan
        if plan.accumulate_main_grad:
            self.target = weight.main_grad.view(weight.shape)
        else:
            self.target = torch.empty_like(weight)
            self.target[plan.shard.num_valid :].zero_()

    def put(self, start: int, end: int, grad_logits: Tensor, rows: Tensor) -> None:
        """The block's rows: grad_logits^T @ rows, one product over all tokens."""
        if self.plan.accumulate_main_grad:
            add_product(self.target[start:end], grad_logits.t(), rows)
        else:
            product_into(grad_logits.t(), rows, self.target[start:end])

    def finish(self) -> Tensor | None:
        """What autograd gets: the gradient, or Megatron's dummy for one already accumulated."""
        if not self.plan.accumulate_main_grad:
            return self.target
        if not hasattr(self.weight, "grad_added_to_main_grad"):
            return None
        self.weight.grad_added_to_main_grad = True
        # DDP's hook wants a gradient; it adds it only for tied weights, which ask for zeros
        tied = getattr(self.weight, "zero_out_wgrad", False)
        return (torch.zeros_like if tied else torch.empty_like)(self.weight)
