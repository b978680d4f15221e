"""Log-probs out of a Megatron model: from its logits, or from the LM head without logits.

The fused head answers in place of the model's output layer, so that tied weights, the all-reduce
of their gradient over pipeline stages, the layer's hooks and its sequence-parallel gather stay
what they are. The model then hands out log-probs and entropy where it would hand out logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import ConfigError, ContractError
from ..logprobs.forward_gradients import TokenLossFn, linear_loss_sum
from ..logprobs.head_plan import DEFAULT_BUDGET_BYTES, LM_HEADS, choose_chunk_size
from ..logprobs.lm_head import linear_outputs
from ..logprobs.vocab_parallel import vocab_parallel_outputs
from ..parallel.token_batch import TokenBatch
from . import compat
from .batch import run_batch
from .groups import ParallelGroups

# the model's output -> log-probs and entropy (or None), [rows, S] fp32, and of an `LMHead` the
# log-probs of the batch's `token_ids` (or None), [rows, S, k] fp32, and the loss sum if it was made
# together with its gradients
ReadOutput = Callable[[Tensor], "tuple[Tensor | None, ...]"]

_said: set[str] = set()


@dataclass(frozen=True)
class LMHead:
    """How log-probs come out of a model.

    Attributes:
        lm_head: "logits": the model's own. "fused": `linear_outputs` on the hidden states and
            the output layer's weight, in vocabulary blocks if the logits are over the budget.
            "fused_forward": the loss and its gradients in forward, by `linear_loss_sum`, in token
            chunks whose logits fit the budget; where nothing is trained, as "fused". "auto":
            logits while they fit, else fused where the model allows it.
        memory_budget_bytes: for the logits of one micro-batch on one rank; None: 2 GiB.
        temperature: logits are divided by it once.
        vocab_size: real vocabulary; columns beyond it are padding. None: there are none.

    Raises:
        ConfigError: a value is out of range.
    """

    lm_head: str = "auto"
    memory_budget_bytes: int | None = None
    temperature: float = 1.0
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.lm_head not in LM_HEADS:
            raise ConfigError(f"lm_head must be one of {', '.join(LM_HEADS)}; got {self.lm_head!r}")
        if self.memory_budget_bytes is not None and not self.memory_budget_bytes >= 0:
            raise ConfigError(f"memory_budget_bytes must be >= 0, got {self.memory_budget_bytes}.")
        if not self.temperature > 0.0:
            raise ConfigError(f"temperature must be > 0, got {self.temperature}.")

    @property
    def budget(self) -> int:
        given = self.memory_budget_bytes
        return DEFAULT_BUDGET_BYTES if given is None else int(given)

    @property
    def makes_loss(self) -> bool:
        """Whether it wants the loss to make gradients of."""
        return self.lm_head == "fused_forward"

    def run(
        self,
        batch: TokenBatch,
        model: Any,
        groups: ParallelGroups,
        *,
        with_entropy: bool = False,
        token_loss: TokenLossFn | None = None,
    ) -> tuple[Tensor, ReadOutput]:
        """Runs the model on a micro-batch.

        Args:
            token_loss: if `makes_loss`, the loss of some tokens of the micro-batch, in the order of
                `labels.t()`; None: nothing is trained.

        Returns:
            The model's output, and what makes a `ReadOutput` of it on a last pipeline stage.

        Raises:
            ContractError: "fused", and the model does not allow it.

        Communicates: what the model does; fused also what `linear_outputs` does.
        """
        chunk = bare_model(model)
        if self.makes_loss and getattr(getattr(chunk, "config", None), "fp16", False):
            raise ContractError(
                "lm_head='fused_forward' makes gradients before the loss scale reaches them, and "
                "fp16 needs one; use lm_head='fused', or bf16."
            )
        if getattr(chunk, "post_process", True):
            if self._is_fused(batch, chunk, groups):
                answer = partial(self._answer, batch, groups, with_entropy, token_loss)
                read = partial(_unpack, with_entropy, token_loss is not None)
                return _run_answered(batch, model, chunk, answer), read
            _check_sharded(chunk, groups)
        return run_batch(batch, model), partial(self._from_logits, batch, groups, with_entropy)

    def _is_fused(self, batch: TokenBatch, chunk: Any, groups: ParallelGroups) -> bool:
        if self.lm_head == "logits":
            return False
        obstacle = fused_obstacle(chunk)
        if self.lm_head != "auto" and obstacle:
            raise ContractError(f"lm_head={self.lm_head!r} is not possible: {obstacle}")
        size = _logits_bytes(batch, chunk)
        if size is None:
            return False
        fits = size <= self.budget
        how = "are kept" if fits else "are left out (fused head)"
        if not fits and obstacle:
            how = f"are kept all the same, as the fused head is not possible: {obstacle}"
        if self.lm_head == "auto" and groups.tp.rank() == groups.dp_cp.rank() == 0:
            _say_once(
                how,
                f"LM head: logits of {batch.tokens.numel()} tokens take {size / 1e9:.3g} GB of a "
                f"budget of {self.budget / 1e9:.3g} GB; they",
            )
        return self.lm_head != "auto" or not (fits or obstacle)

    def _answer(
        self,
        batch: TokenBatch,
        groups: ParallelGroups,
        with_entropy: bool,
        token_loss: TokenLossFn | None,
        layer: Any,
        hidden: Tensor,
        weight: Tensor | None,
    ) -> Tensor:
        """[s (/ tp), rows, H] -> [S, rows, 1 (+ 1) (+ k or 1)].

        Log-probs, entropy, and given tokens' or, where the first two are constant, the loss sum:
        all of it at one place.
        """
        weight = layer.weight if weight is None else weight
        settings = {
            "tp_group": groups.vocab_group,
            "sequence_parallel": layer.sequence_parallel,
            "temperature": self.temperature,
            "with_entropy": with_entropy,
            "vocab_size": self.vocab_size,
            "loss_mask": batch.loss_mask.t(),
        }
        labels = batch.labels.t()
        if token_loss is not None:
            chunk = choose_chunk_size(len(weight), weight.element_size(), self.budget)
            loss_sum, log_probs, entropy = linear_loss_sum(
                hidden, weight, labels, token_loss, chunk_size=chunk, **settings
            )
            last = pad(loss_sum.view(1), (0, log_probs.numel() - 1)).view(*log_probs.shape, 1)
        else:
            token_ids = batch.token_ids
            outputs = linear_outputs(
                hidden,
                weight,
                labels,
                token_ids=None if token_ids is None else token_ids.transpose(0, 1),
                memory_budget_bytes=self.budget,
                accumulate_main_grad=layer.gradient_accumulation_fusion
                and hasattr(weight, "main_grad"),
                **settings,
            )
            log_probs, entropy, last = outputs.log_probs, outputs.entropy, outputs.token_log_probs
        own = torch.stack([x for x in (log_probs, entropy) if x is not None], dim=-1)
        return own if last is None else torch.cat([own, last], dim=-1)

    def _from_logits(
        self, batch: TokenBatch, groups: ParallelGroups, with_entropy: bool, logits: Tensor
    ) -> tuple[Tensor | None, ...]:
        outputs = vocab_parallel_outputs(
            logits,
            batch.labels,
            token_ids=batch.token_ids,
            tp_group=groups.vocab_group,
            temperature=self.temperature,
            with_entropy=with_entropy,
            vocab_size=self.vocab_size,
            loss_mask=batch.loss_mask,
        )
        return outputs.log_probs, outputs.entropy, outputs.token_log_probs


def bare_model(model: Any) -> Any:
    """Returns the model inside DDP and Float16Module."""
    while hasattr(model, "module"):
        model = model.module
    return model


def fused_obstacle(chunk: Any) -> str | None:
    """Says why the fused head cannot stand for this model's output layer; None if it can."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import ColumnParallelLinear

    if not isinstance(chunk, GPTModel):
        return f"the model is {type(chunk).__name__}, not Megatron's GPTModel."
    layer, config = chunk.output_layer, chunk.config
    if type(layer) is not ColumnParallelLinear:
        return f"its output layer is {type(layer).__name__}, not Megatron's ColumnParallelLinear."
    if "forward" in vars(layer):
        return "the forward of its output layer was replaced."
    if layer.bias is not None:
        return "its output layer has a bias."
    for name in ("mtp_num_layers", "defer_embedding_wgrad_compute", "use_mup"):
        if getattr(config, name, None):
            return f"the model's config has {name}={getattr(config, name)}."
    return None


def _run_answered(
    batch: TokenBatch, model: Any, chunk: Any, answer: Callable[[Any, Tensor, Any], Tensor]
) -> Tensor:
    """Runs the model with `answer` in place of its output layer's product."""
    layer = chunk.output_layer
    if not compat.has_output_processor(chunk):
        with _answered(layer, answer):
            return run_batch(batch, model)

    def process(*, hidden_states: Tensor, output_weight: Tensor | None, **_: Any) -> Tensor:
        with _answered(layer, answer):
            return layer(hidden_states, weight=output_weight)[0].transpose(0, 1).contiguous()

    return run_batch(batch, model, output_processor=process)


@contextmanager
def _answered(layer: Any, answer: Callable[[Any, Tensor, Any], Tensor]) -> Iterator[None]:
    """Replaces the layer's `forward` only: calling the layer still runs its hooks.

    One of them, Megatron's, waits for the weight that the distributed optimizer is gathering.
    """

    def forward(input_: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        return answer(layer, input_, weight), None

    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


def _unpack(with_entropy: bool, in_forward: bool, output: Tensor) -> tuple[Tensor | None, ...]:
    own = 2 if with_entropy else 1
    log_probs, entropy = output[..., 0], output[..., 1] if with_entropy else None
    if in_forward:
        entropy = None if entropy is None else entropy.detach()
        return log_probs.detach(), entropy, None, output[..., own].sum()
    return log_probs, entropy, output[..., own:] if output.shape[-1] > own else None


def _logits_bytes(batch: TokenBatch, chunk: Any) -> int | None:
    """Bytes of this micro-batch's logits on this rank; None if the model does not say.

    Of several rows GPTModel makes a second copy, from [S, rows, V] to [rows, S, V].
    """
    columns = getattr(getattr(chunk, "output_layer", None), "output_size_per_partition", None)
    if columns is None:
        return None
    copies = 1 if len(batch.tokens) == 1 else 2
    return copies * batch.tokens.numel() * columns * chunk.config.params_dtype.itemsize


def _check_sharded(chunk: Any, groups: ParallelGroups) -> None:
    layer = getattr(chunk, "output_layer", None)
    if groups.tp.size() > 1 and getattr(layer, "gather_output", False):
        raise ContractError(
            f"the model gathers its logits from {groups.tp.size()} tensor-parallel ranks "
            "(parallel_output=False); they would be taken for shards of a vocabulary as many times "
            "as large. Build it with parallel_output=True, or use lm_head='fused'."
        )


def _say_once(how: str, text: str) -> None:
    """Prints a choice the first time that it is made in this process."""
    if how not in _said:
        _said.add(how)
        print(f"{text} {how}", flush=True)
