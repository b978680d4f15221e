"""Trains one mini-batch on the real Megatron-Core in any layout and returns what came out.

`run_layout` runs on every rank (through `tests.spawn.run_ranks`); gradients and parameters come
back under Hugging Face names and whole, so that layouts can be compared with each other and with
the float64 reference.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tests.reference import mini_batch, tiny_llama
from tests.spawn import run_ranks

MAX_SEQ_LEN = 16
PADDED_VOCAB = 64


@dataclass(frozen=True)
class Layout:
    """How the mini-batch and the model are cut."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    vpp: int | None = None
    sequence_parallel: bool = False
    micro_batch_size: int = 2
    reduction: str = "token_mean"
    loss: str = "dual_clip"
    settings: dict[str, Any] = field(default_factory=dict)
    pre_normalised: bool = False
    tied: bool = False
    bf16: bool = False
    distributed_optimizer: bool = False
    average_in_collective: bool = False
    overlap_grad_reduce: bool = False
    seed: int = 0
    mask_all: bool = False
    pad_to: int = 12
    packed: bool = False
    layers: int = 2

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp


@dataclass
class Outcome:
    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def train_once(layout: Layout) -> Outcome:
    """Runs the layout on its ranks; every rank must report the same metrics, bit for bit."""
    outcomes = run_ranks(run_layout, layout.world_size, layout)
    first = outcomes[0]
    for rank, other in enumerate(outcomes[1:], start=1):
        assert other.metrics == first.metrics, f"rank {rank}: {other.metrics} != {first.metrics}"
    return first


def reference(
    layout: Layout, *, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Returns the metrics and gradients of the float64 reference for the same mini-batch, with
    the weights rounded to `dtype`."""
    rows = rows_of(layout)
    plan = [micro for rank in range(layout.dp) for micro in plan_of(layout, len(rows), rank)]
    weights = mini_batch.weights(rows, layout.reduction, plan, MAX_SEQ_LEN)
    terms = {k: v for k, v in layout.settings.items() if k.endswith("_coef") or k == "temperature"}
    hf_weights = {name: weight.to(dtype) for name, weight in _hf_weights(layout).items()}
    return mini_batch.loss_and_gradient(hf_weights, rows, weights, **terms)


def rows_of(layout: Layout) -> list[mini_batch.Row]:
    rows = mini_batch.make_rows(layout.seed)
    if layout.mask_all:
        rows = [row | {"loss_mask": torch.zeros_like(row["loss_mask"])} for row in rows]
    return rows


def plan_of(layout: Layout, num_rows: int, dp_rank: int) -> list[list[int]]:
    """Returns the rows of each micro-batch of a data-parallel rank (every dp-th row is its own)."""
    mine = list(range(dp_rank, num_rows, layout.dp))
    size = layout.micro_batch_size
    return [mine[i : i + size] for i in range(0, len(mine), size)]


def micro_batches(layout: Layout, dp_rank: int) -> list[dict[str, Any]]:
    rows = rows_of(layout)
    return [
        collate([rows[i] for i in micro], layout.pad_to)
        for micro in plan_of(layout, len(rows), dp_rank)
    ]


def collate(rows: list[mini_batch.Row], width: int) -> dict[str, Any]:
    def padded(name: str, fill: Any) -> Tensor:
        return torch.stack(
            [torch.nn.functional.pad(r[name], (0, width - len(r[name])), value=fill) for r in rows]
        )

    batch = {"tokens": padded("tokens", 0), "loss_mask": padded("loss_mask", False)}
    for name in ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs"):
        batch[name] = padded(name, float("nan"))  # padding may hold anything
    batch["group_ids"] = torch.tensor([row["group_id"] for row in rows])
    return batch


def _hf_weights(layout: Layout) -> dict[str, Tensor]:
    return tiny_llama.random_weights(layout.seed, layers=layout.layers, tied=layout.tied)


def run_layout(layout: Layout, **overrides: Any) -> Outcome:
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state

    from megatron_rl_loss.mcore.groups import parallel_groups
    from megatron_rl_loss.mcore.train_step import run_forward_backward, share_metrics

    chunks, optimizer, spec = build(layout, **overrides)
    try:
        groups = parallel_groups()
        forward_step = make_step(layout)
        batches = weighted(layout, groups)
        collected = run_forward_backward(forward_step, chunks, batches)
        metrics = share_metrics(collected, groups)
        gradients = {} if layout.distributed_optimizer else export_gradients(chunks, spec)
        _, grad_norm, _ = optimizer.step()
        metrics["grad_norm"] = float(grad_norm)
        return Outcome(metrics, gradients, export(chunks, spec))
    finally:
        parallel_state.destroy_model_parallel()


def build(layout: Layout, **overrides: Any) -> tuple[list[Any], Any, Any]:
    """Returns DDP-wrapped chunks with the layout's weights, the optimizer and the spec.

    `overrides` are further arguments of `transformer_config`.
    """
    from megatron_rl_loss.mcore.model import build_gpt_model, transformer_config
    from megatron_rl_loss.mcore.model_spec import model_spec_from_hf
    from megatron_rl_loss.mcore.optimizer import build_optimizer, wrap_with_ddp
    from megatron_rl_loss.mcore.ranks import start_ranks
    from megatron_rl_loss.mcore.weights import load_hf_weights

    sizes = dict(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
    )
    start_ranks(**sizes)
    spec = model_spec_from_hf(tiny_llama.hf_config(layers=layout.layers, tied=layout.tied))
    config = transformer_config(
        spec, **sizes, sequence_parallel=layout.sequence_parallel, bf16=layout.bf16, **overrides
    )
    chunks = build_gpt_model(spec, config, padded_vocab_size=PADDED_VOCAB)
    load_hf_weights(chunks, _hf_weights(layout), spec)
    chunks = wrap_with_ddp(
        chunks,
        use_distributed_optimizer=layout.distributed_optimizer,
        average_in_collective=layout.average_in_collective,
        overlap_grad_reduce=layout.overlap_grad_reduce,
    )
    # eps far above rounding noise: else Adam's first step is sign(gradient), noise included
    optimizer = build_optimizer(chunks, lr=1e-2, eps=1e-3, clip_grad=1e9)
    return chunks, optimizer, spec


def make_step(layout: Layout) -> Any:
    from megatron_rl_loss import make_forward_step

    return make_forward_step(layout.loss, vocab_size=tiny_llama.SIZES["vocab"], **layout.settings)


def weighted(layout: Layout, groups: Any) -> list[dict[str, Any]]:
    """Returns this rank's micro-batches, with weights or with pre-normalised advantages."""
    from megatron_rl_loss import with_loss_weights

    if layout.packed:
        return packed(layout, groups.dp.rank())
    batches = with_loss_weights(
        micro_batches(layout, groups.dp.rank()),
        layout.reduction,
        dp_group=groups.dp,
        max_seq_len=MAX_SEQ_LEN,
    )
    if not layout.pre_normalised:
        return batches
    for batch in batches:
        batch["advantages"] = torch.where(
            batch["loss_mask"], batch["advantages"] * batch.pop("loss_weights"), 0.0
        )
    return batches


def packed(layout: Layout, dp_rank: int) -> list[dict[str, Any]]:
    """Returns this rank's micro-batches with each of them packed into one row."""
    from megatron_rl_loss.mcore.collate import collate, with_sequence_weights
    from megatron_rl_loss.parallel.context_parallel import sequence_multiple

    rows = [row | {"group_ids": row["group_id"]} for row in rows_of(layout)]
    for row in rows:
        del row["group_id"]
    plan = [plan_of(layout, len(rows), rank) for rank in range(layout.dp)]
    where = {i: n for n, micro in enumerate(m for rank in plan for m in rank) for i in micro}
    weighted_rows = with_sequence_weights(
        rows,
        layout.reduction,
        micro_batch_ids=[where[i] for i in range(len(rows))],
        max_seq_len=MAX_SEQ_LEN,
    )
    multiple = sequence_multiple(layout.tp, layout.cp)
    width = layout.pad_to * layout.micro_batch_size if layout.pp > 1 else None
    return [
        collate(weighted_rows, micro, packed=True, multiple=multiple, width=width)
        for micro in plan[dp_rank]
    ]


def export(chunks: list[Any], spec: Any) -> dict[str, Tensor]:
    from megatron_rl_loss.mcore.weights import export_hf_weights

    return dict(export_hf_weights(chunks, spec, dtype=torch.float32))


def export_gradients(chunks: list[Any], spec: Any) -> dict[str, Tensor]:
    """Returns the reduced gradients: what `export` gives with each weight replaced by its own."""
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    kept = [p.data for p in parameters]
    for p in parameters:
        p.data = (
            p.main_grad.clone().to(p.dtype) if p.dtype == torch.float32 else p.main_grad.clone()
        )
    try:
        return export(chunks, spec)
    finally:
        for p, data in zip(parameters, kept):
            p.data = data


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """Asserts that each tensor's error is at most `bound` of the expected tensor's norm."""
    assert set(actual) == set(expected)
    for name, want in expected.items():
        error = (actual[name].double() - want.double()).norm()
        assert error <= bound * want.double().norm(), (
            f"{name}: error {error / want.double().norm():.2e} of its norm, bound {bound:.0e}"
        )


__all__ = ["Layout", "Outcome", "assert_close", "reference", "replace", "train_once"]
