"""Compares a model's parameters and a checkpoint's tensors with what an architecture asks for.

Every difference becomes one line of text; the callers raise them all together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from .hf_files import listed
from .model_spec import ModelSpec
from .weights_map import (
    EMBEDDING,
    FINAL_NORM,
    OUTPUT_LAYER,
    WeightRule,
    global_name,
    layer_of,
)
from .weights_moe import source_header

_EMBEDDING = "model.embed_tokens.weight"
_TIED_OUTPUT = "lm_head.weight"
_FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Buffers that older checkpoints carry; the model derives them from its configuration.
_DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def unwrapped(chunks: Sequence[torch.nn.Module]) -> list[Any]:
    models: list[Any] = []
    for model in chunks:
        while hasattr(model, "module"):
            model = model.module
        models.append(model)
    return models


def named_parameters(models: Sequence[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yields every parameter of this rank by its global name."""
    for model in models:
        layers = _layer_numbers(model)
        first_expert = next(iter(_own_experts(model)), 0)
        for name, parameter in model.named_parameters():
            yield global_name(name, layers, first_expert), parameter


def tensor_parallel_of(rule: WeightRule) -> tuple[int, int]:
    """Returns rank and number of the ranks that the rule's layout cuts over."""
    if rule.expert is None:
        rank = parallel_state.get_tensor_model_parallel_rank()
        return rank, parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_expert_tensor_parallel_rank()
    return rank, parallel_state.get_expert_tensor_parallel_world_size()


def _own_experts(model: Any) -> range:
    """Returns the numbers of this rank's experts."""
    if not model.config.num_moe_experts:
        return range(0)
    num = model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    first = num * parallel_state.get_expert_model_parallel_rank()
    return range(first, first + num)


def _layer_numbers(model: Any) -> list[int]:
    # Megatron counts from 1, the layers of earlier stages and chunks included
    return [layer.layer_number - 1 for layer in model.decoder.layers]


def model_problems(
    models: Sequence[Any], spec: ModelSpec, rules: Mapping[str, WeightRule]
) -> list[str]:
    """Says how this rank's parameters differ from what the architecture asks for."""
    parameters = dict(named_parameters(models))
    expected = {name for model in models for name in _expected_names(model, spec, rules)}
    problems = []
    if models[0].config.num_layers != spec.num_layers:
        problems.append(
            f"the model has {models[0].config.num_layers} layers, the spec {spec.num_layers}"
        )
    problems += _names_problem("the model lacks parameters", expected - set(parameters))
    problems += _names_problem("the model has other parameters", set(parameters) - set(rules))
    for name in expected & set(parameters):
        _, size = tensor_parallel_of(rules[name])
        shape, wanted = tuple(parameters[name].shape), rules[name].shard_shape(size)
        if shape != wanted:
            problems.append(f"parameter {name} has shape {shape}, the spec asks for {wanted}")
    return problems


def _expected_names(model: Any, spec: ModelSpec, rules: Mapping[str, WeightRule]) -> Iterator[str]:
    layers, experts = set(_layer_numbers(model)), {None, *_own_experts(model)}
    for name, rule in rules.items():
        if layer_of(name) in layers and rule.expert in experts:
            yield name
    if model.pre_process:
        yield EMBEDDING
    if model.post_process:
        yield FINAL_NORM
    if model.post_process and not (spec.tied_embeddings and model.pre_process):
        yield OUTPUT_LAYER


def source_problems(
    source: Mapping[str, Tensor], spec: ModelSpec, rules: Mapping[str, WeightRule]
) -> list[str]:
    """Says how a checkpoint differs from what the architecture asks for, on any rank."""
    expected = {name: shape for rule in rules.values() for name, shape in rule.hf_shapes.items()}
    names = set(source.keys())
    extra = {name for name in names - set(expected) if not _DERIVED.fullmatch(name)}
    problems = _names_problem("missing from the checkpoint", set(expected) - names)
    if spec.tied_embeddings and _TIED_OUTPUT in extra:
        extra.remove(_TIED_OUTPUT)
        problems += _tied_problem(source)
    problems += _names_problem("unexpected in the checkpoint", extra)
    for name in [name for name in expected if name in names]:
        shape, dtype = source_header(source, name)
        if shape != expected[name]:
            problems.append(f"{name} has shape {shape}, the spec asks for {expected[name]}")
        if dtype not in _FLOAT_DTYPES:
            problems.append(f"{name} has dtype {dtype}; only plain floating-point weights load")
    return problems


def _tied_problem(source: Mapping[str, Tensor]) -> list[str]:
    if _EMBEDDING not in source or torch.equal(source[_TIED_OUTPUT], source[_EMBEDDING]):
        return []
    return [
        f"{_TIED_OUTPUT} differs from {_EMBEDDING}, but the spec ties them; set "
        "tie_word_embeddings to false in the configuration"
    ]


def _names_problem(what: str, names: set[str]) -> list[str]:
    return [f"{what}: {listed(sorted(names))}"] if names else []
