"""Prompts of a step: a function of seed and step, the same on every rank and after a resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import RolloutError
from .rollout import field_error
from .sources import JsonLines

Messages = tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class Prompt:
    """A prompt as a chat, with what its reward needs.

    Attributes:
        messages: chat messages, {"role": ..., "content": ...}; the last is the user's.
        index: place among the prompts of the step, from 0, over all ranks.
        group_id: number of the prompt in the whole run; its responses share it.
        example: the record the prompt was made of, for the reward function.
    """

    messages: Messages
    index: int = 0
    group_id: int = 0
    example: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The last message."""
        return self.messages[-1]["content"]


class PromptSource(Protocol):
    """Where prompts come from."""

    def prompts(self, step: int, num_prompts: int) -> list[Prompt]: ...


class PromptFile:
    """Prompts from a JSON-lines file: one object per line with `prompt` or `messages`.

    `prompt` is the user's text; `messages` is a list of {"role", "content"} whose last is the
    user's. Other fields go to the reward function. Passes over the file follow each other without
    a gap, each in a new order.

    Args:
        path: the file.
        seed: of the order; None: the file's order.
        system_prompt: put before prompts that have no system message.
        suffix: put after the last message.

    Raises:
        RolloutError: names file, line and field.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        seed: int | None = None,
        system_prompt: str | None = None,
        suffix: str = "",
    ) -> None:
        self._seed = seed
        self._examples = _read_examples(Path(path))
        self._chats = [
            chat(example.get("messages", example.get("prompt")), system_prompt, suffix)
            for example in self._examples
        ]

    def __len__(self) -> int:
        return len(self._examples)

    def prompts(self, step: int, num_prompts: int) -> list[Prompt]:
        """Returns the prompts of step `step`, counted from 0."""
        first = step * num_prompts
        return [
            Prompt(self._chats[i], index, first + index, self._examples[i])
            for index, i in enumerate(indices_of_step(step, num_prompts, len(self), self._seed))
        ]


def indices_of_step(step: int, num: int, size: int, seed: int | None) -> list[int]:
    """Returns `num` indices below `size`: the step's part of endless passes over all of them.

    >>> indices_of_step(1, 3, 4, None)
    [3, 0, 1]
    """
    indices, orders = [], {}
    for position in range(step * num, (step + 1) * num):
        epoch, place = divmod(position, size)
        if epoch not in orders:
            shuffled = None if seed is None else np.random.default_rng([seed, epoch])
            orders[epoch] = range(size) if shuffled is None else shuffled.permutation(size)
        indices.append(int(orders[epoch][place]))
    return indices


def chat(
    prompt: str | Sequence[Mapping[str, str]], system_prompt: str | None, suffix: str
) -> Messages:
    """Returns the messages of a chat: system prompt, the given messages, the suffix at the end."""
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    last = {**given[-1], "content": given[-1]["content"] + suffix}
    has_system = given[0]["role"] == "system" and len(given) > 1
    system = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
    return tuple([*([] if has_system else system), *given[:-1], last])


def _read_examples(path: Path) -> list[Mapping[str, Any]]:
    if not path.is_file():
        raise RolloutError(f"{path}: no such prompt file.")
    examples = []
    for row in JsonLines(path).rows():
        try:
            examples.append(_checked_example(row.record))
        except RolloutError as error:
            raise RolloutError(f"{path}, line {row.number}, {error}") from None
    if not examples:
        raise RolloutError(f"{path}: has no prompts.")
    return examples


def _checked_example(record: Any) -> Mapping[str, Any]:
    if isinstance(record, RolloutError):
        raise record
    if not isinstance(record, Mapping):
        raise RolloutError(
            f"expected an object with 'prompt' or 'messages', got {str(record)[:40]}."
        )
    if ("prompt" in record) == ("messages" in record):
        which = "has both" if "prompt" in record else "has neither"
        raise RolloutError(f"a prompt needs 'prompt' or 'messages'; this one {which}.")
    if "prompt" in record and not (isinstance(record["prompt"], str) and record["prompt"]):
        raise field_error("prompt", f"expected text, got {record['prompt']!r}.")
    if "messages" in record:
        _check_messages(record["messages"])
    return record


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise field_error("messages", f"expected a list of messages, got {str(messages)[:40]}.")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(name), str) for name in ("role", "content")
        ):
            raise field_error("messages", f"message {i} needs 'role' and 'content' as text.")
    if messages[-1]["role"] != "user":
        raise field_error(
            "messages",
            f"the last message must be the user's, got role {messages[-1]['role']!r}: the model's "
            "reply is what is sampled.",
        )
