"""Streaming: the same rollouts as `RolloutFiles`, each once per pass, across restarts."""

from __future__ import annotations

import json
import random
import sys

import numpy as np
import pytest

from megatron_rl_loss.errors import RolloutError
from megatron_rl_loss.rollouts import blocks, stream
from megatron_rl_loss.rollouts.files import RolloutFiles, write_rollouts
from megatron_rl_loss.rollouts.records import record_from_rollout
from megatron_rl_loss.rollouts.rollout import Rollout
from megatron_rl_loss.rollouts.sequences import training_sequence
from megatron_rl_loss.rollouts.stream import RolloutStream


def rollout(number: int, group: int | None, **fields) -> Rollout:
    """The reward is the rollout's number, by which the tests know it again."""
    rng = random.Random(number)
    length = rng.randint(1, 6)
    teacher = {
        "teacher_top_ids": [[rng.randrange(100), 7] for _ in range(length)],
        "teacher_top_log_probs": [[-rng.random(), -1000.0] for _ in range(length)],
    }
    fields = {"rollout_log_probs": [-rng.random() for _ in range(length)], **teacher, **fields}
    ids = [rng.randrange(100) for _ in range(length)]
    return Rollout([1, 2, number % 7], ids, reward=number, group_id=group, **fields)


@pytest.fixture(params=["jsonl", "parquet"])
def folder(request, tmp_path, monkeypatch):
    """Three files of 30, 1 and 50 rollouts in groups of 1 to 9, in blocks of about 8 rows."""
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 8)
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 900)
    rng, number, group = random.Random(1), 0, 0
    for name, size in (("a", 30), ("b", 1), ("c", 50)):
        rows = []
        while len(rows) < size:
            for _ in range(min(rng.randint(1, 9), size - len(rows))):
                rows.append(rollout(number, group))
                number += 1
            group += 1
        write_rollouts(tmp_path / f"{name}.{request.param}", rows)
    return tmp_path


def numbers(rollouts) -> list[int]:
    return [int(r.reward) for r in rollouts]


def test_in_order_it_gives_what_rollout_files_gives(folder):
    read = RolloutStream(folder, vocab_size=100)
    expected = list(RolloutFiles(folder))
    got = read.take(7) + read.take(74)
    assert numbers(got) == list(range(81))
    assert [record_from_rollout(r) for r in got] == [record_from_rollout(r) for r in expected]
    for one, other in zip(got, expected):
        ours, theirs = training_sequence(one, 1.0, 3), training_sequence(other, 1.0, 3)
        assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_a_teachers_entries_at_masked_positions_are_unused_however_they_are_read(
    tmp_path, monkeypatch
):
    fields = {
        "prompt_ids": [1],
        "response_ids": [2, 3],
        "reward": 1.0,
        "loss_mask": [True, False],
        "teacher_top_ids": [[4, 5], [6, 7]],
        "teacher_top_log_probs": [[-1.0, -2.0], [-3.0, -4.0]],
    }
    (tmp_path / "x.jsonl").write_text(json.dumps(fields))
    (slow,) = RolloutFiles(tmp_path)
    monkeypatch.setattr(stream.Parser, "__call__", None)
    (fast,) = RolloutStream(tmp_path).take(1)
    assert record_from_rollout(fast) == record_from_rollout(slow)
    assert fast.teacher_top_ids[1].tolist() == [0, 0]


def test_clean_columns_are_not_parsed_row_by_row(folder, monkeypatch):
    monkeypatch.setattr(stream.Parser, "__call__", None)
    assert all(isinstance(r.response_ids, np.ndarray) for r in RolloutStream(folder).take(81))


@pytest.mark.parametrize("seed", [None, 5])
def test_each_pass_has_every_rollout_once(folder, seed):
    read = RolloutStream(folder, shuffle_seed=seed)
    passes = [numbers(read.take(81)) for _ in range(3)]
    assert all(sorted(one) == list(range(81)) for one in passes)
    assert len({tuple(one) for one in passes}) == (1 if seed is None else 3)


def test_groups_stay_whole_when_shuffled(folder):
    ids = [r.group_id for r in RolloutStream(folder, shuffle_seed=5).take(81)]
    changes = sum(a != b for a, b in zip(ids, ids[1:]))
    assert changes == len(set(ids)) - 1
    assert ids != sorted(ids)


@pytest.mark.parametrize("seed", [None, 5])
def test_a_reader_killed_anywhere_goes_on_with_the_next_rollout(folder, seed):
    whole = numbers(RolloutStream(folder, shuffle_seed=seed).take(200))
    read, got = RolloutStream(folder, shuffle_seed=seed), []
    rng = random.Random(3)
    while len(got) < 200:
        got += numbers(read.take(min(rng.randint(1, 11), 200 - len(got))))
        state = json.loads(json.dumps(read.state_dict()))
        read.take(rng.randint(0, 20))  # lost in the kill
        read = RolloutStream(folder, shuffle_seed=seed)
        read.load_state_dict(state)
    assert got == whole


def test_a_state_from_before_the_first_rollout_starts_anew(folder):
    state = RolloutStream(folder).state_dict()
    read = RolloutStream(folder)
    read.take(5)
    read.load_state_dict(state)
    assert numbers(read.take(2)) == [0, 1]


def test_other_files_or_another_order_than_the_states_are_refused(folder):
    state = RolloutStream(folder, shuffle_seed=1).state_dict()
    with pytest.raises(RolloutError, match="shuffle_seed 1, this reader has 2"):
        RolloutStream(folder, shuffle_seed=2).load_state_dict(state)
    write_rollouts(folder / "d.jsonl", [rollout(0, 0)])
    with pytest.raises(RolloutError, match="names or sizes changed"):
        RolloutStream(folder, shuffle_seed=1).load_state_dict(state)


def test_a_mini_batch_that_cuts_a_group_is_refused(tmp_path):
    write_rollouts(tmp_path / "r.jsonl", [rollout(i, i // 4) for i in range(12)])
    assert len(RolloutStream(tmp_path).take(8, whole_groups=True)) == 8
    with pytest.raises(RolloutError, match="6 rollouts ends within the group 1"):
        RolloutStream(tmp_path).take(6, whole_groups=True)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    "change, checks, message",
    [
        ({"rollout_log_probs": [0.5]}, {}, "a log-prob is at most 0, got 0.5"),
        ({"response_ids": [100]}, {"vocab_size": 100}, "token id 100 at position 0"),
        ({"response_ids": []}, {}, "is empty"),
        ({"rollout_log_probs": [-1.0, -1.0]}, {}, "has 2 entries, but 'response_ids' has 1"),
        ({"reward": float("inf")}, {}, "must be finite"),
        ({"reward": None}, {}, "neither it nor 'advantage' is given"),
        ({"rollout_log_probs": None}, {}, "is not given here, but is in"),
        ({"teacher_top_ids": [[100]]}, {"vocab_size": 100}, "token id 100 at response position 0"),
        ({"teacher_top_ids": [[-1]]}, {}, "got int -1 at response position 0"),
        ({"teacher_top_ids": [[1, 2]]}, {}, "has 2 entries per token, but"),
        ({"teacher_top_ids": [[1], [2]]}, {}, "has 2 entries, but 'response_ids' has 1"),
        ({"teacher_top_ids": None}, {}, "is not given here, but is in"),
        ({"teacher_top_log_probs": [[0.5]]}, {}, "a log-prob is at most 0, got 0.5"),
        ({"teacher_top_log_probs": [[float("nan")]]}, {}, "a log-prob is at most 0, got nan"),
        ({"prompt_ids": [3] * 9}, {"max_tokens": 9}, "more than the sequence length, 9"),
    ],
)
def test_a_bad_row_is_named_by_file_row_and_field(tmp_path, kind, change, checks, message):
    good = {"prompt_ids": [1], "response_ids": [2], "reward": 1.0, "rollout_log_probs": [-1.0]}
    good |= {"teacher_top_ids": [[3]], "teacher_top_log_probs": [[-1.0]]}
    rows = [dict(good) for _ in range(9)]
    rows[6] |= change
    path = tmp_path / f"r.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    unit = "line" if kind == "jsonl" else "row"
    with pytest.raises(RolloutError) as error:
        RolloutStream(path, **checks).take(9)
    assert f"r.{kind}, {unit} 7, field" in str(error.value) and message in str(error.value)


def test_a_teachers_probabilities_above_1_are_seen_in_columns(tmp_path):
    row = {"prompt_ids": [1], "response_ids": [2], "reward": 1.0}
    row |= {"teacher_top_ids": [[3, 4]], "teacher_top_log_probs": [[-1.0, -1.0]]}
    bad = row | {"teacher_top_log_probs": [[-0.1, -0.1]]}
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(map(json.dumps, [row, bad])))
    with pytest.raises(RolloutError, match=r"r\.jsonl, line 2, .* log-probs of 1.81 in all"):
        RolloutStream(path).take(2)


def test_masked_non_finite_log_probs_aliases_and_metadata_are_read_as_ever(tmp_path):
    row = {
        "prompt_token_ids": [1],
        "response_ids": [2, 3],
        "loss_mask": [1, 0],
        "reward": 1,
        "rollout_logprobs": [-1.0, float("nan")],
        "metadata": {"finished": True},
    }
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(row) + "\n\n" + json.dumps(row) + "\n")
    assert RolloutStream(path).take(2) == list(RolloutFiles(path))


def test_empty_files_are_passed_over_and_an_empty_folder_is_refused(tmp_path):
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(RolloutError, match="has no rollouts"):
        RolloutStream(tmp_path).take(1)
    write_rollouts(tmp_path / "b.jsonl", [rollout(0, 0)])
    assert numbers(RolloutStream(tmp_path).take(2)) == [0, 0]


GOOD_LINE = b'{"prompt_ids": [1], "response_ids": [2], "reward": 1.0}'
ODD = {
    "an id that is a float": '{"prompt_ids": [1], "response_ids": [2.0], "reward": 1.0}',
    "an id that is a bool": '{"prompt_ids": [1], "response_ids": [true], "reward": 1.0}',
    "an id that is too large": '{"prompt_ids": [1], "response_ids": [4294967296], "reward": 1.0}',
    "an id below 0": '{"prompt_ids": [-1], "response_ids": [2], "reward": 1.0}',
    "ids in a list too many": '{"prompt_ids": [[1]], "response_ids": [2], "reward": 1.0}',
    "ids in an object": '{"prompt_ids": [{"a": 1}], "response_ids": [2], "reward": 1.0}',
    "log-probs in a list too many": (
        '{"prompt_ids": [1], "response_ids": [2], "reward": 1, "rollout_log_probs": [[-1.0]]}'
    ),
    "a bracket in text": '{"prompt_ids": [1], "response_ids": [2], "reward": 1, "group_id": "["}',
    "ids as text": '{"prompt_ids": "1", "response_ids": [2], "reward": 1.0}',
    "a mask of numbers": '{"prompt_ids": [1], "response_ids": [2], "loss_mask": [1], "reward": 1}',
    "a mask of text": '{"prompt_ids": [1], "response_ids": [2], "loss_mask": ["a"], "reward": 1}',
    "a reward that is a bool": '{"prompt_ids": [1], "response_ids": [2], "reward": true}',
    "a reward that is text": '{"prompt_ids": [1], "response_ids": [2], "reward": "1"}',
    "a huge group": (
        '{"prompt_ids": [1], "response_ids": [2], "reward": 1, "group_id": 10000000000000000000}'
    ),
    "a group that is a number": (
        '{"prompt_ids": [1], "response_ids": [2], "reward": 1, "group_id": 1.5}'
    ),
    "a field twice": '{"prompt_ids": [1], "response_ids": [2], "reward": 1.0, "reward": 2.0}',
    "an alias and its field": '{"prompt_ids": [1], "response_ids": [2], "reward": 1, "score": 1}',
    "an unknown field": '{"prompt_ids": [1], "response_ids": [2], "reward": 1.0, "x": 1}',
    "a list": "[1, 2]",
    "a number": "7",
    "two objects": '{"prompt_ids": [1], "response_ids": [2], "reward": 1}{}',
    "not JSON": '{"prompt_ids": [1], "response_ids": [2], "reward": 1.0',
    "not UTF-8": b'{"prompt_ids": [1], "response_ids": [2], "reward": 1.0, "group_id": "\xff"}',
    "nulls": '{"prompt_ids": [1], "response_ids": [2], "reward": 1, "group_id": null}',
    "other fields": '{"prompt_ids": [1], "response_ids": [2], "advantage": 1.0, "reward": 1.0}',
    "an advantage per token": '{"prompt_ids": [1], "response_ids": [2], "advantage": [1.0]}',
    "integers for log-probs": (
        '{"prompt_ids": [1], "response_ids": [2], "reward": 1, "rollout_log_probs": [-1]}'
    ),
    "a teacher": (
        '{"prompt_ids": [1], "response_ids": [2, 3], "reward": 1, '
        '"teacher_top_ids": [[5, 6], [7, 8]], "teacher_top_log_probs": [[-1, -2.5], [0.0, -9]]}'
    ),
    "a teacher's id that is a float": (
        '{"prompt_ids": [1], "response_ids": [2], "reward": 1, "teacher_top_ids": [[1.0]]}'
    ),
    "a teacher without lists": (
        '{"prompt_ids": [1], "response_ids": [2], "reward": 1, "teacher_top_ids": [1]}'
    ),
    "a teacher with a list too many": (
        '{"prompt_ids": [1], "response_ids": [2], "reward": 1, "teacher_top_ids": [[[1]]]}'
    ),
    "a teacher's empty list": (
        '{"prompt_ids": [1], "response_ids": [2], "reward": 1, "teacher_top_ids": [[]]}'
    ),
    "a teacher's lists of different lengths": (
        '{"prompt_ids": [1], "response_ids": [2, 3], "reward": 1, "teacher_top_ids": [[1], [2, 3]]}'
    ),
    "text groups": '{"prompt_ids": [1], "response_ids": [2], "reward": 1, "group_id": "a"}',
}


def read_all(reader, path, num):
    """Returns the rollouts as records, or the error's text."""
    try:
        return [record_from_rollout(rollout) for rollout in reader(path, num)]
    except RolloutError as error:
        return str(error).splitlines()[-1]


@pytest.mark.parametrize("line", ODD.values(), ids=ODD.keys())
def test_odd_json_is_read_or_refused_as_row_by_row(tmp_path, line):
    line = line if isinstance(line, bytes) else line.encode()
    for name, lines in {"alone": [line], "twice": [line, line], "after": [GOOD_LINE, line]}.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        row_by_row = read_all(lambda path, _: list(RolloutFiles(path)), path, len(lines))
        assert read_all(lambda path, n: RolloutStream(path).take(n), path, len(lines)) == row_by_row


def test_without_simdjson_json_lines_are_read_row_by_row(folder, monkeypatch):
    with_it = RolloutStream(folder).take(81)
    monkeypatch.setitem(sys.modules, "simdjson", None)
    without = RolloutStream(folder).take(81)
    assert [record_from_rollout(r) for r in without] == [record_from_rollout(r) for r in with_it]
