"""Which Hugging Face tensors make up which Megatron parameter, and how tensor parallelism cuts it.

Pure tensor maths: nothing here talks to other ranks or knows the pipeline. A parameter has a
global name, its name in a model of a single rank and chunk: `decoder.layers.7.mlp...` with the
layer's number in the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .model_spec import ModelSpec
from .weights_moe import NAMES

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
SCORE = "score.weight"  # a critic's value head in Hugging Face's sequence classification models
FINAL_NORM = "decoder.final_layernorm.weight"

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_SEQUENTIAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
# Transformer Engine's grouped layers hold one weight per local expert
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)")
# Transformer Engine fuses a norm into the linear layer after it
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


class Layout(Protocol):
    """How a Megatron parameter is cut from Hugging Face tensors, and put together again."""

    def shard(self, tensors: Sequence[Tensor], tp_rank: int, tp_size: int) -> Tensor:
        """Returns one tensor-parallel rank's parameter, made of whole Hugging Face tensors."""
        ...

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Returns the whole Hugging Face tensors, new memory, from every rank's parameter."""
        ...


@dataclass(frozen=True)
class Replicated:
    """The same tensor on every tensor-parallel rank."""

    def shard(self, tensors: Sequence[Tensor], tp_rank: int, tp_size: int) -> Tensor:
        return tensors[0]

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [shards[0].clone()]


@dataclass(frozen=True)
class Split:
    """One tensor, cut evenly along `dim`: 0 for output columns, 1 for input rows of a layer."""

    dim: int

    def shard(self, tensors: Sequence[Tensor], tp_rank: int, tp_size: int) -> Tensor:
        return tensors[0].chunk(tp_size, self.dim)[tp_rank]

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(shards), self.dim)]


@dataclass(frozen=True)
class VocabRows:
    """An embedding, with zero rows added up to the padded vocabulary, cut along the rows."""

    vocab_size: int
    padded_vocab_size: int

    def shard(self, tensors: Sequence[Tensor], tp_rank: int, tp_size: int) -> Tensor:
        rows = self.padded_vocab_size // tp_size
        own = tensors[0][tp_rank * rows : (tp_rank + 1) * rows]
        return torch.nn.functional.pad(own, (0, 0, 0, rows - own.shape[0]))

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(shards))[: self.vocab_size].clone()]


@dataclass(frozen=True)
class FusedQKV:
    """Query, key and value projections, interleaved by query group: q q k v | q q k v | ..."""

    num_query_groups: int
    head_dim: int

    def shard(self, tensors: Sequence[Tensor], tp_rank: int, tp_size: int) -> Tensor:
        grouped = [tensor.unflatten(0, (self.num_query_groups, -1)) for tensor in tensors]
        own = [tensor.chunk(tp_size)[tp_rank] for tensor in grouped]
        return torch.cat(own, 1).flatten(0, 1)

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        groups = self.num_query_groups // len(shards)
        fused = torch.cat([shard.unflatten(0, (groups, -1)) for shard in shards])
        query_rows = fused.shape[1] - 2 * self.head_dim
        parts = fused.split((query_rows, self.head_dim, self.head_dim), 1)
        return [part.clone(memory_format=torch.contiguous_format).flatten(0, 1) for part in parts]


@dataclass(frozen=True)
class GateUp:
    """Gate and up projections of a SwiGLU: each rank holds its gate rows, then its up rows."""

    def shard(self, tensors: Sequence[Tensor], tp_rank: int, tp_size: int) -> Tensor:
        return torch.cat([tensor.chunk(tp_size)[tp_rank] for tensor in tensors])

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([gate for gate, _ in halves]), torch.cat([up for _, up in halves])]


@dataclass(frozen=True)
class WeightRule:
    """How one Megatron parameter is made.

    Attributes:
        hf_shapes: name and whole shape of the Hugging Face tensors, in the layout's order.
        layout: how they are cut and joined.
        expert: number of the expert that it belongs to, None outside the experts. Expert-tensor
            parallelism cuts these.
    """

    hf_shapes: Mapping[str, tuple[int, ...]]
    layout: Layout
    expert: int | None = None

    def shard_shape(self, tp_size: int) -> tuple[int, ...]:
        """Returns the shape of one (expert-)tensor-parallel rank's parameter."""
        whole = [torch.empty(shape, device="meta") for shape in self.hf_shapes.values()]
        return tuple(self.layout.shard(whole, 0, tp_size).shape)


def weight_rules(spec: ModelSpec, padded_vocab_size: int) -> dict[str, WeightRule]:
    """Returns the rule of every parameter of the model, by global name, first to last layer.

    With tied embeddings the output layer, which only a pipeline's last stage has as a parameter of
    its own, is made of the embedding's tensor.
    """
    rows = VocabRows(spec.vocab_size, padded_vocab_size)
    embedding_shape = (spec.vocab_size, spec.hidden_size)
    output_name = "model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"
    rules = {EMBEDDING: WeightRule({"model.embed_tokens.weight": embedding_shape}, rows)}
    for layer in range(spec.num_layers):
        for name, rule in _layer_rules(spec, f"model.layers.{layer}.").items():
            rules[f"decoder.layers.{layer}.{name}"] = rule
    rules[FINAL_NORM] = _replicated("model.norm.weight", spec.hidden_size)
    rules[OUTPUT_LAYER] = WeightRule({output_name: embedding_shape}, rows)
    if spec.value_head:
        rules[OUTPUT_LAYER] = WeightRule({SCORE: (1, spec.hidden_size)}, Replicated())
    return rules


def global_name(name: str, layer_numbers: Sequence[int], first_expert: int = 0) -> str:
    """Returns a parameter's global name.

    Args:
        name: its name in this rank's chunk, with local or Transformer Engine layers.
        layer_numbers: number in the whole model, from 0, of each of the chunk's layers.
        first_expert: number in a whole layer of this rank's first expert.

    >>> global_name("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", [8, 9])
    'decoder.layers.8.pre_mlp_layernorm.weight'
    >>> global_name("decoder.layers.0.mlp.experts.linear_fc2.weight1", [8, 9], first_expert=4)
    'decoder.layers.8.mlp.experts.local_experts.5.linear_fc2.weight'
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    layer, rest = layer_numbers[int(match[1])], match[2]
    sequential, grouped = _SEQUENTIAL_EXPERT.fullmatch(rest), _GROUPED_EXPERT.fullmatch(rest)
    if sequential:
        rest = f"mlp.experts.local_experts.{first_expert + int(sequential[1])}.{sequential[2]}"
    elif grouped:
        expert = first_expert + int(grouped[2])
        rest = f"mlp.experts.local_experts.{expert}.{grouped[1]}.weight"
    return f"decoder.layers.{layer}.{_FUSED_NORMS.get(rest, rest)}"


def layer_of(name: str) -> int | None:
    """Returns the layer's number in a parameter's name, None outside the layers."""
    match = _LAYER.fullmatch(name)
    return None if match is None else int(match[1])


def _layer_rules(spec: ModelSpec, prefix: str) -> dict[str, WeightRule]:
    attention, hidden = f"{prefix}self_attn.", spec.hidden_size
    query_rows = spec.num_attention_heads * spec.head_dim
    rules = {
        "input_layernorm.weight": _replicated(f"{prefix}input_layernorm.weight", hidden),
        "self_attention.linear_qkv.weight": _qkv_rule(spec, attention, "weight", (hidden,)),
        "self_attention.linear_proj.weight": WeightRule(
            {f"{attention}o_proj.weight": (hidden, query_rows)}, Split(1)
        ),
        "pre_mlp_layernorm.weight": _replicated(f"{prefix}post_attention_layernorm.weight", hidden),
        **(_mlp_rules(spec, prefix) if spec.moe is None else _expert_rules(spec, prefix)),
    }
    if spec.qkv_bias:
        rules["self_attention.linear_qkv.bias"] = _qkv_rule(spec, attention, "bias", ())
    if spec.qk_norm:
        for head in ("q", "k"):
            rules[f"self_attention.{head}_layernorm.weight"] = _replicated(
                f"{attention}{head}_norm.weight", spec.head_dim
            )
    return rules


def _mlp_rules(spec: ModelSpec, prefix: str) -> dict[str, WeightRule]:
    hidden, ffn = spec.hidden_size, spec.ffn_hidden_size
    gate, up, down = (f"{prefix}mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    return {
        "mlp.linear_fc1.weight": WeightRule({gate: (ffn, hidden), up: (ffn, hidden)}, GateUp()),
        "mlp.linear_fc2.weight": WeightRule({down: (hidden, ffn)}, Split(1)),
    }


def _expert_rules(spec: ModelSpec, prefix: str) -> dict[str, WeightRule]:
    names, moe, hidden = NAMES[spec.architecture], spec.moe, spec.hidden_size
    assert moe is not None
    router = f"{prefix}{names.block}.gate.weight"
    rules = {"mlp.router.weight": WeightRule({router: (moe.num_experts, hidden)}, Replicated())}
    wide, narrow = (moe.ffn_hidden_size, hidden), (hidden, moe.ffn_hidden_size)
    for expert in range(moe.num_experts):
        hf = f"{prefix}{names.block}.experts.{expert}."
        own = f"mlp.experts.local_experts.{expert}."
        shapes = {f"{hf}{names.gate}.weight": wide, f"{hf}{names.up}.weight": wide}
        rules[f"{own}linear_fc1.weight"] = WeightRule(shapes, GateUp(), expert)
        rules[f"{own}linear_fc2.weight"] = WeightRule(
            {f"{hf}{names.down}.weight": narrow}, Split(1), expert
        )
    return rules


def _replicated(hf_name: str, size: int) -> WeightRule:
    return WeightRule({hf_name: (size,)}, Replicated())


def _qkv_rule(spec: ModelSpec, prefix: str, kind: str, columns: tuple[int, ...]) -> WeightRule:
    query_rows = spec.num_attention_heads * spec.head_dim
    kv_rows = spec.num_query_groups * spec.head_dim
    shapes = {
        f"{prefix}q_proj.{kind}": (query_rows, *columns),
        f"{prefix}k_proj.{kind}": (kv_rows, *columns),
        f"{prefix}v_proj.{kind}": (kv_rows, *columns),
    }
    return WeightRule(shapes, FusedQKV(spec.num_query_groups, spec.head_dim))
