"""The audit: right set-ups pass on every layout, and every planted mistake is named."""

from __future__ import annotations

import pytest

from tests.spawn import RankError, run_ranks

pytest.importorskip("megatron.core")

CP2 = ("parallel.context_parallel_size=2",)
LAYOUTS = {
    "DP 2": (),
    "DP 2, distributed optimizer": ("optimizer.use_distributed_optimizer=true",),
    "DP 2, bf16": ("model.dtype=bf16",),
    "TP 2, sequence parallel": (
        "parallel.tensor_model_parallel_size=2",
        "parallel.sequence_parallel=true",
    ),
    "PP 2": ("parallel.pipeline_model_parallel_size=2",),
    "PP 2, VPP 2": (
        "parallel.pipeline_model_parallel_size=2",
        "parallel.virtual_pipeline_model_parallel_size=2",
    ),
    "CP 2": CP2,
    "KL, entropy and sequence means": (
        "loss.kl_coef=0.1",
        "loss.entropy_coef=0.01",
        "loss.reduction=sequence_mean",
    ),
}


def run_audit(settings, forward_step=None, self_test=False):
    """Runs on every rank; returns the report and the exit status."""
    import warnings

    warnings.simplefilter("ignore")
    from megatron_rl_loss import audit
    from megatron_rl_loss.config.load import load_config

    _, words = audit._config_and_settings(settings)
    run = audit.self_test if self_test else audit.audit
    return run(load_config(None, words), forward_step=forward_step)


def audit_on(ranks, settings=(), **options):
    """Returns rank 0's report and status; every rank must have come to the same."""
    args = (list(settings), options.get("forward_step"), options.get("self_test", False))
    results = run_ranks(run_audit, ranks, *args, timeout=240)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_right_set_up_passes_on_every_layout(layout):
    text, status = audit_on(2, LAYOUTS[layout])
    assert status == 0, text
    rows = [line.split() for line in text.splitlines() if line[:1].isdigit()]
    assert {row[1] for row in rows} == {"dense", "embedding", "norm"}
    assert len({row[0] for row in rows}) == 2  # two cuts
    bound = 5e-2 if "bf16" in layout else 1e-3
    assert all(abs(float(row[2]) - 1.0) <= bound for row in rows), text


@pytest.mark.parametrize(("ranks", "settings", "hidden"), [(1, (), 7), (2, (), 2), (2, CP2, 3)])
def test_every_planted_mistake_that_shows_is_named(ranks, settings, hidden):
    text, status = audit_on(ranks, settings, self_test=True)
    assert status == 0, text
    assert "NOT CAUGHT" not in text and "FALSE ALARM" not in text
    assert text.count("no effect here") == hidden, text
    assert text.count(" caught ") == 12 - hidden, text


@pytest.mark.parametrize(
    ("step", "status", "named"),
    [
        ("right", 0, "right: every factor is 1."),
        ("without_factor", 1, "num_microbatches or dp_size"),
        ("micro_batch_mean", 1, "micro-batch mean"),
    ],
)
def test_a_foreign_forward_step_is_audited(step, status, named):
    text, code = audit_on(2, forward_step=f"tests.mcore.foreign_steps:{step}")
    assert code == status and named in text.replace(") or (", " or "), text


def test_a_forward_step_that_cannot_be_imported_fails_on_all_ranks_at_once():
    with pytest.raises(RankError, match="cannot import the forward step 'no.such:fn'"):
        run_ranks(run_audit, 2, [], "no.such:fn", timeout=60)
