"""The audit: right set-ups pass on every layout, and every planted mistake is named."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest

from tests.mcore import hf_models
from tests.mcore.test_train import model_folder  # noqa: F401
from tests.spawn import RankError, run_ranks

pytest.importorskip("megatron.core")

TP2 = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
EP2 = ("parallel.expert_model_parallel_size=2",)
PP2 = ("parallel.pipeline_model_parallel_size=2",)
CP2 = ("parallel.context_parallel_size=2",)
LORA = ("lora.rank=4", "lora.alpha=8", "lora.targets=all-linear")
DENSE = {"dense", "embedding", "norm"}
EXPERTS = DENSE | {"router", "expert"}
LAYOUTS = {
    "DP 2": (),
    "DP 2, distributed optimizer": ("optimizer.use_distributed_optimizer=true",),
    "DP 2, bf16": ("model.dtype=bf16",),
    "TP 2, sequence parallel": TP2,
    "PP 2": PP2,
    "PP 2, VPP 2": (
        *PP2,
        "parallel.virtual_pipeline_model_parallel_size=2",
    ),
    "CP 2": CP2,
    "KL, entropy and sequence means": (
        "loss.kl_coef=0.1",
        "loss.entropy_coef=0.01",
        "loss.reduction=sequence_mean",
    ),
    "experts, EP 2": (*EP2, "optimizer.use_distributed_optimizer=true"),
    "experts, EP 2, TP 2": (*EP2, *TP2, "parallel.expert_tensor_parallel_size=1"),
    "experts, expert-TP 2": ("parallel.expert_tensor_parallel_size=2",),
    "adapters, TP 2, sequence parallel": (*LORA, *TP2),
    "adapters, PP 2": (*LORA, *PP2),
    "adapters, experts, EP 2": (*LORA, *EP2),
}


def run_audit(settings, forward_step=None, planted="", **options):
    """Runs on every rank; returns the report and the exit status."""
    import warnings

    warnings.simplefilter("ignore")
    from megatron_rl_loss import audit
    from megatron_rl_loss.config.load import load_config

    _, words = audit._config_and_settings(settings)
    run = audit.self_test if options.pop("self_test", False) else audit.audit
    with PLANTED[planted]():
        return run(load_config(None, words), forward_step=forward_step, **options)


def unmarked_experts():
    """Models are built with experts that DDP takes for any other weights."""
    from megatron_rl_loss.mcore import compat

    def mark_as_dense(model):
        for parameter in model.parameters():
            parameter.allreduce = True

    return mock.patch.object(compat, "mark_expert_parameters", mark_as_dense)


def untagged_a():
    """Nobody sums the gradients that tensor-parallel ranks have of A under sequence parallelism."""
    from megatron_rl_loss.lora import apply

    def untagged(*args, **kwargs):
        return replace(sharding_of(*args, **kwargs), partial=None)

    sharding_of = apply.sharding_of
    return mock.patch.object(apply, "sharding_of", untagged)


PLANTED = {"": nullcontext, "experts": unmarked_experts, "A": untagged_a}


def audit_on(ranks, settings=(), **options):
    """Returns rank 0's report and status; every rank must have come to the same."""
    results = run_ranks(partial(run_audit, **options), ranks, list(settings), timeout=240)
    assert all(result == results[0] for result in results)
    return results[0]


def rows_of(text):
    """Returns (num_microbatches, kind, factor) of every row of the table."""
    rows = [line.split() for line in text.splitlines() if line[:1].isdigit()]
    return [(int(row[0]), " ".join(row[1:-2]), float(row[-2])) for row in rows]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_right_set_up_passes_on_every_layout(layout):
    text, status = audit_on(2, LAYOUTS[layout])
    assert status == 0, text
    rows = rows_of(text)
    assert {kind for _, kind, _ in rows} == kinds_of(layout)
    assert len({num_microbatches for num_microbatches, _, _ in rows}) == 2  # two cuts
    bound = 5e-2 if "bf16" in layout else 1e-3
    assert all(abs(factor - 1.0) <= bound for *_, factor in rows), text


def kinds_of(layout):
    if "adapters" in layout:
        return {"adapter", "expert adapter"} if "experts" in layout else {"adapter"}
    return EXPERTS if "experts" in layout else DENSE


@pytest.mark.parametrize(
    ("ranks", "settings", "hidden"), [(1, (), 8), (2, (), 3), (2, CP2, 4), (2, EP2, 2)]
)
def test_every_planted_mistake_that_shows_is_named(ranks, settings, hidden):
    text, status = audit_on(ranks, settings, self_test=True)
    assert status == 0, text
    assert "NOT CAUGHT" not in text and "FALSE ALARM" not in text
    assert text.count("no effect here") == hidden, text
    assert text.count(" caught ") == 13 - hidden, text


@pytest.mark.parametrize(
    ("step", "status", "named"),
    [
        ("right", 0, "right: every factor is 1."),
        ("without_factor", 1, "num_microbatches or dp_size"),
        ("micro_batch_mean", 1, "micro-batch mean"),
        ("flipped", 1, "constant factor"),
    ],
)
def test_a_foreign_forward_step_is_audited(step, status, named):
    text, code = audit_on(2, forward_step=f"tests.mcore.foreign_steps:{step}")
    assert code == status and named in text.replace(") or (", " or "), text


def test_a_foreign_forward_step_that_raises_is_an_error_and_not_a_wrong_gradient():
    with pytest.raises(RankError, match="foreign_steps:broken' raised KeyError: 'boom'"):
        run_ranks(run_audit, 2, [], "tests.mcore.foreign_steps:broken", timeout=60)


def test_a_forward_step_that_cannot_be_imported_fails_on_all_ranks_at_once():
    with pytest.raises(RankError, match="cannot import the forward step 'no.such:fn'"):
        run_ranks(run_audit, 2, [], "no.such:fn", timeout=60)


@pytest.fixture(scope="module")
def moe_folder(model_folder, tmp_path_factory):  # noqa: F811
    """The tokenizer of `model_folder` with a mixture of experts."""
    folder = tmp_path_factory.mktemp("moe") / "model"
    shutil.copytree(model_folder, folder)
    hf_models.hf_model("qwen3_moe").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("trained", "kinds"),
    [((), EXPERTS), (LORA, {"adapter", "expert adapter"})],
    ids=["all weights", "adapters"],
)
def test_the_experts_and_adapters_of_a_model_are_audited(moe_folder, trained, kinds):
    settings = [f"model.path={moe_folder}", *EP2, *trained]
    text, status = audit_on(2, settings, use_model=True)
    assert status == 0, text
    assert {kind for _, kind, _ in rows_of(text)} == kinds
    assert all(abs(factor - 1.0) <= 1e-3 for *_, factor in rows_of(text)), text


@pytest.mark.parametrize(
    "settings",
    [EP2, (*TP2, "parallel.expert_tensor_parallel_size=1")],
    ids=["EP 2", "expert-TP 1 of TP 2"],
)
def test_experts_that_ddp_reduces_over_the_dense_ranks_are_named(settings):
    text, status = audit_on(2, settings, planted="experts")
    assert status == 1 and "WRONG (expert ranks)" in text, text
    off = {kind for _, kind, factor in rows_of(text) if abs(factor - 1.0) > 1e-3}
    assert off == {"expert"}, text


def test_an_adapters_a_without_its_tag_is_named():
    text, status = audit_on(2, [*LORA, *TP2, "lora.targets=[linear_qkv]"], planted="A")
    assert status == 1 and "WRONG (copies differ)" in text and "adapter" in text, text
