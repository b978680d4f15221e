"""Where the rollouts of a step come from: files, or the model itself.

A source gives every rank the rollouts of the whole step, in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from .errors import InputError
from .parallel.agreement import raise_together
from .rollouts.files import RolloutFiles
from .rollouts.prompts import Prompt, PromptSource
from .rollouts.rewards import RewardFn, score_rollouts
from .rollouts.rollout import Rollout
from .rollouts.sampler import Sampler
from .rollouts.stream import RolloutStream

ExportWeights = Callable[[], Iterable[tuple[str, Tensor]]]


class RolloutSource(Protocol):
    def rollouts(self, step: int) -> list[Rollout]:
        """Returns all rollouts of a step (counted from 0), the same on every rank."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns where it is, small and of plain numbers and text, the same on every rank."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to where `state_dict` was taken."""
        ...


class Position:
    """The position of a source whose rollouts are a function of the step alone: nothing to keep."""

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: the number of steps done is enough."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` returned."""


class FileRollouts(Position):
    """Rollouts read from files, in order or shuffled by seed.

    Args:
        files: opened and checked.
        per_step: rollouts in a step, over all ranks.
        shuffle_seed: None for the files' order.
        whole_groups: refuse to cut a group, for estimators that compare within it.
    """

    def __init__(
        self, files: RolloutFiles, *, per_step: int, shuffle_seed: int | None, whole_groups: bool
    ) -> None:
        self._files = files
        self._per_step = per_step
        self._shuffle_seed = shuffle_seed
        self._whole_groups = whole_groups

    def rollouts(self, step: int) -> list[Rollout]:
        return raise_together(lambda: self._read(step), dist.group.WORLD)

    def _read(self, step: int) -> list[Rollout]:
        return self._files.mini_batch(
            step,
            self._per_step,
            shuffle_seed=self._shuffle_seed,
            whole_groups=self._whole_groups,
        )


class StreamedRollouts:
    """Rollouts read from files that do not fit into memory, each once per pass.

    Every rank reads all files. A first step that is not the one after the saved position's (or the
    start) is reached by reading over the rollouts before it.

    Args:
        stream: at its start.
        per_step: rollouts in a step, over all ranks.
        whole_groups: refuse to end a step within a group.
    """

    def __init__(self, stream: RolloutStream, *, per_step: int, whole_groups: bool) -> None:
        self._stream = stream
        self._per_step = per_step
        self._whole_groups = whole_groups
        self._next = 0

    def rollouts(self, step: int) -> list[Rollout]:
        return raise_together(lambda: self._read(step), dist.group.WORLD)

    def _read(self, step: int) -> list[Rollout]:
        if step < self._next:
            raise InputError(
                f"step {step} was asked for after step {self._next - 1}; a stream only goes on. "
                "Load the position that was saved with the steps done."
            )
        while self._next < step:
            self._take()
        return self._take()

    def _take(self) -> list[Rollout]:
        self._next += 1
        return self._stream.take(self._per_step, whole_groups=self._whole_groups)

    def state_dict(self) -> dict[str, Any]:
        """Returns the step that comes next and the stream's position."""
        return {"step": self._next, "stream": self._stream.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a position.

        Raises:
            RolloutError: the files or the order are others than when the position was saved.
        """
        if not state:  # of a checkpoint without positions
            return
        self._stream.load_state_dict(state["stream"])
        self._next = state["step"]


class SampledRollouts(Position):
    """Rollouts sampled from the live model's weights; the prompts are shared out over all ranks.

    Args:
        sampler: this rank's copy of the model.
        prompts: the same on every rank.
        reward_fn: of (prompt text, response text, example).
        prompts_per_step: over all ranks.
        prompts_per_batch: a rank gets whole batches of so many, as the sampler runs them.
        export_weights: streams the live weights, on every rank.
    """

    def __init__(
        self,
        sampler: Sampler,
        prompts: PromptSource,
        reward_fn: RewardFn,
        *,
        prompts_per_step: int,
        prompts_per_batch: int,
        export_weights: ExportWeights,
    ) -> None:
        self._sampler = sampler
        self._prompts = prompts
        self._reward_fn = reward_fn
        self._prompts_per_step = prompts_per_step
        self._prompts_per_batch = prompts_per_batch
        self._export_weights = export_weights

    def rollouts(self, step: int) -> list[Rollout]:
        """Exports the weights, samples this rank's share and gathers everybody's.

        Communicates: the export's gathers, and one gather of the rollouts over the world.
        """
        self._sampler.update_weights(self._export_weights())
        mine = raise_together(lambda: self._sample_mine(step), dist.group.WORLD)
        everybodys: list[list[tuple[int, Rollout]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everybodys, mine)
        numbered = [pair for part in everybodys for pair in part]
        return [rollout for _, rollout in sorted(numbered, key=lambda pair: pair[0])]

    def _sample_mine(self, step: int) -> list[tuple[int, Rollout]]:
        prompts = [
            p for p in self._prompts.prompts(step, self._prompts_per_step) if self._is_mine(p)
        ]
        rollouts = self._sampler.generate(prompts, step)
        index = {prompt.group_id: prompt.index for prompt in prompts}
        scored = score_rollouts(rollouts, prompts, self._reward_fn)
        return [(index[rollout.group_id], rollout) for rollout in scored]

    def _is_mine(self, prompt: Prompt) -> bool:
        batch = prompt.index // self._prompts_per_batch
        return batch % dist.get_world_size() == dist.get_rank()


class Stopwatch:
    """Seconds since it was made or last read."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def read(self) -> float:
        now = time.perf_counter()
        seconds, self._start = now - self._start, now
        return seconds
