"""Stand-ins for Transformer Engine's layers, by name and interface: it needs a GPU to import."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.mcore.test_lora import on_one_rank

HIDDEN, FFN, EXPERTS = 6, 5, 3


class TELayerNormColumnParallelLinear(torch.nn.Module):
    """A norm and a product; returns (output, bias)."""

    normalization, eps, zero_centered_gamma = "RMSNorm", 1e-5, False

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.randn(8, HIDDEN, dtype=torch.float64))
        self.layer_norm_weight = torch.nn.Parameter(torch.rand(HIDDEN, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        normed = torch.nn.functional.rms_norm(x, (HIDDEN,), self.layer_norm_weight, self.eps)
        return normed @ self.weight.t(), None


class TEColumnParallelGroupedLinear(torch.nn.Module):
    """One weight per expert; takes tokens sorted by expert, and how many each has."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        for i in range(EXPERTS):
            weight = torch.randn(2 * FFN, HIDDEN, dtype=torch.float64)
            self.register_parameter(f"weight{i}", torch.nn.Parameter(weight))

    def forward(self, x: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, None]:
        parts = x.split(m_splits)
        outputs = [part @ getattr(self, f"weight{i}").t() for i, part in enumerate(parts)]
        return torch.cat(outputs), None


def stand_in() -> Any:
    config = SimpleNamespace(
        gated_linear_unit=True,
        num_moe_experts=EXPERTS,
        num_query_groups=2,
        sequence_parallel=False,
        moe_shared_expert_overlap=False,
        recompute_granularity=None,
    )
    layer = torch.nn.Module()
    layer.layer_number = 3
    layer.self_attention, layer.mlp = torch.nn.Module(), torch.nn.Module()
    layer.self_attention.linear_qkv = TELayerNormColumnParallelLinear(config)
    layer.mlp.experts = torch.nn.Module()
    layer.mlp.experts.linear_fc1 = TEColumnParallelGroupedLinear(config)
    model = torch.nn.Module()
    model.config = config
    model.decoder = torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList([layer])
    return model


def _run() -> dict[str, Any]:
    from megatron_rl_loss.lora import LoRAConfig, adapters, apply_lora, merged
    from megatron_rl_loss.mcore.ranks import start_ranks

    start_ranks()
    torch.manual_seed(0)
    model = stand_in()
    layer = model.decoder.layers[0]
    qkv, fc1 = layer.self_attention.linear_qkv, layer.mlp.experts.linear_fc1
    names = [n for n, _ in model.named_parameters()]
    apply_lora([model], LoRAConfig(rank=2, alpha=4.0, targets=["linear_qkv", "linear_fc1"]))
    handles = list(adapters([model]))
    for handle in handles:
        handle.b.data.normal_()
    x, tokens = (torch.randn(4, HIDDEN, dtype=torch.float64) for _ in range(2))
    outputs = [qkv(x)[0], fc1(tokens, [3, 0, 1])[0]]
    sum(output.sum() for output in outputs).backward()
    weights = {n: p.to(torch.float64) for n, p in merged([model])[0].named_parameters()}
    plain = stand_in()
    assert sorted(weights) == sorted(names)
    for name, parameter in plain.named_parameters():
        parameter.data.copy_(weights[name])
    layer = plain.decoder.layers[0]
    expected = [layer.self_attention.linear_qkv(x)[0]]
    expected.append(layer.mlp.experts.linear_fc1(tokens, [3, 0, 1])[0])
    entries = fc1.adapter.sharded_state_dict("mlp.experts.linear_fc1.adapter.")
    return {
        "names": [h.name for h in handles],
        "kinds": [h.kind for h in handles],
        "errors": [float((a - b).abs().max()) for a, b in zip(outputs, expected)],
        "idle": [float(h.b.grad.norm()) for h in handles],
        "entries": {k: (e.key, e.global_shape, e.global_offset[0]) for k, e in entries.items()},
    }


def test_layers_with_a_fused_norm_and_grouped_experts_are_adapted():
    seen = on_one_rank(_run)
    experts = [f"decoder.layers.2.mlp.experts.local_experts.{i}.linear_fc1" for i in range(3)]
    assert seen["names"] == ["decoder.layers.2.self_attention.linear_qkv", *experts]
    assert seen["kinds"] == ["qkv", "gate_up", "gate_up", "gate_up"]
    assert max(seen["errors"]) < 1e-12
    assert seen["idle"][2] == 0.0 and all(seen["idle"][i] > 0 for i in (0, 1, 3))
    key = "mlp.experts.linear_fc1.adapter.lora_b"
    inner = "mlp.experts.linear_fc1.adapter.experts.2.lora_b"
    assert seen["entries"][inner] == (key, (3, 2 * FFN, 2), 2)
