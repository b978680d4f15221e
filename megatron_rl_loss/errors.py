"""The package's errors: one root, and every caller mistake is also a `ValueError`.

A message says what was expected, what came (names and numbers) and what to do.
"""


class MegatronRLLossError(Exception):
    """Root of every error this package raises on purpose."""


class InputError(MegatronRLLossError, ValueError):
    """Data handed over by the caller is wrong: a shape, a value, a missing tensor."""


class ConfigError(MegatronRLLossError, ValueError):
    """A setting is unknown, has the wrong type or contradicts another one."""


class ContractError(MegatronRLLossError, ValueError):
    """Megatron is set up so that the loss would be scaled wrongly; see README, "The contract"."""


class LayoutError(MegatronRLLossError, ValueError):
    """Parallel sizes, world size and batch sizes do not fit together."""


class RolloutError(InputError):
    """A rollout file is wrong; the message names file, line and field."""


class WeightsError(InputError):
    """A checkpoint and a model do not match; the message names the tensors."""


class CheckpointError(MegatronRLLossError):
    """A checkpoint cannot be written or read, or belongs to another model."""
