import sys
import types
import warnings

import pytest
import torch

from megatron_rl_loss import ContractError, schedule_factor
from megatron_rl_loss.mcore import compat
from megatron_rl_loss.mcore.guard import check_contract
from megatron_rl_loss.mcore.micro_batches import MicroBatchIterator, resolve_num_microbatches


class Group:
    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size


def groups(dp_cp=1, pp=1, tp=1):
    return types.SimpleNamespace(dp_cp=Group(dp_cp), pp=Group(pp), tp=Group(tp))


def config(**changes):
    values = dict(
        calculate_per_token_loss=False,
        finalize_model_grads_func=lambda *a, **k: None,
        grad_scale_func=None,
        fp16=False,
    )
    return types.SimpleNamespace(**values | changes)


def model(config, wrapper=None):
    inner = torch.nn.Linear(1, 1)
    inner.config = config
    if wrapper is None:
        return inner
    outer = type(wrapper, (torch.nn.Module,), {})()
    outer.module, outer.config = inner, config
    return outer


def test_the_factor_is_num_microbatches_times_dp_size():
    assert schedule_factor(5, 3) == 15


@pytest.mark.parametrize("counts", [(0, 1), (1, 0), (-1, 2), (1, 1, 0)])
def test_no_micro_batches_or_ranks_are_refused(counts):
    with pytest.raises(ContractError, match="at least 1"):
        schedule_factor(*counts)


def test_the_factor_with_the_per_token_flag_is_num_microbatches_over_cp_size():  # C06
    assert schedule_factor(6, 3, 4, calculate_per_token_loss=True) == 1.5


@pytest.mark.parametrize("name, value", [("num_moe_experts", 4), ("mtp_num_layers", 1)])
def test_per_token_flag_is_refused_with_auxiliary_losses(name, value):
    flagged = config(calculate_per_token_loss=True, **{name: value})
    with pytest.raises(ContractError, match=f"{name} is {value}.*calculate_per_token_loss=False"):
        check_contract(model(flagged), groups())
    check_contract(model(config(**{name: value})), groups())
    check_contract(model(config(calculate_per_token_loss=True)), groups())


@pytest.mark.parametrize("sizes", [{"dp_cp": 2}, {"pp": 2}, {"tp": 2}])
def test_a_missing_finalize_hook_is_refused(sizes):  # C38
    from megatron.core.distributed import DistributedDataParallel

    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    torch.nn.Module.__init__(wrapped)
    wrapped.config = config(finalize_model_grads_func=None)
    wrapped.module = None
    with pytest.raises(ContractError, match="finalize_model_grads_func"):
        check_contract(wrapped, groups(**sizes))


@pytest.mark.parametrize("name", ["FullyShardedDataParallel", "MegatronFSDP", "FSDPLinear"])
def test_other_gradient_reducers_are_refused(name):
    with pytest.raises(ContractError, match=name):
        check_contract(model(config(), wrapper=name), groups(dp_cp=2))


def test_an_unwrapped_model_on_several_data_ranks_is_refused():
    with pytest.raises(ContractError, match="never be averaged"):
        check_contract(model(config()), groups(dp_cp=2))
    check_contract(model(config()), groups())


def test_fp16_without_a_loss_scale_hook_is_refused():
    with pytest.raises(ContractError, match="grad_scale_func"):
        check_contract(model(config(fp16=True)), groups())


@pytest.mark.parametrize("version", ["0.12.3", "0.9.0"])
def test_old_megatron_is_refused(version):
    with pytest.raises(ContractError, match="older than 0.13"):
        compat.check_version(version)


def test_an_untested_megatron_warns_once_and_names_the_audit(monkeypatch):
    import megatron.core

    compat.megatron_version.cache_clear()
    monkeypatch.setattr(megatron.core, "__version__", "0.99.0")
    try:
        with pytest.warns(UserWarning, match="0.99.0 was not tested.*megatron-rl-loss audit"):
            assert compat.megatron_version() == (0, 99, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compat.megatron_version()
            for version in (*compat.TESTED_VERSIONS, "0.19.2+1a2b3c4"):
                compat.megatron_version.cache_clear()
                monkeypatch.setattr(megatron.core, "__version__", version)
                compat.megatron_version()
    finally:
        compat.megatron_version.cache_clear()


def test_num_microbatches_comes_from_argument_then_iterator():  # C03
    iterator = MicroBatchIterator([{}, {}])
    assert resolve_num_microbatches(3, iterator) == 3
    numbers = iter([4, 2])
    ask = lambda: next(numbers)  # noqa: E731
    assert [resolve_num_microbatches(ask, iterator) for _ in range(2)] == [4, 2]
    assert resolve_num_microbatches(None, iterator) == 2


def test_num_microbatches_comes_from_megatrons_calculator_last():
    from megatron.core import num_microbatches_calculator as calculator

    with pytest.raises(ContractError, match="num_microbatches"):
        resolve_num_microbatches(None, iter([]))
    calculator.init_num_microbatches_calculator(0, None, 8, 2, 1)
    try:
        assert resolve_num_microbatches(None, iter([])) == 4
    finally:
        calculator.destroy_num_microbatches_calculator()


def test_pypis_apex_is_not_taken_for_nvidias(monkeypatch):  # C40
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    compat.has_nvidia_apex.cache_clear()
    assert not compat.has_nvidia_apex()
    compat.has_nvidia_apex.cache_clear()
