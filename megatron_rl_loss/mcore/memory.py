"""Parameters and memory of a model in a layout, from shapes alone; nothing here needs Megatron.

Weights, gradients and optimizer state are exact counts of what Megatron keeps; activations are an
estimate. Not counted: CUDA context and communication buffers (some GB), allocator fragments, an
embedded sampler's model.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..errors import LayoutError
from .model_layout import (
    check_expert_split,
    check_pipeline_split,
    check_tensor_split,
    padded_vocab_size,
)
from .model_spec import ModelSpec

# lora.config has the same; importing it would import Megatron
TARGET_SETS = {
    "attention": ("linear_qkv", "linear_proj"),
    "all-linear": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
}
FP32_BYTES = 4
# with fp32 master weights: the weight, and Adam's master weight and two moments
WEIGHT_BYTES = {"bf16": 2, "fp32": 4}
OPTIMIZER_BYTES = {"bf16": 12, "fp32": 8}


@dataclass(frozen=True)
class Layout:
    """Megatron's parallel sizes, and all ranks together."""

    world: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False

    def check(self, spec: ModelSpec) -> None:
        """Raises `LayoutError` unless the layout can hold the model and fits the world."""
        check_tensor_split(spec, self.tp, self.sequence_parallel)
        check_pipeline_split(spec, self.pp)
        check_expert_split(
            spec,
            tp_size=self.tp,
            ep_size=self.ep,
            etp_size=self.etp,
            sequence_parallel=self.sequence_parallel,
        )
        for size in (self.tp * self.pp * self.cp, self.ep * self.etp * self.pp):
            if self.world % size:
                raise LayoutError(f"{self.world} GPUs are no multiple of the layout's {size}.")

    def shards(self, *, is_expert: bool) -> int:
        """Returns the ranks that share out a distributed optimizer's state of a parameter."""
        if is_expert:
            return self.world // (self.ep * self.etp * self.pp)
        return self.world // (self.tp * self.pp)


@dataclass(frozen=True)
class Adapters:
    """Which layers have adapters, by the fields of `lora.LoRAConfig`."""

    rank: int
    targets: str | Sequence[str] = "attention"
    expert_rank: int | None = None
    exclude: Sequence[str] = ()

    def rank_of(self, name: str, *, is_expert: bool) -> int:
        """Returns the rank of a layer's adapter, 0 without one."""
        patterns = TARGET_SETS[self.targets] if isinstance(self.targets, str) else self.targets
        if not _matches(name, patterns) or _matches(name, self.exclude):
            return 0
        return (self.expert_rank if is_expert else None) or self.rank


def _matches(name: str, patterns: Sequence[str]) -> bool:
    leaf = name.rpartition(".")[2]
    return any(p == leaf or fnmatch.fnmatchcase(name, p) for p in patterns)


@dataclass(frozen=True)
class Linear:
    """A linear layer inside the decoder's layers, or all experts' of one layer.

    Attributes:
        name: in the layer, an expert's with the number 0.
        rows, columns: of the weight.
        is_row: row-parallel, else column-parallel.
        num_parts: Hugging Face layers that are fused into it.
        num: experts, else 1.
    """

    name: str
    rows: int
    columns: int
    is_row: bool
    num_parts: int = 1
    num: int = 1
    is_expert: bool = False

    def adapter(self, rank: int, size: int, *, split: bool = False) -> int:
        """Returns the parameters of one adapter on one of `size` tensor-parallel ranks.

        Args:
            rank: of the adapter.
            size: ranks that cut the layer.
            split: one A for each Hugging Face layer, as in a PEFT file.
        """
        a, b = rank * self.columns * (self.num_parts if split else 1), self.rows * rank
        if self.is_expert:
            return (a + b) // size
        return a // size + b if self.is_row else a + b // size


def linears(spec: ModelSpec) -> list[Linear]:
    """Returns the linear layers of one layer of the decoder."""
    hidden, heads = spec.hidden_size, spec.num_attention_heads * spec.head_dim
    qkv = heads + 2 * spec.num_query_groups * spec.head_dim
    attention = [
        Linear("self_attention.linear_qkv", qkv, hidden, False, num_parts=3),
        Linear("self_attention.linear_proj", hidden, heads, True),
    ]
    if spec.moe is None:
        prefix, ffn, num = "mlp", spec.ffn_hidden_size, 1
    else:
        prefix, ffn, num = "mlp.experts.local_experts.0", spec.moe.ffn_hidden_size, 0
        num = spec.moe.num_experts
    is_expert = spec.moe is not None
    return attention + [
        Linear(f"{prefix}.linear_fc1", 2 * ffn, hidden, False, 2, num, is_expert),
        Linear(f"{prefix}.linear_fc2", hidden, ffn, True, 1, num, is_expert),
    ]


@dataclass
class Count:
    """Parameters of one kind, outside the experts and of experts."""

    dense: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.experts

    def add(self, number: int, *, is_expert: bool) -> None:
        if is_expert:
            self.experts += number
        else:
            self.dense += number


@dataclass
class Parameters:
    """Parameters of a rank, or with a layout of one rank those of the model."""

    base: Count = field(default_factory=Count)
    adapters: Count = field(default_factory=Count)


def count_parameters(
    spec: ModelSpec,
    layout: Layout,
    adapters: Adapters | None,
    *,
    stage: int = 0,
    split: bool = False,
) -> Parameters:
    """Counts one rank's parameters.

    Args:
        spec: the architecture.
        layout: its cut.
        adapters: None if all weights are trained.
        stage: pipeline stage.
        split: count adapters as a PEFT file has them, one A for each Hugging Face layer.
    """
    found = Parameters()
    per_stage = spec.num_layers // layout.pp
    for number in range(stage * per_stage, (stage + 1) * per_stage):
        found.base.add(_other_parameters(spec, layout.tp), is_expert=False)
        for linear in linears(spec):
            size = layout.etp if linear.is_expert else layout.tp
            num = linear.num // (layout.ep if linear.is_expert else 1)
            weight = linear.rows * linear.columns // size
            found.base.add(num * weight, is_expert=linear.is_expert)
            if adapters is not None:
                name = f"decoder.layers.{number}.{linear.name}"
                rank = adapters.rank_of(name, is_expert=linear.is_expert)
                own = num * linear.adapter(rank, size, split=split)
                found.adapters.add(own, is_expert=linear.is_expert)
    found.base.add(_ends(spec, layout, stage), is_expert=False)
    return found


def _other_parameters(spec: ModelSpec, tp_size: int) -> int:
    """Returns the norms, biases and the router of one layer."""
    number = 2 * spec.hidden_size
    if spec.qk_norm:
        number += 2 * spec.head_dim
    if spec.qkv_bias:
        heads = spec.num_attention_heads + 2 * spec.num_query_groups
        number += heads * spec.head_dim // tp_size
    if spec.moe is not None:
        number += spec.moe.num_experts * spec.hidden_size
    return number


def _ends(spec: ModelSpec, layout: Layout, stage: int) -> int:
    """Returns the embedding, final norm and output layer, where the stage has them."""
    rows = padded_vocab_size(spec.vocab_size, layout.tp) // layout.tp
    first, last = stage == 0, stage == layout.pp - 1
    # the last of several stages has its own copy of a tied embedding
    tied = spec.tied_embeddings and first
    number = rows * spec.hidden_size * (int(first) + int(last and not tied))
    return number + (spec.hidden_size if last else 0)


@dataclass
class Memory:
    """Bytes on one GPU, by kind."""

    weights: float = 0.0
    adapters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    reference: float = 0.0
    critic: float = 0.0
    activations: float | None = None

    @property
    def states(self) -> float:
        """All but activations."""
        return sum(value for name, value in vars(self).items() if name != "activations")

    @property
    def total(self) -> float:
        return self.states + (self.activations or 0.0)


@dataclass(frozen=True)
class Training:
    """How the model is trained, as far as memory goes.

    Attributes:
        dtype: "bf16" (with fp32 gradients and master weights) or "fp32".
        distributed_optimizer: its state is shared out over the data-parallel ranks.
        reference, critic: a second, frozen copy of the model; a critic, trained as a whole.
        recompute: "none", "selective" or "full".
        tokens: in a micro-batch, padding included; None: activations are not estimated.
        logits_budget: most bytes of logits at a time.
    """

    dtype: str = "bf16"
    distributed_optimizer: bool = True
    reference: bool = False
    critic: bool = False
    recompute: str = "none"
    tokens: int | None = None
    logits_budget: int = 2 * 2**30


def memory(
    spec: ModelSpec, layout: Layout, adapters: Adapters | None, training: Training
) -> Memory:
    """Returns the memory of the fullest GPU."""
    stages = [_stage_memory(spec, layout, adapters, training, s) for s in range(layout.pp)]
    return max(stages, key=lambda stage: stage.total)


def _stage_memory(
    spec: ModelSpec, layout: Layout, adapters: Adapters | None, training: Training, stage: int
) -> Memory:
    found = count_parameters(spec, layout, adapters, stage=stage)
    weight = WEIGHT_BYTES[training.dtype]
    trained = found.base if adapters is None else found.adapters
    state = _trained_bytes(layout, training)
    result = Memory(
        weights=found.base.total * weight,
        adapters=found.adapters.total * weight,
        gradients=trained.total * FP32_BYTES,
        optimizer=state(trained),
    )
    if training.reference and adapters is None:
        result.reference = result.weights
    if training.critic:
        base = count_parameters(spec, layout, None, stage=stage).base
        result.critic = base.total * (weight + FP32_BYTES) + state(base)
    if training.tokens is not None:
        result.activations = _activations(spec, layout, training, stage)
    return result


def _trained_bytes(layout: Layout, training: Training) -> Callable[[Count], float]:
    def state(count: Count) -> float:
        shards = [1, 1]
        if training.distributed_optimizer:
            shards = [layout.shards(is_expert=False), layout.shards(is_expert=True)]
        per = OPTIMIZER_BYTES[training.dtype]
        return per * (count.dense / shards[0] + count.experts / shards[1])

    return state


def _activations(spec: ModelSpec, layout: Layout, training: Training, stage: int) -> float:
    """Estimates what forward keeps for backward, flash attention assumed.

    Formula: per token and layer, the input of the layer (full recomputation), or the inputs of
    norms, linear layers and attention, and of SwiGLU, over top_k experts in a mixture; times the
    micro-batches in flight on the stage; plus one layer's worth while it is recomputed; plus the
    logits, as large as the budget lets them be.
    """
    assert training.tokens is not None
    tokens, width = training.tokens / layout.cp, WEIGHT_BYTES[training.dtype]
    hidden_cut = layout.tp if layout.sequence_parallel else 1
    boundary = spec.hidden_size * width / hidden_cut
    layer = sum(_layer_values(spec, layout, hidden_cut)) * width
    in_flight = min(layout.pp - stage, layout.pp)
    per_stage = spec.num_layers // layout.pp
    kept = layer * per_stage * in_flight
    if training.recompute == "full":
        kept = boundary * per_stage * in_flight + layer
    logits = 0.0
    if stage == layout.pp - 1:
        rows = padded_vocab_size(spec.vocab_size, layout.tp) // layout.tp
        logits = min(tokens * rows * (width + FP32_BYTES), training.logits_budget)
    return tokens * kept + logits


def _layer_values(spec: ModelSpec, layout: Layout, hidden_cut: int) -> Iterator[float]:
    """Yields numbers kept per token and layer."""
    heads = spec.num_attention_heads * spec.head_dim
    groups = spec.num_query_groups * spec.head_dim
    yield 4 * spec.hidden_size / hidden_cut  # inputs of both norms, and what they return
    yield 2 * (heads + 2 * groups) / layout.tp  # with and without rotary embedding and norm
    yield heads / layout.tp
    if spec.moe is None:
        yield 3 * spec.ffn_hidden_size / layout.tp
    else:
        # gathered tokens, gate, up and their product, output; ETP ranks all see the tokens
        yield spec.moe.top_k * (2 * spec.hidden_size + 3 * spec.moe.ffn_hidden_size) / hidden_cut
