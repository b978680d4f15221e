"""What the main job imports late: imported before the fork."""

import megatron.core.dist_checkpointing  # noqa: F401
import megatron.core.distributed  # noqa: F401
import megatron.core.models.gpt  # noqa: F401
import megatron.core.optimizer  # noqa: F401
import torch.distributed.checkpoint  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

import megatron_rl_loss.between_steps
import megatron_rl_loss.mcore.checkpoint
import megatron_rl_loss.report  # noqa: F401
