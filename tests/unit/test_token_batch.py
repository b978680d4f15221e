import pytest
import torch

from megatron_rl_loss import InputError, MicroBatchIterator, with_loss_weights
from megatron_rl_loss.parallel.token_batch import make_token_batch

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
    narrow = batch(tokens=TOKENS[:, :3], loss_mask=MASK[:, :3])
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
    batches = [batch(), batch(), batch()]
    iterator = MicroBatchIterator(each for each in batches)
    assert iterator.num_microbatches == 3 and list(iterator) == batches


LOG_PROBS = torch.full(MASK.shape, -1.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": TOKENS.float()}, "tokens must be integers, got torch.float32"),
        ({"tokens": MASK}, "tokens must be integers, got torch.bool"),
        ({"tokens": "hello"}, "tokens must be a tensor or numbers, got str"),
        ({"tokens": TOKENS[:0], "loss_mask": MASK[:0]}, "at least one row"),
        ({"tokens": TOKENS - 3}, "tokens is -3 at row 0, position 0"),
        ({"labels": TOKENS.float()}, "labels must be integers"),
        ({"labels": TOKENS}, "not shifted"),
        ({"position_ids": TOKENS.float()}, "position_ids must be integers"),
        ({"position_ids": "abc"}, "position_ids must be a tensor or numbers"),
        ({"attention_mask": torch.ones(2, 5)}, r"bool, \(2, 1, 5, 5\)"),
        ({"attention_mask": torch.ones(2, 1, 5, 5)}, "got torch.float32"),
        ({"loss_mask": MASK.tolist()[:1]}, r"loss_mask has shape \(1, 5\)"),
        ({"loss_weights": "mean"}, "loss_weights must be a tensor or numbers, got str"),
        ({"old_log_probs": torch.ones(2)}, r"old_log_probs has shape \(2,\)"),
        ({"ref_log_probs": -LOG_PROBS}, "ref_log_probs is 1 at row 0, position 1.*at most 0"),
        ({"old_log_probs": LOG_PROBS.exp()}, "old_log_probs is 0.36.*not probabilities"),
        ({"rollout_log_probs": -LOG_PROBS}, "rollout_log_probs is 1"),
        ({"teacher_log_probs": -LOG_PROBS}, "teacher_log_probs is 1"),
    ],
)
def test_what_cannot_be_right_is_refused(changes, words):
    with pytest.raises(InputError, match=words):
        make_token_batch(batch(**changes))


def test_log_probs_may_round_above_zero_and_be_anything_where_masked():
    make_token_batch(batch(old_log_probs=torch.where(MASK, 1e-4, 5.0)))


def test_repeated_tokens_are_shifted_labels_all_the_same():
    same = torch.full_like(TOKENS, 7)
    make_token_batch(batch(tokens=same, labels=same))


def test_one_value_per_row_is_for_whole_sequence_quantities():
    made = make_token_batch(batch(loss_weights=torch.tensor([0.5, 2.0])))
    assert made.loss_weights[:, 0].tolist() == [0.5, 2.0]


def test_token_ids_outside_the_vocabulary_are_refused():
    make_token_batch(batch(), vocab_size=10)
    with pytest.raises(InputError, match="tokens is 9 at row 1, position 4.*vocabulary of 9"):
        make_token_batch(batch(), vocab_size=9)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (batch(), "sequence of dicts, got dict; put it into a list"),
        ("batch", "sequence of dicts, got str"),
        (None, "sequence of dicts, got NoneType"),
        ([1, 2], "element 0 must be a dict, got int"),
    ],
)
def test_micro_batches_are_a_sequence_of_dicts(given, words):
    with pytest.raises(InputError, match=words):
        MicroBatchIterator(given)
    with pytest.raises(InputError, match=words):
        with_loss_weights(given, "sum")


def test_weights_need_the_same_fields_in_every_micro_batch():
    with pytest.raises(InputError, match="micro-batch 1 and micro-batch 0.*'ref_log_probs'"):
        with_loss_weights([batch(), batch(ref_log_probs=LOG_PROBS)], "sum")


def test_masks_of_another_kind_are_refused_before_weights_are_made():
    with pytest.raises(InputError, match="must be bool"):
        with_loss_weights([batch(loss_mask=MASK.float())], "token_mean")
