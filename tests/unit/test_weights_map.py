"""Cutting and joining weights, on tensors whose entries say where they belong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_rl_loss.mcore.model_spec import ModelSpec
from megatron_rl_loss.mcore.weights_map import (
    FusedQKV,
    GateUp,
    Split,
    VocabRows,
    global_name,
    weight_rules,
)

SPEC = ModelSpec(
    architecture="qwen2",
    num_layers=2,
    hidden_size=8,
    ffn_hidden_size=12,
    num_attention_heads=8,
    num_query_groups=4,
    head_dim=2,
    vocab_size=10,
    max_position_embeddings=64,
    qkv_bias=True,
    qk_norm=True,
)


def labelled_rows(label: int, rows: int) -> Tensor:
    """Returns a matrix whose row r holds 100 * label + r."""
    return (100.0 * label + torch.arange(rows))[:, None].expand(rows, 3)


def rows_of(tensor: Tensor) -> list[int]:
    return tensor[:, 0].int().tolist()


def test_fused_qkv_holds_each_groups_queries_then_its_key_and_value():
    q, k, v = labelled_rows(1, 8), labelled_rows(2, 4), labelled_rows(3, 4)
    layout = FusedQKV(num_query_groups=2, head_dim=2)  # two query heads per group
    first = [100, 101, 102, 103, 200, 201, 300, 301]
    second = [104, 105, 106, 107, 202, 203, 302, 303]
    assert rows_of(layout.shard([q, k, v], 0, 1)) == first + second
    assert rows_of(layout.shard([q, k, v], 0, 2)) == first
    assert rows_of(layout.shard([q, k, v], 1, 2)) == second


def test_gate_and_up_are_cut_before_they_are_fused():
    gate, up = labelled_rows(1, 4), labelled_rows(2, 4)
    assert rows_of(GateUp().shard([gate, up], 0, 1)) == [100, 101, 102, 103, 200, 201, 202, 203]
    assert rows_of(GateUp().shard([gate, up], 1, 2)) == [102, 103, 202, 203]


def test_split_cuts_rows_or_columns():
    matrix = torch.arange(12.0).view(3, 4)
    assert Split(1).shard([matrix], 1, 2).tolist() == matrix[:, 2:].tolist()
    assert Split(0).shard([matrix], 2, 3).tolist() == matrix[2:].tolist()


@pytest.mark.parametrize(
    ("tp_rank", "expected"), [(0, [100, 101, 102, 103]), (1, [104, 0, 0, 0]), (2, [0, 0, 0, 0])]
)
def test_vocabulary_shards_past_the_end_are_zero_rows(tp_rank, expected):
    shard = VocabRows(5, 12).shard([labelled_rows(1, 5)], tp_rank, 3)
    assert rows_of(shard) == expected


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_every_rule_joins_its_shards_to_the_same_bits(tp_size):
    rules = weight_rules(SPEC, padded_vocab_size=16)
    for name, rule in rules.items():
        whole = [torch.randn(shape) for shape in rule.hf_shapes.values()]
        shards = [rule.layout.shard(whole, rank, tp_size) for rank in range(tp_size)]
        assert {tuple(shard.shape) for shard in shards} == {rule.shard_shape(tp_size)}, name
        for merged, tensor in zip(rule.layout.merge(shards), whole, strict=True):
            assert torch.equal(merged, tensor), name


@pytest.mark.parametrize("num_query_groups", [1, 4])
def test_merged_tensors_are_memory_of_their_own(num_query_groups):
    # with one group, query, key and value are contiguous inside the fused parameter
    spec = replace(SPEC, num_query_groups=num_query_groups)
    for name, rule in weight_rules(spec, padded_vocab_size=10).items():
        whole = [torch.randn(shape) for shape in rule.hf_shapes.values()]
        merged = rule.layout.merge([rule.layout.shard(whole, 0, 1)])
        storages = {tensor.untyped_storage().data_ptr() for tensor in [*whole, *merged]}
        assert len(storages) == len(whole) + len(merged), name
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in merged), name


def test_rules_name_every_hugging_face_tensor_once_and_ties_the_output_layer():
    untied = weight_rules(SPEC, 10)
    names = [name for rule in untied.values() for name in rule.hf_shapes]
    assert len(names) == len(set(names)) == 3 + 2 * 14
    tied = weight_rules(replace(SPEC, tied_embeddings=True), 10)
    assert list(tied["output_layer.weight"].hf_shapes) == ["model.embed_tokens.weight"]
    assert list(untied["output_layer.weight"].hf_shapes) == ["lm_head.weight"]


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        ("decoder.layers.1.mlp.linear_fc2.weight", "decoder.layers.7.mlp.linear_fc2.weight"),
        (
            "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.4.input_layernorm.weight",
        ),
        ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
    ],
)
def test_global_names_have_the_whole_models_layer_number(local, expected):
    assert global_name(local, [4, 7]) == expected
