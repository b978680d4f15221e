"""The import rule, the public names, and what importing the package costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_rl_loss

ROOT = Path(megatron_rl_loss.__file__).parent
LAYERS = [
    ("errors",),
    ("types", "checks"),
    ("ops",),
    ("metrics",),
    ("losses", "logprobs", "parallel"),
    ("mcore", "rollouts", "config", "torch_backend"),
    ("lora",),
    ("signals", "ppo"),
    ("report", "rollout_source", "trainer", "between_steps"),
    ("watch_source",),
    ("recipe",),
    ("build_rollouts",),
    ("build", "pretrain", "audit_stand_in"),
    ("train", "audit", "plot", "plan"),
    ("cli", "__main__"),
]
LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names}
MODULES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


def top(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path):
    """Yields the absolute name of everything the module imports."""
    package = ["megatron_rl_loss", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_import_only_from_lower_layers(path):
    here = top(path)
    assert here in LAYER_OF, f"{path} belongs to no layer; add it to LAYERS"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "megatron":
            assert here in ("mcore", "lora"), f"{path} imports {name}"
        if parts[0] == "omegaconf":
            assert here == "config", f"{path} imports {name}"
        if parts[0] != "megatron_rl_loss" or len(parts) < 2 or parts[1] == here:
            continue
        if parts[1] in LAYER_OF:
            assert LAYER_OF[parts[1]] < LAYER_OF[here], f"{path} imports {name}"


def test_schedule_scaling_is_in_one_file():
    users = {
        path.name
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "calculate_per_token_loss"
    }
    assert users <= {"guard.py", "scaling.py", "compat.py"}, users


@pytest.mark.parametrize("name", megatron_rl_loss.__all__)
def test_public_names_resolve(name):
    assert getattr(megatron_rl_loss, name) is not None


def test_the_fixed_public_names_are_there():
    fixed = {
        "token_weights", "normalize_advantages", "masked_sum", "schedule_factor",
        "vocab_parallel_log_probs", "make_forward_step", "use_cpu_ranks",
    }  # fmt: skip
    assert fixed <= set(megatron_rl_loss.__all__)
    with pytest.raises(AttributeError):
        megatron_rl_loss.nothing_like_this  # noqa: B018


def test_importing_the_package_loads_no_heavy_module():
    code = (
        "import sys, megatron_rl_loss\n"
        "from megatron_rl_loss import make_forward_step, Objective, token_weights\n"
        "heavy = {'megatron', 'transformers', 'omegaconf', 'matplotlib', 'pyarrow', 'wandb'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
