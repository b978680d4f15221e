"""The table of planted mistakes still fits the code and the tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from mistakes import MISTAKES  # noqa: E402


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_the_place_of_a_planted_mistake_is_there(mistake):
    text = (ROOT / "megatron_rl_loss" / mistake.file).read_text()
    assert mistake.right in text and mistake.right != mistake.wrong
    file, _, test = mistake.tests.partition("::")
    assert f"def {test.partition('[')[0]}" in (ROOT / file).read_text()
