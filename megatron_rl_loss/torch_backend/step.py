"""The same losses behind torch's DistributedDataParallel and FSDP2's `fully_shard`.

Both average gradients over data-parallel ranks, and nothing divides by the number of micro-batches
here. So the local sum S is multiplied by dp_size, and by nothing else: S * D / D = S.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ..errors import ConfigError, ContractError, InputError
from ..logprobs.vocab_parallel import vocab_parallel_outputs
from ..losses.objective import Objective
from ..metrics import MetricTensors, reduce_metrics
from ..parallel.agreement import raise_together
from ..parallel.token_batch import TokenBatch
from .micro_batch import padded_batch

# (model, tokens [rows, S]) -> logits [rows, S, V]
LogitsFunction = Callable[[Any, Tensor], Tensor]


def gradient_mean_factor(dp_size: int) -> int:
    """Returns what the local loss sum is multiplied by before backward.

    Args:
        dp_size: ranks that DistributedDataParallel or `fully_shard` averages gradients over.

    >>> gradient_mean_factor(4)
    4
    """
    return dp_size


def make_torch_step(
    loss: str | Callable[..., Any] = "ppo_clip",
    *,
    temperature: float = 1.0,
    report_entropy: bool = True,
    logits_of: LogitsFunction | None = None,
    **settings: Any,
) -> TorchStep:
    """Makes what `torch_train_step` runs on each mini-batch.

    Args:
        loss, settings: as in `make_forward_step` (kl_coef, entropy_coef, off_policy, on_policy,
            and settings of the loss).
        temperature: logits are divided by it.
        report_entropy: report the entropy even if it is not trained.
        logits_of: calls the model; by default `model(tokens)` or its `.logits`.

    Raises:
        ConfigError: unknown loss or setting, or a value out of range.
    """
    if not temperature > 0.0:
        raise ConfigError(f"temperature must be > 0, got {temperature}.")
    fields = set(Objective.__dataclass_fields__) - {"loss", "loss_settings"}
    own = {name: settings.pop(name) for name in list(settings) if name in fields}
    objective = Objective(loss=loss, loss_settings=settings, **own)
    return TorchStep(objective, temperature, report_entropy, logits_of or _logits)


class TorchStep:
    """Forward and backward over a mini-batch; made by `make_torch_step`."""

    def __init__(
        self,
        objective: Objective,
        temperature: float,
        report_entropy: bool,
        logits_of: LogitsFunction,
    ) -> None:
        self.objective = objective
        self.temperature = temperature
        self.report_entropy = report_entropy
        self.logits_of = logits_of

    def forward_backward(
        self, model: Any, micro_batches: Sequence[Mapping[str, Any]]
    ) -> dict[str, float]:
        """Adds the gradient of the mini-batch to the parameters' `.grad` and returns the metrics.

        Args:
            model: wrapped in DistributedDataParallel or sharded by `fully_shard`; or bare, alone.
            micro_batches: this rank's, with `loss_weights` or pre-normalised advantages; equally
                many on every rank.

        Raises:
            InputError: a micro-batch is wrong (on any rank), or ranks have different numbers.
            ContractError: several ranks, and nothing that averages gradients.

        Communicates: two small all-reduces before and two after the passes, whose gradients are
        reduced once, in the last backward.
        """
        group = data_parallel_group(model)
        dp_size = 1 if group is None else group.size()
        device = next(model.parameters()).device
        batches = raise_together(lambda: self._batches(micro_batches, device), group)
        _check_same_number(len(batches), group, device)
        metrics = []
        for i, batch in enumerate(batches):
            with _reduced_if(model, i == len(batches) - 1):
                loss_sum, values = self._loss(model, batch, 1.0 / (len(batches) * dp_size))
                (loss_sum * gradient_mean_factor(dp_size)).backward()
            metrics.append(values)
        return reduce_metrics(metrics, dp_cp_group=group)

    def _batches(
        self, micro_batches: Sequence[Mapping[str, Any]], device: torch.device
    ) -> list[TokenBatch]:
        if not micro_batches:
            raise InputError(
                "a rank needs at least one micro-batch (its mask may be all False), got none."
            )
        batches = [padded_batch(m, self.objective.needs, device) for m in micro_batches]
        for batch in batches:
            self.objective.check_weights(batch.weights_given)
        return batches

    def _loss(self, model: Any, batch: TokenBatch, share: float) -> tuple[Tensor, MetricTensors]:
        outputs = vocab_parallel_outputs(
            self.logits_of(model, batch.tokens),
            batch.labels,
            token_ids=batch.token_ids,
            temperature=self.temperature,
            with_entropy=self.report_entropy or self.objective.needs_entropy_gradient,
            loss_mask=batch.loss_mask,
        )
        return self.objective(
            outputs.log_probs,
            outputs.entropy,
            batch.tensors,
            batch.loss_mask,
            batch.loss_weights,
            share=share,
            token_log_probs=outputs.token_log_probs,
        )


def torch_train_step(
    step: TorchStep,
    model: Any,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Mapping[str, Any]],
    *,
    clip_grad: float = 1.0,
    scheduler: Any = None,
) -> dict[str, float]:
    """Trains on one mini-batch and returns its metrics, the same on every rank.

    Args:
        step: from `make_torch_step`.
        model, micro_batches: as in `TorchStep.forward_backward`.
        clip_grad: largest global gradient norm; 0: no clipping.

    Returns:
        The metrics of `reduce_metrics` plus `grad_norm` (before clipping) and `learning_rate`.

    Raises:
        InputError: a micro-batch is wrong, or the loss is not finite; no weight was changed.
    """
    optimizer.zero_grad()
    metrics = step.forward_backward(model, micro_batches)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad or math.inf)
    metrics["grad_norm"] = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    optimizer.step()
    metrics["learning_rate"] = max(group["lr"] for group in optimizer.param_groups)
    if scheduler is not None:
        scheduler.step()
    return metrics


def data_parallel_group(model: Any) -> dist.ProcessGroup | None:
    """Returns the ranks that gradients are averaged over; None: this rank is alone.

    Raises:
        ContractError: several ranks, and nothing that averages gradients.
    """
    if isinstance(model, DistributedDataParallel):
        return model.process_group
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if isinstance(model, FSDPModule):
        return dist.group.WORLD
    raise ContractError(
        f"{dist.get_world_size()} ranks train {type(model).__name__}, which is neither wrapped in "
        "torch.nn.parallel.DistributedDataParallel nor sharded by torch.distributed.fsdp."
        "fully_shard: its gradients would never be averaged. Use one of them."
    )


@contextmanager
def _reduced_if(model: Any, is_last: bool) -> Iterator[None]:
    """Lets backward reduce gradients over ranks in the last micro-batch only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        yield
    elif isinstance(model, DistributedDataParallel) and not is_last:
        with model.no_sync():
            yield
    else:
        yield


def _check_same_number(number: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Other numbers on other ranks would hang in the next collective."""
    if group is None:
        return
    ends = torch.tensor([number, -number], device=device)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = int(ends[0]), -int(ends[1])
    if largest != smallest:
        raise InputError(
            f"ranks have between {smallest} and {largest} micro-batches (this one {number}); give "
            "each the same number, with micro-batches whose mask is all False where one has fewer."
        )


def _logits(model: Any, tokens: Tensor) -> Tensor:
    output = model(tokens)
    return getattr(output, "logits", output)
