"""How much the loss function (all after the logits) adds to a step of the demo model.

    python scripts/bench_loss_overhead.py [--rounds 5] [--rows 8] [--seq-length 48]

Interleaves training steps with our loss (log-probs, entropy, dual-clip PPO, metrics) and steps
whose loss is one multiply and sum over the logits, on SmolLM2-135M's architecture with random
weights through Megatron's schedule, and prints the ratio of the medians. Also times the import.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import warnings

import torch

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


def main() -> None:
    options = argument_parser().parse_args()
    warnings.simplefilter("ignore")
    print(f"import beyond torch: {import_seconds():.3f} s (goal: under 0.3 s)")
    from megatron_rl_loss import make_forward_step

    chunks, micro_batch = model_and_batch(options.rows, options.seq_length)
    ours = make_forward_step("dual_clip", on_policy=True)
    seconds: dict[str, list[float]] = {"with our loss": [], "with a plain sum": []}
    for round_ in range(options.rounds + 1):  # the first warms up, compilation included
        for name, step in (("with our loss", ours), ("with a plain sum", plain_step)):
            taken = timed(step, chunks, micro_batch)
            if round_:
                seconds[name].append(taken)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(f"{name:<17} median {medians[name]:.3f} s, {min(values):.3f} .. {max(values):.3f}")
    ratio = medians["with our loss"] / medians["with a plain sum"]
    print(f"the loss adds {100 * (ratio - 1):.1f} % to a step (goal: under 5 %)")


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=48)
    return parser


def import_seconds() -> float:
    code = (
        "import torch, time; t = time.perf_counter(); import megatron_rl_loss as m;"
        "m.Objective, m.token_weights, m.vocab_parallel_log_probs; print(time.perf_counter() - t)"
    )
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(3)]
    return statistics.median(float(run.stdout) for run in runs)


def model_and_batch(rows: int, seq_length: int) -> tuple[list, dict]:
    from megatron_rl_loss import start_ranks, with_loss_weights, wrap_with_ddp
    from megatron_rl_loss.mcore.model import build_gpt_model, transformer_config
    from megatron_rl_loss.mcore.model_spec import model_spec_from_hf

    start_ranks()
    spec = model_spec_from_hf(SMOLLM2)
    chunks = wrap_with_ddp(build_gpt_model(spec, transformer_config(spec)))
    mask = torch.zeros(rows, seq_length, dtype=torch.bool)
    mask[:, seq_length * 3 // 4 : -1] = True
    batch = {
        "tokens": torch.randint(spec.vocab_size, (rows, seq_length)),
        "loss_mask": mask,
        "advantages": torch.randn(rows),
    }
    return chunks, with_loss_weights([batch], "token_mean")[0]


def plain_step(data_iterator, model):
    """A forward step whose loss reads the logits once and whose gradient is one constant."""
    batch = next(data_iterator)
    tokens = batch["tokens"]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    logits = model(tokens, positions, None)
    return logits, lambda output: ((output * 1e-6).sum(), {})


def timed(step, chunks, micro_batch) -> float:
    from megatron_rl_loss.mcore.train_step import run_forward_backward

    chunks[0].zero_grad_buffer()
    start = time.perf_counter()
    run_forward_backward(step, chunks, [micro_batch])
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
