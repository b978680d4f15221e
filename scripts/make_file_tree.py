"""Writes the README's file tree from the first line of each module's docstring.

python scripts/make_file_tree.py            writes README.md
python scripts/make_file_tree.py --check    fails if README.md is out of date
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- tree -->", "<!-- /tree -->"
FOLDERS = {
    "ops": "tensor maths, torch only",
    "losses": "un-reduced losses, and the objective that weights and sums them",
    "logprobs": "log-probs and entropy from logits or hidden states",
    "parallel": "who communicates what",
    "mcore": "everything that touches Megatron-Core",
    "lora": "low-rank adapters, and what keeps, swaps and saves them",
    "torch_backend": "the same objective behind torch DDP and FSDP2",
    "rollouts": "rollout files, prompts, rewards, the embedded sampler",
    "config": "settings of the main job",
}
OTHERS = """configs/           base.yaml (every setting), demo.yaml, loss/ (a recipe per file)
scripts/           demo.sh, test.sh, pretrain_rl.py, slurm/, toy_loop.py, benchmarks, generators
tests/             reference/ (slow float64), unit/, dist/ (gloo ranks), mcore/ (real Megatron)
docs/              losses.md and more
"""


def first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    line = docstring.split("\n\n")[0].replace("\n", " ").rstrip(".")
    return line if len(line) <= 90 else line.split(":")[0].split(", ")[0].split(". ")[0]


def tree() -> str:
    package = ROOT / "megatron_rl_loss"
    lines = ["megatron_rl_loss/"]
    lines += [entry(path, 2) for path in sorted(package.glob("*.py"))]
    for name, text in FOLDERS.items():
        if (package / name).is_dir():
            lines.append(f"  {name + '/':<24}{text}")
            lines += [
                entry(path, 4)
                for path in sorted((package / name).glob("*.py"))
                if path.name != "__init__.py"
            ]
    return "\n".join([*lines, OTHERS.rstrip()])


def entry(path: Path, indent: int) -> str:
    name = " " * indent + path.name
    return f"{name:<25} {first_line(path)}"


def updated(readme: str) -> str:
    before, rest = readme.split(START)
    _, after = rest.split(END)
    return f"{before}{START}\n```\n{tree()}\n```\n{END}{after}"


def main() -> int:
    path = ROOT / "README.md"
    text = path.read_text()
    new = updated(text)
    if "--check" in sys.argv:
        if new != text:
            print("README.md: the file tree is out of date; run scripts/make_file_tree.py")
        return int(new != text)
    path.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
