"""LoRA in every layout against one rank: logits, every adapter's gradient, one optimizer step."""

from __future__ import annotations

import functools

import pytest

from tests.mcore.harness import Layout
from tests.mcore.lora_harness import Case, Outcome, relative_error, run_case

DENSE, DEEP = Case(), Case(Layout(layers=4))
MOE = Case(moe=True)


def tp2(**sizes) -> Layout:
    return Layout(tp=2, sequence_parallel=True, **sizes)


CASES = {
    "dense TP 2": (DENSE, Case(Layout(tp=2))),
    "dense TP 2 SP": (DENSE, Case(tp2())),
    "dense DP 2": (DENSE, Case(Layout(dp=2))),
    "dense CP 2": (DENSE, Case(Layout(cp=2))),
    "dense PP 2": (DENSE, Case(Layout(pp=2))),
    "dense VPP 2": (DEEP, Case(Layout(pp=2, vpp=2, layers=4))),
    "MoE EP 2": (MOE, Case(Layout(dp=2), moe=True, ep=2)),
    "MoE DP 2": (MOE, Case(Layout(dp=2), moe=True)),
    "MoE TP 2 SP, EP 1, ETP 1": (MOE, Case(tp2(), moe=True)),
    "MoE TP 2 SP, EP 2, ETP 1": (MOE, Case(tp2(), moe=True, ep=2)),
    "MoE TP 2 SP, EP 1, ETP 2": (MOE, Case(tp2(), moe=True, etp=2)),
    "MoE CP 2": (MOE, Case(Layout(cp=2), moe=True)),
    "MoE TP 2 SP, DP 2, EP 2, ETP 1": (MOE, Case(tp2(dp=2), moe=True, ep=2)),
    "MoE TP 2 SP, DP 2, EP 2, ETP 2": (MOE, Case(tp2(dp=2), moe=True, ep=2, etp=2)),
}


@functools.cache
def alone(name: str) -> Outcome:
    return run_case({"dense": DENSE, "deep": DEEP, "moe": MOE}[name])


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_step_equal_one_rank(name):
    single, case = CASES[name]
    expected = alone("moe" if single is MOE else "deep" if single is DEEP else "dense")
    actual = run_case(case)
    assert relative_error(actual.logits, expected.logits) < 1e-10
    assert set(actual.gradients) == set(expected.gradients)
    for key, gradient in expected.gradients.items():
        assert gradient.norm() > 1e-3, key
        assert relative_error(actual.gradients[key], gradient) < 1e-10, key
    assert actual.grad_norm == pytest.approx(
        expected.grad_norm, rel=1e-6
    )  # Megatron takes it in fp32
    for key, parameter in expected.parameters.items():
        assert relative_error(actual.parameters[key], parameter) < 1e-9, key
