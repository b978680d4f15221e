"""Plants known mistakes in a copy of the package and checks that a test fails for each.

    python scripts/plant_mistakes.py              # all of them, about 20 minutes on 2 cores
    python scripts/plant_mistakes.py factor mask  # those whose name contains a word

The tests are run on the copy; this checkout is not touched. Exit status 1 if a mistake survives.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mistakes import MISTAKES, Mistake

ROOT = Path(__file__).resolve().parent.parent


def survives(mistake: Mistake) -> bool:
    """Returns True if the tests pass in spite of the mistake."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("megatron_rl_loss", "tests", "configs", "scripts", "docs"):
            if (ROOT / name).exists():
                shutil.copytree(
                    ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__")
                )
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / "megatron_rl_loss" / mistake.file
        text = path.read_text()
        if mistake.right not in text:
            raise SystemExit(
                f"{mistake.name}: {mistake.file} has no {mistake.right!r}; update this script"
            )
        path.write_text(text.replace(mistake.right, mistake.wrong))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            mistake.tests,
        ]
        result = subprocess.run(command, cwd=copy, capture_output=True, text=True)
        if result.returncode not in (0, 1):  # 1: a test failed; others: the tests did not run
            raise SystemExit(
                f"{mistake.name}: pytest ended with {result.returncode}:\n{result.stdout}"
            )
        return result.returncode == 0


def main(words: list[str]) -> int:
    chosen = [m for m in MISTAKES if not words or any(word in m.name for word in words)]
    alive = []
    for mistake in chosen:
        lived = survives(mistake)
        print(f"{'SURVIVED' if lived else 'caught'}  {mistake.name}", flush=True)
        if lived:
            alive.append(mistake.name)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} mistakes caught")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
