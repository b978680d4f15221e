"""Sequences become padded rows or one packed row, and nothing is trained across a boundary."""

from __future__ import annotations

import pytest
import torch

from megatron_rl_loss.errors import InputError
from megatron_rl_loss.parallel.packing import pack_sequences, pad_sequences, unpack_sequences
from megatron_rl_loss.parallel.token_batch import make_token_batch


def sequence(tokens, mask, **fields) -> dict:
    return {"tokens": torch.tensor(tokens), "loss_mask": torch.tensor(mask).bool(), **fields}


FIRST = sequence([1, 2, 3], [0, 1, 0], old_log_probs=[-1.0, -2.0, -3.0], advantages=0.5)
SECOND = sequence([4, 5], [1, 0], old_log_probs=[-4.0, -5.0], advantages=-1.0)


def test_rows_are_padded_on_the_right_with_mask_false():
    batch = pad_sequences([FIRST, SECOND], multiple=4)
    assert batch["tokens"].tolist() == [[1, 2, 3, 0], [4, 5, 0, 0]]
    assert batch["loss_mask"].tolist() == [[False, True, False, False], [True] + [False] * 3]
    assert batch["old_log_probs"].tolist() == [[-1, -2, -3, 0], [-4, -5, 0, 0]]
    assert batch["advantages"].tolist() == [0.5, -1.0]


def test_each_packed_sequence_is_padded_and_its_real_and_padded_offsets_are_kept():
    batch = pack_sequences([FIRST, SECOND], multiple=4)
    assert batch["tokens"].tolist() == [[1, 2, 3, 0, 4, 5, 0, 0]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 5]
    assert batch["cu_seqlens_padded"].tolist() == [0, 4, 8]
    assert batch["cu_seqlens"].dtype == batch["cu_seqlens_padded"].dtype == torch.int32
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert batch["advantages"].tolist() == [[0.5] * 3 + [0.0] + [-1.0] * 2 + [0.0] * 2]


def test_labels_are_shifted_within_each_packed_sequence():
    batch = pack_sequences([FIRST, SECOND])
    assert batch["tokens"].tolist() == [[1, 2, 3, 4, 5]]
    assert batch["labels"].tolist() == [[2, 3, 0, 5, 0]]


def test_given_labels_are_kept():
    batch = pack_sequences([FIRST | {"labels": [7, 8, 9]}, SECOND | {"labels": [6, 6]}])
    assert batch["labels"].tolist() == [[7, 8, 9, 6, 6]]


def test_a_fixed_width_extends_the_padding_of_the_last_sequence():
    batch = pack_sequences([FIRST, SECOND], multiple=4, width=16)
    assert batch["tokens"].shape == (1, 16)
    assert batch["cu_seqlens"].tolist() == [0, 3, 5]
    assert batch["cu_seqlens_padded"].tolist() == [0, 4, 16]
    assert batch["position_ids"][0, 4:].tolist() == list(range(12))


def test_unpacking_returns_the_sequences():
    batch = pack_sequences([FIRST, SECOND], multiple=4, width=12)
    parts = unpack_sequences(batch["tokens"], batch["cu_seqlens"], batch["cu_seqlens_padded"])
    assert [part.tolist() for part in parts] == [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize("collate", [pad_sequences, pack_sequences])
@pytest.mark.parametrize(
    "sequences, message",
    [
        ([], "no sequence"),
        ([FIRST, FIRST | {"loss_mask": torch.ones(3).bool()}],
         "sequence 1: loss_mask is True at its last token"),
        ([FIRST, {"tokens": [1], "loss_mask": [False]}], "sequence 1 has the fields"),
        ([{"tokens": [1, 2]}], r"missing: \['loss_mask'\]"),
        ([FIRST | {"attention_mask": [1, 1, 1]}], r"not usable: \['attention_mask'\]"),
        ([FIRST | {"old_log_probs": [1.0]}], r"old_log_probs has shape \(1,\)"),
        ([FIRST, SECOND | {"advantages": [1.0, 2.0]}], r"advantages has shape \(2,\)"),
        ([FIRST | {"loss_mask": [0, 1, 0]}], "loss_mask must be bool"),
        ([sequence([], [])], "T >= 1"),
        ([FIRST | {"group_ids": [1, 2, 3]}], r"group_ids has shape \(3,\)"),
    ],
)  # fmt: skip
def test_sequences_that_do_not_fit_are_refused_by_number(collate, sequences, message):
    with pytest.raises(InputError, match=message):
        collate(sequences)


@pytest.mark.parametrize("collate", [pad_sequences, pack_sequences])
@pytest.mark.parametrize("width", [2, 10])
def test_a_width_that_does_not_hold_the_tokens_or_is_no_multiple_is_refused(collate, width):
    with pytest.raises(InputError, match=f"width {width} must hold .* multiple of 4"):
        collate([FIRST, SECOND], multiple=4, width=width)


@pytest.mark.parametrize("collate", [pad_sequences, pack_sequences])
def test_a_multiple_below_one_is_refused(collate):
    with pytest.raises(InputError, match="multiple must be at least 1, got 0"):
        collate([FIRST], multiple=0)


def test_only_a_packed_row_is_unpacked_by_its_own_offsets():
    batch = pack_sequences([FIRST, SECOND], multiple=4)
    padded = batch["cu_seqlens_padded"]
    for tokens, real, message in (
        (batch["tokens"][:, :7], batch["cu_seqlens"], r"end at 8, but tokens are \(1, 7\)"),
        (batch["tokens"], batch["cu_seqlens"][:2], r"got \(2,\) and \(3,\)"),
        (batch["tokens"], torch.tensor([0, 6, 8]), r"got lengths \[6, 2\] in \[4, 4\]"),
    ):
        with pytest.raises(InputError, match=message):
            unpack_sequences(tokens, real, padded)


def test_weights_of_rows_need_a_mask():
    with pytest.raises(InputError, match=r"loss_weights has shape \(1,\)"):
        make_token_batch({"tokens": torch.ones(1, 4).long(), "loss_weights": torch.ones(1)})


def packed_batch(**changes) -> dict:
    batch = pack_sequences([FIRST, SECOND], multiple=4)
    del batch["labels"], batch["position_ids"]
    return batch | changes


def test_a_micro_batch_derives_labels_and_positions_within_packed_sequences():
    made = make_token_batch(packed_batch())
    assert made.labels.tolist() == [[2, 3, 0, 4, 5, 0, 0, 0]]  # padding's label 4 is never trained
    assert made.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert made.packed.offsets == (0, 4, 8) and made.packed.lengths == (3, 2)


def test_a_context_parallel_rank_takes_its_slice_of_every_tensor_after_labels_are_made():
    first, second = (make_token_batch(packed_batch(), cp_rank=r, cp_size=2) for r in (0, 1))
    assert first.tokens.tolist() == [[1, 0, 4, 0]] and second.tokens.tolist() == [[2, 3, 5, 0]]
    assert first.labels.tolist() == [[2, 4, 5, 0]] and second.labels.tolist() == [[3, 0, 0, 0]]
    assert second.loss_mask.tolist() == [[True, False, False, False]]
    assert second.tensors["old_log_probs"].tolist() == [[-2, -3, -5, 0]]
    assert first.position_ids.tolist() == [[0, 3, 0, 3]]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"cu_seqlens": None}, "no 'cu_seqlens'"),
        ({"cu_seqlens": torch.tensor([0, 5])}, r"\(2,\) and \(3,\)"),
        ({"cu_seqlens_padded": torch.tensor([0, 4, 7])}, r"end at 7, but tokens are \(1, 8\)"),
        ({"cu_seqlens": torch.tensor([0, 5, 6])}, r"lengths \[5, 1\] in \[4, 4\]"),
        ({"cu_seqlens": torch.tensor([1, 3, 5])}, "start at 0"),
        (
            {"loss_mask": torch.tensor([[0, 0, 1, 0, 1, 0, 0, 0]]).bool()},
            "last position of packed sequence 0",
        ),
        ({"attention_mask": torch.ones(1)}, "attention_mask works neither"),
    ],
)
def test_packed_micro_batches_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        make_token_batch(packed_batch(**changes))
