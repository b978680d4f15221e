"""First values of A, the same for any parallel sizes."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor


def initial_a(name: str, shape: tuple[int, int], *, init: str, seed: int) -> Tensor:
    """Returns A as a whole, drawn by a generator of its own, seeded by `seed` and `name`.

    Formula: uniform in +-bound; "kaiming": bound = 1 / sqrt(in), which is PEFT's
    kaiming_uniform(a=sqrt(5)); "xavier": bound = sqrt(6 / (r + in)). `in` is the whole layer's.

    Args:
        name: global name of the layer.
        shape: (r, in).

    Returns:
        [r, in] fp32 on the CPU.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    r, fan_in = shape
    bound = 1 / math.sqrt(fan_in) if init == "kaiming" else math.sqrt(6 / (r + fan_in))
    values = torch.rand(r, fan_in, generator=generator, device="cpu", dtype=torch.float32)
    return (2 * values - 1) * bound
