from __future__ import annotations

import json

import pytest

from megatron_rl_loss.errors import RolloutError
from megatron_rl_loss.rollouts.prompts import PromptFile, indices_of_step


def prompt_file(tmp_path, *records, **settings):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return PromptFile(path, **settings)


NUMBERED = [{"prompt": str(i), "answer": i * i} for i in range(10)]


def texts(source, step, num):
    return [prompt.text for prompt in source.prompts(step, num)]


@pytest.mark.parametrize("seed", [None, 5])
def test_prompts_depend_on_seed_and_step_alone_and_all_come_equally_often(tmp_path, seed):
    source = prompt_file(tmp_path, *NUMBERED, seed=seed)
    steps = [texts(source, step, 4) for step in range(5)]
    assert sorted(sum(steps, [])) == sorted([str(i) for i in range(10)] * 2)  # noqa: RUF017
    fresh = prompt_file(tmp_path, *NUMBERED, seed=seed)
    assert [texts(fresh, step, 4) for step in (3, 0)] == [steps[3], steps[0]]


def test_passes_are_shuffled_differently_by_seed_and_epoch():
    orders = [indices_of_step(step, 10, 10, seed) for step, seed in [(0, 1), (1, 1), (0, 2)]]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len(set(map(tuple, orders))) == 3


def test_without_seed_the_order_is_the_files(tmp_path):
    source = prompt_file(tmp_path, *NUMBERED)
    assert texts(source, 0, 3) == ["0", "1", "2"]
    assert texts(source, 3, 3) == ["9", "0", "1"]


def test_more_prompts_than_lines_repeat_them(tmp_path):
    source = prompt_file(tmp_path, *NUMBERED[:2])
    assert texts(source, 0, 5) == ["0", "1", "0", "1", "0"]


def test_group_ids_are_unique_in_the_run_and_indices_in_the_step(tmp_path):
    source = prompt_file(tmp_path, *NUMBERED[:3])
    prompts = [p for step in range(4) for p in source.prompts(step, 4)]
    assert [p.group_id for p in prompts] == list(range(16))
    assert [p.index for p in prompts] == [0, 1, 2, 3] * 4


def test_the_whole_line_goes_to_the_reward_function(tmp_path):
    (prompt,) = prompt_file(tmp_path, NUMBERED[3]).prompts(0, 1)
    assert prompt.example == {"prompt": "3", "answer": 9}


def test_system_prompt_and_suffix_are_put_around_the_prompt(tmp_path):
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    own_system = [{"role": "system", "content": "mine"}, *chat]
    source = prompt_file(
        tmp_path, {"prompt": "x"}, {"messages": chat}, {"messages": own_system},
        system_prompt="sys", suffix=" end",
    )  # fmt: skip
    got = [[m["content"] for m in prompt.messages] for prompt in source.prompts(0, 3)]
    assert got == [["sys", "x end"], ["sys", "a", "b", "c end"], ["mine", "a", "b", "c end"]]
    assert source.prompts(0, 2)[1].example == {"messages": chat}


BAD = [
    ({"text": "x"}, "a prompt needs 'prompt' or 'messages'; this one has neither"),
    ({"prompt": "x", "messages": []}, "this one has both"),
    ({"prompt": ""}, "field 'prompt': expected text"),
    ({"prompt": 3}, "field 'prompt': expected text, got 3"),
    ({"messages": []}, "field 'messages': expected a list of messages"),
    ({"messages": "x"}, "field 'messages': expected a list of messages"),
    ({"messages": [{"role": "user"}]}, "field 'messages': message 0 needs 'role' and 'content'"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "last message must be the user's"),
    ([1], "expected an object"),
]


@pytest.mark.parametrize("record, message", BAD, ids=[m for _, m in BAD])
def test_bad_prompts_are_named_by_file_and_line(tmp_path, record, message):
    with pytest.raises(RolloutError, match=rf"prompts\.jsonl, line 2, .*{message}"):
        prompt_file(tmp_path, NUMBERED[0], record)


def test_missing_and_empty_prompt_files_are_refused(tmp_path):
    with pytest.raises(RolloutError, match="has no prompts"):
        prompt_file(tmp_path)
    with pytest.raises(RolloutError, match="no such prompt file"):
        PromptFile(tmp_path / "nothing.jsonl")
    (tmp_path / "prompts.jsonl").write_text("{")
    with pytest.raises(RolloutError, match="line 1, not valid JSON"):
        PromptFile(tmp_path / "prompts.jsonl")
