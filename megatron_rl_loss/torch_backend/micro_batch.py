"""A checked micro-batch of padded rows: what a model without Megatron's attention can run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import InputError
from ..parallel.token_batch import TokenBatch, make_token_batch
from ..types import PACKING_FIELDS, glossary_names


def padded_batch(
    micro_batch: Mapping[str, Any], needs: Sequence[str], device: torch.device | None = None
) -> TokenBatch:
    """Checks a micro-batch and fills in what can be derived.

    Args:
        micro_batch: tensors by glossary name (or an alias), [rows, S]; padded on the right.
        needs: names that the loss reads.
        device: where the result goes; None leaves it.

    Raises:
        InputError: as `make_token_batch`; or the rows are packed, or bring their own mask.
    """
    given = glossary_names(micro_batch)
    refused = [name for name in (*PACKING_FIELDS, "attention_mask") if given.get(name) is not None]
    if refused:
        raise InputError(
            f"micro-batch has {', '.join(refused)}; this backend takes rows padded on the right."
        )
    return make_token_batch(given, needs=needs, device=device)
