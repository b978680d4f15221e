"""Reward functions for runs that go wrong."""

from __future__ import annotations

import os
import sys
from typing import Any


def rank_1_dies(prompt: str, response: str, example: Any) -> float:
    if os.environ.get("RANK") == "1":
        raise RuntimeError("the reward broke here")
    return 1.0


def rank_1_aborts(prompt: str, response: str, example: Any) -> float:
    """Dies as after an error in C code: no other rank hears of it."""
    if os.environ.get("RANK") == "1":
        print("error: the reward broke here", file=sys.stderr, flush=True)
        os.abort()
    return 1.0
