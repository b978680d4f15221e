"""A test for losses from outside: does the function keep the contract of `losses.registry`?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.sequences import Sequences
from ..types import PER_TOKEN_FLOAT_FIELDS, PER_TOKEN_SET_FIELDS, TokenLoss
from .objective import Objective

_ROWS, _LENGTH = 4, 6  # unequal, so that a broadcast of rows over positions shows
_ENTRIES = 3


@dataclass(frozen=True)
class LossReport:
    """What `check_loss` found out.

    Attributes:
        needs: tensors the loss reads.
        homogeneous: w * l(A) == l(w * A): pre-normalised advantages are enough. If False, the
            micro-batch must have `loss_weights`.
        depends_on_micro_batch: a row's loss changes with the other rows of its micro-batch, so
            the gradient depends on the cut.
    """

    needs: tuple[str, ...]
    homogeneous: bool
    depends_on_micro_batch: bool


def check_loss(loss: str | Callable[..., TokenLoss | Tensor], **settings: Any) -> LossReport:
    """Tries a loss on random tokens and tells what it is, or what is wrong with it.

    Checked: the result has one value per token; padding changes nothing, and values at masked
    positions no bit of loss and gradient; log_probs get a finite gradient, which is not 0
    everywhere; stats are constants, one per token; inputs are not changed; a loss that says
    `fn.homogeneous = True` is.

    Args:
        loss: a name, an import path or a function.
        **settings: of the loss.

    Raises:
        ConfigError: the loss fails on, or reduces, the smallest example.
        InputError: a check failed; the message lists all that did.

    >>> def my_loss(log_probs, advantages):
    ...     return -log_probs * advantages
    >>> check_loss(my_loss).homogeneous
    True
    """
    objective = Objective(loss, settings)
    trial = _Trial(objective)
    if not trial.learns():
        raise InputError(
            f"the loss {objective.spec.name!r} gives log_probs no gradient, or one that is not "
            "finite."
        )
    homogeneous = trial.is_homogeneous()
    problems = [
        text
        for text, wrong in (
            ("padding changes its values: it must use loss_mask", not trial.ignores_padding()),
            (
                "masked values reach its loss or gradient, or the loss is random",
                not trial.ignores_masked_values(),
            ),
            (
                "it sums or averages along a row, which may hold several packed sequences: ask for "
                "`sequences`",
                not trial.ignores_packing(),
            ),
            ("a stat is not one constant per token", not trial.stats_are_constants()),
            ("it changes its inputs in place", not trial.leaves_inputs()),
            (
                "it says homogeneous = True, but w * l(A) != l(w * A)",
                objective.spec.homogeneous and not homogeneous,
            ),
        )
        if wrong
    ]
    if problems:
        raise InputError(f"the loss {objective.spec.name!r}: {'; '.join(problems)}.")
    return LossReport(objective.spec.needs, homogeneous, not trial.rows_are_independent())


class _Trial:
    def __init__(self, objective: Objective) -> None:
        self.objective, self.spec = objective, objective.spec
        self.settings = objective.loss_settings
        generator = torch.Generator().manual_seed(0)
        self.mask = torch.rand(_ROWS, _LENGTH, generator=generator) < 0.8
        self.tensors = {}
        for name in ("log_probs", "entropy", *PER_TOKEN_FLOAT_FIELDS):
            values = torch.randn(_ROWS, _LENGTH, generator=generator)
            if name.endswith("log_probs"):
                values = -1.5 + 0.3 * values
            if name == "entropy":
                values = values.abs()
            self.tensors[name] = torch.where(self.mask, values, 0.0)
        for name in ("token_log_probs", *PER_TOKEN_SET_FIELDS):
            values = torch.randn(_ROWS, _LENGTH, _ENTRIES, generator=generator)
            self.tensors[name] = self.masked(-2.0 + 0.3 * values, 0.0)
        learned = ("log_probs", "token_log_probs")
        self.learned = [name for name in learned if name in self.spec.needs] or ["log_probs"]

    def masked(self, values: Tensor, garbage: float) -> Tensor:
        mask = self.mask if values.dim() == self.mask.dim() else self.mask.unsqueeze(-1)
        return torch.where(mask, values, garbage)

    def leaves(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns copies of the tensors that a loss sends gradients to."""
        return {name: tensors[name].clone().requires_grad_() for name in self.learned}

    def call(self, tensors: dict[str, Tensor], mask: Tensor) -> TokenLoss:
        given = dict(tensors, loss_mask=mask, sequences=Sequences(mask))
        result = self.spec.fn(*(given[name] for name in self.spec.needs), **self.settings)
        return TokenLoss(*result) if isinstance(result, tuple) else TokenLoss(result, {})

    def values(self, tensors: dict[str, Tensor], mask: Tensor) -> Tensor:
        return torch.where(mask, self.call(tensors, mask).loss.detach(), 0.0)

    def learns(self) -> bool:
        leaves = self.leaves(self.tensors)
        loss = self.call({**self.tensors, **leaves}, self.mask).loss
        if not loss.requires_grad:
            return False
        total = loss[self.mask].sum()
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        return all(g is not None and bool(g.isfinite().all() and g.any()) for g in gradients)

    def ignores_padding(self) -> bool:
        def padded(x: Tensor) -> Tensor:
            return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, 3))

        want = self.values(self.tensors, self.mask)
        got = self.values({k: padded(v) for k, v in self.tensors.items()}, padded(self.mask))
        # not equal to the bit: vector units round a row's tail differently
        return torch.allclose(got[:, :_LENGTH], want, rtol=1e-5, atol=1e-6)

    def ignores_masked_values(self) -> bool:
        """Compares bits of loss and gradient, on the way that training takes."""
        steps = []
        for garbage in (0.0, torch.nan, torch.inf):
            made = ("log_probs", "entropy", "token_log_probs")
            names = (*made, *self.objective.needs)
            dirty = {k: self.masked(self.tensors[k], garbage) for k in names}
            leaves = self.leaves(dirty)
            log_probs, entropy, tokens = ({**dirty, **leaves}[name] for name in made)
            others = {k: v for k, v in dirty.items() if k not in made}
            weights = self.tensors["loss_weights"]
            loss, _ = self.objective(
                log_probs, entropy, others, self.mask, weights, token_log_probs=tokens
            )
            steps.append((loss.detach(), *torch.autograd.grad(loss, list(leaves.values()))))
        return all(
            torch.equal(a, b) for step in steps[1:] for a, b in zip(steps[0], step, strict=True)
        )

    def ignores_packing(self) -> bool:
        """Puts all rows into one; losses that ask for `sequences` are told where each ends."""
        if "sequences" in self.spec.needs:
            return True
        packed = {name: value.flatten(0, 1).unsqueeze(0) for name, value in self.tensors.items()}
        got = self.values(packed, self.mask.reshape(1, -1)).view_as(self.mask)
        want = self.values(self.tensors, self.mask)
        return torch.allclose(got, want, rtol=1e-4, atol=1e-6)

    def stats_are_constants(self) -> bool:
        stats = self.call({**self.tensors, **self.leaves(self.tensors)}, self.mask).stats
        return all(
            isinstance(x, Tensor) and x.shape == self.mask.shape and not x.requires_grad
            for x in stats.values()
        )

    def leaves_inputs(self) -> bool:
        copies = {name: value.clone() for name, value in self.tensors.items()}
        self.call(copies, self.mask.clone())
        return all(torch.equal(copies[name], value) for name, value in self.tensors.items())

    def is_homogeneous(self) -> bool:
        generator = torch.Generator().manual_seed(1)
        weights = torch.rand(_ROWS, _LENGTH, generator=generator) + 0.1
        values = self.values(self.tensors, self.mask)
        return all(
            torch.allclose(
                self.values(self.with_advantages_times(size * weights), self.mask),
                values * size * weights,
                rtol=1e-4,
                atol=1e-6 * size,
            )
            for size in (0.01, 100.0)  # clamps and thresholds of either side
        )

    def with_advantages_times(self, factor: Tensor | float) -> dict[str, Tensor]:
        return {**self.tensors, "advantages": self.tensors["advantages"] * factor}

    def rows_are_independent(self) -> bool:
        for size in (1.0, 100.0):  # large ones reach the thresholds of covariances
            tensors = self.with_advantages_times(size)
            alone = [
                self.values({k: v[i : i + 1] for k, v in tensors.items()}, self.mask[i : i + 1])
                for i in range(_ROWS)
            ]
            together = self.values(tensors, self.mask)
            if not torch.allclose(torch.cat(alone), together, rtol=1e-4, atol=1e-6 * size):
                return False
        return True
