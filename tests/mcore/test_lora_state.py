"""Adapter checkpoints and the AdapterStore: what training needs comes back, all of it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl_loss.errors import ConfigError, WeightsError
from tests.mcore import lora_harness
from tests.mcore.harness import Layout
from tests.mcore.lora_harness import Case, relative_error, whole
from tests.spawn import run_ranks

FP32 = Case(moe=True, dtype=torch.float32, expert_rank=4)
EP2 = replace(FP32, base=Layout(dp=2), ep=2)
TP2_ETP2 = replace(FP32, base=Layout(tp=2, sequence_parallel=True), etp=2)
DISTRIBUTED = replace(FP32, base=Layout(dp=2, distributed_optimizer=True))


def step(case: Case, chunks: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    lora_harness.forward_backward(case, chunks)
    optimizer.step()


def everything(case: Case, chunks: Any, optimizer: Any) -> dict[str, Any]:
    """Returns whole parameters, fp32 weights and moments as shards, by name."""
    from megatron_rl_loss.lora.optimizer_state import MOMENTS, parameter_states, whole_of

    states = {id(s.parameter): s for s in parameter_states(chunks, optimizer)}
    parts = {"": lora_harness.named(case, chunks, lambda p: p)}
    for kind in ("main", *MOMENTS):

        def read(p: Any, kind: str = kind) -> Any:
            state = states[id(p)]
            if kind == "main":
                return whole_of(state, state.main)
            part = state.state.get(kind)
            if part is None and not state.is_cut:
                part = torch.zeros_like(p)  # no step yet
            return whole_of(state, part)

        parts[kind] = lora_harness.named(case, chunks, read)
    return parts


def _train(case: Case, save: str | None, load: str | None, steps: int) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    from megatron_rl_loss.lora.checkpoint import load_adapter, save_adapter

    chunks, optimizer = lora_harness.build(replace(case, random_b=load is None))
    if load is not None:
        load_adapter(load, chunks, optimizer)
    for _ in range(steps):
        step(case, chunks, optimizer)
    result = everything(case, chunks, optimizer)
    if save is not None:
        save_adapter(save, chunks, optimizer)
        keys = dist_checkpointing.load_tensors_metadata(save)
        assert keys and all(".lora_" in key for key in keys), "the base is not to be saved"
    return result


def train(case: Case, *, save: Any = None, load: Any = None, steps: int) -> dict[str, Any]:
    ranks = run_ranks(
        _train, case.base.world_size, case, save and str(save), load and str(load), steps
    )
    return {
        f"{name} {kind}": value
        for kind in ranks[0]
        for name, value in whole([rank[kind] for rank in ranks]).items()
    }


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Any]:
    return train(FP32, steps=2)


@pytest.mark.parametrize(
    ("before", "after"),
    [(FP32, FP32), (FP32, TP2_ETP2), (EP2, FP32), (TP2_ETP2, EP2), (DISTRIBUTED, EP2)],
    ids=["1 to 1", "1 to TP 2 ETP 2", "EP 2 to 1", "TP 2 ETP 2 to EP 2", "distributed to EP 2"],
)
def test_resuming_in_any_layout_equals_the_uninterrupted_run(
    before, after, uninterrupted, tmp_path
):
    train(before, save=tmp_path / "a", steps=1)
    resumed = train(after, load=tmp_path / "a", steps=1)
    assert set(resumed) == set(uninterrupted)
    same = before is after
    for name, expected in uninterrupted.items():
        if same:
            assert torch.equal(resumed[name], expected), name
        else:
            assert relative_error(resumed[name], expected) < 2e-5, name


def test_stages_of_a_pipeline_resume_on_one_rank(tmp_path):
    dense = replace(FP32, moe=False)
    train(replace(dense, base=Layout(pp=2)), save=tmp_path / "a", steps=1)
    resumed = train(dense, load=tmp_path / "a", steps=1)
    for name, expected in train(dense, steps=2).items():
        assert relative_error(resumed[name], expected) < 2e-5, name


def test_resuming_with_the_distributed_optimizer_is_exact(tmp_path):
    train(DISTRIBUTED, save=tmp_path / "a", steps=1)
    whole_run = train(DISTRIBUTED, steps=2)
    resumed = train(DISTRIBUTED, load=tmp_path / "a", steps=1)
    for name, expected in whole_run.items():
        assert torch.equal(resumed[name], expected), name


def _weights_only(folder: str) -> dict[str, Any]:
    from megatron_rl_loss.lora.checkpoint import (
        load_adapter,
        load_adapter_weights,
        save_adapter,
    )
    from megatron_rl_loss.lora.optimizer_state import parameter_states

    chunks, optimizer = lora_harness.build(FP32)
    step(FP32, chunks, optimizer)
    written = {n: p.detach().clone() for n, p in _parameters(chunks)}
    save_adapter(folder, chunks)
    step(FP32, chunks, optimizer)
    errors = []
    try:
        load_adapter(folder, chunks, optimizer)
    except WeightsError as error:
        errors.append(str(error))
    changed = {n: not torch.equal(p, written[n]) for n, p in _parameters(chunks)}
    assert all(changed.values()), "the refused load changed something"
    load_adapter_weights(folder, chunks, optimizer)
    assert all(torch.equal(p, written[n]) for n, p in _parameters(chunks))
    assert all(not s.state and s.step == 0 for s in parameter_states(chunks, optimizer))
    return {"errors": errors}


def _parameters(chunks: Any) -> list[tuple[str, Any]]:
    from megatron_rl_loss.lora.handles import adapter_parameters

    return list(adapter_parameters(chunks))


def test_weights_without_optimizer_state_load_by_their_own_call_only(tmp_path):
    seen = run_ranks(_weights_only, 1, str(tmp_path / "a"))[0]
    assert "load_adapter_weights" in seen["errors"][0]


def _refused_load(case: Case, folder: str) -> str:
    from megatron_rl_loss.lora.checkpoint import load_adapter

    chunks, optimizer = lora_harness.build(case)
    before = {n: p.detach().clone() for n, p in _parameters(chunks)}
    try:
        load_adapter(folder, chunks, optimizer)
    except WeightsError as error:
        assert all(torch.equal(p, before[n]) for n, p in _parameters(chunks))
        return str(error)
    return "not refused"


def test_a_checkpoint_of_other_adapters_is_refused_by_name(tmp_path):
    folder = tmp_path / "a"
    train(replace(FP32, exclude=("decoder.layers.0.mlp.*",)), save=folder, steps=0)

    def refusal(case: Case) -> str:
        return run_ranks(_refused_load, case.base.world_size, case, str(folder))[0]

    missing = refusal(FP32)
    assert "missing from the checkpoint" in missing
    assert "decoder.layers.0.mlp.linear_fc1.lora_a" in missing
    extra = refusal(replace(FP32, targets="attention"))
    assert "only in the checkpoint" in extra and "local_experts" in extra
    other_rank = refusal(replace(FP32, rank=2, exclude=("decoder.layers.0.mlp.*",)))
    assert "lora.rank: 4 in the checkpoint, 2 here" in other_rank
    shutil.rmtree(folder)
    assert "no distributed checkpoint" in refusal(FP32)


def _write_twice(folder: str) -> str:
    from megatron_rl_loss.lora.checkpoint import save_adapter

    chunks, _ = lora_harness.build(FP32)
    save_adapter(folder, chunks)
    try:
        save_adapter(folder, chunks)
    except WeightsError as error:
        return str(error)
    return "not refused"


def test_a_checkpoint_is_never_overwritten(tmp_path):
    assert "not empty" in run_ranks(_write_twice, 1, str(tmp_path / "a"))[0]


def _whole_model(case: Case, folder: str, save: bool) -> dict[str, Any]:
    """Saves or loads base and adapters by the model's own sharded_state_dict."""
    from megatron.core import dist_checkpointing

    from megatron_rl_loss.lora.checkpoint import write_state

    chunks, _ = lora_harness.build(replace(case, random_b=save))
    model = chunks[0].module
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={"dp_cp_group": group})
    if save:
        write_state(state, Path(folder))
    else:
        model.load_state_dict(dist_checkpointing.load(state, folder), strict=False)
    return lora_harness.named(case, chunks, lambda p: p)


@pytest.mark.parametrize(
    ("before", "after"), [(FP32, TP2_ETP2), (TP2_ETP2, EP2)], ids=["to TP 2", "to EP 2"]
)
def test_the_models_own_sharded_state_dict_holds_the_adapters(before, after, tmp_path):
    folder = str(tmp_path / "whole")
    saved = whole(run_ranks(_whole_model, before.base.world_size, before, folder, True))
    loaded = whole(run_ranks(_whole_model, after.base.world_size, after, folder, False))
    for name, value in saved.items():
        assert torch.equal(loaded[name], value), name


def _apart(case: Case) -> dict[str, Any]:
    """Trains A on one half of the rows and B on the other, each in a model of its own."""
    results = {}
    for name in ("a", "b"):
        chunks, optimizer = lora_harness.build(case)
        for _ in range(2):
            half_step(case, chunks, optimizer, name)
        results[name] = lora_harness.named(case, chunks, lambda p: p)
        stop()
    return results


def half_step(case: Case, chunks: Any, optimizer: Any, name: str) -> None:
    optimizer.zero_grad()
    for chunk in chunks:
        chunk.zero_grad_buffer()
    accumulate(case, chunks, name)
    optimizer.step()


def accumulate(case: Case, chunks: Any, name: str) -> None:
    flip = 1.0 if name == "a" else -0.5
    lora_harness.forward_backward(replace(case, sign=flip), chunks, zero=False)


def stop() -> None:
    from megatron_rl_loss.mcore.ranks import stop_ranks

    stop_ranks()


def _in_turns(case: Case) -> dict[str, Any]:
    from megatron_rl_loss.lora import AdapterStore

    chunks, optimizer = lora_harness.build(case)
    store = AdapterStore(chunks, optimizer, name="a")
    store.add("b")
    half_step(case, chunks, optimizer, "a")
    store.activate("b")
    store.activate("a")
    for chunk in chunks:
        chunk.zero_grad_buffer()
    accumulate(case, chunks, "a")  # its gradient waits while b trains
    store.activate("b")
    half_step(case, chunks, optimizer, "b")
    half_step(case, chunks, optimizer, "b")
    results = {"b": lora_harness.named(case, chunks, lambda p: p)}
    store.activate("a")
    optimizer.step()
    results["a"] = lora_harness.named(case, chunks, lambda p: p)
    assert store.active == "a" and store.names == ["a", "b"]

    store.remove("b")
    store.add("b")
    store.activate("b")
    half_step(case, chunks, optimizer, "b")
    half_step(case, chunks, optimizer, "b")
    results["b again"] = lora_harness.named(case, chunks, lambda p: p)
    return results


@pytest.mark.parametrize(
    "case",
    [FP32, EP2, DISTRIBUTED, replace(FP32, dtype=torch.bfloat16)],
    ids=["1 rank", "EP 2", "distributed optimizer", "bf16"],
)
def test_training_two_adapters_in_turns_equals_training_each_alone(case):
    apart = run_ranks(_apart, case.base.world_size, case)
    turns = run_ranks(_in_turns, case.base.world_size, case)
    for name, alone in (("a", "a"), ("b", "b"), ("b again", "b")):
        expected = whole([rank[alone] for rank in apart])
        actual = whole([rank[name] for rank in turns])
        for key, value in expected.items():
            assert torch.equal(actual[key], value), (name, key)
    a, b = (whole([rank[name] for rank in apart]) for name in ("a", "b"))
    assert not torch.equal(
        a["decoder.layers.0.mlp.linear_fc1.b"], b["decoder.layers.0.mlp.linear_fc1.b"]
    )


def _store_errors() -> list[str]:
    from megatron_rl_loss.lora import AdapterStore

    chunks, optimizer = lora_harness.build(FP32)
    store = AdapterStore(chunks, optimizer)
    texts = []
    for call in (
        lambda: store.activate("x"),
        lambda: store.add("default"),
        lambda: store.remove("default"),
    ):
        try:
            call()
        except ConfigError as error:
            texts.append(str(error))
    step(FP32, chunks, optimizer)
    try:
        AdapterStore(chunks, optimizer)
    except ConfigError as error:
        texts.append(str(error))
    return texts


def test_the_store_names_what_is_wrong():
    unknown, twice, live, late = run_ranks(_store_errors, 1)[0]
    assert "'x'" in unknown and "default" in unknown
    assert "already" in twice and "live" in live and "made steps" in late
