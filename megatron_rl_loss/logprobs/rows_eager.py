"""Row statistics and row gradients of a softmax in plain PyTorch, a few rows at a time.

Needs no compiler, runs on every device, and is the oracle of the other two backends. All three
offer the same two functions; `m`, `s`, `t` and the coefficients are fp32 [N].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CPU_CHUNK_ELEMENTS = 1 << 21  # two fp32 buffers of 8 MB: few enough calls, cache-sized per thread
GPU_CHUNK_ELEMENTS = 1 << 26
LOWEST = -1e30  # stands for -inf in products with a probability that is 0, where -inf gives NaN


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for every training dtype; float64 stays, for numerical checks of gradients."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_statistics(
    z: Tensor, inv_temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the statistics of each row that the normaliser and the entropy are made of.

    Formula: m = max z; d = (z - m) / T; s = sum exp(d); t = sum exp(d) * d, without 0 * inf.
    A row of no column, or of nothing but -inf, gives m = -inf, s = t = 0.

    Args:
        z: [N, V] logits, last stride 1, any float dtype, never written.
        inv_temperature: 1 / T.
        with_entropy: whether t is wanted.

    Returns:
        m, s, t (or None), each [N]; m in units of z.
    """
    num_rows, dtype = z.shape[0], compute_dtype(z.dtype)
    m, s, t = (torch.empty(num_rows, dtype=dtype, device=z.device) for _ in range(3))
    if z.shape[1] == 0:
        return m.fill_(-torch.inf), s.zero_(), t.zero_() if with_entropy else None
    d_buffer, e_buffer = _buffers(z, 2 if with_entropy else 1)
    for rows in _chunks(z):
        d = _copy_into(d_buffer, z[rows])
        torch.amax(d, 1, out=m[rows])
        d.sub_(_finite_or_zero(m[rows])[:, None])
        if inv_temperature != 1:
            d.mul_(inv_temperature)
        if with_entropy:
            e = torch.exp(d, out=e_buffer[: d.numel()].view_as(d))
            torch.sum(e, 1, out=s[rows])
            torch.sum(d.clamp_(min=LOWEST).mul_(e), 1, out=t[rows])
        else:
            torch.sum(d.exp_(), 1, out=s[rows])
    return m, s, t if with_entropy else None


def write_row_gradients(
    z: Tensor,
    out: Tensor,
    m: Tensor,
    log_s: Tensor,
    inv_temperature: float,
    a: Tensor,
    b: Tensor | None,
) -> None:
    """Writes out = p * (a + b * log p), exact 0 in rows whose coefficients are 0.

    Formula: log p = (z - m) / T - log_s; p = exp(log p), with p * log p = 0 where p = 0.

    Args:
        z: [N, V] logits.
        out: [N, V], written; may be `z` itself.
        m, log_s: [N] statistics over the whole vocabulary.
        a, b: [N] coefficients; b None means 0.
    """
    if z.shape[1] == 0:
        return
    active = (a != 0) if b is None else (a != 0) | (b != 0)
    d_buffer, p_buffer = _buffers(z, 1 if b is None else 2)
    for rows in _chunks(z):
        if z.device.type == "cpu" and not active[rows].any():
            out[rows].zero_()
            continue
        logp = _copy_into(d_buffer, z[rows]).sub_(m[rows][:, None])
        if inv_temperature != 1:
            logp.mul_(inv_temperature)
        logp.sub_(log_s[rows][:, None])
        if b is None:
            g = logp.exp_().mul_(a[rows][:, None])
        else:
            p = torch.exp(logp, out=p_buffer[: logp.numel()].view_as(logp))
            g = logp.clamp_(min=LOWEST).mul_(b[rows][:, None]).add_(a[rows][:, None]).mul_(p)
        _store(out[rows], g, active[rows])


def _store(out: Tensor, g: Tensor, active: Tensor) -> None:
    if g.device.type != "cpu" or not active.all():
        g = g.masked_fill_(~active[:, None], 0)
    out.copy_(g)


def _chunks(z: Tensor) -> Iterator[slice]:
    step = _rows_per_chunk(z)
    return (slice(i, min(i + step, z.shape[0])) for i in range(0, z.shape[0], step))


def _rows_per_chunk(z: Tensor) -> int:
    elements = CPU_CHUNK_ELEMENTS if z.device.type == "cpu" else GPU_CHUNK_ELEMENTS
    return max(1, elements // max(1, z.shape[1]))


def _buffers(z: Tensor, count: int) -> list[Tensor | None]:
    """Two entries: `count` chunk-sized buffers in the compute dtype, then None."""
    size = min(_rows_per_chunk(z), z.shape[0]) * z.shape[1]
    dtype = compute_dtype(z.dtype)
    buffers = [torch.empty(size, dtype=dtype, device=z.device) for _ in range(count)]
    return buffers + [None] * (2 - count)


def _copy_into(buffer: Tensor, rows: Tensor) -> Tensor:
    return buffer[: rows.numel()].view(rows.shape).copy_(rows)


def _finite_or_zero(m: Tensor) -> Tensor:
    """m with -inf replaced by 0, so that -inf - m is -inf and not NaN."""
    return m.masked_fill(m == -torch.inf, 0)
