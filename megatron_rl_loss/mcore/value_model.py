"""A critic: Megatron's GPTModel with a value head in place of its output layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ContractError
from .fused_head import bare_model
from .model_spec import ModelSpec
from .weights_map import SCORE


class ValueHead(torch.nn.Module):
    """One value per token of the hidden states, in fp32; called like Megatron's output layer.

    The weight [1, H] is the same on every tensor-parallel rank and starts at 0, so that every
    layout starts with the same critic: all values 0.

    Under sequence parallelism each rank values its own tokens and the values are gathered. The
    weight's gradient is then a part on each rank; `weight.sequence_parallel` makes Megatron's
    `finalize_model_grads` add the parts. The gathered values' gradients are the same on every
    rank, and each takes back its own tokens' without adding.

    Args:
        config: Megatron's `TransformerConfig` of the model.
        tp_group: tensor-parallel group; None: Megatron's own.
    """

    def __init__(self, config: Any, tp_group: Any = None) -> None:
        from megatron.core import tensor_parallel

        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device)
        )
        self.sequence_parallel = config.sequence_parallel
        self._tp_group = tp_group
        self.weight.sequence_parallel = config.sequence_parallel
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(self.weight)

    def forward(self, input_: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """[s (/ tp), rows, H] -> values [s, rows, 1], fp32, and no bias."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region as gather

        values = torch.nn.functional.linear(input_.float(), self.weight.float())
        if self.sequence_parallel:
            group = {} if self._tp_group is None else {"group": self._tp_group}
            values = gather(values, tensor_parallel_output_grad=False, **group)
        return values, None


def put_value_head(chunks: Sequence[Any], tp_group: Any = None) -> None:
    """Replaces the output layer of the last pipeline stage's chunk by a `ValueHead`.

    Call it on every rank, after weights are loaded and before the chunks are wrapped in DDP.

    Raises:
        ContractError: the model ties its output layer to the embedding, whose copies a pipeline
            would go on reducing.
    """
    for chunk in map(bare_model, chunks):
        if chunk.share_embeddings_and_output_weights:
            raise ContractError(
                "a critic has no output layer to tie to the embedding: build the model with "
                "share_embeddings_and_output_weights=False."
            )
        if chunk.post_process:
            chunk.output_layer = ValueHead(chunk.config, tp_group)


def value_spec(spec: ModelSpec) -> ModelSpec:
    """Returns the architecture of a critic with the layers of `spec`; build it as any model."""
    return dataclasses.replace(spec, tied_embeddings=False, value_head=True)


def value_weights(weights: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Returns a checkpoint's tensors as a critic loads them.

    Args:
        weights: whole tensors by Hugging Face names, of a policy, or with `score.weight` [1, H]
            of a critic or a reward model (LlamaForSequenceClassification).
        spec: of the policy or the critic.

    Returns:
        The same tensors without the LM head; `score.weight` is 0 where there is none.
    """
    kept = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    kept.setdefault(SCORE, torch.zeros(1, spec.hidden_size))
    return kept
