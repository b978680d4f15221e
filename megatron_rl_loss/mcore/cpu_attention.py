"""Core attention for ranks without Transformer Engine, in place of Megatron's local one.

Megatron's `DotProductAttention` refuses context parallelism and packed sequences. This one takes
both: keys and values are gathered over the context-parallel group, and each sequence of a packed
row attends to itself only. It is made for CPU ranks: it is right, but gathering whole keys and
values costs more memory than Transformer Engine's ring.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..errors import ConfigError, InputError
from ..parallel.context_parallel import gather_sequence_summing, zigzag_positions

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


class CoreAttention(MegatronModule):
    """softmax(q k^T * softmax_scale) v over the earlier tokens of the same sequence.

    Query heads share key and value heads in groups where there are fewer of those. The softmax is
    torch's `scaled_dot_product_attention`, in fp32 inside whatever the dtype.

    Args:
        config: Megatron's.
        layer_number: ignored: query-key layer scaling cancels out in exact arithmetic.
        attn_mask_type: causal, or causal with padding.
        attention_type: ignored (self-attention).
        attention_dropout: must be 0.
        softmax_scale: default 1 / sqrt(head dimension).
        cp_comm_type: ignored: always an all-gather.
        pg_collection: Megatron's groups; None reads its parallel state.
        model_comm_pgs: what 0.13 calls `pg_collection`.

    Raises:
        ConfigError: the config asks for dropout, a window, or another softmax.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        model_comm_pgs: Any = None,
    ) -> None:
        super().__init__(config=config)
        _check_config(config, attn_mask_type, attention_dropout)
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp_group = None
        if config.context_parallel_size > 1:
            self.cp_group = _cp_group(pg_collection or model_comm_pgs)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Returns the attention's output, [S_local, rows, heads * head_dim].

        Args:
            query: [S_local, rows, heads, head_dim]; packed [T_local, heads, head_dim].
            key, value: the same with the key-value heads of this rank.
            attention_mask: None, or bool with True where attention is **not** allowed, which then
                replaces the causal mask; neither with context parallelism nor packed.
            attn_mask_type: as in the constructor.
            attention_bias: must be None.
            packed_seq_params: offsets of the sequences in a packed row.

        Communicates: with context parallelism, `gather_sequence_summing` over its group.
        """
        if attn_mask_type not in (None, *_CAUSAL) or attention_bias is not None:
            raise ConfigError(
                f"attention here is causal and without bias, got mask type {attn_mask_type}"
                f"{'' if attention_bias is None else ' and a bias'}."
            )
        if packed_seq_params is not None:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        alone = self.cp_group is None and packed_seq_params is None
        if attention_mask is not None and not alone:
            raise InputError(
                "attention_mask works neither with context parallelism nor with packed sequences; "
                "leave it out: padding on the right needs none under causal attention."
            )
        cp_size = 1 if self.cp_group is None else self.cp_group.size()
        offsets = _offsets(packed_seq_params, query.shape[0] * cp_size)
        if cp_size > 1:
            key, value = self._gather(key, value, offsets)
        outputs = self._per_sequence(query, key, value, offsets, attention_mask)
        output = torch.cat(outputs, dim=0) if len(outputs) > 1 else outputs[0]
        return output.flatten(2)

    def _gather(self, key: Tensor, value: Tensor, offsets: list[int]) -> list[Tensor]:
        both = gather_sequence_summing(
            torch.cat([key, value], dim=-1), self.cp_group, dim=0, cu_seqlens=offsets
        )
        return list(both.split([key.shape[-1], value.shape[-1]], dim=-1))

    def _per_sequence(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        offsets: list[int],
        attention_mask: Tensor | None,
    ) -> list[Tensor]:
        rank, size = (
            (0, 1) if self.cp_group is None else (self.cp_group.rank(), self.cp_group.size())
        )
        outputs, begin = [], 0
        for start, end in pairwise(offsets):
            mask = _allowed(attention_mask, query.dtype)
            if size > 1:
                positions = zigzag_positions((0, end - start), rank, size)
                mask = positions[:, None] >= torch.arange(end - start)
                mask = mask.to(query.device)
            own = slice(begin, begin + (end - start) // size)
            outputs.append(self._attend(query[own], key[start:end], value[start:end], mask))
            begin = own.stop
        return outputs

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        output = F.scaled_dot_product_attention(
            q, k, v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        return output.permute(2, 0, 1, 3)


def _check_config(
    config: TransformerConfig, attn_mask_type: AttnMaskType, dropout: float | None
) -> None:
    window = getattr(config, "window_size", None)
    softmax = getattr(config, "softmax_type", "vanilla")
    refusals = {
        "attention_dropout": (config.attention_dropout if dropout is None else dropout, 0.0),
        "window_size": (window, None),
        "softmax_type": (softmax, "vanilla"),
    }
    for name, (got, supported) in refusals.items():
        if got != supported:
            raise ConfigError(
                f"{name}={got!r} needs Transformer Engine's attention; without it only "
                f"{supported!r} is supported."
            )
    if attn_mask_type not in _CAUSAL:
        raise ConfigError(f"attention here is causal, got mask type {attn_mask_type}.")


def _cp_group(pg_collection: Any) -> Any:
    if pg_collection is not None and hasattr(pg_collection, "cp"):
        return pg_collection.cp
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()


def _offsets(packed: PackedSeqParams | None, length: int) -> list[int]:
    if packed is None:
        return [0, length]
    padded = packed.cu_seqlens_q_padded
    return (packed.cu_seqlens_q if padded is None else padded).tolist()


def _allowed(attention_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Returns an additive mask; finite, since a row that may see nothing must not become NaN."""
    if attention_mask is None:
        return None
    lowest = torch.finfo(dtype).min / 2
    return torch.zeros_like(attention_mask, dtype=dtype).masked_fill(attention_mask, lowest)
