"""The LM head without logits, in the forward step: every parameter's gradient as with logits."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch

from megatron_rl_loss.errors import ConfigError, ContractError, InputError
from tests.mcore import harness
from tests.mcore.harness import Layout, Outcome, assert_close, reference, replace
from tests.spawn import run_ranks

BOUND = 1e-5
BASE = Layout(settings={"kl_coef": 0.1, "entropy_coef": 0.01, "temperature": 0.8})
LAYOUTS = {
    "one rank, tied": replace(BASE, tied=True),
    "packed, CP 2": replace(BASE, packed=True, cp=2),
    "DP 2, overlap, tied": replace(BASE, dp=2, overlap_grad_reduce=True, tied=True),
    "TP 2": replace(BASE, tp=2),
    "TP 2, tied": replace(BASE, tp=2, tied=True),
    "TP 2 with sequence parallelism": replace(BASE, tp=2, sequence_parallel=True),
    "TP 2 with sequence parallelism, tied": replace(BASE, tp=2, sequence_parallel=True, tied=True),
    "PP 2": replace(BASE, pp=2),
    "PP 2, tied": replace(BASE, pp=2, tied=True),
    "PP 2, VPP 2, tied": replace(BASE, pp=2, vpp=2, layers=4, tied=True),
}
# blocks of 8 columns: the vocabulary of 60 takes 8 of them, and the last is not full
HEADS: dict[str, dict[str, Any]] = {
    "logits": {"lm_head": "logits"},
    "kept": {"lm_head": "fused"},
    "blocks": {"lm_head": "fused", "memory_budget_bytes": 0},
    "auto": {"memory_budget_bytes": 0},
    "in forward": {"lm_head": "fused_forward", "memory_budget_bytes": 0},
    "in forward, main_grad": {"lm_head": "fused_forward"},
    "blocks into main_grad": {"lm_head": "fused", "memory_budget_bytes": 0},
}


def run_heads(layout: Layout) -> dict[str, tuple[Outcome, list[torch.Tensor], set[int]]]:
    """On each rank: gradients, log-probs without gradient, and the output layer's widths."""
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state

    from megatron_rl_loss.logprobs import head_plan
    from megatron_rl_loss.mcore.fused_head import bare_model
    from megatron_rl_loss.mcore.groups import parallel_groups
    from megatron_rl_loss.mcore.token_log_probs import token_log_probs
    from megatron_rl_loss.mcore.train_step import run_forward_backward, share_metrics

    names, results = ("MIN_BLOCK", "MAX_BLOCK", "MIN_CHUNK"), {}
    sizes = {name: getattr(head_plan, name) for name in names}
    chunks, _, spec = harness.build(layout)
    layers = [c.output_layer for c in map(bare_model, chunks) if c.post_process]
    widths: set[int] = set()
    for layer in layers:
        layer.register_forward_hook(lambda *args: widths.add(args[2][0].shape[-1]))
    try:
        for size in names:
            setattr(head_plan, size, 8)
        for name, settings in HEADS.items():
            for chunk in chunks:
                chunk.zero_grad_buffer()
            for layer in layers:
                layer.gradient_accumulation_fusion = name.endswith("main_grad")
            widths.clear()
            groups = parallel_groups()
            step = harness.make_step(replace(layout, settings=layout.settings | settings))
            batches = harness.weighted(layout, groups)
            collected = run_forward_backward(step, chunks, batches)
            metrics = share_metrics(collected, groups)
            log_probs = token_log_probs(chunks, batches, **vars(step.head))
            outcome = Outcome(metrics, harness.export_gradients(chunks, spec), {})
            results[name] = outcome, log_probs, set(widths)
        return results
    finally:
        for size, value in sizes.items():
            setattr(head_plan, size, value)
        parallel_state.destroy_model_parallel()


@functools.cache
def reference_gradient(layers: int, tied: bool) -> dict[str, torch.Tensor]:
    return reference(replace(BASE, layers=layers, tied=tied))[1]


@functools.cache
def results(name: str) -> list:
    return run_ranks(run_heads, LAYOUTS[name].world_size, LAYOUTS[name])


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradient_of_every_parameter_is_the_same_with_any_head(name, head):
    gradients = reference_gradient(LAYOUTS[name].layers, LAYOUTS[name].tied)
    for rank in results(name):
        want, got = rank["logits"][0], rank[head][0]
        assert_close(got.gradients, gradients, BOUND)
        assert_close(got.gradients, want.gradients, BOUND)
        assert got.metrics == pytest.approx(want.metrics, rel=BOUND, abs=1e-7)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_log_probs_without_gradient_are_the_same_with_any_head(name, head):
    for rank in results(name):
        for want, got in zip(rank["logits"][1], rank[head][1], strict=True):
            assert got.any()
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("head", HEADS)
def test_the_fused_head_makes_no_logits_and_runs_the_layers_hooks(head):
    widths = {width for rank in results("TP 2") for width in rank[head][2]}
    fused = {1, 3} if head.startswith("in forward") else {1, 2}  # without and with gradient
    assert widths == ({harness.PADDED_VOCAB // 2} if head == "logits" else fused)


REFUSED = {
    "bias": "output layer has a bias",
    "forward": "forward of its output layer was replaced",
    "layer": "OtherLayer, not Megatron's ColumnParallelLinear",
    "mtp_num_layers": "mtp_num_layers=1",
    "defer_embedding_wgrad_compute": "defer_embedding_wgrad_compute=1",
    "use_mup": "use_mup=1",
}


def run_refused() -> dict[str, str | None]:
    """Returns why the head cannot be fused after each change of a model that allows it."""
    from unittest.mock import patch

    from megatron.core import parallel_state

    from megatron_rl_loss.mcore.fused_head import bare_model, fused_obstacle

    chunk = bare_model(harness.build(BASE)[0][0])
    layer, config = chunk.output_layer, chunk.config
    other = type("OtherLayer", (type(layer),), {})(4, 4, config=config, init_method=torch.abs)
    found = {"nothing": fused_obstacle(chunk)}
    with patch.object(layer, "bias", torch.nn.Parameter(torch.zeros(1))):
        found["bias"] = fused_obstacle(chunk)
    with patch.object(layer, "forward", layer.forward):
        found["forward"] = fused_obstacle(chunk)
    with patch.object(chunk, "output_layer", other):
        found["layer"] = fused_obstacle(chunk)
    for name in ("mtp_num_layers", "defer_embedding_wgrad_compute", "use_mup"):
        with patch.object(config, name, 1, create=True):
            found[name] = fused_obstacle(chunk)
    parallel_state.destroy_model_parallel()
    return found


def test_what_the_head_would_get_wrong_is_an_obstacle():
    found = run_ranks(run_refused, 1)[0]
    assert found.pop("nothing") is None
    assert set(found) == set(REFUSED)
    for change, words in REFUSED.items():
        assert words in found[change]


def run_unfit(settings: dict[str, Any], gathers: bool) -> str:
    """Returns the error of a step on a model with mtp_num_layers (or gathered logits), or ""."""
    warnings.simplefilter("ignore")
    from unittest.mock import patch

    from megatron.core import parallel_state

    from megatron_rl_loss.mcore.fused_head import bare_model
    from megatron_rl_loss.mcore.groups import parallel_groups
    from megatron_rl_loss.mcore.train_step import run_forward_backward

    layout = replace(BASE, tp=2, settings=settings)
    chunks, _, _ = harness.build(layout)
    layer = bare_model(chunks[0]).output_layer
    try:
        batches = harness.weighted(layout, parallel_groups())
        with patch.object(layer, "gather_output", gathers):
            layer.bias = None if gathers else torch.nn.Parameter(torch.zeros(30 + 2))
            run_forward_backward(harness.make_step(layout), chunks, batches)
        return ""
    except ContractError as error:
        return str(error)
    finally:
        parallel_state.destroy_model_parallel()


def test_fused_is_an_error_where_it_is_not_possible_and_auto_keeps_the_logits():
    for message in run_ranks(run_unfit, 2, {"lm_head": "fused"}, False):
        assert message.startswith("lm_head='fused' is not possible: its output layer has a bias")
    assert run_ranks(run_unfit, 2, {"memory_budget_bytes": 0}, False) == ["", ""]


def test_gathered_logits_are_refused():
    for message in run_ranks(run_unfit, 2, {}, True):
        assert "parallel_output=True, or use lm_head='fused'" in message


@pytest.mark.parametrize(
    ("loss", "settings", "why"),
    [
        ("gspo", {}, "'gspo' .* sums over whole sequences"),
        ("ppo_clip", {"off_policy": {"is_level": "sequence"}}, "sums over whole sequences"),
        ("clip_cov", {}, "ranks the tokens of a micro-batch"),
        ("top_k_distillation", {}, "reads log-probs of given tokens"),
        ("megatron_rl_loss.losses.covariance:clip_cov", {}, "does not say fn.token_level = True"),
    ],
)
def test_gradients_in_forward_are_refused_for_a_loss_that_is_not_made_token_by_token(
    loss, settings, why
):
    from megatron_rl_loss import make_forward_step

    with pytest.raises(ConfigError, match=f"{why}.*use lm_head='fused'"):
        make_forward_step(loss, lm_head="fused_forward", **settings)


def test_a_loss_of_ones_own_may_say_that_it_is_made_token_by_token():
    from megatron_rl_loss import make_forward_step

    def own(log_probs, advantages):
        return -log_probs * advantages

    own.token_level = True
    assert make_forward_step(own, lm_head="fused_forward").head.makes_loss


def test_gradients_in_forward_are_refused_for_fp16():
    from types import SimpleNamespace

    from megatron_rl_loss.logprobs.forward_gradients import linear_loss_sum
    from megatron_rl_loss.mcore.fused_head import LMHead

    model = SimpleNamespace(config=SimpleNamespace(fp16=True))
    with pytest.raises(ContractError, match="before the loss scale reaches them"):
        LMHead("fused_forward").run(None, model, None)
    half = torch.zeros(1, 4, dtype=torch.float16)
    with pytest.raises(InputError, match="fp16 needs one"):
        linear_loss_sum(half, half, torch.zeros(1).long(), lambda lp, h, at: lp)


def test_wrong_settings_of_the_head_are_refused():
    from megatron_rl_loss import make_forward_step

    with pytest.raises(ConfigError, match="auto, logits, fused, fused_forward; got 'fast'"):
        make_forward_step(lm_head="fast")
    with pytest.raises(ConfigError, match="memory_budget_bytes must be >= 0, got -1"):
        make_forward_step(memory_budget_bytes=-1)
