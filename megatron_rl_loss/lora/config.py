"""The settings of LoRA adapters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError

TARGET_SETS = {
    "attention": ("linear_qkv", "linear_proj"),
    "all-linear": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
}
INITS = ("kaiming", "xavier")


@dataclass(frozen=True)
class LoRAConfig:
    """Which linear layers get an adapter, y = W x + scale * B (A x), and how it starts.

    Attributes:
        rank: r, rows of A and columns of B.
        alpha: scale is alpha / rank; one scale for all adapters, whatever `expert_rank` is, as
            servers read one only.
        targets: "attention" (fused QKV and output projection), "all-linear" (these, and the MLPs
            and experts), or Megatron's names of layers (`linear_qkv`) and patterns of global
            names (`decoder.layers.0.*`). Router, embeddings and output layer stay frozen.
        expert_rank: rank of the experts' adapters; None: `rank`.
        exclude: names and patterns, as in `targets`, of layers that get none.
        init: of A: "kaiming", uniform in +-1 / sqrt(fan_in) as PEFT's default, or "xavier". B
            starts at 0, so that a fresh adapter changes nothing.
        seed: of A. The same values come out for any parallel sizes.
        use_rslora: scale is alpha / sqrt(rank).
        dropout: must be 0: the log-probs of a step must not change between two forward passes.

    Raises:
        ConfigError: a value is out of range; the message names all of them.
    """

    rank: int
    alpha: float
    targets: str | Sequence[str] = "attention"
    expert_rank: int | None = None
    exclude: Sequence[str] = ()
    init: str = "kaiming"
    seed: int = 0
    use_rslora: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        problems = [text for wrong, text in self._checks() if wrong]
        if problems:
            raise ConfigError("\n".join(problems))

    def _checks(self) -> list[tuple[bool, str]]:
        named = isinstance(self.targets, str)
        return [
            (
                not _is_rank(self.rank),
                f"lora.rank must be an integer of at least 1: {self.rank!r}.",
            ),
            (
                self.expert_rank is not None and not _is_rank(self.expert_rank),
                f"lora.expert_rank must be an integer of at least 1 or null: {self.expert_rank!r}.",
            ),
            (
                not (math.isfinite(self.alpha) and self.alpha > 0),
                f"lora.alpha must be positive and finite: {self.alpha!r}.",
            ),
            (
                named and self.targets not in TARGET_SETS,
                f"lora.targets must be one of {', '.join(TARGET_SETS)}, or a list of layer names: "
                f"{self.targets!r}.",
            ),
            (not named and not list(self.targets), "lora.targets is empty; name a layer."),
            (
                isinstance(self.exclude, str),
                f"lora.exclude must be a list of layer names: {self.exclude!r}.",
            ),
            (
                self.init not in INITS,
                f"lora.init must be one of {', '.join(INITS)}: {self.init!r}.",
            ),
            (
                self.dropout != 0,
                f"lora.dropout must be 0, got {self.dropout!r}: with dropout the log-probs of a "
                "step would change between two forward passes.",
            ),
        ]

    @property
    def patterns(self) -> tuple[str, ...]:
        """The names and patterns that `targets` stands for."""
        if isinstance(self.targets, str):
            return TARGET_SETS[self.targets]
        return tuple(self.targets)

    @property
    def scale(self) -> float:
        """What B (A x) is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
