"""The critic's forward step, and its values without gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ContractError
from ..losses.value import ValueObjective
from ..metrics import MetricTensors
from ..parallel.token_batch import TokenBatch
from .batch import run_batch
from .forward_step import ForwardStep
from .fused_head import ReadOutput, bare_model
from .groups import ParallelGroups
from .token_log_probs import token_outputs
from .value_model import ValueHead


def make_value_step(
    *,
    value_clip: float | None = 0.2,
    value_coef: float = 1.0,
    num_microbatches: int | Callable[[], int] | None = None,
    pairs_only: bool = False,
    pg_collection: Any = None,
) -> ValueStep:
    """Makes `forward_step(data_iterator, model)` of a critic, scaled as `make_forward_step` does.

    Formula: num_microbatches * dp_size * value_coef * sum_t w_t l_t over this rank's tokens, l_t
    of `losses.value.clipped_value_loss`. Micro-batches need `old_values`, `returns` and explicit
    `loss_weights`.

    Args:
        value_clip, value_coef: see `ValueObjective`.
        num_microbatches, pairs_only, pg_collection: see `make_forward_step`.

    Raises:
        ConfigError: a value is out of range.
    """
    return ValueStep(
        ValueObjective(value_clip=value_clip, value_coef=value_coef),
        ValueOutput(),
        num_microbatches=num_microbatches,
        report_entropy=False,
        pairs_only=pairs_only,
        pg_collection=pg_collection,
    )


@dataclass(frozen=True)
class ValueOutput:
    """How values come out of a critic; stands where `LMHead` stands for a policy."""

    def run(
        self, batch: TokenBatch, model: Any, groups: ParallelGroups, *, with_entropy: bool = False
    ) -> tuple[Tensor, ReadOutput]:
        """Runs the critic; the function that is returned makes values [rows, S] of its output.

        Raises:
            ContractError: the model has no value head.
        """
        chunk = bare_model(model)
        if getattr(chunk, "post_process", True) and not isinstance(
            getattr(chunk, "output_layer", None), ValueHead
        ):
            raise ContractError(
                "the critic's output layer is no ValueHead; call put_value_head(chunks) before "
                "the model is wrapped in DDP, or build it from value_spec(spec)."
            )
        return run_batch(batch, model), _read_values


def _read_values(output: Tensor) -> tuple[Tensor, None]:
    return output[..., 0], None


class ValueStep(ForwardStep):
    """Callable with Megatron's forward-step signature; made by `make_value_step`."""

    def _loss_sum(
        self, batch: TokenBatch, groups: ParallelGroups, values: Tensor, _: Tensor | None
    ) -> tuple[Tensor, MetricTensors]:
        return self.objective(
            values, batch.tensors, batch.loss_mask, batch.loss_weights, share=self._share
        )


@torch.no_grad()
def token_values(chunks: Sequence[Any], micro_batches: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Returns each micro-batch's values, [rows, S] fp32 on the CPU, on every rank.

    Entry t is the value of the state after token t, in which token t + 1 is chosen; also at
    positions that are not trained, so that the value after the last token can bootstrap.

    Args, Communicates: as `token_log_probs`.
    """
    return token_outputs(ValueOutput(), chunks, micro_batches)
