"""The memory plan's counts are those of the real model on its ranks."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl_loss.mcore.memory import Adapters, Layout, count_parameters
from megatron_rl_loss.mcore.model_spec import model_spec_from_hf
from tests.mcore import hf_models
from tests.spawn import run_ranks

pytest.importorskip("transformers")

LORA = {"rank": 8, "targets": "all-linear", "expert_rank": 4}
CASES = [
    ("qwen3_moe", hf_models.Layout(ep=2)),
    ("qwen3_moe", hf_models.Layout(tp=2, sequence_parallel=True, etp=2, padded_vocab=256)),
    ("qwen3_moe", hf_models.Layout(pp=2)),
    ("qwen2 tied", hf_models.Layout(tp=2, padded_vocab=256)),
    ("qwen3 tied", hf_models.Layout(pp=2)),
]


def counted(layout: hf_models.Layout, config: Any) -> tuple[int, int]:
    """On a rank: the parameters of the base model and of the adapters."""
    from megatron_rl_loss.lora import LoRAConfig, apply_lora

    chunks, _ = hf_models.start(layout, config)
    try:
        base = sum(p.numel() for chunk in chunks for p in chunk.parameters())
        return base, apply_lora(chunks, LoRAConfig(alpha=8.0, **LORA)).num_trained
    finally:
        hf_models.stop()


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_every_rank_has_the_planned_number_of_parameters(name, layout):
    config = hf_models.hf_config(name).to_dict()
    planned = Layout(2, layout.tp, layout.pp, 1, layout.ep, layout.etp, layout.sequence_parallel)
    spec = model_spec_from_hf(config)
    for rank, actual in enumerate(run_ranks(counted, 2, layout, config)):
        stage = rank if layout.pp == 2 else 0
        found = count_parameters(spec, planned, Adapters(**LORA), stage=stage)
        assert actual == (found.base.total, found.adapters.total)
