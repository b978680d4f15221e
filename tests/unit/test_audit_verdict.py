"""What the audit concludes from measured factors."""

from __future__ import annotations

import pytest

from megatron_rl_loss.mcore.audit_factors import Factor, parameter_kind
from megatron_rl_loss.mcore.audit_probe import probe_num_microbatches
from megatron_rl_loss.mcore.audit_verdict import Cut, Sizes, findings

TOLERANCE = 1e-3


def exact(value):
    return {"dense": Factor(value, 0.0, 0.0, 0.0), "norm": Factor(value, 0.0, 0.0, 0.0)}


def mistakes(cut, whole, sizes, reductions=1, fits=({}, {})):
    cuts = [
        Cut("cut", 5, cut, reductions, fits[0]),
        Cut("whole", 1, whole, reductions, fits[1]),
    ]
    return [name for finding in findings(cuts, sizes, TOLERANCE) for name in finding.mistakes]


@pytest.mark.parametrize(
    ("cut", "whole", "named"),
    [
        (1.0, 1.0, []),
        (1 / 5, 1.0, ["num_microbatches"]),
        (5.0, 1.0, ["num_microbatches"]),
        (1 / 2, 1 / 2, ["dp_size"]),
        (2.0, 2.0, ["dp_size"]),
        (3.0, 3.0, ["cp_size"]),
        (1 / 3, 1 / 3, ["cp_size"]),
        (1 / 10, 1 / 2, ["num_microbatches", "dp_size"]),
        (6.0, 6.0, ["dp_size", "cp_size", "calculate_per_token_loss"]),
        (1.7, 1.7, ["constant factor"]),
        (-1.0, -1.0, ["constant factor"]),
        (0.0, 0.0, ["no gradient"]),
        (0.0005, 0.0005, ["constant factor"]),
        (float("nan"), float("nan"), ["not finite"]),
        (1.0, 1.7, ["unexplained"]),
    ],
)
def test_a_factor_is_named_by_the_sizes_that_make_it(cut, whole, named):
    assert mistakes(exact(cut), exact(whole), Sizes(dp=2, cp=3, world=6)) == named


def test_equal_sizes_are_both_named():
    named = mistakes(exact(0.5), exact(0.5), Sizes(dp=2, cp=2, world=4))
    assert set(named) == {"dp_size", "cp_size"}


def test_one_kind_off_is_no_common_factor():
    off = exact(1.0) | {"norm": Factor(2.0, 0.0, 0.0, 0.0)}
    assert mistakes(off, off, Sizes(2, 1, 2)) == ["unexplained"]


def test_experts_alone_off_are_reduced_over_other_ranks():
    off = exact(1.0) | {"expert": Factor(0.4, 0.7, 0.0, 0.0)}
    apart = exact(1.0) | {"expert": Factor(0.5, 0.3, 0.3, 0.0)}
    sizes = Sizes(2, 1, 2, experts_apart=True)
    for factors in (off, apart):
        assert mistakes(factors, factors, sizes) == ["expert ranks"]
        assert mistakes(factors, factors, Sizes(2, 1, 2)) in (["unexplained"], ["ranks differ"])
    both = off | {"dense": Factor(0.4, 0.7, 0.0, 0.0)}
    assert mistakes(both, both, sizes) == ["unexplained"]


def test_a_residual_is_not_right_although_the_factor_is_1():
    off = exact(1.0) | {"dense": Factor(1.0, 0.3, 0.0, 0.0)}
    assert mistakes(off, off, Sizes(2, 1, 2)) == ["unexplained"]


def test_ranks_that_differ_are_named():
    data = exact(1.0) | {"dense": Factor(1.0, 0.3, 0.3, 0.0)}
    tensor = exact(1.0) | {"norm": Factor(1.0, 0.0, 0.0, 0.3)}
    assert mistakes(data, data, Sizes(2, 1, 2)) == ["ranks differ"]
    assert mistakes(tensor, tensor, Sizes(1, 1, 2)) == ["copies differ"]


@pytest.mark.parametrize(
    ("reductions", "world", "named"),
    [(0, 2, ["finalize missing"]), (2, 1, ["finalize twice"]), (0, 1, []), (1, 2, [])],
)
def test_reductions_are_counted(reductions, world, named):
    assert mistakes(exact(1.0), exact(1.0), Sizes(world, 1, world), reductions) == named


def test_other_weights_are_named_where_they_fit():
    off = {"dense": Factor(0.8, 0.3, 0.0, 0.0)}
    fits = {"local counts": off, "micro-batch mean": exact(0.5)}
    named = mistakes(off, off, Sizes(2, 1, 2), fits=(fits, fits))
    assert named == ["micro-batch mean"]


def test_other_weights_are_not_named_for_any_factor_that_they_leave():
    # under token_mean, weight 1 is a constant times the right weight: it fits every scalar
    fits = {"loss_weights ignored": exact(12.0)}, {"loss_weights ignored": exact(4.0)}
    assert mistakes(exact(0.5), exact(1 / 6), Sizes(1, 1, 1), fits=fits) == ["unexplained"]
    fits = ({"loss_weights ignored": exact(1.0)},) * 2
    named = mistakes(exact(24.0), exact(24.0), Sizes(1, 1, 1), fits=fits)
    assert named == ["loss_weights ignored"]


def test_a_cut_that_is_right_fits_any_other_weights():
    off = {"dense": Factor(0.8, 0.3, 0.0, 0.0)}
    fits = {"micro-batch mean": exact(1.0)}
    assert mistakes(off, exact(1.0), Sizes(1, 1, 1), fits=(fits, {})) == ["micro-batch mean"]


@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (2, 1), (3, 2), (15, 7)])
def test_the_number_of_micro_batches_divides_neither_size(dp, cp):
    assert (dp * cp) % probe_num_microbatches(dp, cp)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("module.decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight", "expert"),
        ("module.decoder.layers.0.mlp.router.weight", "router"),
        ("module.embedding.word_embeddings.weight", "embedding"),
        ("module.output_layer.weight", "embedding"),
        ("module.decoder.layers.0.input_layernorm.weight", "norm"),
        ("module.decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight", "adapter"),
        (
            "module.decoder.layers.0.mlp.experts.linear_fc1.adapter.experts.1.lora_a",
            "expert adapter",
        ),
        ("module.decoder.layers.0.self_attention.linear_qkv.weight", "dense"),
    ],
)
def test_parameters_are_sorted_by_name(name, kind):
    assert parameter_kind(name, None) == kind
