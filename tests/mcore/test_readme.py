"""What the README shows works as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.mcore.harness import Layout, build, micro_batches, replace
from tests.spawn import run_ranks

ROOT = Path(__file__).parents[2]
LAYOUT = Layout(micro_batch_size=2)


def plug_in_example() -> str:
    section = (ROOT / "README.md").read_text().split("## Plug it into", 1)[1]
    return re.search(r"```python\n(.*?)```", section, re.S).group(1)


def run_example(layout: Layout) -> dict[str, float]:
    warnings.simplefilter("ignore")
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_rl_loss.mcore.groups import parallel_groups

    chunks, optimizer, _ = build(layout)
    names = {
        "model": chunks,
        "optimizer": optimizer,
        "forward_backward_func": get_forward_backward_func(),
        "micro_batches": micro_batches(layout, parallel_groups().dp.rank()),
        "seq_length": layout.pad_to,
        "micro_batch_size": layout.micro_batch_size,
    }
    exec(plug_in_example(), names)
    return names["metrics"]


def test_the_plug_in_example_gives_the_same_numbers_on_two_data_ranks():
    (alone,) = run_ranks(run_example, 1, LAYOUT)
    together = run_ranks(run_example, 2, replace(LAYOUT, dp=2, micro_batch_size=1))
    assert together[0] == together[1] and set(alone) == set(together[0])
    for name, value in alone.items():
        assert together[0][name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


def test_the_toy_loop_gives_the_same_numbers_on_two_data_ranks():
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    lines = []
    for arguments in ([], two):
        result = subprocess.run(
            [sys.executable, *arguments, "scripts/toy_loop.py"],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert result.returncode == 0, result.stderr[-3000:]
        lines.append([x for x in result.stdout.splitlines() if x.startswith("step")])
    assert len(lines[0]) == 5
    alone, together = ([float(x) for x in re.findall(r"[\d.-]+\d", str(part))] for part in lines)
    assert alone == pytest.approx(together, rel=1e-4, abs=2e-6)
