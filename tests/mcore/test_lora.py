"""LoRA on the real Megatron-Core: what it changes, what it leaves alone, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_rl_loss.errors import ConfigError, LayoutError
from tests.mcore import lora_harness
from tests.mcore.harness import Layout
from tests.mcore.lora_harness import Case, relative_error, run_case
from tests.spawn import run_ranks

FP32 = torch.float32


def on_one_rank(fn: Any, *args: Any) -> Any:
    return run_ranks(fn, 1, *args)[0]


def logits_of(case: Case, chunks: Any) -> torch.Tensor:
    with torch.no_grad():
        parts = lora_harness.forward_backward(case, chunks, zero=False, forward_only=True)
    return lora_harness.whole_logits(parts, case.base.cp)


def _switched(case: Case) -> dict[str, Any]:
    from megatron_rl_loss.lora import apply_lora, disabled

    chunks = lora_harness.build_bare(case)
    seen = {"base": logits_of(case, chunks)}
    apply_lora(chunks, lora_harness.lora_config(case))
    seen["fresh"] = logits_of(case, chunks)
    lora_harness.set_random_b(chunks)
    seen["on"] = logits_of(case, chunks)
    with disabled(chunks):
        seen["off"] = logits_of(case, chunks)
        with disabled(chunks[0]):
            seen["off twice"] = logits_of(case, chunks)
        seen["still off"] = logits_of(case, chunks)
    try:
        with disabled(chunks):
            raise RuntimeError
    except RuntimeError:
        seen["on again"] = logits_of(case, chunks)
    return seen


@pytest.mark.parametrize("moe", [False, True])
def test_a_fresh_or_disabled_adapter_is_the_base_model_bit_for_bit(moe):
    seen = on_one_rank(_switched, Case(moe=moe, dtype=FP32))
    for name in ("fresh", "off", "off twice", "still off"):
        assert torch.equal(seen[name], seen["base"]), name
    assert torch.equal(seen["on again"], seen["on"])
    assert relative_error(seen["on"], seen["base"]) > 0.05


def _merged(case: Case) -> dict[str, Any]:
    """Adapter gradients, and those that the chain rule gives from the merged model's weights."""
    from megatron_rl_loss.lora import adapters, merged

    chunks, _ = lora_harness.build(case)
    before = lora_harness.frozen_bits(chunks)
    on = lora_harness.forward_backward(case, chunks)
    actual = {h.name: (h.a.main_grad.clone(), h.b.main_grad.clone()) for h in adapters(chunks)}
    factors = {h.name: (h.a.detach(), h.b.detach(), h.scale) for h in adapters(chunks)}
    view = merged(chunks)[0]
    weights = {name: p.detach().to(case.dtype) for name, p in view.named_parameters()}
    after = lora_harness.frozen_bits(chunks)
    assert all(torch.equal(after[name], value) for name, value in before.items())

    stop_parallel()
    plain, _ = lora_harness.wrapped(case, lora_harness.build_bare(case))
    names = dict(plain[0].module.named_parameters())
    assert set(names) == set(weights)
    for name, weight in weights.items():
        names[name].data.copy_(weight)
    full = lora_harness.forward_backward(case, plain)
    expected = {}
    for name, (a, b, scale) in factors.items():
        grad = names[f"{name}.weight"].main_grad
        expected[name] = (scale * b.t() @ grad, scale * grad @ a.t())
    return {"on": on, "full": full, "actual": actual, "expected": expected}


def stop_parallel() -> None:
    from megatron_rl_loss.mcore.ranks import stop_ranks

    stop_ranks()


@pytest.mark.parametrize("moe", [False, True])
def test_merged_weights_give_the_same_logits_and_the_chain_rule_the_same_gradients(moe):
    seen = on_one_rank(_merged, Case(moe=moe))
    for key, logits in seen["full"].items():
        assert relative_error(seen["on"][key], logits) < 1e-12
    assert len(seen["actual"]) == (4 + 2 + 8 if moe else 8)
    for name, pair in seen["expected"].items():
        for actual, expected in zip(seen["actual"][name], pair):
            assert relative_error(actual, expected) < 1e-10, name


def test_two_micro_batches_accumulate_to_one_of_twice_the_rows():
    small, large = run_case(Case(moe=True)), run_case(Case(moe=True, micro_batch_size=2))
    for name, gradient in small.gradients.items():
        assert relative_error(large.gradients[name], gradient) < 1e-10, name


FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}


@pytest.mark.parametrize("overrides", [FULL, SELECTIVE], ids=["full", "selective"])
def test_recomputing_a_frozen_base_gives_the_same_gradients(overrides):
    case = Case(targets=["linear_fc1", "decoder.layers.0.self_attention.linear_qkv"])
    plain, recomputed = run_case(case), run_case(replace(case, overrides=overrides))
    assert recomputed.grad_norm > 0
    for name, gradient in plain.gradients.items():
        assert relative_error(recomputed.gradients[name], gradient) < 1e-12, name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_pipeline_stage_without_adapters_runs(layer, tied):
    case = Case(Layout(tied=tied), targets=[f"decoder.layers.{layer}.*"])
    alone = run_case(case)
    split = run_case(replace(case, base=Layout(pp=2, tied=tied)))
    assert set(split.gradients) == set(alone.gradients)
    for name, gradient in alone.gradients.items():
        assert relative_error(split.gradients[name], gradient) < 1e-10, name


def test_the_distributed_optimizer_makes_the_same_step():
    case = Case(Layout(dp=2), moe=True, ep=2, dtype=FP32, steps=3)
    plain = run_case(case)
    cut = run_case(replace(case, base=replace(case.base, distributed_optimizer=True)))
    for name, parameter in plain.parameters.items():
        assert relative_error(cut.parameters[name], parameter) < 1e-5, name


def test_experts_without_tokens_get_zero_gradients():
    case = Case(Layout(dp=2), moe=True, ep=2, all_to_one_pair=True)
    outcome = run_case(case)
    norms: dict[str, list[float]] = {}
    for name, gradient in outcome.gradients.items():
        if "experts" in name:
            norms.setdefault(name.split(".local_experts.")[1][0], []).append(float(gradient.norm()))
    assert len(norms) == 4 and all(len(of_expert) == 4 for of_expert in norms.values())
    idle = [of_expert for of_expert in norms.values() if not any(of_expert)]
    assert len(idle) == 2
    assert all(min(of_expert) > 0 for of_expert in norms.values() if of_expert not in idle)


def _what_is_trained(case: Case) -> dict[str, Any]:
    from megatron_rl_loss.lora import adapters, report

    chunks, optimizer = lora_harness.build(case)
    ours = {id(p) for h in adapters(chunks) for p in (h.a, h.b)}
    buffers = [*chunks[0].buffers, *chunks[0].expert_parallel_buffers]
    in_ddp = {id(p) for buffer in buffers for p in buffer.params}
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    needing = {id(p) for p in chunks[0].parameters() if p.requires_grad}
    return {
        "same": ours == in_ddp == stepped == needing,
        "report": report(chunks),
        "text": str(report(chunks)),
    }


def test_only_adapters_are_trained_and_the_report_counts_them():
    seen = on_one_rank(_what_is_trained, Case(moe=True, dtype=FP32))
    assert seen["same"]
    kinds = seen["report"].kinds
    hidden, ffn, experts, rank, expert_rank = 16, 24, 4, 4, 2
    fc1 = kinds["mlp.experts.linear_fc1"]
    assert fc1.num_adapters == experts
    assert fc1.num_whole_parameters == experts * expert_rank * (hidden + 2 * ffn)
    qkv = kinds["self_attention.linear_qkv"]
    assert qkv.num_adapters == 2 and qkv.num_parameters == 2 * rank * (hidden + 32)
    total = sum(count.num_parameters for count in kinds.values())
    assert seen["report"].num_trained == total
    assert f"trained {total:,}" in seen["text"] and "mlp.experts.linear_fc2" in seen["text"]


def _finalize(case: Case) -> dict[str, list[float]]:
    from megatron.core.distributed import finalize_model_grads

    from megatron_rl_loss.lora import adapters

    chunks, _ = lora_harness.build(case)
    rank = torch.distributed.get_rank()
    for chunk in chunks:
        chunk.zero_grad_buffer()
    for handle in adapters(chunks):
        for contribution in ((1.0, 2.0), (3.0, 4.0))[rank]:
            handle.a.main_grad += contribution
            handle.b.main_grad += contribution
    finalize_model_grads(chunks)
    return {
        f"{h.name.rpartition('.')[2]}.{n}": sorted(set(p.main_grad.flatten().tolist()))
        for h in adapters(chunks)
        for n, p in (("a", h.a), ("b", h.b))
    }


def test_whole_factors_are_summed_over_the_sequence_parallel_ranks():
    case = Case(Layout(tp=2, sequence_parallel=True))
    first, second = run_ranks(_finalize, 2, case)
    for name in ("linear_qkv.a", "linear_fc1.a", "linear_proj.b", "linear_fc2.b"):
        assert first[name] == second[name] == [10.0], name
    for name in ("linear_qkv.b", "linear_fc1.b", "linear_proj.a", "linear_fc2.a"):
        assert (first[name], second[name]) == ([3.0], [7.0]), name


def _traffic(case: Case, off: bool) -> int:
    """Runs forward and backward without DDP and returns the numbers that collectives took in."""
    import contextlib

    from megatron_rl_loss.lora import apply_lora, disabled

    chunks = lora_harness.build_bare(case)
    apply_lora(chunks, lora_harness.lora_config(case))
    model = chunks[0]
    # else the base model alone would have no backward pass
    model.embedding.register_forward_hook(lambda m, a, out: out.requires_grad_(True))
    batch = lora_harness.batches_of(case, 0)[0]
    positions = torch.arange(lora_harness.LENGTH)[None]
    with disabled(chunks) if off else contextlib.nullcontext(), counting() as sizes:
        model(batch["tokens"], positions, None).sum().backward()
    return sum(sizes)


class counting:
    """Counts the elements that this rank hands to collectives."""

    NAMES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
    NAMES += ("_all_gather_base", "_reduce_scatter_base", "all_gather", "reduce_scatter")

    def __enter__(self) -> list[int]:
        from megatron.core.tensor_parallel import layers, mappings

        self.sizes: list[int] = []
        self.kept = []
        for place in (torch.distributed, mappings, layers):
            for name in (*self.NAMES, "dist_all_gather_func", "dist_reduce_scatter_func"):
                original = getattr(place, name, None)
                if original is not None:
                    self.kept.append((place, name, original))
        for place, name, original in self.kept:
            setattr(place, name, self.counted(name, original))
        return self.sizes

    def counted(self, name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = args[0] if name == "all_reduce" else args[1]
            self.sizes.append(given.numel())
            return original(*args, **kwargs)

        return call

    def __exit__(self, *error: Any) -> None:
        for place, name, original in self.kept:
            setattr(place, name, original)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_adapters_exchange_nothing_wider_than_their_rank(sequence_parallel):
    case = Case(Layout(tp=2, sequence_parallel=sequence_parallel), rank=3)
    base = run_ranks(_traffic, 2, case, True)[0]
    adapted = run_ranks(_traffic, 2, case, False)[0]
    layers, length, rank = 2, lora_harness.LENGTH, 3
    # column: one exchange in backward, with sequence parallelism one in each direction;
    # row: one forward, with sequence parallelism one in each direction
    if sequence_parallel:
        per_linear = (length // 2 + length) * rank
    else:
        per_linear = length * rank
    assert adapted - base == layers * 4 * per_linear
    assert base > 10 * (adapted - base) / rank


def _refused(case: Case, changes: dict[str, Any]) -> str:
    from megatron_rl_loss.lora import LoRAConfig, apply_lora

    settings = {"rank": 4, "alpha": 8.0, "targets": "all-linear"} | changes
    wrap, again = settings.pop("wrap", False), settings.pop("again", False)
    model_settings = settings.pop("model", {})
    chunks = lora_harness.build_bare(case)
    for name, value in model_settings.items():
        setattr(chunks[0].config, name, value)
    if wrap:
        chunks, _ = lora_harness.wrapped(case, chunks)
    if again:
        apply_lora(chunks, LoRAConfig(**settings))
    before = {name: (p.requires_grad, p) for name, p in chunks[0].named_parameters()}
    classes = [type(module) for module in chunks[0].modules()]
    try:
        apply_lora(chunks, LoRAConfig(**settings))
    except (ConfigError, LayoutError) as error:
        after = {name: (p.requires_grad, p) for name, p in chunks[0].named_parameters()}
        assert set(before) == set(after)
        assert all(before[n][0] == after[n][0] and before[n][1] is after[n][1] for n in before)
        assert classes == [type(module) for module in chunks[0].modules()]
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        (Case(), {"targets": ["q_prj"]}, ["'q_prj'", "linear_qkv", "linear_fc2"]),
        (Case(), {"targets": ["q_proj"]}, ["did you mean 'linear_qkv'"]),
        (Case(), {"targets": ["output_layer"]}, ["output layer take no adapters"]),
        (Case(moe=True), {"targets": ["router"]}, ["router", "take no adapters"]),
        (Case(), {"exclude": ["decoder.layers.7.*"]}, ["decoder.layers.7"]),
        (Case(), {"wrap": True}, ["DistributedDataParallel", "before"]),
        (Case(), {"again": True}, ["already"]),
        (Case(), {"model": {"fp8": "hybrid"}}, ["fp8", "bf16"]),
        (
            Case(moe=True),
            {"model": {"moe_router_enable_expert_bias": True}},
            ["moe_router_bias_update_rate", "set it to 0"],
        ),
    ],
)
def test_what_is_not_supported_is_refused_and_changes_nothing(case, changes, words):
    text = on_one_rank(_refused, replace(case, dtype=FP32), changes)
    for word in words:
        assert word in text, text


def test_every_rank_refuses_an_expert_rank_that_does_not_split():
    case = Case(Layout(tp=2, sequence_parallel=True), moe=True, etp=2, dtype=FP32)
    texts = run_ranks(_refused, 2, case, {"expert_rank": 3})
    assert texts[0] == texts[1]
    assert "expert_tensor_parallel_size 2" in texts[0] and "multiple of 2" in texts[0]


class _Other(torch.nn.Module):
    """Has the names by which Megatron-Bridge's PEFT wrappers switch their adapters."""

    def __init__(self) -> None:
        super().__init__()
        self._adapter_enabled = True

    def disable_adapter_layers(self) -> None:
        self._adapter_enabled = False

    def enable_adapter_layers(self) -> None:
        self._adapter_enabled = True


def _foreign() -> list[Any]:
    from megatron_rl_loss.lora import disabled
    from megatron_rl_loss.mcore.ranks import start_ranks

    start_ranks()
    wrapped, off_before = _Other(), _Other()
    off_before.disable_adapter_layers()
    model = torch.nn.Sequential(torch.nn.Sequential(wrapped), off_before)

    def flags() -> tuple[bool, bool]:
        return wrapped._adapter_enabled, off_before._adapter_enabled

    seen = []
    with disabled([model]):
        seen.append(flags())
        with disabled(model):
            seen.append(flags())
        seen.append(flags())
    seen.append(flags())
    try:
        with disabled(torch.nn.Linear(1, 1)):
            pass
    except ConfigError as error:
        seen.append(str(error))
    return seen


def test_adapters_of_megatron_bridge_are_switched_by_their_methods():
    *flags, error = on_one_rank(_foreign)
    assert flags == [(False, False)] * 3 + [(True, False)]
    assert "no adapters to disable" in error


def test_kaiming_bounds_use_the_whole_layer():
    case = Case(Layout(tp=2), random_b=False, dtype=FP32)
    parameters = run_case(replace(case, steps=1)).parameters
    a = parameters["decoder.layers.0.mlp.linear_fc2.a"]
    assert a.shape[1] == 48
    assert 0.8 / math.sqrt(48) < a.abs().max() < 1.2 / math.sqrt(48)
