"""The same data through tinker-cookbook and the tinker SDK; runs only where both can be imported.

Tested: tinker-cookbook 0.6, tinker 0.38. Tinker's losses run on its service, and the packages hold
neither their formulas nor their defaults (0.8 and 1.2 for ppo, 0 and 4 for cispo are in its online
documentation). So what is compared is what runs on the client: advantages, KL and teacher in the
advantages, how data is aligned, supervised weights, DPO, custom losses, and the losses' names.
Deliberate differences, which the inputs below avoid:

* a Datum has N - 1 positions for N tokens; a training sequence here has N, the last never trained.
* the cookbook centres the KL over the batch before it goes into the advantages; here it is plain.
* the cookbook's discounted KL sums count all positions, and spill into the prompt's advantages;
  here returns count trained tokens only.
* the cookbook's RL data carries its mask in the advantages; here `loss_mask` is explicit.
* its top-k distillation renormalises the k probabilities; here they stay, or get a rest.
* a Datum may have clip thresholds per token; here they are settings of the loss.
* `remove_constant_reward_groups` keeps one group if all are constant; here none is informative.

Without a counterpart under Tinker's names: its `gspo` (there is `gspo`), `stable_reinforce`.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch.nn.functional import log_softmax
from torch.nn.utils.rnn import pad_sequence

from megatron_rl_loss.losses.distillation import on_policy_distillation
from megatron_rl_loss.losses.objective import Objective
from megatron_rl_loss.losses.registry import LOSSES
from megatron_rl_loss.ops.advantages import dr_grpo_advantages, informative_groups
from megatron_rl_loss.ops.gae import gae
from megatron_rl_loss.ops.kl import kl_penalty
from megatron_rl_loss.ops.preferences import dpo_advantages
from megatron_rl_loss.parallel.token_weights import token_weights
from megatron_rl_loss.rollouts.rollout import Rollout
from megatron_rl_loss.rollouts.sequences import training_sequence
from tests.unit.test_losses import objective_step

tinker = pytest.importorskip("tinker", exc_type=ImportError)
tinker_datum = pytest.importorskip("tinker.types.datum", exc_type=ImportError)
processing = pytest.importorskip("tinker_cookbook.rl.data_processing", exc_type=ImportError)
rl_metrics = pytest.importorskip("tinker_cookbook.rl.metrics", exc_type=ImportError)
rl_types = pytest.importorskip("tinker_cookbook.rl.types", exc_type=ImportError)
completers = pytest.importorskip("tinker_cookbook.completers", exc_type=ImportError)
supervised = pytest.importorskip("tinker_cookbook.supervised.common", exc_type=ImportError)

# two turns of the second one are trained, what the environment says between them is not
ROLLOUTS = [
    Rollout([5, 6], [7, 8, 9], rollout_log_probs=[-0.5, -1.0, -2.0], reward=1.0),
    Rollout(
        [5, 6],
        [3, 2, 11, 12, 4],
        [True, True, False, False, True],
        rollout_log_probs=[-0.25, -3.0, 0.0, 0.0, -0.75],
        reward=-0.5,
    ),
    Rollout([5, 6], [1], rollout_log_probs=[-1.5], reward=0.25),
]


def turn(before, tokens, log_probs, reward=0.0):
    return rl_types.Transition(
        ob=tinker.ModelInput.from_ints(list(before)),
        ac=completers.TokensWithLogprobs(list(tokens), list(log_probs)),
        reward=reward,
        episode_done=True,
    )


def trajectory(rollout):
    """Cuts a response into the turns that its mask shows."""
    turns, mask, end = [], list(rollout.loss_mask), 0
    while True in mask[end:]:
        start = mask.index(True, end)
        end = mask.index(False, start) if False in mask[start:] else len(mask)
        before = (*rollout.prompt_ids, *rollout.response_ids[:start])
        log_probs = rollout.rollout_log_probs[start:end]
        turns.append(turn(before, rollout.response_ids[start:end], log_probs, reward=0.1))
    return rl_types.Trajectory(transitions=turns, final_ob=tinker.ModelInput.from_ints([]))


def group(rewards, rollouts=ROLLOUTS):
    trajectories = [trajectory(r) for r in rollouts[: len(rewards)]]
    return rl_types.TrajectoryGroup(trajectories, list(rewards), [{} for _ in rewards])


def datums(advantages=(1.5, -0.5, 0.75)):
    groups = [group([r.reward for r in ROLLOUTS])]
    return processing.assemble_training_data(groups, [torch.tensor(advantages)])[0]


def rows(data, name):
    """A field of all datums as [rows, S]."""
    given = [datum.loss_fn_inputs[name].to_torch() for datum in data]
    return pad_sequence(given, batch_first=True)


def case():
    """Datums, and the same as tensors of a micro-batch, with made-up current log-probs."""
    data = datums()
    mask = rows(data, "mask") > 0
    rollout_log_probs = rows(data, "logprobs")
    generator = torch.Generator().manual_seed(0)
    noise = 0.4 * torch.randn(3, *mask.shape, generator=generator)
    names = ("log_probs", "teacher_log_probs", "ref_log_probs")
    tensors = {k: torch.where(mask, rollout_log_probs + x, 0.0) for k, x in zip(names, noise)}
    tensors |= {"rollout_log_probs": rollout_log_probs, "advantages": rows(data, "advantages")}
    return data, tensors, mask


class Scorer:
    """A sampling client that gives the rows of `log_probs` as log-probs of the sequences."""

    def __init__(self, data, log_probs):
        self.by_tokens = {}
        for datum, row in zip(data, log_probs):
            targets = datum.loss_fn_inputs["target_tokens"].data
            tokens = (*datum.model_input.to_ints(), targets[-1])
            self.by_tokens[tokens] = [0.0, *row[: len(targets)].tolist()]

    def compute_logprobs(self, sequence):
        return self._later(self.by_tokens[tuple(sequence.to_ints())])

    def sample(self, *, prompt, **_):
        log_probs = self.by_tokens[tuple(prompt.to_ints())]
        return self._later(
            SimpleNamespace(prompt_logprobs=log_probs, prompt_cache_hit_tokens=0, sequences=[])
        )

    def _later(self, result):
        async def coroutine():
            return result

        return SimpleNamespace(coroutine=coroutine)


def test_training_sequences_equal_datums():
    for rollout, datum, advantage in zip(ROLLOUTS, datums(), (1.5, -0.5, 0.75)):
        ours = training_sequence(rollout, advantage, 0)
        theirs = {name: x.to_torch() for name, x in datum.loss_fn_inputs.items()}
        mask = ours["loss_mask"][:-1]
        assert ours["tokens"][:-1].tolist() == datum.model_input.to_ints()
        assert torch.equal(ours["tokens"][1:], theirs["target_tokens"])
        assert torch.equal(mask, theirs["mask"] > 0)
        assert torch.equal(ours["rollout_log_probs"][:-1], theirs["logprobs"])
        assert torch.equal(torch.where(mask, ours["advantages"][:-1], 0.0), theirs["advantages"])
        assert not ours["loss_mask"][-1]


def test_advantages_equal_the_cookbooks():
    rewards = [[1.0, 0.0, 0.25], [2.0, 2.0], [0.5, -1.0]]
    groups = [group(given, [ROLLOUTS[0]] * 3) for given in rewards]
    total = torch.tensor([r + 0.1 for given in rewards for r in given])  # a turn's reward is 0.1
    numbers = torch.tensor([3, 3, 3, 8, 8, 1, 1])
    want = torch.cat(processing.compute_advantages(groups))
    torch.testing.assert_close(dr_grpo_advantages(total, numbers), want, rtol=1e-6, atol=1e-6)
    kept = processing.remove_constant_reward_groups(groups)
    assert kept == [groups[0], groups[2]]
    assert numbers[informative_groups(total, numbers)].unique().tolist() == [1, 3]


def test_mismatch_metrics_equal_the_cookbooks():
    data, tensors, mask = case()
    trained = [row[: d.model_input.length] for row, d in zip(tensors["log_probs"], data)]
    want = rl_metrics.compute_kl_sample_train(data, trained)
    tensors["old_log_probs"] = tensors["log_probs"]
    _, _, metrics = objective_step(Objective("ppo_clip"), tensors, mask, mask.float())
    k1 = metrics["mismatch_k1"]
    k2 = kl_penalty(tensors["log_probs"], tensors["rollout_log_probs"], "k2")[mask].mean()
    assert float(k1[0] / k1[1]) == pytest.approx(want["optim/kl_sample_train_v1"], rel=1e-5)
    assert float(k2) == pytest.approx(want["optim/kl_sample_train_v2"], rel=1e-5)


@pytest.mark.parametrize("discount", [0.0, 0.9])
def test_kl_in_the_advantages_equals_the_cookbooks(discount):
    data, tensors, mask = case()
    data, mask = data[::2], mask[::2, :4]  # without the two turns, see above
    tensors = {k: v[::2, :4] for k, v in tensors.items()}
    base = Scorer(data, tensors["ref_log_probs"])
    metrics, _ = asyncio.run(rl_metrics.incorporate_kl_penalty(data, base, 0.3, discount))
    kl = kl_penalty(tensors["rollout_log_probs"], tensors["ref_log_probs"], "k1")
    assert float(kl[mask].mean()) == pytest.approx(metrics["kl_policy_base"], rel=1e-5)
    penalty = torch.where(mask, -0.3 * (kl - kl[mask].mean()), 0.0)
    if discount:
        zeros = torch.zeros_like(penalty)
        _, penalty = gae(penalty, zeros, mask, discount=discount, gae_lambda=1.0)
    want = rows(data, "advantages")[mask]
    torch.testing.assert_close((tensors["advantages"] + penalty)[mask], want)


def test_on_policy_distillation_equals_the_cookbooks():
    pytest.importorskip("tinker_cookbook.distillation.train_on_policy", exc_type=ImportError)
    from tinker_cookbook.distillation.train_on_policy import incorporate_kl_penalty

    data, tensors, mask = case()
    for datum in data:
        zeros = torch.zeros_like(datum.loss_fn_inputs["advantages"].to_torch())
        datum.loss_fn_inputs["advantages"] = tinker.TensorData.from_torch(zeros)
    teacher = Scorer(data, tensors["teacher_log_probs"])
    asyncio.run(incorporate_kl_penalty(data, [teacher] * 3, [0] * 3, 1.0, 0.0))
    weights = token_weights(mask, "sum")
    tensors["advantages"] = rows(data, "advantages")
    want = objective_step(Objective("tinker_importance_sampling"), tensors, mask, weights)
    tensors["old_log_probs"] = tensors["rollout_log_probs"]
    got = objective_step(Objective("on_policy_distillation"), tensors, mask, weights)
    torch.testing.assert_close(got[:2], want[:2])
    assert got[1].abs().max() > 1e-3


def test_expected_on_policy_distillation_equals_the_cookbooks_reverse_kl():
    sdft = pytest.importorskip("tinker_cookbook.distillation.sdft", exc_type=ImportError)
    student, teacher = torch.randn(2, 6, 11, generator=torch.Generator().manual_seed(0))
    student.requires_grad_()
    log_probs, q = log_softmax(student, -1), log_softmax(teacher, -1)
    datum = SimpleNamespace(loss_fn_inputs={"weights": tinker.TensorData.from_torch(q.exp())})
    want, _ = sdft.reverse_kl_custom_loss([datum], [log_probs])
    (want_gradient,) = torch.autograd.grad(want, student, retain_graph=True)
    loss = on_policy_distillation(log_probs, log_probs.detach(), q).loss
    got = (log_probs.detach().exp() * loss).sum()  # over all tokens, in place of samples
    (gradient,) = torch.autograd.grad(got, student)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("theirs", "ours"), [("none", "sum"), ("mean", "sequence_mean")])
def test_supervised_weights_and_loss_equal_the_cookbooks(theirs, ours):
    sequences = [training_sequence(rollout, 0.0, 0) for rollout in ROLLOUTS]
    data = [
        supervised.datum_from_model_input_weights(
            tinker.ModelInput.from_ints(s["tokens"].tolist()),
            torch.cat([torch.zeros(1), s["loss_mask"][:-1].float()]),
            reduction=theirs,
        )
        for s in sequences
    ]
    mask = pad_sequence([s["loss_mask"][:-1] for s in sequences], batch_first=True)
    weights = token_weights(mask, ours)
    scale = len(data) if theirs == "mean" else 1  # Tinker sums over sequences
    torch.testing.assert_close(scale * weights, rows(data, "weights"))
    log_probs = case()[1]["log_probs"]
    rows_of_log_probs = [
        tinker.TensorData.from_torch(row[: d.model_input.length]) for row, d in zip(log_probs, data)
    ]
    want = supervised.compute_mean_nll(
        rows_of_log_probs, [d.loss_fn_inputs["weights"] for d in data]
    )
    got, _, _ = objective_step(
        Objective("cross_entropy"), {"log_probs": log_probs}, mask, weights / weights.sum()
    )
    assert float(got) == pytest.approx(want, rel=1e-5)


def test_dpo_equals_the_cookbooks():
    train_dpo = pytest.importorskip("tinker_cookbook.preference.train_dpo", exc_type=ImportError)
    sums, ref_sums = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    given = sums.clone().requires_grad_()
    (chosen, rejected), (ref_chosen, ref_rejected) = given.chunk(2), ref_sums.chunk(2)
    want, _ = train_dpo.compute_dpo_loss(chosen, rejected, ref_chosen, ref_rejected, 0.4)
    want.backward()
    pairs, is_chosen = torch.tensor([7, 8, 9, 7, 8, 9]), torch.arange(6) < 3
    advantages, losses = dpo_advantages(sums, ref_sums, pairs, is_chosen, beta=0.4)
    torch.testing.assert_close(losses.mean(), want.detach())
    torch.testing.assert_close(-advantages / 6, given.grad)  # of policy_gradient, w = 1 / B


@pytest.mark.parametrize("name", ["tinker_ppo", "tinker_cispo"])
def test_cross_entropy_carries_custom_losses_as_the_sdk_does(name):
    """The SDK turns a loss of the client's into weights of any sign for `cross_entropy`."""
    data, tensors, mask = case()
    objective, ones = Objective(name), token_weights(mask, "sum")

    def custom_loss(_, log_probs):
        log_probs = pad_sequence(log_probs, batch_first=True)
        given = {k: v for k, v in tensors.items() if k != "log_probs"}
        return objective(log_probs, None, given, mask, ones)[0], {}

    outputs = [
        {"logprobs": tinker.TensorData.from_torch(row[: d.model_input.length])}
        for row, d in zip(tensors["log_probs"], data)
    ]
    weighted = tinker.TrainingClient._compute_custom_loss(
        data, custom_loss, SimpleNamespace(loss_fn_outputs=outputs)
    )
    weights = rows(weighted.data, "weights")
    assert weights.min() < 0 < weights.max()
    loss, want, _ = objective_step(objective, tensors, mask, ones)
    _, got, _ = objective_step(Objective("cross_entropy"), tensors, mask, weights)
    torch.testing.assert_close(got, want)
    assert float(loss) == pytest.approx(weighted.loss_sum)


def test_names_equal_the_sdks():
    known = get_args(tinker.types.LossFnType)
    ours = [name.removeprefix("tinker_") for name in LOSSES if name.startswith("tinker_")]
    assert set(known) - {*ours, "cross_entropy"} == {"gspo", "stable_reinforce", "custom"}
    assert not set(ours) - set(known)
    for name in ("tinker_ppo", "tinker_cispo"):
        assert set(LOSSES[name].settings) <= set(tinker_datum._KEY_TO_TYPE)
