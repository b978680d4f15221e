"""DDP and FSDP2 give the gradient and metrics of the float64 reference, for any cut."""

from __future__ import annotations

import pytest
import torch

from tests.mcore.harness import Layout, assert_close, micro_batches, reference, replace
from tests.reference import tiny_llama
from tests.spawn import RankError, run_ranks

TERMS = {"kl_coef": 0.1, "entropy_coef": 0.01, "temperature": 0.8}
BASE = Layout(settings=TERMS, dp=2)
BOUND = 1e-5


class TinyLlama(torch.nn.Module):
    """The reference's model as a module, in float64."""

    def __init__(self):
        super().__init__()
        weights = tiny_llama.random_weights(0)
        self.names = list(weights)
        self.values = torch.nn.ParameterList(w.double() for w in weights.values())

    def forward(self, tokens):
        weights = dict(zip(self.names, self.values))
        return torch.stack([tiny_llama.logits(weights, row) for row in tokens])

    def gradients(self):
        return {
            name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            for name, p in zip(self.names, self.values)
        }


def wrap(model, kind):
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.device_mesh.init_device_mesh(
            "cpu", (torch.distributed.get_world_size(),)
        )
        return fully_shard(model, mesh=mesh)
    return model


def train(layout, kind, drop_last=False):
    """Runs on every rank; returns metrics and gradients."""
    from megatron_rl_loss import with_loss_weights
    from megatron_rl_loss.torch_backend.step import make_torch_step, torch_train_step

    group = torch.distributed.group.WORLD if layout.dp > 1 else None
    rank = torch.distributed.get_rank()
    batches = with_loss_weights(micro_batches(layout, rank), layout.reduction, dp_group=group)
    if drop_last and rank == 1:
        batches = batches[:-1]
    torch.manual_seed(0)
    model = TinyLlama()
    wrapped = wrap(model, kind)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.0)
    step = make_torch_step(layout.loss, **layout.settings)
    metrics = torch_train_step(step, wrapped, optimizer, batches, clip_grad=0.0)
    return metrics, model.gradients()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_gradient_and_metrics_equal_the_reference_for_any_cut(kind, size):
    check(replace(BASE, micro_batch_size=size), kind)


@pytest.mark.parametrize("reduction", ["sequence_mean", "prompt_mean"])
def test_other_reductions_equal_the_reference(reduction):
    check(replace(BASE, reduction=reduction), "ddp")


def test_one_rank_needs_no_wrapper():
    check(replace(BASE, dp=1), "bare")


def check(layout, kind):
    results = run_ranks(train, layout.dp, layout, kind)
    want_metrics, want_gradients = reference(layout)
    for metrics, gradients in results:
        assert metrics == results[0][0]
        for name, want in want_metrics.items():
            assert metrics[name] == pytest.approx(want, rel=BOUND, abs=1e-9), name
        assert_close(gradients, want_gradients, BOUND)


def test_several_ranks_without_a_wrapper_are_refused():
    with pytest.raises(RankError, match="neither wrapped in"):
        run_ranks(train, 2, BASE, "bare")


def test_other_numbers_of_micro_batches_fail_on_every_rank_at_once():
    with pytest.raises(RankError, match="between 1 and 2 micro-batches") as error:
        run_ranks(train, 2, BASE, "ddp", True)
    assert str(error.value).count("InputError: ranks have between 1 and 2") == 2
