"""The oldest and the newest Megatron-Core give the same gradients as the pinned one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYOUTS = (
    "test_same_gradient.py::test_gradient_and_metrics_equal_the_reference_for_any_cut",
    "test_layouts.py::test_gradient_metrics_and_step_equal_one_rank",
    "test_context_parallel.py::test_gradient_and_metrics_equal_the_reference_under_context_parallelism",
    "test_moe.py::test_policy_gradient_of_dense_expert_and_router_weights_equals_one_rank",
)
VERSIONS = Path(sys.prefix) / "megatron-versions"  # made by scripts/setup_venv.sh test


@pytest.mark.parametrize("version", ["0.13.1", "0.19.2"])
@pytest.mark.timeout(600)
def test_any_layout_gives_the_reference_gradient(version):
    if not (VERSIONS / version).is_dir():
        pytest.skip(f"megatron-core {version} is not in {VERSIONS}; see scripts/run_versions.sh")
    result = subprocess.run(
        ["bash", "scripts/run_versions.sh", version],
        capture_output=True,
        text=True,
        timeout=560,
        cwd=ROOT,
        env=os.environ
        | {
            "PYTHON": sys.executable,
            "VERSIONS_DIR": str(VERSIONS),
            "TESTS": " ".join(f"tests/mcore/{test}" for test in LAYOUTS),
        },
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert f"== megatron-core {version}" in result.stdout and " passed in " in result.stdout
