"""Rewards for sampled responses: a user's function, or a `reasoning-gym` task."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import ConfigError, InputError
from .prompts import Prompt, chat, indices_of_step
from .rollout import Rollout

# reward_fn(prompt_text, response_text, example) -> float
RewardFn = Callable[[str, str, Mapping[str, Any]], float]


def load_reward_fn(path: str) -> RewardFn:
    """Imports a reward function.

    Args:
        path: "my_pkg.my_mod:reward_fn", a function of the prompt's text, the response's text
            (without special tokens) and the example (a dict: the line of the prompt file, or the
            entry of the task), which returns a finite number.

    Raises:
        ConfigError: it cannot be imported or is not callable.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"a reward function is given as 'my_pkg.my_mod:reward_fn', got {path!r}.")
    try:
        fn = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot import the reward function {path!r}: {error}.") from error
    if not callable(fn):
        raise ConfigError(f"{path!r} is a {type(fn).__name__}, not a function.")
    return fn


def score_rollouts(
    rollouts: Sequence[Rollout], prompts: Sequence[Prompt], reward_fn: RewardFn
) -> list[Rollout]:
    """Returns the rollouts with rewards.

    Args:
        rollouts: with `metadata["response_text"]`, as `Sampler.generate` returns them.
        prompts: theirs, found by `group_id`.

    Raises:
        InputError: the function raised, or returned something else than a finite number.
    """
    by_group: dict[Any, Prompt] = {prompt.group_id: prompt for prompt in prompts}
    scored = []
    for rollout in rollouts:
        response = rollout.metadata["response_text"]
        reward = _checked_reward(reward_fn, by_group[rollout.group_id], response)
        scored.append(dataclasses.replace(rollout, reward=reward))
    return scored


def _checked_reward(reward_fn: RewardFn, prompt: Prompt, response: str) -> float:
    where = f"for the prompt {prompt.text[:60]!r} and the response {response[:60]!r}"
    name = getattr(reward_fn, "__qualname__", repr(reward_fn))
    try:
        reward = reward_fn(prompt.text, response, prompt.example)
    except Exception as error:
        raise InputError(
            f"the reward function {name} raised {type(error).__name__}: {error} {where}."
        ) from error
    try:
        number = float(reward)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(
            f"the reward function {name} returned {reward!r} {where}; it must return a finite "
            "number."
        )
    return number


class ReasoningGymTask:
    """Prompts and rewards of a task of the `reasoning-gym` package.

    Reward: 1 if the task scores the answer above `correct_score`, else 0 (or the score itself when
    `correct_score` is None); plus `format_reward` if the whole answer matches `format_pattern`.

    Args:
        name: of the task, such as "basic_arithmetic".
        seed, size: of its data set; after `size` prompts the same ones come again.
        params: the task's own parameters.
        correct_score, format_pattern, format_reward: see above; reward units.
        system_prompt, suffix: put before the question (as a system message) and after it.

    Raises:
        ConfigError: the package is missing, or the task or a parameter is unknown or wrong.
    """

    def __init__(
        self,
        name: str,
        *,
        seed: int,
        size: int = 1000,
        params: Mapping[str, Any] | None = None,
        correct_score: float | None = 0.9,
        format_pattern: str | None = None,
        format_reward: float = 0.2,
        system_prompt: str | None = None,
        suffix: str = "",
    ) -> None:
        self._data = _create_data(name, {**(params or {}), "seed": seed, "size": size})
        self._correct_score = correct_score
        self._format = None if format_pattern is None else _compiled(format_pattern)
        self._format_reward = format_reward
        self._system_prompt, self._suffix = system_prompt, suffix

    def prompts(self, step: int, num_prompts: int) -> list[Prompt]:
        """Returns the prompts of step `step`, counted from 0."""
        prompts = []
        for index, i in enumerate(indices_of_step(step, num_prompts, len(self._data), None)):
            entry = self._data[i]
            messages = chat(entry["question"], self._system_prompt, self._suffix)
            prompts.append(Prompt(messages, index, step * num_prompts + index, entry))
        return prompts

    def score(self, answer: str, entry: Mapping[str, Any]) -> float:
        """Returns the task's own score of an answer to `entry`, 0 to 1."""
        return float(self._data.score_answer(answer.strip(), entry))

    def reward(self, prompt_text: str, response_text: str, example: Mapping[str, Any]) -> float:
        """Returns the reward; a `RewardFn`."""
        reward = self.score(response_text, example)
        if self._correct_score is not None:
            reward = float(reward > self._correct_score)
        if self._format is not None and self._format.fullmatch(response_text.strip()):
            reward += self._format_reward
        return reward


def _create_data(name: str, params: Mapping[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError("this task needs reasoning-gym: pip install reasoning-gym.") from error
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ConfigError(
            f"reasoning-gym has no task {name!r}; {hint}It has {len(DATASETS)}: see "
            "reasoning_gym.factory.DATASETS."
        )
    known = [f.name for f in dataclasses.fields(DATASETS[name][1])]
    unknown = [param for param in params if param not in known]
    if unknown:
        raise ConfigError(
            f"the task {name!r} has no parameter {', '.join(map(repr, unknown))}; it has: "
            f"{', '.join(known)}."
        )
    try:
        return reasoning_gym.create_dataset(name, **params)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"the task {name!r} refuses its parameters: {error}") from error


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"format_pattern {pattern!r} is no regular expression: {error}."
        ) from error
