"""A Megatron loop of somebody else's, with this plugin's three lines; runs on a CPU in seconds.

Run `python scripts/toy_loop.py`, or on two data ranks, with the same numbers,
`torchrun --nproc-per-node 2 scripts/toy_loop.py`.
"""

from __future__ import annotations

import torch

from megatron_rl_loss import (
    MicroBatchIterator,
    build_optimizer,
    make_forward_step,
    reduce_metrics,
    start_ranks,
    with_loss_weights,
    wrap_with_ddp,
)

ROWS, SEQ_LENGTH, VOCAB, MICRO_BATCH_SIZE = 8, 16, 64, 2


def toy_model() -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0,
        attention_dropout=0.0, use_cpu_initialization=True, gradient_accumulation_fusion=False,
        masked_softmax_fusion=False, bias_activation_fusion=False, bias_dropout_fusion=False,
    )  # fmt: skip
    return GPTModel(config, get_gpt_layer_local_spec(), VOCAB, SEQ_LENGTH)


def rollouts() -> list[dict[str, torch.Tensor]]:
    """Returns made-up responses from position 6 on; entry t of a tensor belongs to token t + 1."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(ROWS):
        mask = torch.arange(SEQ_LENGTH) >= 5
        mask[-1] = False
        rows.append(
            {
                "tokens": torch.randint(VOCAB, (SEQ_LENGTH,), generator=generator),
                "loss_mask": mask,
                "advantages": torch.randn(1, generator=generator).expand(SEQ_LENGTH),
            }
        )
    return rows


def main() -> None:
    start_ranks()  # torch.distributed and Megatron's groups; gloo where there is no GPU
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    dp_group = parallel_state.get_data_parallel_group()
    model = wrap_with_ddp([toy_model()])
    optimizer = build_optimizer(model, lr=1e-3)

    mine = rollouts()[dp_group.rank() :: dp_group.size()]
    parts = [mine[i : i + MICRO_BATCH_SIZE] for i in range(0, len(mine), MICRO_BATCH_SIZE)]
    micro_batches = [{k: torch.stack([r[k] for r in part]) for k in part[0]} for part in parts]

    micro_batches = with_loss_weights(micro_batches, "token_mean", dp_group=dp_group)
    forward_step = make_forward_step("ppo_clip", on_policy=True)
    for step in range(5):
        model[0].zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=MicroBatchIterator(micro_batches),
            model=model,
            num_microbatches=len(micro_batches),
            seq_length=SEQ_LENGTH,
            micro_batch_size=MICRO_BATCH_SIZE,
            forward_only=False,
        )
        metrics = reduce_metrics(losses, dp_cp_group=dp_group)
        _, grad_norm, _ = optimizer.step()
        if dp_group.rank() == 0:
            print(f"step {step}: loss {metrics['loss']:.6f}, grad-norm {grad_norm:.6f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
