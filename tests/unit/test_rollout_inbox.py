"""The folder between an engine and the trainer: what is taken, in which order, and how often."""

from __future__ import annotations

import json
import threading
import time

import pytest

from megatron_rl_loss.errors import RolloutError
from megatron_rl_loss.rollouts.files import write_rollouts
from megatron_rl_loss.rollouts.inbox import Inbox, version_of, wait_for_room
from megatron_rl_loss.rollouts.rollout import Rollout


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rollouts").mkdir()
    return tmp_path / "rollouts"


def write(folder, name, first, num, group_size=1):
    """Rewards are the rollouts' numbers."""
    ids = range(first, first + num)
    rows = [Rollout([1], [2], reward=i, group_id=i // group_size) for i in ids]
    write_rollouts(folder / name, rows)


def open_inbox(folder, **changes):
    settings = {"max_staleness": 2, "timeout": 0.1, "poll": 0.01}
    return Inbox(folder, folder.parent / "journal.jsonl", **{**settings, **changes})


def numbers(rollouts):
    return [int(r.reward) for r in rollouts]


def test_each_row_goes_to_one_step_oldest_version_first(folder):
    write(folder, "v1-b.parquet", 20, 3)
    write(folder, "v0-a.jsonl", 0, 5)
    write(folder, "v0-b.jsonl", 10, 2)
    box = open_inbox(folder)
    steps = [numbers(box.rollouts(step, 4)) for step in range(2)]
    assert steps == [[0, 1, 2, 3], [4, 10, 11, 20]]
    assert sorted(p.name for p in folder.iterdir()) == ["used", "v1-b.parquet"]


def test_a_step_that_is_run_again_gets_the_same_rows_and_none_is_given_twice(folder):
    write(folder, "v0-a.jsonl", 0, 6)
    box = open_inbox(folder)
    first = [numbers(box.rollouts(step, 2)) for step in range(2)]
    with (folder.parent / "journal.jsonl").open("a") as file:
        file.write('{"step": 2, "ro')  # killed while writing
    write(folder, "v0-0.jsonl", 50, 2)  # comes before v0-a by name
    again = open_inbox(folder, max_staleness=3)
    assert [numbers(again.rollouts(step, 2)) for step in range(2)] == first
    assert [numbers(again.rollouts(step, 2)) for step in (2, 3)] == [[50, 51], [4, 5]]
    assert len((folder.parent / "journal.jsonl").read_text().splitlines()) == 4


def test_stale_files_are_put_aside_unused(folder):
    write(folder, "v1-a.jsonl", 0, 4)
    write(folder, "v2-a.jsonl", 10, 4)
    assert numbers(open_inbox(folder).rollouts(4, 2)) == [10, 11]
    assert (folder / "used" / "v1-a.jsonl").exists()


def test_unfinished_files_are_left_alone(folder):
    write(folder, "v0-a.jsonl", 0, 2)
    (folder / ".v0-b.jsonl.tmp").write_text("{half")
    (folder / "v0-c.jsonl").write_text("{half")
    box = open_inbox(folder, done_markers=True)
    with pytest.raises(RolloutError, match="0 are there"):
        box.rollouts(0, 2)
    (folder / "v0-a.jsonl.done").touch()
    assert numbers(open_inbox(folder, done_markers=True).rollouts(0, 2)) == [0, 1]
    assert not (folder / "v0-a.jsonl.done").exists()


def test_it_waits_for_the_engine_and_says_what_is_missing(folder):
    box = open_inbox(folder, timeout=10)
    threading.Timer(0.2, write, [folder, "v0-a.jsonl", 0, 2]).start()
    assert box.rollouts(0, 2, patience=0.01) is None
    assert numbers(box.rollouts(0, 2)) == [0, 1]
    with pytest.raises(RolloutError, match=r"waited 0.1 s for the 2 rollouts of step 1; 0 are"):
        open_inbox(folder).rollouts(1, 2)


def test_the_engine_waits_until_the_trainer_has_taken_enough(folder):
    for i in range(2):
        write(folder, f"v0-{i}.jsonl", 10 * i, 2)
    with pytest.raises(RolloutError, match="took no file for 0.05 s while 2 or more were waiting"):
        wait_for_room(folder, 2, timeout=0.05, poll=0.01)
    box = open_inbox(folder)
    threading.Timer(0.2, box.rollouts, [0, 2]).start()
    start = time.monotonic()
    wait_for_room(folder, 2, timeout=10, poll=0.01)
    assert time.monotonic() - start > 0.1


def test_bad_rows_wrong_names_and_removed_files_are_named(folder):
    write(folder, "v0-a.jsonl", 0, 3)
    with (folder / "v0-a.jsonl").open("a") as file:
        file.write(json.dumps({"prompt_ids": [1], "response_ids": []}) + "\n")
    with pytest.raises(RolloutError, match=r"v0-a.jsonl, line 4, field 'response_ids'"):
        open_inbox(folder).rollouts(0, 2)
    write(folder, "v0-a.jsonl", 0, 3)
    open_inbox(folder).rollouts(0, 3)
    (folder / "used" / "v0-a.jsonl").unlink()
    with pytest.raises(RolloutError, match="the journal names this file, but it was removed"):
        open_inbox(folder).rollouts(0, 3)
    with pytest.raises(RolloutError, match="must start with the version"):
        version_of("engine0.jsonl")


def test_a_step_that_ends_within_a_group_is_refused(folder):
    write(folder, "v0-a.jsonl", 0, 8, group_size=4)
    with pytest.raises(RolloutError, match="row 6 is the last one of a step, but its group 1"):
        open_inbox(folder, whole_groups=True).rollouts(0, 6)
    assert len(open_inbox(folder, whole_groups=True).rollouts(0, 4)) == 4


def test_a_journal_that_forgot_steps_is_refused(folder):
    write(folder, "v0-a.jsonl", 0, 2)
    box = open_inbox(folder)
    box.rollouts(0, 2)
    state = box.state_dict()
    open_inbox(folder).load_state_dict(state)
    (folder.parent / "journal.jsonl").unlink()
    with pytest.raises(RolloutError, match="has 0 steps, but 1 were done"):
        open_inbox(folder).load_state_dict(state)
