import pytest
import torch

from megatron_rl_loss import InputError, MicroBatchIterator, with_loss_weights
from megatron_rl_loss.mcore.batch import make_token_batch

TOKENS = torch.arange(10).reshape(2, 5)
MASK = torch.tensor([[False, True, True, True, False], [True, False, False, False, False]])


def batch(**changes):
    return {"tokens": TOKENS, "loss_mask": MASK, "advantages": torch.tensor([1.0, -1.0])} | changes


def test_labels_positions_and_weights_are_derived():  # C23
    made = make_token_batch(batch())
    assert made.labels.tolist() == [[1, 2, 3, 4, 0], [6, 7, 8, 9, 0]]
    assert made.position_ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert torch.equal(made.loss_weights, MASK.float()) and not made.weights_given
    assert made.tensors["advantages"][0].tolist() == [1.0] * 5


def test_the_mask_is_derived_from_weights():
    weights = MASK * torch.tensor([[0.5], [-2.0]])
    made = make_token_batch({"tokens": TOKENS, "loss_weights": weights})
    assert torch.equal(made.loss_mask, MASK) and made.weights_given


def test_foreign_names_are_understood():
    made = make_token_batch({"input_ids": TOKENS, "response_mask": MASK})
    assert torch.equal(made.tokens, TOKENS)


def test_non_finite_values_at_masked_positions_are_accepted():  # C18
    old = torch.where(MASK, -1.0, float("nan"))
    make_token_batch(batch(old_log_probs=old))


@pytest.mark.parametrize(
    "name", ["advantages", "old_log_probs", "rollout_log_probs", "loss_weights"]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_at_trained_positions_are_named(name, value):  # C18
    bad = torch.zeros(2, 5)
    bad[0, 3] = value
    with pytest.raises(InputError, match=f"{name} is .* row 0, position 3"):
        make_token_batch(batch(**{name: bad}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": None}, "no 'tokens'"),
        ({"tokens": TOKENS.float()}, "integer"),
        ({"tokens": TOKENS[0]}, r"\[rows, S\]"),
        ({"loss_mask": None}, "'loss_mask' .* or 'loss_weights'"),
        ({"loss_mask": MASK[:, :4]}, r"loss_mask has shape \(2, 4\)"),
        ({"loss_mask": MASK.float()}, "loss_mask must be bool"),
        ({"loss_mask": torch.ones(2, 5, dtype=torch.bool)}, "last position of row 0"),
        ({"labels": TOKENS[:, :4]}, r"labels has shape \(2, 4\)"),
        ({"position_ids": TOKENS[:, :4]}, "position_ids"),
        ({"advantages": torch.ones(5)}, r"advantages has shape \(5,\)"),
        ({"advantage": torch.ones(2)}, "unknown field 'advantage'"),
        ({"input_ids": TOKENS}, "twice"),
    ],
)
def test_a_wrong_micro_batch_is_refused_with_the_reason(changes, words):
    with pytest.raises(InputError, match=words):
        make_token_batch(batch(**changes))


def test_missing_tensors_are_named_with_a_hint():
    with pytest.raises(InputError, match="'old_log_probs', 'ref_log_probs'.*on_policy"):
        make_token_batch(batch(), needs=("advantages", "old_log_probs", "ref_log_probs"))


def test_a_length_that_parallelism_cannot_split_is_refused():
    with pytest.raises(InputError, match="5 is not a multiple of 2"):
        make_token_batch(batch(), seq_multiple=2)


def test_weights_of_a_mini_batch_cover_micro_batches_of_any_width():
    narrow = {"tokens": TOKENS[:, :3], "loss_mask": MASK[:, :3]}
    weighted = with_loss_weights([batch(), narrow], "token_mean")
    assert [tuple(w["loss_weights"].shape) for w in weighted] == [(2, 5), (2, 3)]
    assert weighted[0]["loss_weights"].max().item() == pytest.approx(1 / 7)
    assert sum(float(w["loss_weights"].sum()) for w in weighted) == pytest.approx(1.0)


def test_weights_are_made_once():
    with pytest.raises(InputError, match="already has"):
        with_loss_weights([batch(loss_weights=MASK.float())], "sum")
    with pytest.raises(InputError, match="at least one micro-batch"):
        with_loss_weights([], "sum")
    with pytest.raises(InputError, match="packed row"):
        with_loss_weights([batch(cu_seqlens=torch.tensor([0, 5]))], "sum")
    with pytest.raises(InputError, match="no 'loss_mask'"):
        with_loss_weights([{"tokens": TOKENS}], "sum")


def test_the_iterator_knows_its_number():
    iterator = MicroBatchIterator([1, 2, 3])
    assert iterator.num_microbatches == 3 and list(iterator) == [1, 2, 3]
