"""Names of the tensors in a micro-batch, and the alias table for foreign spellings.

Every per-token tensor is indexed like `labels`, that is: entry t of a row belongs to the
prediction of `labels[t] == tokens[t + 1]` (shifted once, by nobody again).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .errors import InputError

TOKEN_FIELDS = ("tokens", "labels", "position_ids")
PER_TOKEN_FLOAT_FIELDS = (
    "loss_weights",
    "advantages",
    "returns",
    "old_log_probs",
    "rollout_log_probs",
    "ref_log_probs",
    "teacher_log_probs",
    "old_values",
    "rollout_is_weights",
)
# [rows, S, k]: k entries per token; the ids say which tokens `token_log_probs` are wanted of
TOKEN_IDS_FIELD = "teacher_top_ids"
PER_TOKEN_SET_FIELDS = (TOKEN_IDS_FIELD, "teacher_top_log_probs")
# k probabilities sum to at most 1; log-probs rounded to 16 bits may say a little more
MAX_TEACHER_MASS = 1.02
LOG_PROB_FIELDS = ("old_log_probs", "rollout_log_probs", "ref_log_probs", "teacher_log_probs")
# may also be [rows]: one value for the whole sequence
PER_ROW_OR_TOKEN_FIELDS = ("loss_weights", "advantages", "returns", "rollout_is_weights")
MASK_FIELDS = ("loss_mask", "attention_mask")
ROW_FIELDS = ("group_ids",)
PACKING_FIELDS = ("cu_seqlens", "cu_seqlens_padded")
MICRO_BATCH_FIELDS = (
    TOKEN_FIELDS
    + MASK_FIELDS
    + PER_TOKEN_FLOAT_FIELDS
    + PER_TOKEN_SET_FIELDS
    + ROW_FIELDS
    + PACKING_FIELDS
)

# Foreign spelling -> glossary name. The only place where other projects' names may appear.
ALIASES: Mapping[str, str] = {
    "input_ids": "tokens",
    "target_tokens": "labels",
    "response_mask": "loss_mask",
    "completion_mask": "loss_mask",
    "prev_logprobs": "old_log_probs",
    "old_logprobs": "old_log_probs",
    "generation_logprobs": "rollout_log_probs",
    "inference_logprobs": "rollout_log_probs",
    "ref_logprobs": "ref_log_probs",
    "reference_policy_logprobs": "ref_log_probs",
}

MicroBatch = dict[str, Any]


def glossary_names(micro_batch: Mapping[str, Any]) -> MicroBatch:
    """Returns a copy of `micro_batch` with foreign spellings renamed to the glossary's.

    Raises:
        InputError: a name and its alias are both present, or a name is unknown.

    >>> glossary_names({"input_ids": 1, "response_mask": 2})
    {'tokens': 1, 'loss_mask': 2}
    """
    if not hasattr(micro_batch, "items"):
        raise InputError(f"a micro-batch must be a dict, got {type(micro_batch).__name__}.")
    renamed: MicroBatch = {}
    for name, value in micro_batch.items():
        known = ALIASES.get(name, name)
        if known not in MICRO_BATCH_FIELDS:
            raise InputError(
                f"micro-batch has an unknown field {name!r}; known fields: "
                f"{', '.join(MICRO_BATCH_FIELDS)}. Rename it or leave it out."
            )
        if known in renamed:
            raise InputError(f"micro-batch has {known!r} twice (once as an alias); keep one.")
        renamed[known] = value
    return renamed


def check_same_fields(name: str, mappings: Sequence[Any]) -> None:
    """Raises `InputError` unless the fields that are never derived are in all dicts or in none."""
    fields = {*PER_TOKEN_FLOAT_FIELDS, *PER_TOKEN_SET_FIELDS, *ROW_FIELDS}
    for i, mapping in enumerate(mappings):
        different = (set(mapping) ^ set(mappings[0])) & fields
        if different:
            raise InputError(
                f"{name} {i} and {name} 0 do not have the same fields: only one of them has "
                f"{', '.join(map(repr, sorted(different)))}. Give every {name} of the mini-batch "
                "the same fields."
            )


class TokenLoss(NamedTuple):
    """What a loss function returns.

    Attributes:
        loss: un-reduced, one fp32 entry per token; gets the gradient.
        stats: per-token figures to report as means over trained tokens; constant.
    """

    loss: Tensor
    stats: dict[str, Tensor] = {}
