"""Reward functions for runs that go wrong."""

from __future__ import annotations

import os
from typing import Any


def rank_1_dies(prompt: str, response: str, example: Any) -> float:
    if os.environ.get("RANK") == "1":
        raise RuntimeError("the reward broke here")
    return 1.0
