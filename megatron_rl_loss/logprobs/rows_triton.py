"""The same two row functions as Triton kernels, for CUDA (and for Triton's interpreter in tests).

Forward reads each logit once (running maximum, sum and entropy sum in registers); backward reads
and writes each once, in place if asked. Both move 2 + 4 bytes per bf16 logit and nothing else, so
memory bandwidth is their floor. Few rows are split over several programs to fill the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import rows_eager

FORWARD_BLOCK = 8192  # 16 kB of bf16 per step and program: hides latency at 8 warps
BACKWARD_BLOCK = 4096
MIN_PROGRAMS = 528  # four per multiprocessor of an H100 / H200
LOWEST = tl.constexpr(-1e30)
NEG_INF = tl.constexpr(float("-inf"))


def usable(z: Tensor) -> bool:
    """Whether the kernels can take logits like `z`."""
    interpreted = triton.knobs.runtime.interpret
    return z.dtype != torch.float64 and (z.is_cuda or interpreted) and z.stride(1) == 1


def row_statistics(
    z: Tensor, inv_temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `rows_eager.row_statistics`."""
    num_rows, num_columns = z.shape
    if not num_rows or not num_columns or not usable(z):
        return rows_eager.row_statistics(z, inv_temperature, with_entropy)
    blocks = triton.cdiv(num_columns, FORWARD_BLOCK)
    splits = max(1, min(blocks, MIN_PROGRAMS // num_rows))
    width = triton.cdiv(blocks, splits) * FORWARD_BLOCK
    splits = triton.cdiv(num_columns, width)
    stats = torch.empty(3, splits, num_rows, dtype=torch.float32, device=z.device)
    _statistics_kernel[(num_rows, splits)](
        z, stats, z.stride(0), num_rows, num_columns, width, inv_temperature,
        WITH_ENTROPY=with_entropy, BLOCK=FORWARD_BLOCK, num_warps=8,
    )  # fmt: skip
    m, s, t = join_statistics(*stats, inv_temperature) if splits > 1 else stats[:, 0]
    return m, s, t if with_entropy else None


def join_statistics(
    m: Tensor, s: Tensor, t: Tensor, inv_temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Joins statistics [P, N] of P parts of a row into [N]."""
    top = m.amax(0)
    shift = ((m - top.masked_fill(top == -torch.inf, 0)) * inv_temperature).clamp(
        min=rows_eager.LOWEST
    )
    scale = shift.exp()
    return top, (s * scale).sum(0), ((t + s * shift) * scale).sum(0)


def write_row_gradients(
    z: Tensor,
    out: Tensor,
    m: Tensor,
    log_s: Tensor,
    inv_temperature: float,
    a: Tensor,
    b: Tensor | None,
) -> None:
    """See `rows_eager.write_row_gradients`."""
    num_rows, num_columns = z.shape
    if not num_rows or not num_columns or not usable(z):
        rows_eager.write_row_gradients(z, out, m, log_s, inv_temperature, a, b)
        return
    grid = (num_rows, triton.cdiv(num_columns, BACKWARD_BLOCK))
    _gradients_kernel[grid](
        z, out, m, log_s, a, a if b is None else b, z.stride(0), out.stride(0), num_columns,
        inv_temperature, WITH_ENTROPY=b is not None, BLOCK=BACKWARD_BLOCK, num_warps=8,
    )  # fmt: skip


@triton.jit
def _statistics_kernel(
    z_ptr, stats_ptr, row_stride, num_rows, num_columns, width, inv_temperature,
    WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    z_ptr += row * row_stride
    end = tl.minimum((part + 1) * width, num_columns)
    m = tl.full([], NEG_INF, tl.float32)
    s = tl.full([], 0.0, tl.float32)
    t = tl.full([], 0.0, tl.float32)
    for start in range(part * width, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(z_ptr + columns, mask=columns < end, other=NEG_INF).to(tl.float32)
        new_m = tl.maximum(m, tl.max(x, 0))
        origin = tl.where(new_m == NEG_INF, 0.0, new_m)
        shift = tl.maximum((m - origin) * inv_temperature, LOWEST)
        scale = tl.exp(shift)
        d = (x - origin) * inv_temperature
        e = tl.exp(d)
        if WITH_ENTROPY:
            # a select, not a maximum: NaN must stay NaN
            t = (t + s * shift) * scale + tl.sum(e * tl.where(d < LOWEST, LOWEST, d), 0)
        s = s * scale + tl.sum(e, 0)
        m = new_m
    stats_ptr += part * num_rows + row
    plane = tl.num_programs(1) * num_rows
    tl.store(stats_ptr, m)
    tl.store(stats_ptr + plane, s)
    tl.store(stats_ptr + 2 * plane, t)


@triton.jit
def _gradients_kernel(
    z_ptr, out_ptr, m_ptr, log_s_ptr, a_ptr, b_ptr, z_stride, out_stride, num_columns,
    inv_temperature, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    a = tl.load(a_ptr + row)
    idle = a == 0.0
    if WITH_ENTROPY:
        b = tl.load(b_ptr + row)
        idle = idle & (b == 0.0)
    out_ptr += row * out_stride + columns
    if idle:
        tl.store(out_ptr, tl.zeros([BLOCK], out_ptr.dtype.element_ty), mask=inside)
    else:
        x = tl.load(z_ptr + row * z_stride + columns, mask=inside, other=0.0).to(tl.float32)
        log_p = (x - tl.load(m_ptr + row)) * inv_temperature - tl.load(log_s_ptr + row)
        g = tl.exp(log_p) * a
        if WITH_ENTROPY:
            g = tl.exp(log_p) * (a + b * tl.where(log_p < LOWEST, LOWEST, log_p))
        tl.store(out_ptr, g.to(out_ptr.dtype.element_ty), mask=inside)
