"""A plain float64 Llama over Hugging Face weight names; slow, and shares no code with anything."""

from __future__ import annotations

import torch
from torch import Tensor

SIZES = dict(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=61)
EPS, THETA = 1e-5, 10_000.0

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": SIZES["hidden"],
    "num_hidden_layers": SIZES["layers"],
    "num_attention_heads": SIZES["heads"],
    "num_key_value_heads": SIZES["kv_heads"],
    "head_dim": SIZES["head_dim"],
    "intermediate_size": SIZES["ffn"],
    "vocab_size": SIZES["vocab"],
    "max_position_embeddings": 128,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}


def hf_config(*, layers: int = SIZES["layers"], tied: bool = False) -> dict:
    return HF_CONFIG | {"num_hidden_layers": layers, "tie_word_embeddings": tied}


def random_weights(
    seed: int = 0, *, layers: int = SIZES["layers"], tied: bool = False
) -> dict[str, Tensor]:
    """Returns fp32 weights; norms are away from 1 so that nothing cancels."""
    generator = torch.Generator().manual_seed(seed)
    s = SIZES

    def normal(*shape: int, scale: float = 0.2) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    weights = {
        "model.embed_tokens.weight": normal(s["vocab"], s["hidden"], scale=0.5),
        "model.norm.weight": 1 + normal(s["hidden"]),
    }
    if not tied:
        weights["lm_head.weight"] = normal(s["vocab"], s["hidden"])
    q, kv = s["heads"] * s["head_dim"], s["kv_heads"] * s["head_dim"]
    for i in range(layers):
        p = f"model.layers.{i}."
        weights |= {
            p + "input_layernorm.weight": 1 + normal(s["hidden"]),
            p + "post_attention_layernorm.weight": 1 + normal(s["hidden"]),
            p + "self_attn.q_proj.weight": normal(q, s["hidden"]),
            p + "self_attn.k_proj.weight": normal(kv, s["hidden"]),
            p + "self_attn.v_proj.weight": normal(kv, s["hidden"]),
            p + "self_attn.o_proj.weight": normal(s["hidden"], q),
            p + "mlp.gate_proj.weight": normal(s["ffn"], s["hidden"]),
            p + "mlp.up_proj.weight": normal(s["ffn"], s["hidden"]),
            p + "mlp.down_proj.weight": normal(s["hidden"], s["ffn"]),
        }
    return weights


def logits(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Returns [S, vocab] for one row of tokens [S]."""
    x = weights["model.embed_tokens.weight"][tokens]
    layers = sum(name.endswith("input_layernorm.weight") for name in weights)
    for i in range(layers):
        w = {n.split(f"layers.{i}.")[1]: v for n, v in weights.items() if f"layers.{i}." in n}
        x = x + _attention(w, _norm(x, w["input_layernorm.weight"]))
        y = _norm(x, w["post_attention_layernorm.weight"])
        gate = y @ w["mlp.gate_proj.weight"].T
        up = y @ w["mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w["mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return _norm(x, weights["model.norm.weight"]) @ head.T


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def _attention(w: dict[str, Tensor], x: Tensor) -> Tensor:
    length, d = len(x), SIZES["head_dim"]
    q = _rotate((x @ w["self_attn.q_proj.weight"].T).view(length, -1, d))
    k = _rotate((x @ w["self_attn.k_proj.weight"].T).view(length, -1, d))
    v = (x @ w["self_attn.v_proj.weight"].T).view(length, -1, d)
    heads = []
    for h in range(SIZES["heads"]):
        g = h * SIZES["kv_heads"] // SIZES["heads"]
        scores = q[:, h] @ k[:, g].T / d**0.5
        future = torch.ones(length, length).triu(1).bool()
        heads.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[:, g])
    return torch.cat(heads, dim=-1) @ w["self_attn.o_proj.weight"].T


def _rotate(x: Tensor) -> Tensor:
    length, _, d = x.shape
    frequencies = THETA ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
