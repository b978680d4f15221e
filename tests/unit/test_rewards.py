from __future__ import annotations

import math
import re

import pytest

from megatron_rl_loss.errors import ConfigError, InputError
from megatron_rl_loss.rollouts.prompts import Prompt
from megatron_rl_loss.rollouts.rewards import ReasoningGymTask, load_reward_fn, score_rollouts
from megatron_rl_loss.rollouts.rollout import Rollout


def length_reward(prompt_text, response_text, example):
    return len(response_text) + example["bonus"]


NOT_A_FUNCTION = 3


# ---- a user's function


def test_reward_functions_are_imported_by_path():
    fn = load_reward_fn(f"{__name__}:length_reward")
    assert fn("p", "abc", {"bonus": 0.5}) == 3.5


@pytest.mark.parametrize(
    "path, message",
    [
        ("my_reward", "is given as 'my_pkg.my_mod:reward_fn', got 'my_reward'"),
        (":fn", "is given as"),
        ("no_such_module_xyz:fn", "cannot import .* No module named 'no_such_module_xyz'"),
        (f"{__name__}:no_such_fn", "cannot import .* no attribute 'no_such_fn'"),
        (f"{__name__}:NOT_A_FUNCTION", "is a int, not a function"),
    ],
)
def test_reward_functions_that_cannot_be_imported_are_named(path, message):
    with pytest.raises(ConfigError, match=message):
        load_reward_fn(path)


def rollouts_and_prompts():
    prompts = [
        Prompt(({"role": "user", "content": f"question {g}"},), i, g, {"bonus": float(g)})
        for i, g in enumerate((10, 20))
    ]
    rollouts = [
        Rollout([1], [2], group_id=g, metadata={"response_text": text})
        for g, text in [(10, "a"), (10, "bb"), (20, "ccc")]
    ]
    return rollouts, prompts


def test_each_rollout_is_scored_with_its_prompts_example():
    scored = score_rollouts(*rollouts_and_prompts(), length_reward)
    assert [r.reward for r in scored] == [11.0, 12.0, 23.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, None, "x", [1.0]])
def test_rewards_that_are_not_finite_numbers_are_refused(bad):
    def constant(prompt_text, response_text, example):
        return bad

    with pytest.raises(InputError, match=r"constant returned .* 'question 10' .* finite number"):
        score_rollouts(*rollouts_and_prompts(), constant)


def test_an_error_in_the_reward_function_names_prompt_and_response():
    def broken(prompt_text, response_text, example):
        return example["no such key"]

    with pytest.raises(InputError, match=r"broken raised KeyError: .* 'question 10' .* 'a'"):
        score_rollouts(*rollouts_and_prompts(), broken)


# ---- reasoning-gym

ADDITION = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 1,
    "operators": ["+"],
    "allow_parentheses": False,
    "allow_negation": False,
}


def addition(**settings):
    pytest.importorskip("reasoning_gym")
    settings = {
        "seed": 42,
        "params": ADDITION,
        "suffix": " Reply with only the number.",
        **settings,
    }
    return ReasoningGymTask("basic_arithmetic", **settings)


def test_task_prompts_are_questions_with_suffix_and_system_prompt():
    prompts = addition(system_prompt="Be brief.").prompts(0, 3)
    for prompt in prompts:
        assert re.fullmatch(r"Calculate \d+ \+ \d+\. Reply with only the number\.", prompt.text)
        assert [m["role"] for m in prompt.messages] == ["system", "user"]


def test_task_prompts_depend_on_seed_and_step_alone():
    a, b = addition(), addition()
    steps = [[p.text for p in a.prompts(step, 8)] for step in range(3)]
    assert [p.text for p in b.prompts(2, 8)] == steps[2]
    assert len(set(map(tuple, steps))) == 3
    assert [p.text for p in addition(seed=43_000).prompts(0, 8)] != steps[0]


def test_after_size_prompts_the_same_come_again_with_other_group_ids():
    first, second = (addition(size=4).prompts(step, 4) for step in (0, 1))
    assert [p.text for p in first] == [p.text for p in second]
    assert {p.group_id for p in first}.isdisjoint(p.group_id for p in second)


def test_rewards_are_1_for_right_answers_plus_the_format_reward():
    task = addition(format_pattern=r"-?\d+", format_reward=0.2)
    for prompt in task.prompts(0, 10):
        a, b = map(int, re.findall(r"\d+", prompt.text))
        cases = {
            f"{a + b}": 1.2,
            f" {a + b}\n": 1.2,
            f"{a + b + 1}": 0.2,
            f"The answer is {a + b}.": 0.0,
            "": 0.0,
            "-": 0.0,
        }
        for response, want in cases.items():
            assert task.reward(prompt.text, response, prompt.example) == pytest.approx(want)


def test_without_a_threshold_the_reward_is_the_tasks_score():
    task = addition(correct_score=None)
    (prompt,) = task.prompts(0, 1)
    answer = prompt.example["answer"]
    got = task.reward(prompt.text, f"It is {answer}", prompt.example)
    assert got == pytest.approx(len(answer) / (len(answer) + 6))


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("basic_aritmetic", {}, "no task 'basic_aritmetic'; did you mean 'basic_arithmetic'"),
        (
            "basic_arithmetic",
            {"params": {"min_term": 2}},
            "no parameter 'min_term'; it has: .*min_te",
        ),
        ("basic_arithmetic", {"params": {"min_terms": -1}}, "refuses its parameters: min_terms"),
        ("basic_arithmetic", {"format_pattern": "("}, "'\\(' is no regular expression"),
    ],
)
def test_wrong_tasks_and_parameters_are_named(name, settings, message):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=message):
        ReasoningGymTask(name, seed=0, **settings)
