"""The console command `megatron-rl-loss`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

COMMANDS = ("train", "audit", "plot", "plan")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `megatron-rl-loss COMMAND ...` and returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = words[0] if words else ""
    if command == "train":
        from .train import main as train

        return train(words[1:])
    if command == "audit":
        from .audit import main as audit

        return audit(words[1:])
    if command == "plot":
        from .plot import main as plot

        return plot(words[1:])
    if command == "plan":
        from .plan import main as plan

        return plan(words[1:])
    print(f"usage: megatron-rl-loss {{{','.join(COMMANDS)}}} ...", file=sys.stderr)
    return 0 if command in ("-h", "--help") else 2


if __name__ == "__main__":
    raise SystemExit(main())
