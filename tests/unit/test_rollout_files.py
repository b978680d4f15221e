from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
import pytest
import torch

from megatron_rl_loss.errors import RolloutError
from megatron_rl_loss.rollouts import files as files_module
from megatron_rl_loss.rollouts.files import (
    RolloutFiles,
    read_rollouts,
    validate_rollouts,
    write_rollouts,
)
from megatron_rl_loss.rollouts.rollout import Rollout, group_number
from megatron_rl_loss.rollouts.stream import RolloutStream

GOOD = {"prompt_ids": [1, 22], "response_ids": [7, 8, 2], "reward": 1.0}
NAN = math.nan


def write_lines(path, *records):
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def groups_of(sizes):
    """Rollouts whose first response token numbers them, in groups of the given sizes."""
    rollouts = []
    for group, size in enumerate(sizes):
        for _ in range(size):
            rollouts.append(Rollout([1], [len(rollouts)], reward=0.5, group_id=f"g{group}"))
    return rollouts


def numbers(rollouts):
    return [rollout.response_ids[0] for rollout in rollouts]


FULL = Rollout(
    prompt_ids=[1, 2],
    response_ids=[3, 4, 5],
    loss_mask=[True, False, True],
    reward=-0.25,
    advantage=[0.1, 0.2, 1 / 3],
    rollout_log_probs=[-0.1, -2.5, float(np.float32(-1 / 3))],
    ref_log_probs=[-1e-9, -30.0, 0.0],
    teacher_top_ids=[[3, 9], [0, 0], [5, 1]],
    teacher_top_log_probs=[[-0.1, -2.5], [-1000.0, -1000.0], [float(np.float32(-1 / 3)), -1000.0]],
    group_id="prompt 1",
    metadata={"source": "ü", "nested": {"a": [1, None]}},
)


# ---- reading and writing


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet"])
def test_what_is_written_is_read_back_bit_for_bit(tmp_path, name):
    rollouts = [FULL, replace(FULL, response_ids=[9, 9, 2], loss_mask=None, metadata={})]
    write_rollouts(tmp_path / name, rollouts)
    assert list(read_rollouts(tmp_path / name)) == rollouts
    assert list(RolloutFiles(tmp_path / name)) == rollouts


def test_arrays_tensors_and_lists_make_the_same_rollout():
    lists = Rollout([1, 2], [3, 4], loss_mask=[True, False], advantage=0.5, ref_log_probs=[-1, -2])
    arrays = Rollout(
        np.array([1, 2]),
        torch.tensor([3, 4]),
        loss_mask=torch.tensor([1, 0]),
        advantage=torch.tensor(0.5),
        ref_log_probs=np.array([-1.0, -2.0], dtype=np.float32),
    )
    assert arrays == lists


def test_files_of_a_folder_are_read_in_order_of_their_names(tmp_path):
    rollouts = groups_of([1] * 5)
    write_rollouts(tmp_path / "b.parquet", rollouts[2:4])
    write_rollouts(tmp_path / "a.jsonl", rollouts[:2])
    write_rollouts(tmp_path / "c.jsonl", rollouts[4:])
    (tmp_path / "notes.txt").write_text("not a rollout")
    (tmp_path / ".d.jsonl").write_text("hidden")
    assert numbers(read_rollouts(tmp_path)) == [0, 1, 2, 3, 4]
    assert numbers(RolloutFiles(tmp_path)) == [0, 1, 2, 3, 4]


def test_ordered_reading_is_lazy(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", GOOD, "broken")
    reader = read_rollouts(path)
    assert next(reader).reward == 1.0
    with pytest.raises(RolloutError, match="line 2"):
        next(reader)


def test_foreign_names_and_null_are_understood(tmp_path):
    record = {
        "prompt_token_ids": [1],
        "completion_ids": [2, 3],
        "completion_mask": [1, 0],
        "generation_logprobs": [-0.5, -0.25],
        "reference_policy_logprobs": None,
        "advantages": [1.0, 2.0],
        "uid": 4,
    }
    (got,) = read_rollouts(write_lines(tmp_path / "x.jsonl", record))
    assert got == Rollout(
        [1], [2, 3], [True, False], None, [1.0, 2.0], rollout_log_probs=[-0.5, -0.25], group_id=4
    )


def test_blank_lines_and_a_byte_order_mark_are_skipped_and_lines_still_count(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n\r\n{bad\n")
    with pytest.raises(RolloutError, match=r"x\.jsonl, line 3, not valid JSON"):
        validate_rollouts(path)


def test_summary_counts_what_is_there(tmp_path):
    write_rollouts(tmp_path / "x.jsonl", [*groups_of([2, 3]), Rollout([1, 2], [3] * 7, reward=0)])
    with pytest.raises(RolloutError, match="line 6, field 'group_id': is not given here"):
        validate_rollouts(tmp_path / "x.jsonl")
    write_rollouts(tmp_path / "x.jsonl", groups_of([2, 3]))
    summary = validate_rollouts(tmp_path / "x.jsonl")
    assert (summary.num_rollouts, summary.num_groups) == (5, 2)
    assert (summary.max_prompt_tokens, summary.max_response_tokens) == (1, 1)
    assert summary.fields == ("reward", "group_id")


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, name):
    path = tmp_path / name
    write_rollouts(path, [FULL])
    before = path.read_bytes()

    def failing():
        yield FULL
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_rollouts(path, failing())
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_parquet_metadata_may_be_a_struct(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({**{k: [v] for k, v in GOOD.items()}, "metadata": [{"a": 1}]})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    assert next(read_rollouts(tmp_path / "x.parquet")).metadata == {"a": 1}


def test_parquet_holds_scalar_and_per_token_advantages_together(tmp_path):
    rollouts = [Rollout([1], [2, 3], advantage=0.5), Rollout([1], [2, 3], advantage=[0.1, 0.2])]
    write_rollouts(tmp_path / "x.parquet", rollouts)
    assert [r.advantage for r in read_rollouts(tmp_path / "x.parquet")] == [(0.5, 0.5), (0.1, 0.2)]


# ---- order


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_shuffling_is_fixed_by_seed_and_epoch_and_keeps_groups_together(tmp_path, name):
    path = tmp_path / name
    write_rollouts(path, groups_of([2, 3, 1, 2, 4, 2, 3, 1]))

    def shuffled(seed, epoch):
        return numbers(read_rollouts(path, shuffle_seed=seed, epoch=epoch))

    first = shuffled(7, 0)
    assert first == shuffled(7, 0)
    assert sorted(first) == list(range(18)) and first != list(range(18))
    assert len({tuple(shuffled(*key)) for key in [(7, 0), (7, 1), (8, 0)]}) == 3
    ids = [r.group_id for r in read_rollouts(path, shuffle_seed=7)]
    changes = 1 + sum(a != b for a, b in pairwise(ids))
    assert changes == 8


def test_without_groups_single_rollouts_are_shuffled(tmp_path):
    path = tmp_path / "x.jsonl"
    write_rollouts(path, [Rollout([1], [i], reward=0.0) for i in range(20)])
    order = numbers(read_rollouts(path, shuffle_seed=1))
    assert sum(abs(a - b) == 1 for a, b in pairwise(order)) < 8


@pytest.mark.parametrize("shuffle_seed", [None, 3])
def test_mini_batches_depend_on_the_step_alone_and_use_every_rollout_equally(
    tmp_path, shuffle_seed
):
    path = tmp_path / "x.jsonl"
    write_rollouts(path, groups_of([1] * 10))
    files = RolloutFiles(path)
    batches = [numbers(files.mini_batch(s, 4, shuffle_seed=shuffle_seed)) for s in range(5)]
    assert sorted(chain(*batches)) == sorted(list(range(10)) * 2)
    for step in (4, 1):
        again = RolloutFiles(path).mini_batch(step, 4, shuffle_seed=shuffle_seed)
        assert numbers(again) == batches[step]


def test_cutting_a_group_is_refused_where_whole_groups_are_needed(tmp_path):
    path = tmp_path / "x.jsonl"
    write_rollouts(path, groups_of([2, 2, 3, 1]))
    files = RolloutFiles(path)
    assert len(files.mini_batch(0, 4, whole_groups=True)) == 4
    assert len(files.mini_batch(1, 4, whole_groups=True)) == 4
    with pytest.raises(RolloutError, match=r"cuts the group that starts at .*x\.jsonl, line 3"):
        files.mini_batch(0, 3, whole_groups=True)
    assert len(files.mini_batch(0, 3)) == 3


@pytest.mark.parametrize("size", [0, 9])
def test_a_mini_batch_larger_than_the_file_is_refused(tmp_path, size):
    write_rollouts(tmp_path / "x.jsonl", groups_of([8]))
    with pytest.raises(RolloutError, match=rf"mini-batch of {size} rollouts .* there are 8"):
        RolloutFiles(tmp_path / "x.jsonl").mini_batch(0, size)


# ---- bad input

BAD_RECORDS = [
    ({"response_ids": []}, "field 'response_ids': is empty"),
    ({"prompt_ids": []}, "field 'prompt_ids': is empty"),
    ({"prompt_ids": None}, "field 'prompt_ids': is missing"),
    ({"response_ids": 7}, "field 'response_ids': expected a list, got int 7"),
    ({"response_ids": [7, -1, 2]}, "field 'response_ids': expected token .* int -1 at position 1"),
    ({"response_ids": [7, True]}, "field 'response_ids': expected token ids .* bool True"),
    ({"response_ids": [7, 2.0]}, "field 'response_ids': expected token ids .* float 2.0"),
    ({"response_ids": [7, 100]}, "field 'response_ids': token id 100 at position 1, .* 100 tokens"),
    ({"prompt_ids": [2500]}, "field 'prompt_ids': token id 2500 at position 0"),
    ({"loss_mask": [1, 1]}, "field 'loss_mask': has 2 entries, but 'response_ids' has 3"),
    ({"loss_mask": [1, 0.5, 1]}, "field 'loss_mask': expected true or false .* float 0.5"),
    ({"loss_mask": "110"}, "field 'loss_mask': expected a list, got str '110'"),
    ({"reward": None}, "field 'reward': neither it nor 'advantage'"),
    ({"reward": NAN}, "field 'reward': must be finite, got nan"),
    ({"reward": "1"}, "field 'reward': expected a number, got str '1'"),
    ({"reward": True}, "field 'reward': expected a number, got bool True"),
    ({"reward": [1.0]}, "field 'reward': expected a number, got list"),
    ({"advantage": [1.0]}, "field 'advantage': has 1 entries, but 'response_ids' has 3"),
    ({"advantage": [1.0, math.inf, 0.0]}, "field 'advantage': is inf at response position 1"),
    ({"advantage": -math.inf}, "field 'advantage': must be finite, got -inf"),
    ({"advantage": "x"}, "field 'advantage': expected a list, got str 'x'"),
    ({"rollout_log_probs": [-1.0, NAN, -1.0]}, "field 'rollout_log_probs': is nan at response pos"),
    ({"rollout_log_probs": [-1.0, None, -1.0]}, "field 'rollout_log_probs': is nan at response"),
    ({"rollout_log_probs": [-1.0] * 5}, "field 'rollout_log_probs': has 5 entries, but .* has 3"),
    ({"rollout_log_probs": [0.5, 0.1, 0.2]}, "a log-prob is at most 0, got 0.5 at response pos"),
    ({"rollout_log_probs": [-1.0, "a", -1.0]}, "field 'rollout_log_probs': expected a number"),
    ({"ref_log_probs": [-math.inf, -1.0, -1.0]}, "field 'ref_log_probs': is -inf at response"),
    ({"teacher_top_ids": [[1], [2]]}, "field 'teacher_top_ids': has 2 entries, but .* has 3"),
    ({"teacher_top_ids": [1, 2, 3]}, "field 'teacher_top_ids': expected a list, got int 1"),
    ({"teacher_top_ids": [[1], [2, 3], [4]]}, "has 2 entries at response position 1 and 1 at pos"),
    ({"teacher_top_ids": [[], [], []]}, "'teacher_top_ids': has 0 entries at response position 0"),
    ({"teacher_top_ids": [[1], [-1], [1]]}, "expected token ids .* int -1 at response position 1"),
    ({"teacher_top_ids": [[1], [100], [1]]}, "'teacher_top_ids': token id 100 at response pos.* 1"),
    ({"teacher_top_ids": [[1], None, [1]]}, "'teacher_top_ids': expected a list, got NoneType"),
    ({"teacher_top_log_probs": [[-0.1, -0.1]] * 3}, "log-probs of 1.81 in all at response pos.* 0"),
    ({"teacher_top_log_probs": [[-1.0], [0.5], [-1.0]]}, "is at most 0, got 0.5 at response pos"),
    ({"teacher_top_log_probs": [[-1.0], [NAN], [-1.0]]}, "is at most 0, got nan at response pos"),
    ({"teacher_top_log_probs": [[-1.0], [None], [-1.0]]}, "at most 0, got nan at response pos"),
    (
        {"teacher_top_ids": [[1, 2]] * 3, "teacher_top_log_probs": [[-1.0]] * 3},
        "'teacher_top_ids': has 2 entries per token, but 'teacher_top_log_probs' has 1",
    ),
    ({"group_id": 1.5}, r"field 'group_id': expected an integer \(int64\) or a string, got float"),
    ({"group_id": 2**64}, "field 'group_id': expected an integer"),
    ({"reward": 1e39}, "field 'reward': must be finite, got 1e\\+39"),
    ({"reward": 10**400}, "field 'reward': must be finite, got inf"),
    ({"response_ids": [2**40]}, "field 'response_ids': expected token ids"),
    ({"metadata": [1]}, "field 'metadata': expected an object, got list"),
    ({"metadata": "{"}, "field 'metadata': not a JSON object"),
    ({"rewrd": 1.0}, "field 'rewrd': unknown; did you mean 'reward'"),
    ({"xyzzy": 1.0}, "field 'xyzzy': unknown; Fields: prompt_ids"),
    ({"completion_ids": [7]}, "field 'response_ids': is given twice"),
    ({"prev_logprobs": [-1.0] * 3}, "field 'prev_logprobs': is not read: the trainer computes"),
]


@pytest.mark.parametrize("change, message", BAD_RECORDS, ids=[m[:45] for _, m in BAD_RECORDS])
def test_a_bad_record_is_named_by_file_line_and_field(tmp_path, change, message):
    path = write_lines(tmp_path / "x.jsonl", GOOD, {**GOOD, **change}, GOOD)
    with pytest.raises(RolloutError, match=rf"x\.jsonl, line 2, .*{message}"):
        RolloutFiles(path, vocab_size=100)
    with pytest.raises(RolloutError, match="line 2, "):
        list(read_rollouts(path, vocab_size=100))


BAD_LINES = [
    ('{"prompt_ids": [1', "not valid JSON: .* at column"),
    ("[1, 2]", "expected an object"),
    ("3", "expected an object"),
    ('{"reward": 1, "reward": 2}', "field 'reward': is given twice"),
    ("[" * 100_000, "nested too deeply"),
]


@pytest.mark.parametrize("line, message", BAD_LINES, ids=[m for _, m in BAD_LINES])
def test_a_bad_line_is_named_by_file_and_line(tmp_path, line, message):
    with pytest.raises(RolloutError, match=rf"x\.jsonl, line 2, {message}"):
        validate_rollouts(write_lines(tmp_path / "x.jsonl", GOOD, line))


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(json.dumps(GOOD).encode() + b'\n{"a": "\xff"}\n')
    with pytest.raises(RolloutError, match=r"line 2, not UTF-8 text"):
        validate_rollouts(tmp_path / "x.jsonl")


def test_a_bad_parquet_row_is_named(tmp_path):
    import pyarrow
    import pyarrow.parquet

    columns = {"prompt_ids": [[1], [1]], "response_ids": [[2], []], "reward": [0.0, 1.0]}
    table = pyarrow.table(columns)
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(RolloutError, match=r"x\.parquet, row 2, field 'response_ids': is empty"):
        RolloutFiles(tmp_path / "x.parquet")


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    (tmp_path / "x.parquet").write_text("not parquet")
    with pytest.raises(RolloutError, match=r"x\.parquet: cannot be read as Parquet"):
        validate_rollouts(tmp_path / "x.parquet")


def test_all_bad_rollouts_are_listed_up_to_ten(tmp_path):
    bad = [{**GOOD, "reward": NAN}] * 12
    with pytest.raises(RolloutError) as caught:
        RolloutFiles(write_lines(tmp_path / "x.jsonl", GOOD, *bad))
    lines = str(caught.value).splitlines()
    assert "12 bad rollouts" in lines[0] and "line 2, field 'reward'" in lines[1]
    assert len(lines) == 12 and lines[-1] == "... and 2 more"


@pytest.mark.parametrize(
    "field", ["reward", "rollout_log_probs", "ref_log_probs", "teacher_top_ids", "group_id"]
)
@pytest.mark.parametrize("first", [True, False])
def test_mixed_kinds_are_refused(tmp_path, field, first):
    values = {"reward": 1.0, "group_id": 3, "teacher_top_ids": [[1]] * 3}
    value = values.get(field, [-1.0] * 3)
    base = {"prompt_ids": [1], "response_ids": [7, 8, 2], "advantage": 0.5}
    records = [base, {**base, field: value}]
    path = write_lines(tmp_path / "x.jsonl", *(records if first else records[::-1]))
    with pytest.raises(RolloutError, match=rf"line 2, field '{field}': is.* line 1; rollouts that"):
        RolloutFiles(path)


def test_a_teacher_gives_as_many_tokens_in_every_rollout(tmp_path):
    records = [{**GOOD, "teacher_top_ids": [[1] * k] * 3} for k in (2, 3)]
    path = write_lines(tmp_path / "x.jsonl", *records)
    with pytest.raises(RolloutError, match=r"line 2, .* has 3 entries per token, but 2 in .*fill"):
        RolloutFiles(path)
    write_lines(tmp_path / "a.jsonl", records[0])
    write_lines(path, records[1])
    with pytest.raises(RolloutError, match=r"x\.jsonl, line 1, .* has 3 entries per token, but 2"):
        RolloutStream(tmp_path).take(2)


@pytest.mark.parametrize(
    ("field", "bad"),
    [("teacher_top_ids", -1), ("teacher_top_ids", 1e9)]
    + [("teacher_top_log_probs", bad) for bad in (0.5, NAN, None, "a")],
)
def test_a_teachers_entries_at_masked_positions_are_not_looked_at(tmp_path, field, bad):
    good = -1.0 if field == "teacher_top_log_probs" else 5
    teacher = [[good, good], [good, bad], [good, good]]
    record = {**GOOD, field: teacher, "loss_mask": [True, False, True]}
    (got,) = read_rollouts(write_lines(tmp_path / "x.jsonl", record), vocab_size=100)
    unused = -1000.0 if field == "teacher_top_log_probs" else 0
    assert getattr(got, field) == ((good, good), (unused, unused), (good, good))


def test_drop_non_finite_takes_a_teachers_unknown_log_probs_out_of_the_mask(tmp_path):
    record = {**GOOD, "teacher_top_log_probs": [[-1.0, NAN], [-1.0, -math.inf], [-1.0, -1.0]]}
    (got,) = read_rollouts(write_lines(tmp_path / "x.jsonl", record), drop_non_finite=True)
    assert got.loss_mask == (False, True, True)
    assert got.teacher_top_log_probs[1] == (-1.0, -math.inf)


@pytest.mark.parametrize("field", ["rollout_log_probs", "ref_log_probs", "advantage"])
@pytest.mark.parametrize("bad", [NAN, math.inf, None])
def test_non_finite_values_at_masked_positions_are_not_looked_at(tmp_path, field, bad):
    record = {**GOOD, field: [-1.0, bad, -0.5], "loss_mask": [True, False, True]}
    (got,) = read_rollouts(write_lines(tmp_path / "x.jsonl", record))
    assert getattr(got, field) == (-1.0, 0.0, -0.5)
    assert got.loss_mask == (True, False, True)


@pytest.mark.parametrize("bad", [NAN, -math.inf, None])
def test_drop_non_finite_takes_the_token_out_of_the_mask(tmp_path, bad):
    record = {**GOOD, "rollout_log_probs": [-1.0, bad, -1.0], "ref_log_probs": [bad, -1.0, -1.0]}
    path = write_lines(tmp_path / "x.jsonl", record)
    (got,) = read_rollouts(path, drop_non_finite=True)
    assert got.loss_mask == (False, False, True)
    assert got.rollout_log_probs == (-1.0, 0.0, -1.0)


def test_supervised_data_needs_no_reward(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", {"prompt_ids": [1], "response_ids": [2]})
    assert RolloutFiles(path, need_reward=False)[0].reward is None
    assert validate_rollouts(path, need_reward=False).fields == ()
    with pytest.raises(RolloutError, match="line 1, field 'reward': neither"):
        RolloutFiles(path)


def test_drop_non_finite_keeps_other_checks(tmp_path):
    record = {**GOOD, "rollout_log_probs": [NAN]}
    with pytest.raises(RolloutError, match="has 1 entries"):
        list(read_rollouts(write_lines(tmp_path / "x.jsonl", record), drop_non_finite=True))


def test_a_mini_batch_of_a_large_file_is_checked_before_it_is_returned(tmp_path, monkeypatch):
    records = [GOOD] * 7 + [{**GOOD, "reward": NAN}]
    path = write_lines(tmp_path / "x.jsonl", *records)
    monkeypatch.setattr(files_module, "CHECK_ALL_BYTES", 10)
    files = RolloutFiles(path)
    assert len(files.mini_batch(0, 4)) == 4
    with pytest.raises(RolloutError, match="line 8, field 'reward'"):
        files.mini_batch(1, 4)
    with pytest.raises(RolloutError, match="line 8, field 'reward'"):
        RolloutFiles(path, check_all=True)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file_is_refused(tmp_path, text):
    (tmp_path / "x.jsonl").write_text(text)
    for read in (RolloutFiles, validate_rollouts):
        with pytest.raises(RolloutError, match="has no rollouts"):
            read(tmp_path / "x.jsonl")


def test_missing_and_unknown_paths_are_refused(tmp_path):
    with pytest.raises(RolloutError, match="no such file or folder"):
        RolloutFiles(tmp_path / "nothing.jsonl")
    with pytest.raises(RolloutError, match="has no file ending in"):
        RolloutFiles(tmp_path)
    (tmp_path / "x.csv").write_text("a")
    with pytest.raises(RolloutError, match=r"ends in \.jsonl.* got '\.csv'"):
        RolloutFiles(tmp_path / "x.csv")
    with pytest.raises(RolloutError, match="no suffix"):
        write_rollouts(tmp_path / "x", [FULL])


def test_group_numbers_fit_int64_and_differ():
    ids = [group_number(f"prompt {i}") for i in range(1000)]
    assert len(set(ids)) == 1000 and max(ids) < 2**63 and min(ids) >= 0
    assert torch.tensor(ids).dtype is torch.int64
    assert group_number("\ud800") >= 0
    assert group_number("a") == 2340832890917691671
