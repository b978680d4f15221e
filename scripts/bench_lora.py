"""What adapters add to the forward and backward pass of a frozen model, on this machine.

    python scripts/bench_lora.py [--rank 32] [--targets attention] [--layers 10] [--rounds 7]

Interleaves passes with adapters and passes of the same model with its adapters disabled, whose
backward goes down to the embedding too, on SmolLM2-135M's architecture with random weights (fewer
layers by default), and prints the ratio of the medians.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
import warnings
from typing import Any

import torch

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
GOAL = 1.35


def main() -> None:
    options = argument_parser().parse_args()
    warnings.simplefilter("ignore")
    model, report = build(options)
    print(report)
    from megatron_rl_loss.lora import disabled

    tokens = torch.randint(0, 49152, (options.rows, options.seq_length))
    modes: dict[str, Any] = {
        "frozen base": lambda: disabled(model),
        "with adapters": contextlib.nullcontext,
    }
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    for round_ in range(options.rounds + 1):  # the first warms up
        for name, mode in modes.items():
            with mode():
                taken = timed(model, tokens)
            if round_:
                seconds[name].append(taken)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(f"{name:<14} median {medians[name]:.3f} s, {min(values):.3f} .. {max(values):.3f}")
    ratio = medians["with adapters"] / medians["frozen base"]
    print(f"ratio {ratio:.3f} (goal at rank 32, attention only: at most {GOAL})")


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--targets", default="attention")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    return parser


def build(options: argparse.Namespace) -> tuple[Any, Any]:
    from megatron_rl_loss.lora import LoRAConfig, apply_lora
    from megatron_rl_loss.mcore.model import build_gpt_model, transformer_config
    from megatron_rl_loss.mcore.model_spec import model_spec_from_hf
    from megatron_rl_loss.mcore.ranks import start_ranks

    start_ranks()
    spec = model_spec_from_hf(SMOLLM2 | {"num_hidden_layers": options.layers})
    chunks = build_gpt_model(spec, transformer_config(spec))
    config = LoRAConfig(rank=options.rank, alpha=32.0, targets=options.targets)
    report = apply_lora(chunks, config)
    chunks[0].embedding.register_forward_hook(lambda m, args, out: out.requires_grad_(True))
    return chunks[0], report


def timed(model: Any, tokens: torch.Tensor) -> float:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    model(tokens, positions, None).mean().backward()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
