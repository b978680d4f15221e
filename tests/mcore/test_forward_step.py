"""What the forward step accepts and refuses, on the real schedule, before any weight changes."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.mcore.harness import (
    Layout,
    build,
    export,
    export_gradients,
    make_step,
    replace,
    weighted,
)
from tests.spawn import run_ranks

LAYOUT = Layout(micro_batch_size=2)


def session(layout, action):
    """Runs `action(chunks, optimizer, spec, groups)` on a freshly built model."""
    warnings.simplefilter("ignore")
    from megatron_rl_loss.mcore.groups import parallel_groups

    chunks, optimizer, spec = build(layout)
    return action(chunks, optimizer, spec, parallel_groups())


def on_ranks(action, layout=LAYOUT):
    return run_ranks(session, layout.world_size, layout, action)


def one_step_object_for_two_calls(chunks, optimizer, spec, groups):
    from megatron_rl_loss.mcore.train_step import run_forward_backward

    forward_step, norms = make_step(LAYOUT), []
    for size in (2, 4):
        chunks[0].zero_grad_buffer()
        batches = weighted(replace(LAYOUT, micro_batch_size=size), groups)
        run_forward_backward(forward_step, chunks, batches)
        norms.append(
            torch.stack([p.main_grad.norm() for p in chunks[0].parameters()]).norm().item()
        )
    return norms


def test_num_microbatches_is_read_on_every_call():  # C03
    ((first, second),) = on_ranks(one_step_object_for_two_calls)
    assert second == pytest.approx(first, rel=1e-5)


def a_frozen_number(chunks, optimizer, spec, groups):
    from megatron_rl_loss import ContractError, make_forward_step, train_step

    before = export(chunks, spec)
    forward_step = make_forward_step("dual_clip", num_microbatches=2)
    with pytest.raises(ContractError, match="another number of micro-batches"):
        train_step(forward_step, chunks, optimizer, weighted(LAYOUT, groups))
    return all(torch.equal(before[name], after) for name, after in export(chunks, spec).items())


def test_a_wrong_fixed_number_is_noticed_before_the_optimizer_step():
    assert on_ranks(a_frozen_number) == [True]


def refusals(chunks, optimizer, spec, groups):
    from megatron_rl_loss import ContractError, InputError, make_forward_step, train_step
    from megatron_rl_loss.mcore.guard import model_config
    from megatron_rl_loss.mcore.train_step import run_forward_backward

    before = export(chunks, spec)
    batches = weighted(LAYOUT, groups)

    def attempt(error, words, batches=batches, **settings):
        with pytest.raises(error, match=words):
            train_step(make_forward_step("dual_clip", **settings), chunks, optimizer, batches)

    bare = [{k: v for k, v in batch.items() if k != "loss_weights"} for batch in batches]
    attempt(InputError, r"micro-batch 0: kl_coef=0.1 need 'loss_weights'", bare, kl_coef=0.1)
    lacking = [{k: v for k, v in batch.items() if k != "old_log_probs"} for batch in batches]
    attempt(InputError, "lacks 'old_log_probs'.*on_policy=True", lacking)
    bad = [dict(batch) for batch in batches]
    row, position = (int(x) for x in bad[1]["loss_mask"].nonzero()[0])
    bad[1]["advantages"] = bad[1]["advantages"].clone()
    bad[1]["advantages"][row, position] = float("inf")
    attempt(InputError, f"micro-batch 1: advantages is inf at row {row}, position {position}", bad)
    attempt(ContractError, "at least one micro-batch", [])
    with pytest.raises(InputError, match="ran out"):
        step = make_forward_step("dual_clip", num_microbatches=lambda: 3)
        step(iter([]), chunks[0])
    with pytest.raises(InputError, match="no data iterator"):
        make_forward_step("dual_clip", num_microbatches=1)(None, chunks[0])
    config = model_config(chunks[0])
    config.calculate_per_token_loss, config.mtp_num_layers = True, 1
    with pytest.raises(ContractError, match="calculate_per_token_loss=False"):
        run_forward_backward(make_forward_step("dual_clip"), chunks, batches)
    config.calculate_per_token_loss, config.mtp_num_layers = False, None
    return all(torch.equal(before[name], after) for name, after in export(chunks, spec).items())


def test_bad_input_is_refused_and_changes_nothing():
    assert on_ranks(refusals) == [True]


def no_hook(chunks, optimizer, spec, groups):
    from megatron_rl_loss import ContractError, train_step
    from megatron_rl_loss.mcore.guard import model_config

    model_config(chunks[0]).finalize_model_grads_func = None
    with pytest.raises(ContractError, match="finalize_model_grads_func is not set"):
        train_step(make_step(LAYOUT), chunks, optimizer, weighted(replace(LAYOUT, dp=2), groups))
    return True


def test_a_missing_hook_is_refused_on_two_data_ranks():  # C38
    assert on_ranks(no_hook, replace(LAYOUT, dp=2)) == [True, True]


def an_unmarked_shard(chunks, optimizer, spec, groups):
    from megatron_rl_loss import ContractError, train_step

    named = dict(chunks[0].named_parameters())
    name = next(name for name in named if name.endswith("linear_qkv.weight"))
    named[name].tensor_model_parallel = False  # as perform_initialization=False leaves it
    with pytest.raises(ContractError, match="linear_qkv.weight is sharded over 2.*not marked"):
        train_step(make_step(LAYOUT), chunks, optimizer, weighted(LAYOUT, groups))
    return True


def test_a_sharded_weight_that_megatron_has_not_marked_is_refused():
    assert on_ranks(an_unmarked_shard, replace(LAYOUT, tp=2)) == [True, True]


def bad_on_rank_1(chunks, optimizer, spec, groups):
    from megatron_rl_loss import InputError, train_step

    batches = weighted(replace(LAYOUT, dp=2), groups)
    if groups.dp.rank() == 1:
        batches[0]["old_log_probs"] = torch.full_like(batches[0]["old_log_probs"], float("nan"))
    try:
        train_step(make_step(LAYOUT), chunks, optimizer, batches)
    except InputError as error:
        return str(error)


def test_bad_data_on_one_rank_stops_all_ranks():
    first, second = on_ranks(bad_on_rank_1, replace(LAYOUT, dp=2))
    assert first.startswith("rank 1: micro-batch 0: old_log_probs is nan") and first.endswith(
        second
    )


def nan_weights(chunks, optimizer, spec, groups):
    from megatron_rl_loss import InputError, train_step

    next(chunks[0].parameters()).data.fill_(float("nan"))
    with pytest.raises(InputError, match="the loss is nan.*No weight was changed"):
        train_step(make_step(LAYOUT), chunks, optimizer, weighted(LAYOUT, groups))
    return True


def test_a_loss_that_is_not_finite_stops_before_the_update():  # C12
    assert on_ranks(nan_weights) == [True]


def noise_behind_the_mask(chunks, optimizer, spec, groups):
    from megatron_rl_loss.mcore.train_step import run_forward_backward

    gradients = []
    for noise in (0.0, float("nan"), float("inf"), -200.0):
        batches = weighted(LAYOUT, groups)
        for batch in batches:
            for name in ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs"):
                batch[name] = torch.where(batch["loss_mask"], batch[name], noise)
        chunks[0].zero_grad_buffer()
        layout = replace(LAYOUT, settings={"kl_coef": 0.1})
        run_forward_backward(make_step(layout), chunks, batches)
        gradients.append(export_gradients(chunks, spec))
    return [all(torch.equal(g[n], gradients[0][n]) for n in g) for g in gradients]


def test_values_behind_the_mask_change_no_bit_of_the_gradient():  # C10
    assert on_ranks(noise_behind_the_mask) == [[True] * 4]
