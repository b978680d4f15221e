"""The forward step that Megatron's schedules and `pretrain()` call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..checks import mapping_list
from ..errors import ConfigError, InputError
from ..logprobs.forward_gradients import TokenLossFn
from ..losses.objective import Objective
from ..losses.off_policy import OffPolicy
from ..metrics import MetricTensors
from ..ops.sequences import Sequences
from ..parallel.sequence_sums import make_sequences
from ..parallel.token_batch import TokenBatch, make_token_batch
from ..types import TokenLoss, check_same_fields, glossary_names
from .batch import make_rank_batch
from .fused_head import LMHead, ReadOutput
from .groups import ParallelGroups, parallel_groups
from .guard import check_contract, model_config, per_token_flag
from .micro_batches import resolve_num_microbatches
from .scaling import micro_batch_share, schedule_factor

LossFunction = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def make_forward_step(
    loss: str | Callable[..., TokenLoss | Tensor] = "ppo_clip",
    *,
    num_microbatches: int | Callable[[], int] | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    kl_is_weighted: bool = False,
    entropy_coef: float = 0.0,
    entropy_max: float | None = None,
    off_policy: OffPolicy | Mapping[str, Any] | None = None,
    temperature: float = 1.0,
    on_policy: bool = False,
    vocab_size: int | None = None,
    lm_head: str = "auto",
    memory_budget_bytes: int | None = None,
    report_entropy: bool = True,
    pairs_only: bool = False,
    pg_collection: Any = None,
    **loss_settings: Any,
) -> ForwardStep:
    """Makes `forward_step(data_iterator, model)` for Megatron's schedules and `pretrain()`.

    Formula: with l_t = loss_t + kl_coef * kl_t - entropy_coef * H_t, the loss function returns
    num_microbatches * dp_size * sum_t w_t l_t over this rank's tokens, as a 2-tuple with metrics.
    After the schedule's mean over micro-batches and DDP's mean over ranks, the gradient is that of
    the sum over the whole mini-batch.

    The data iterator yields dicts (see `types`): with `loss_weights` the advantages are raw;
    without them they are pre-normalised (`normalize_advantages`) or the loss is a plain sum. A
    loss that reads `token_log_probs` gets those of the dict's `teacher_top_ids` [rows, S, k].

    Args:
        loss: a name of `losses.registry.LOSSES`, an import path "my_pkg.my_mod:fn", or a function.
        num_microbatches: of each forward_backward call: a number, or a function asked on every
            call. None: the data iterator's `num_microbatches`, or Megatron's calculator.
        kl_coef, kl_estimator, kl_is_weighted: KL term to `ref_log_probs`; see `Objective`.
        entropy_coef, entropy_max: entropy bonus, subtracted with gradient; see `Objective`.
        off_policy: correction for the rollout policy, an `OffPolicy` or a dict of its settings.
        temperature: logits are divided by it once, here; the one that the rollouts were sampled at.
        on_policy: see `Objective`.
        vocab_size: real vocabulary; logit columns beyond it are padding and take no probability.
        lm_head, memory_budget_bytes: "auto", "logits", "fused" or "fused_forward"; see
            `fused_head.LMHead`.
        report_entropy: report the entropy even if it is not trained.
        pairs_only: leave out the `_max` metrics, which Megatron's `pretrain()` would average.
        pg_collection: Megatron's ProcessGroupCollection; None reads its global parallel state.
        **loss_settings: settings of the loss.

    Raises:
        ConfigError: unknown loss or setting, a value out of range, or lm_head="fused_forward" with
            a loss that is not made token by token.
    """
    objective = Objective(
        loss=loss,
        loss_settings=loss_settings,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        kl_is_weighted=kl_is_weighted,
        entropy_coef=entropy_coef,
        entropy_max=entropy_max,
        off_policy=off_policy,
        on_policy=on_policy,
    )
    if lm_head == "fused_forward":
        objective.check_token_level()
    return ForwardStep(
        objective,
        LMHead(lm_head, memory_budget_bytes, temperature, vocab_size),
        num_microbatches=num_microbatches,
        report_entropy=report_entropy,
        pairs_only=pairs_only,
        pg_collection=pg_collection,
    )


class ForwardStep:
    """Callable with Megatron's forward-step signature; made by `make_forward_step`."""

    def __init__(
        self,
        objective: Any,  # Objective, or one with the same face
        head: Any,  # LMHead, or what else makes the objective's tensors of the model's output
        *,
        num_microbatches: int | Callable[[], int] | None,
        report_entropy: bool,
        pairs_only: bool,
        pg_collection: Any,
    ) -> None:
        self.objective = objective
        self.head = head
        self.num_microbatches = num_microbatches
        self.report_entropy = report_entropy
        self.pairs_only = pairs_only
        self._pg_collection = pg_collection
        self._guarded: tuple[Any, bool] = (None, False)
        self._share = 1.0  # of the running call's metrics

    def __call__(
        self, data_iterator: Any, model: Any, return_schedule_plan: bool = False
    ) -> tuple[Tensor, LossFunction]:
        """Runs one micro-batch.

        Returns:
            The model's output (logits, or the fused head's log-probs and entropy, on a last
            pipeline stage; hidden states elsewhere) and the loss function that the schedule calls
            on it.

        Raises:
            ContractError: Megatron is set up so that gradients would be scaled wrongly.
            InputError: the micro-batch is wrong; nothing was run.
        """
        if return_schedule_plan:
            raise ConfigError(
                "overlap_moe_expert_parallel_comm (a schedule plan) is not supported; switch it "
                "off."
            )
        groups = parallel_groups(self._pg_collection)
        flag = self._guard(model, groups)
        sizes = (
            resolve_num_microbatches(self.num_microbatches, data_iterator),
            groups.dp.size(),
            groups.cp.size(),
        )
        factor = schedule_factor(*sizes, calculate_per_token_loss=flag)
        self._share = micro_batch_share(*sizes)
        batch = self._next_batch(data_iterator, model, groups)
        with_entropy = self.report_entropy or self.objective.needs_entropy_gradient
        made_by_head = getattr(self.head, "makes_loss", False) and torch.is_grad_enabled()
        loss = {"token_loss": self._token_loss(batch)} if made_by_head else {}
        output, read = self.head.run(batch, model, groups, with_entropy=with_entropy, **loss)
        return output, partial(self._loss, batch, factor, groups, read)

    def check(self, micro_batches: Iterable[Mapping[str, Any]]) -> None:
        """Raises `InputError` if a micro-batch is wrong, naming its number; runs nothing."""
        micro_batches = mapping_list("micro_batches", micro_batches)
        check_same_fields("micro-batch", [glossary_names(batch) for batch in micro_batches])
        for i, micro_batch in enumerate(micro_batches):
            try:
                batch = make_token_batch(micro_batch, needs=self.objective.needs)
                self.objective.check_weights(batch.weights_given)
            except InputError as error:
                raise type(error)(f"micro-batch {i}: {error}") from error

    def _guard(self, model: Any, groups: ParallelGroups) -> bool:
        """Returns `calculate_per_token_loss`; checks a set-up that is new."""
        config = model_config(model)
        if not torch.is_grad_enabled():
            return False
        flag = per_token_flag(config)
        if self._guarded[0] is not config or self._guarded[1] != flag:
            check_contract(model, groups)
            self._guarded = (config, flag)
        return flag

    def _next_batch(self, data_iterator: Any, model: Any, groups: ParallelGroups) -> TokenBatch:
        if data_iterator is None:
            raise InputError(
                "this rank has no data iterator; every rank needs one (every tensor- and pipeline-"
                "parallel rank of a data-parallel rank reads the same micro-batches)."
            )
        try:
            micro_batch = next(data_iterator)
        except StopIteration:
            raise InputError(
                "the data iterator ran out: the schedule asks for num_microbatches micro-batches "
                "on every rank."
            ) from None
        batch = make_rank_batch(micro_batch, model, groups, needs=self.objective.needs)
        self.objective.check_weights(batch.weights_given)
        return batch

    def _loss(
        self,
        batch: TokenBatch,
        factor: float,
        groups: ParallelGroups,
        read: ReadOutput,
        output: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss_sum, metrics = self._loss_sum(batch, groups, *read(output))
        if self.pairs_only:
            metrics = {name: value for name, value in metrics.items() if value.numel() == 2}
        return loss_sum * factor, metrics

    def _loss_sum(
        self,
        batch: TokenBatch,
        groups: ParallelGroups,
        log_probs: Tensor,
        entropy: Tensor | None,
        token_log_probs: Tensor | None = None,
        made_in_forward: Tensor | None = None,
    ) -> tuple[Tensor, MetricTensors]:
        loss_sum, metrics = self.objective(
            log_probs,
            entropy,
            batch.tensors,
            batch.loss_mask,
            batch.loss_weights,
            share=self._share,
            sequences=self._sequences(batch, groups),
            token_log_probs=token_log_probs,
        )
        return (loss_sum if made_in_forward is None else made_in_forward), metrics

    def _token_loss(self, batch: TokenBatch) -> TokenLossFn:
        """Returns the loss sum of some tokens, for a head that makes the loss."""

        def flat(x: Tensor) -> Tensor:
            return x.transpose(0, 1).reshape(1, -1)

        mask, weights = flat(batch.loss_mask), flat(batch.loss_weights)
        tensors = {name: flat(x) for name, x in batch.tensors.items()}

        def token_loss(log_probs: Tensor, entropy: Tensor | None, at: slice) -> Tensor:
            return self.objective(
                log_probs[None],
                None if entropy is None else entropy[None],
                {name: x[:, at] for name, x in tensors.items()},
                mask[:, at],
                weights[:, at],
            )[0]

        return token_loss

    def _sequences(self, batch: TokenBatch, groups: ParallelGroups) -> Sequences | None:
        if not self.objective.needs_sequences:
            return None
        offsets = None if batch.packed is None else batch.packed.offsets
        return make_sequences(batch.loss_mask, cu_seqlens=offsets, cp_group=groups.cp)
