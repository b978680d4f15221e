"""Matrix products of 16-bit factors, in fp32 where that is the better machine code."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_ROWS = 4096  # what a product of another dtype holds before it is added: it stays in the cache


def product_into(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Writes a @ b to `out`, all of one dtype, and returns it."""
    if _slow_16_bit(a.device.type, a.dtype):
        return out.copy_(a.float() @ b.float())
    return torch.mm(a, b, out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where total may be fp32 and the factors 16-bit."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda and total.dtype == torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        slow = _slow_16_bit(a.device.type, a.dtype) and total.dtype == torch.float32
        b = b.float() if slow else b
        for part, rows in zip(total.split(_ROWS), a.split(_ROWS)):
            if slow:
                part.addmm_(rows.float(), b)
            else:
                part.add_(rows @ b)


@lru_cache(maxsize=8)
def _slow_16_bit(device_type: str, dtype: torch.dtype) -> bool:
    """Whether 16-bit products have no instructions here: fp32 ones are then ten times faster."""
    if device_type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    supported = torch.ops.mkldnn
    name = "_is_mkldnn_bf16_supported" if dtype == torch.bfloat16 else "_is_mkldnn_fp16_supported"
    return not getattr(supported, name)()
