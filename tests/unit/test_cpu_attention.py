"""The core attention without Transformer Engine equals plain softmax attention, and says no."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_rl_loss.errors import ConfigError, InputError

pytest.importorskip("megatron.core")


def attention(**settings):
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_rl_loss.mcore.cpu_attention import CoreAttention

    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=4, num_query_groups=2,
        attention_dropout=0.0,
    )  # fmt: skip
    for name, value in settings.items():
        setattr(config, name, value)
    return CoreAttention(config, 1, AttnMaskType.causal, "self")


def inputs(rows: int = 2, length: int = 6):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(length, rows, heads, 4, generator=generator, dtype=torch.float64)
        for heads in (4, 2, 2)
    ]


def slow_attention(query, key, value):
    """[S, heads, d] of one sequence, head by head and token by token."""
    output = torch.zeros_like(query)
    for head in range(query.shape[1]):
        group = head // (query.shape[1] // key.shape[1])
        for t in range(len(query)):
            scores = key[: t + 1, group] @ query[t, head] / 2.0  # sqrt of head dimension 4
            output[t, head] = torch.softmax(scores, 0) @ value[: t + 1, group]
    return output.flatten(1)


def packed(*offsets: int) -> SimpleNamespace:
    return SimpleNamespace(cu_seqlens_q=torch.tensor(offsets), cu_seqlens_q_padded=None)


def test_it_is_causal_attention_with_grouped_keys():
    q, k, v = inputs()
    output = attention()(q, k, v, None)
    for row in range(2):
        torch.testing.assert_close(output[:, row], slow_attention(q[:, row], k[:, row], v[:, row]))


def test_packed_sequences_attend_to_themselves_only():
    q, k, v = (x[:, 0] for x in inputs())
    output = attention()(q, k, v, None, packed_seq_params=packed(0, 2, 6))
    for part in (slice(0, 2), slice(2, 6)):
        torch.testing.assert_close(output[part, 0], slow_attention(q[part], k[part], v[part]))


def test_a_given_mask_replaces_the_causal_one_and_may_hide_everything():
    q, k, v = inputs()
    forbidden = torch.ones(6, 6).triu(1).bool()[None, None]
    torch.testing.assert_close(attention()(q, k, v, forbidden), attention()(q, k, v, None))
    assert attention()(q, k, v, torch.ones_like(forbidden)).isfinite().all()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"attention_dropout": 0.1}, "attention_dropout=0.1 needs Transformer Engine"),
        ({"window_size": (4, 0)}, r"window_size=\(4, 0\)"),
        ({"softmax_type": "learnable"}, "softmax_type='learnable'"),
    ],
)
def test_settings_it_does_not_know_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        attention(**settings)


def test_a_mask_for_packed_rows_and_a_bias_are_refused():
    q, k, v = inputs()
    with pytest.raises(InputError, match="attention_mask works neither"):
        attention()(q[:, 0], k[:, 0], v[:, 0], torch.zeros(1), packed_seq_params=packed(0, 6))
    with pytest.raises(ConfigError, match="without bias"):
        attention()(q, k, v, None, attention_bias=torch.zeros(1))
