"""Runs the audit's measurements on this layout; every rank gets the same verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ContractError
from ..types import MicroBatch
from .audit_factors import Factor, factors
from .audit_gradients import (
    Gradients,
    Measured,
    data_group,
    reference_gradients,
    schedule_gradients,
    trained_parameters,
)
from .audit_probe import (
    make_probe,
    merged,
    probe_num_microbatches,
    weighted_as,
    with_policy_log_probs,
)
from .audit_verdict import HYPOTHESES, Cut, Finding, Sizes, findings, is_right
from .forward_step import ForwardStep
from .groups import ParallelGroups
from .guard import check_contract


@dataclass
class Audit:
    """A model, what its gradient should be, and the probe.

    Attributes:
        chunks: the model as the schedule gets it, in Megatron's DDP.
        reference_step: our forward step with the objective that the contract is about.
        groups: this rank's.
        probe: this rank's micro-batches without weights.
        parts: fewest micro-batches that the schedule can run.
        reduction: arguments of `with_loss_weights`.
        tolerance: of factors and residuals.
        experts_apart: see `Sizes`.
    """

    chunks: Sequence[Any]
    reference_step: ForwardStep
    groups: ParallelGroups
    probe: list[MicroBatch]
    parts: int
    reduction: Mapping[str, Any]
    tolerance: float
    experts_apart: bool = False
    _references: dict[tuple[str, str], Gradients] = field(default_factory=dict)

    def run(
        self, step: Callable[..., Any], mistake_in_weights: str = ""
    ) -> tuple[list[Cut], list[Finding]]:
        """Measures `step` on the probe in many micro-batches and in the fewest.

        Args:
            step: fn(data_iterator, model), as the schedule calls it.
            mistake_in_weights: hands it other weights than the right ones; see `weighted_as`.
        """
        cuts = [
            self._cut(name, step, micro_batches, mistake_in_weights)
            for name, micro_batches in (
                ("cut", self.probe),
                ("whole", merged(self.probe, self.parts)),
            )
        ]
        return cuts, findings(cuts, self.sizes, self.tolerance)

    @property
    def sizes(self) -> Sizes:
        dp_size, cp_size = self.groups.dp.size(), self.groups.cp.size()
        return Sizes(dp_size, cp_size, dist.get_world_size(), self.experts_apart)

    def set_up_findings(self) -> list[Finding]:
        """Returns what the forward step's own guard would refuse."""
        try:
            check_contract(self.chunks[0], self.groups)
        except ContractError as error:
            text = str(error)
            names = {
                "calculate_per_token_loss": "calculate_per_token_loss",
                "finalize missing": "finalize_model_grads_func is not set",
            }
            mistakes = tuple(name for name, words in names.items() if words in text)
            return [Finding(mistakes or ("set-up",), text)]
        return []

    def _cut(
        self, name: str, step: Callable[..., Any], rows: list[MicroBatch], mistake: str
    ) -> Cut:
        micro_batches = self._weighted(mistake, rows)
        with _megatrons_calculator(micro_batches, self.groups):
            measured = schedule_gradients(step, self.chunks, micro_batches)
        against = self._factors(measured, "", name, rows)
        right = all(is_right(f, self.tolerance) for f in against.values())
        fits = {} if right else {m: self._factors(measured, m, name, rows) for m in HYPOTHESES}
        return Cut(name, len(micro_batches), against, _largest(measured.num_reductions), fits)

    def _weighted(self, mistake: str, rows: list[MicroBatch]) -> list[MicroBatch]:
        return weighted_as(mistake, rows, self.groups, **self.reduction)

    def _factors(
        self, measured: Measured, mistake: str, name: str, rows: list[MicroBatch]
    ) -> dict[str, Factor]:
        if (mistake, name) not in self._references:
            self._references[mistake, name] = reference_gradients(
                self.reference_step, self.chunks, merged(self._weighted(mistake, rows), self.parts)
            )
        reference = self._references[mistake, name]
        return factors(self.chunks, measured.gradients, reference, self.groups)


def make_audit(
    chunks: Sequence[Any],
    reference_step: ForwardStep,
    groups: ParallelGroups,
    *,
    vocab_size: int,
    reduction: Mapping[str, Any],
    tolerance: float,
) -> Audit:
    """Returns an audit with its probe.

    Communicates: one forward pass over the probe, and two numbers.
    """
    parts = groups.pp.size() if len(chunks) > 1 else 1
    count = probe_num_microbatches(groups.dp.size(), groups.cp.size(), parts)
    probe = with_policy_log_probs(
        make_probe(groups, count, vocab_size),
        chunks,
        parts,
        **vars(reference_step.head),
    )
    apart = _experts_apart(chunks)
    return Audit(chunks, reference_step, groups, probe, parts, reduction, tolerance, apart)


def _experts_apart(chunks: Sequence[Any]) -> bool:
    groups = {
        tuple(dist.get_process_group_ranks(data_group(*p))) for p in trained_parameters(chunks)
    }
    # a pipeline stage may be without adapters, and all ranks must come to the same
    return _largest(len(groups)) > 1


def _largest(number: int) -> int:
    box = torch.tensor([number], device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return int(box)


@contextmanager
def _megatrons_calculator(
    micro_batches: Sequence[MicroBatch], groups: ParallelGroups
) -> Iterator[None]:
    """Sets Megatron's num_microbatches calculator, which other forward steps ask."""
    from megatron.core import num_microbatches_calculator as calculator

    name = "_GLOBAL_NUM_MICROBATCHES_CALCULATOR"
    kept = getattr(calculator, name)
    setattr(calculator, name, None)
    rows = len(micro_batches[0]["tokens"])
    calculator.init_num_microbatches_calculator(
        dist.get_rank(), None, len(micro_batches) * rows * groups.dp.size(), rows, groups.dp.size()
    )
    try:
        yield
    finally:
        setattr(calculator, name, kept)
