import pytest
import torch

from megatron_rl_loss import ContractError, InputError, reduce_metrics
from megatron_rl_loss.metrics import masked_max, mean_pair, sum_pair


def micro(loss, share, **more):
    return {"loss": sum_pair(torch.tensor(loss), share), **more}


def test_loss_is_summed_over_micro_batches():  # C27
    assert reduce_metrics([micro(2.0, 0.5), micro(4.0, 0.5)])["loss"] == 6.0


def test_a_mean_is_over_tokens_not_over_micro_batches():  # C27
    parts = [
        micro(0.0, 0.5, entropy=mean_pair(torch.full((n,), v), torch.ones(n, dtype=torch.bool)))
        for n, v in ((10, 2.0), (990, 0.1))
    ]
    assert reduce_metrics(parts)["entropy"] == pytest.approx(0.119)


def test_a_maximum_is_over_everything():
    mask = torch.tensor([True, False])
    parts = [
        micro(0.0, 0.5, ratio_max=masked_max(torch.tensor([value, 9.0]), mask))
        for value in (1.5, 1.2)
    ]
    assert reduce_metrics(parts)["ratio_max"] == 1.5


def test_metrics_of_nothing_are_zero():
    none = torch.zeros(2, dtype=torch.bool)
    values = torch.tensor([float("nan"), float("inf")])
    metrics = reduce_metrics(
        [micro(0.0, 1.0, entropy=mean_pair(values, none), ratio_max=masked_max(values, none))]
    )
    assert metrics == {"loss": 0.0, "entropy": 0.0, "ratio_max": 0.0}


def test_the_loss_metric_is_a_copy():  # C28
    loss = torch.tensor(3.0)
    pair = sum_pair(loss, 1.0)
    loss *= 2
    loss /= 3
    assert pair.tolist() == [3.0, 1.0]


def test_a_wrong_number_of_micro_batches_is_noticed():  # C03
    with pytest.raises(ContractError, match="another number of micro-batches"):
        reduce_metrics([micro(1.0, 0.25), micro(1.0, 0.25)])
    with pytest.raises(ContractError, match="no metrics"):
        reduce_metrics([])


def test_a_loss_that_is_not_finite_is_refused():
    with pytest.raises(InputError, match="the loss is nan.*No weight was changed"):
        reduce_metrics([micro(float("nan"), 1.0)])


def test_micro_batches_with_different_metrics_are_refused():
    other = micro(1.0, 0.5) | {"kl": torch.tensor([1.0, 1.0])}
    with pytest.raises(ContractError, match="do not all report the same metrics"):
        reduce_metrics([micro(1.0, 0.5), other])


def test_double_precision_stays():
    pair = mean_pair(torch.tensor([1.0, 1e-12], dtype=torch.float64), torch.tensor([True, True]))
    assert pair[0].item() == 1.0 + 1e-12
