"""Which parallel sizes can hold a model; nothing here needs Megatron."""

from __future__ import annotations

import math

from ..errors import LayoutError
from .model_spec import ModelSpec

UNEVEN_PIPELINE_SETTINGS = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def check_tensor_split(spec: ModelSpec, tp_size: int, sequence_parallel: bool) -> None:
    """Raises `LayoutError` unless heads and MLP split evenly over the tensor-parallel ranks."""
    sizes = {
        "num_attention_heads": spec.num_attention_heads,
        "num_query_groups": spec.num_query_groups,
    }
    if spec.moe is None:
        sizes["ffn_hidden_size"] = spec.ffn_hidden_size
    for name, size in sizes.items():
        if size % tp_size:
            raise LayoutError(
                f"tensor_model_parallel_size {tp_size} does not divide {name} {size}; choose a "
                f"divisor of {math.gcd(*sizes.values())}."
            )
    if sequence_parallel and tp_size == 1:
        raise LayoutError(
            "sequence_parallel needs tensor_model_parallel_size > 1, got 1; switch one of them."
        )


def check_pipeline_split(spec: ModelSpec, chunks: int) -> None:
    """Raises `LayoutError` unless the layers split evenly over the pipeline's model chunks."""
    if spec.num_layers % chunks:
        raise LayoutError(
            f"{spec.num_layers} layers do not split evenly over {chunks} pipeline chunks "
            "(pipeline_model_parallel_size x virtual_pipeline_model_parallel_size); choose a "
            "divisor (or pass one of "
            f"{', '.join(UNEVEN_PIPELINE_SETTINGS)} to transformer_config)."
        )


def check_expert_split(
    spec: ModelSpec, *, tp_size: int, ep_size: int, etp_size: int, sequence_parallel: bool
) -> None:
    """Raises `LayoutError` unless the parallel sizes can hold the model's experts.

    Args:
        spec: the architecture.
        tp_size, ep_size, etp_size: tensor, expert and expert-tensor parallel ranks.
        sequence_parallel: whether activations are split along the sequence.
    """
    moe = spec.moe
    if moe is None:
        if ep_size > 1:
            raise LayoutError(
                f"expert_model_parallel_size is {ep_size}, but {spec.architecture} has no "
                "experts; set it to 1."
            )
        return
    for name, size, divisor in (
        ("expert_model_parallel_size", ep_size, moe.num_experts),
        ("expert_tensor_parallel_size", etp_size, moe.ffn_hidden_size),
    ):
        if divisor % size:
            what = "experts" if divisor == moe.num_experts else "rows of an expert"
            raise LayoutError(f"{name} {size} does not divide {divisor} {what}; choose a divisor.")
    if tp_size > 1 and not sequence_parallel:
        raise LayoutError(
            f"tensor_model_parallel_size {tp_size} with experts needs sequence_parallel=True: "
            "Megatron refuses to train without."
        )


def padded_vocab_size(vocab_size: int, tp_size: int, multiple: int = 128) -> int:
    """Returns the vocabulary with unused rows added, so that every shard is a good matrix size.

    Formula: the smallest multiple of `multiple` * `tp_size` that holds `vocab_size`.

    Args:
        vocab_size: rows of the checkpoint's embedding.
        tp_size: tensor-parallel size; the largest in use, for one size in several layouts.
        multiple: rows per shard are a multiple of this.

    >>> padded_vocab_size(151_936, 1), padded_vocab_size(151_936, 2)
    (151936, 152064)
    """
    unit = multiple * tp_size
    return -(-vocab_size // unit) * unit
