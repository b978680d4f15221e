"""The dtype that per-token maths runs in."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """Returns `x` in fp32, or as it is in fp64 (so that gradients can be checked numerically)."""
    return x if x.dtype is torch.float64 else x.float()
