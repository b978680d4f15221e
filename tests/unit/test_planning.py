"""The plan of a mini-batch: complete, equal on all ranks, within the limits, even, and fast."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl_loss.errors import InputError, LayoutError
from megatron_rl_loss.mcore.collate import collate, with_sequence_weights
from megatron_rl_loss.mcore.planning import Plan, plan_micro_batches
from megatron_rl_loss.parallel.token_weights import token_weights


def long_tailed_lengths(n: int, seed: int = 0) -> np.ndarray:
    """Log-normal, median 800 tokens, cut at 16 and 16,384: about 7 % are longer than 4,096."""
    lengths = np.random.default_rng(seed).lognormal(math.log(800), 1.0, n)
    return np.clip(lengths, 16, 16_384).astype(int)


def rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def check_plan(plan: Plan, lengths, *, dp_size, multiple, pad_to, packed, max_rows, max_tokens):
    """Recounts, from the micro-batches alone, everything a plan promises."""
    assert len(plan.micro_batches) == dp_size
    assert {len(rank) for rank in plan.micro_batches} == {plan.num_microbatches}
    assert plan.num_microbatches % multiple == 0 and plan.num_microbatches > 0
    flat = [i for rank in plan.micro_batches for micro_batch in rank for i in micro_batch]
    assert sorted(flat) == list(range(len(lengths)))
    slots = dp_size * plan.num_microbatches
    assert plan.num_fillers == max(0, slots - len(lengths))
    for rank, micro_batches in enumerate(plan.micro_batches):
        tokens = 0
        for micro_batch in micro_batches:
            padded = [rounded_up(lengths[i], pad_to) for i in micro_batch] or [0]
            cost = sum(padded) if packed else max(padded) * len(micro_batch)
            tokens += cost
            assert max_rows is None or len(micro_batch) <= max_rows
            assert max_tokens is None or cost <= max_tokens
            assert padded == sorted(padded, reverse=True)
        assert plan.rank_tokens[rank] == tokens


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=50),
    dp_size=st.integers(1, 5),
    multiple=st.integers(1, 4),
    pad_to=st.sampled_from([1, 4]),
    packed=st.booleans(),
    max_rows=st.integers(1, 6),
    spare=st.integers(0, 100),
    by_tokens=st.booleans(),
)
def test_every_plan_is_complete_equal_and_within_its_limits(
    lengths, dp_size, multiple, pad_to, packed, max_rows, spare, by_tokens
):
    max_tokens = rounded_up(max(lengths), pad_to) + spare if by_tokens else None
    limits = {"max_rows": None if by_tokens else max_rows, "max_tokens": max_tokens}
    layout = {"dp_size": dp_size, "multiple": multiple, "pad_to": pad_to, "packed": packed}
    arguments = {"micro_batch_size": limits["max_rows"], "max_tokens_per_microbatch": max_tokens}
    plan = plan_micro_batches(lengths, **layout, **arguments)
    check_plan(plan, lengths, **layout, **limits)
    assert plan == plan_micro_batches(np.array(lengths), **layout, **arguments)
    if not by_tokens:
        least = -(-len(lengths) // (dp_size * max_rows))
        assert plan.num_microbatches == rounded_up(least, multiple)


def test_uneven_sequences_are_split_instead_of_filled_up():
    plan = plan_micro_batches([9, 8, 7, 6, 5], dp_size=1, micro_batch_size=2, multiple=4)
    assert [len(m) for m in plan.micro_batches[0]].count(0) == 0
    assert plan.num_microbatches == 4 and plan.num_fillers == 0


def test_three_and_two_micro_batches_on_two_ranks_become_three_and_three_without_filler():
    plan = plan_micro_batches([4] * 7, dp_size=2, micro_batch_size=2)
    assert plan.num_microbatches == 2 and plan.num_fillers == 0
    assert sorted(len(m) for rank in plan.micro_batches for m in rank) == [1, 2, 2, 2]


def test_fillers_are_planned_only_where_sequences_run_out():
    plan = plan_micro_batches([4, 4, 4], dp_size=2, micro_batch_size=1, multiple=2)
    assert plan.num_microbatches == 2 and plan.num_fillers == 1
    assert plan.micro_batches[1][-1] == ()


def test_a_budget_is_filled_to_the_least_number_of_packed_micro_batches():
    plan = plan_micro_batches([6, 5, 5, 4], dp_size=1, max_tokens_per_microbatch=10, packed=True)
    assert plan.num_microbatches == 2 and sorted(plan.rank_tokens) == [20]


def test_a_padded_budget_counts_the_padding():
    plan = plan_micro_batches([8, 1, 1, 1], dp_size=1, max_tokens_per_microbatch=8)
    assert plan.micro_batches == (((0,), (1, 2, 3)),)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("limit", [{"micro_batch_size": 4}, {"max_tokens_per_microbatch": 16_384}])
@pytest.mark.parametrize("n, dp_size", [(512, 8), (4096, 8), (4096, 64)])
def test_ranks_get_at_most_1_05_of_the_mean_tokens(n, dp_size, limit, packed):
    plan = plan_micro_batches(
        long_tailed_lengths(n), dp_size=dp_size, packed=packed, multiple=2, **limit
    )
    assert plan.num_fillers == 0
    assert plan.imbalance <= 1.05


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "limit",
    [{"micro_batch_size": 1}, {"micro_batch_size": 4}, {"max_tokens_per_microbatch": 16_384}],
)
def test_100_000_sequences_are_planned_within_2_seconds(limit, packed):
    lengths = long_tailed_lengths(100_000)
    start = time.process_time()
    plan_micro_batches(lengths, dp_size=64, multiple=4, pad_to=8, packed=packed, **limit)
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize("packed", [True, False])
def test_lengths_just_above_half_the_budget_do_not_slow_planning_down(packed):
    lengths = 501 + np.arange(30_000) % 7
    start = time.process_time()
    plan = plan_micro_batches(lengths, dp_size=8, max_tokens_per_microbatch=1000, packed=packed)
    assert plan.max_rows == 1 and time.process_time() - start < 2.0


def test_printing_shows_ranks_tokens_and_fillers():
    text = str(plan_micro_batches([5, 3, 8], dp_size=2, micro_batch_size=1))
    assert "3 sequences, 16 tokens (padded): 2 ranks x 2 micro-batches, 1 fillers" in text
    assert text.splitlines()[2].split() == ["0", "1", "1", "8", "8"]
    assert "and 4 more ranks" in str(plan_micro_batches([1] * 20, dp_size=20, micro_batch_size=1))


def test_micro_batch_ids_give_the_legacy_weights():
    lengths = [5, 3, 8, 2, 6]
    plan = plan_micro_batches(lengths, dp_size=2, micro_batch_size=2)
    rows = [{"tokens": [1] * n, "loss_mask": [True] * (n - 1) + [False]} for n in lengths]
    weighted = with_sequence_weights(
        rows, "token_mean_legacy", micro_batch_ids=plan.micro_batch_ids
    )
    for rank in plan.micro_batches:
        for micro_batch in rank:
            trained = sum(lengths[i] - 1 for i in micro_batch)
            for i in micro_batch:
                expected = torch.full((lengths[i],), 1 / (4 * trained))
                expected[-1] = 0
                torch.testing.assert_close(weighted[i]["loss_weights"], expected)


@pytest.mark.parametrize(
    "limit, message",
    [
        ({"micro_batch_size": 0}, "micro_batch_size must be an integer of at least 1, got 0"),
        ({}, "got None and None"),
        ({"micro_batch_size": 1, "max_tokens_per_microbatch": 9}, "got 1 and 9"),
        (
            {"micro_batch_size": 1, "multiple": 0},
            "multiple must be an integer of at least 1, got 0",
        ),
        (
            {"max_tokens_per_microbatch": 6},
            "sequence 1 has 7 tokens, more than max_tokens_per_microbatch 6",
        ),
        (
            {"max_tokens_per_microbatch": 7, "pad_to": 4},
            r"sequence 1 has 7 tokens \(8 after padding to 4\), more than .* 7",
        ),
        (
            {"micro_batch_size": 1, "multiple": 4, "allow_fillers": False},
            "3 sequences cannot fill 8 micro-batches .*dp_size 2 x a multiple of 4",
        ),
    ],
)
def test_impossible_plans_are_refused_with_their_numbers(limit, message):
    with pytest.raises(LayoutError, match=message):
        plan_micro_batches([3, 7, 2], dp_size=2, **limit)


@pytest.mark.parametrize(
    "lengths, message",
    [([], "at least one"), ([1.5, 2.5], "must be integers"), ([3, 0], "sequence 1 .* 0")],
)
def test_empty_mini_batches_and_sequences_are_refused(lengths, message):
    with pytest.raises(InputError, match=message):
        plan_micro_batches(lengths, dp_size=1, micro_batch_size=1)


def some_sequences() -> list[dict]:
    return [
        {
            "tokens": torch.arange(n) + 10 * n,
            "loss_mask": torch.arange(n) < n - 1,
            "advantages": float(n),
            "old_log_probs": -torch.arange(n).float(),
            "group_ids": n % 2,
        }
        for n in (5, 3, 4)
    ]


@pytest.mark.parametrize("packed", [True, False])
def test_a_filler_has_the_fields_of_the_others_and_trains_nothing(packed):
    sequences = with_sequence_weights(some_sequences(), "sequence_mean")
    full = collate(sequences, (0, 1), packed=packed, multiple=4)
    filler = collate(sequences, (), packed=packed, multiple=4)
    assert set(filler) == set(full)
    assert filler["tokens"].shape == (1, 4) and not filler["loss_mask"].any()
    assert not filler["loss_weights"].any()
    assert all(filler[name].dtype == full[name].dtype for name in full)


def test_missing_rows_are_added_without_trained_tokens():
    batch = collate(some_sequences(), (1,), rows=3, width=8)
    assert batch["tokens"].shape == (3, 8) and batch["advantages"].tolist() == [3, 0, 0]
    assert batch["loss_mask"].sum(1).tolist() == [2, 0, 0]
    with pytest.raises(InputError, match="2 sequences do not fit into 1 rows"):
        collate(some_sequences(), (0, 1), rows=1)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "prompt_mean"])
def test_sequence_weights_equal_the_weights_of_the_padded_rows(reduction):
    sequences = some_sequences()
    rows = collate(sequences, (0, 1, 2))
    expected = token_weights(rows["loss_mask"], reduction, group_ids=rows["group_ids"])
    weighted = collate(with_sequence_weights(sequences, reduction), (0, 1, 2))
    assert torch.equal(weighted["loss_weights"], expected)


def test_sequences_get_their_weights_once():
    weighted = with_sequence_weights(some_sequences(), "sum")
    with pytest.raises(InputError, match="sequence 0 has 'loss_weights' already"):
        with_sequence_weights(weighted, "sum")
