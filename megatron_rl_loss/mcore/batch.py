"""Gives a model this rank's part of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..parallel.context_parallel import sequence_multiple
from ..parallel.packed_row import PackedRow
from ..parallel.token_batch import TokenBatch, make_token_batch
from . import compat
from .fillers import run_filler
from .groups import ParallelGroups
from .guard import model_config


def make_rank_batch(
    micro_batch: Mapping[str, Any], model: Any, groups: ParallelGroups, *, needs: Iterable[str] = ()
) -> TokenBatch:
    """Returns this rank's part of a micro-batch that has whole rows, checked, on its device.

    Raises:
        InputError: as `make_token_batch`.
    """
    tp_size = groups.tp.size() if model_config(model).sequence_parallel else 1
    return make_token_batch(
        micro_batch,
        needs=needs,
        device=next(model.parameters()).device,
        vocab_size=_vocab_size(model),
        seq_multiple=sequence_multiple(tp_size, groups.cp.size()),
        cp_rank=groups.cp.rank(),
        cp_size=groups.cp.size(),
    )


def run_batch(batch: TokenBatch, model: Any, **arguments: Any) -> Tensor:
    """Returns the model's output for a micro-batch, called with `arguments` as well."""
    if batch.packed is not None:
        arguments["packed_seq_params"] = packed_seq_params(batch.packed, batch.tokens.device)
    inputs = (batch.tokens, batch.position_ids, batch.attention_mask)
    run = partial(compat.call_model, model, *inputs, **arguments)
    return run() if batch.is_trained else run_filler(model, run)


def packed_seq_params(row: PackedRow, device: torch.device) -> Any:
    """Returns Megatron's `PackedSeqParams`."""
    from megatron.core.packed_seq_params import PackedSeqParams

    padded = torch.tensor(row.offsets, dtype=torch.int32, device=device)
    real = torch.tensor([0, *row.lengths]).cumsum(0).to(device, torch.int32)
    longest = max(end - start for start, end in pairwise(row.offsets))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _vocab_size(model: Any) -> int | None:
    """Returns the padded vocabulary of a wrapped or bare GPTModel."""
    while model is not None and not hasattr(model, "vocab_size"):
        model = getattr(model, "module", None)
    return getattr(model, "vocab_size", None)
