"""Runs LoRA on the real Megatron-Core in any layout, in float64, and puts the shards together.

Loss: sum of logits times fixed numbers, so that nothing but Megatron and the adapters is tested.
Every rank returns its shards; `whole` joins them by the rules written down here, apart from the
package's.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.mcore import harness, moe_harness
from tests.mcore.harness import PADDED_VOCAB, Layout
from tests.mcore.moe_harness import MoeLayout
from tests.reference import tiny_llama
from tests.spawn import run_ranks

NUM_ROWS, LENGTH = 4, 8


@dataclass(frozen=True)
class Case:
    """A layout with its adapters. `base.layers` counts for dense models; MoE ones have two."""

    base: Layout = Layout()
    moe: bool = False
    ep: int = 1
    etp: int = 1
    targets: Any = "all-linear"
    exclude: tuple[str, ...] = ()
    rank: int = 4
    expert_rank: int | None = 2
    dtype: torch.dtype = torch.float64
    micro_batch_size: int = 1
    random_b: bool = True
    steps: int = 1
    overrides: dict[str, Any] = field(default_factory=dict)
    all_to_one_pair: bool = False
    sign: float = 1.0


@dataclass
class Outcome:
    logits: Tensor
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    grad_norm: float


def run_case(case: Case) -> Outcome:
    ranks = run_ranks(train_on_rank, case.base.world_size, case)
    logits = {key: part for rank in ranks for key, part in rank["logits"].items()}
    norms = {rank["grad_norm"] for rank in ranks}
    assert max(norms) - min(norms) <= 1e-9 * max(norms), norms
    return Outcome(
        whole_logits(logits, case.base.cp),
        whole([rank["gradients"] for rank in ranks]),
        whole([rank["parameters"] for rank in ranks]),
        max(norms),
    )


def whole_logits(parts: dict[tuple[int, int, int], Tensor], cp_size: int) -> Tensor:
    """Joins {(row, tp rank, cp rank): [S / cp, V / tp]} to [rows, S, V]."""
    rows = []
    for row in range(NUM_ROWS):
        tp_size = len({key[1] for key in parts})
        slices = [torch.cat([parts[row, t, c] for t in range(tp_size)], -1) for c in range(cp_size)]
        chunks = [half for piece in slices for half in piece.chunk(2)]
        first, second = chunks[0::2], chunks[1::2]
        rows.append(torch.cat([*first, *reversed(second)]))
    return torch.stack(rows)


# name -> (kind, is B, shard number, dimension or None, tensor)
Shards = dict[str, tuple[str, bool, int, Any, Tensor]]


def whole(ranks: Sequence[Shards]) -> dict[str, Tensor]:
    """Joins the adapters' shards; copies of a shard must be equal."""
    found: dict[str, dict[int, tuple]] = {}
    for shards in ranks:
        for name, entry in shards.items():
            kept = found.setdefault(name, {}).setdefault(entry[2], entry)
            torch.testing.assert_close(entry[4], kept[4], rtol=1e-9, atol=1e-12, msg=name)
    result = {}
    for name, parts in found.items():
        kind, is_b, _, dim, tensor = parts[0]
        tensors = [parts[i][4] for i in range(len(parts))]
        if dim is None:
            result[name] = tensor
        elif kind == "gate_up" and is_b:
            halves = [t.chunk(2, 0) for t in tensors]
            result[name] = torch.cat([h[0] for h in halves] + [h[1] for h in halves])
        else:
            result[name] = torch.cat(tensors, dim)
    return result


def shard(value: Tensor, kind: str, is_b: bool, rank: int, size: int, dim: int | None) -> Tensor:
    if dim is None:
        return value
    if kind == "gate_up" and is_b:
        return torch.cat([half.chunk(size, 0)[rank] for half in value.chunk(2, 0)])
    return value.chunk(size, dim)[rank]


def named(case: Case, chunks: Sequence[Any], read: Callable[[Any], Tensor]) -> Shards:
    from megatron_rl_loss.lora import adapters

    found: Shards = {}
    for handle in adapters(chunks):
        cut = handle.sharding
        for letter, p, dim in (("a", handle.a, cut.a_dim), ("b", handle.b, cut.b_dim)):
            number = cut.rank if dim is not None else 0
            name = f"{handle.name}.{letter}"
            found[name] = (handle.kind, letter == "b", number, dim, read(p).detach().clone())
    return found


def set_random_b(chunks: Sequence[Any]) -> None:
    """Gives each B the values that its name has in every layout."""
    from megatron_rl_loss.lora import adapters

    for handle in adapters(chunks):
        cut, shape = handle.sharding, list(handle.b.shape)
        if cut.b_dim is not None:
            shape[cut.b_dim] *= cut.size
        generator = torch.Generator().manual_seed(zlib.crc32(handle.name.encode()))
        value = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.1
        part = shard(value, handle.kind, True, cut.rank, cut.size, cut.b_dim)
        handle.b.data.copy_(part)


def build_bare(case: Case) -> list[Any]:
    """Starts the groups and returns chunks with the weights of the case, without adapters."""
    from megatron_rl_loss.mcore.ranks import start_ranks

    base = case.base
    sizes = dict(
        tensor_model_parallel_size=base.tp,
        pipeline_model_parallel_size=base.pp,
        virtual_pipeline_model_parallel_size=base.vpp,
        context_parallel_size=base.cp,
    )
    start_ranks(**sizes, expert_model_parallel_size=case.ep, expert_tensor_parallel_size=case.etp)
    chunks = _moe(case) if case.moe else _dense(case, sizes)
    return chunks


def _dense(case: Case, sizes: dict[str, Any]) -> list[Any]:
    from megatron_rl_loss.mcore.model import build_gpt_model, transformer_config
    from megatron_rl_loss.mcore.model_spec import model_spec_from_hf
    from megatron_rl_loss.mcore.weights import load_hf_weights

    base = case.base
    spec = model_spec_from_hf(tiny_llama.hf_config(layers=base.layers, tied=base.tied))
    config = transformer_config(
        spec,
        **sizes,
        sequence_parallel=base.sequence_parallel,
        **{"params_dtype": case.dtype, "pipeline_dtype": case.dtype} | case.overrides,
    )
    chunks = build_gpt_model(spec, config, padded_vocab_size=PADDED_VOCAB)
    chunks = [chunk.to(case.dtype) for chunk in chunks]
    load_hf_weights(chunks, harness._hf_weights(base), spec)
    return chunks


def _moe(case: Case) -> list[Any]:
    from megatron.core.models.gpt import GPTModel

    layout = MoeLayout(case.base, ep=case.ep, etp=case.etp)
    config = moe_harness.moe_config(layout)
    settings = {"params_dtype": case.dtype, "gated_linear_unit": True}
    settings["activation_func"] = torch.nn.functional.silu
    for name, value in (settings | case.overrides).items():
        setattr(config, name, value)
    model = GPTModel(
        config=config,
        transformer_layer_spec=moe_harness.moe_spec(config),
        vocab_size=PADDED_VOCAB,
        max_sequence_length=64,
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    ).to(case.dtype)
    for name, (index, dim, parameter) in moe_harness.named_parameters(model).items():
        sharded = getattr(parameter, "tensor_model_parallel", False)
        size = 1 if not sharded else case.etp if "experts" in name else case.base.tp
        parameter.data.copy_(_made_weight(name, parameter.shape, index, size, dim))
        if case.all_to_one_pair and name.endswith("router.weight"):
            parameter.data.zero_()  # equal logits: all tokens go to the same two experts
    return [model]


def _made_weight(name: str, shape: Sequence[int], index: int, size: int, dim: int) -> Tensor:
    """Returns this rank's part of the weight that `name` has in every layout."""
    whole_shape = list(shape)
    whole_shape[dim] *= size
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    value = torch.randn(whole_shape, generator=generator) * 0.2 + ("norm" in name)
    kind = "gate_up" if "linear_fc1" in name else "other"
    return shard(value, kind, True, index, size, dim if size > 1 else None)


def lora_config(case: Case) -> Any:
    from megatron_rl_loss.lora import LoRAConfig

    return LoRAConfig(
        rank=case.rank,
        alpha=8.0,
        targets=case.targets,
        expert_rank=case.expert_rank,
        exclude=case.exclude,
        seed=5,
    )


def build(case: Case) -> tuple[list[Any], Any]:
    """Returns DDP-wrapped chunks with adapters, and the optimizer."""
    from megatron_rl_loss.lora import apply_lora

    chunks = build_bare(case)
    apply_lora(chunks, lora_config(case))
    if case.random_b:
        set_random_b(chunks)
    return wrapped(case, chunks)


def wrapped(case: Case, chunks: list[Any]) -> tuple[list[Any], Any]:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer.module import Float16Module

    from megatron_rl_loss.mcore.optimizer import build_optimizer

    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=case.dtype != torch.float64,
        use_distributed_optimizer=case.base.distributed_optimizer,
    )
    config = chunks[0].config
    if case.dtype == torch.bfloat16:
        config.bf16 = True
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    chunks = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    return chunks, build_optimizer(chunks, lr=1e-2, eps=1e-3, clip_grad=0.0)


def train_on_rank(case: Case) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    chunks, optimizer = build(case)
    base = frozen_bits(chunks)
    for _ in range(case.steps):
        optimizer.zero_grad()
        logits = forward_backward(case, chunks)
        gradients = named(case, chunks, lambda p: p.main_grad)
        _, grad_norm, _ = optimizer.step()
    assert all(torch.equal(base[name], now) for name, now in frozen_bits(chunks).items())
    return {
        "logits": logits,
        "gradients": {} if case.base.distributed_optimizer else gradients,
        "parameters": named(case, chunks, lambda p: p),
        "grad_norm": float(grad_norm),
    }


def frozen_bits(chunks: Sequence[Any]) -> dict[str, Tensor]:
    return {
        f"{i}.{name}": p.detach().clone()
        for i, chunk in enumerate(chunks)
        for name, p in chunk.named_parameters()
        if ".adapter." not in name
    }


def batches_of(case: Case, dp_rank: int, num_rows: int = NUM_ROWS) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(0, 60, (num_rows, LENGTH), generator=generator)
    targets = torch.randn(num_rows, LENGTH, PADDED_VOCAB, generator=generator, dtype=torch.float64)
    mine = list(range(dp_rank, num_rows, case.base.dp))
    size = case.micro_batch_size
    return [
        {"tokens": tokens[rows], "targets": targets[rows].to(case.dtype), "rows": rows}
        for rows in (mine[i : i + size] for i in range(0, len(mine), size))
    ]


def forward_backward(
    case: Case, chunks: Sequence[Any], *, zero: bool = True, forward_only: bool = False
) -> dict[tuple[int, int, int], Tensor]:
    """Runs the schedule and returns the last stage's logits by (row, tp rank, cp rank)."""
    from megatron_rl_loss.mcore.groups import parallel_groups
    from megatron_rl_loss.mcore.scaling import schedule_factor
    from megatron_rl_loss.mcore.train_step import run_forward_backward
    from megatron_rl_loss.parallel.context_parallel import zigzag_split

    groups = parallel_groups()
    batches = batches_of(case, groups.dp.rank())
    factor = schedule_factor(len(batches), groups.dp.size(), groups.cp.size())
    seen: dict[tuple[int, int, int], Tensor] = {}

    def own(x: Tensor) -> Tensor:
        return zigzag_split(x, groups.cp.rank(), groups.cp.size())

    def step(iterator: Any, model: Any) -> tuple[Tensor, Any]:
        batch = next(iterator)
        positions = torch.arange(LENGTH).expand_as(batch["tokens"])
        output = model(own(batch["tokens"]), own(positions), None)

        def loss(logits: Tensor) -> tuple[Tensor, dict]:
            for i, row in enumerate(batch["rows"]):
                seen[row, groups.tp.rank(), groups.cp.rank()] = logits[i].detach().clone()
            target = own(batch["targets"]).chunk(groups.tp.size(), -1)[groups.tp.rank()]
            return (logits * target).sum() * (factor * case.sign), {}

        return output, loss

    if zero:
        for chunk in chunks:
            if hasattr(chunk, "zero_grad_buffer"):
                chunk.zero_grad_buffer()
    run_forward_backward(step, chunks, batches, forward_only=forward_only)
    return seen


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())
