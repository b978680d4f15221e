"""The same two row functions compiled by inductor for CPU: one loop over a row, nothing in between.

Arithmetic is done in base 2: `exp2` is the faster instruction sequence, and inductor inlines it
where it would store `exp` to a buffer as long as a row. The two scale factors are folded into
vectors, so it costs nothing. If compiling fails, the eager rows take over, with one warning.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import rows_eager
from .rows_eager import LOWEST

LOG2E, LN2 = math.log2(math.e), math.log(2)
MIN_ELEMENTS = 1 << 25  # below, compiling (tens of seconds, once) costs more than it saves
_broken: list[str] = []  # why compiling does not work here, once known


def usable(z: Tensor) -> bool:
    """Whether these rows can take logits like `z`; float64 is left to the eager rows."""
    return not _broken and z.device.type == "cpu" and z.dtype != torch.float64 and z.shape[0] > 1


def row_statistics(
    z: Tensor, inv_temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `rows_eager.row_statistics`."""
    if usable(z) and z.shape[1] > 1:
        run = _statistics_entropy if with_entropy else _statistics
        try:
            m, s, *t = _compiled(run)(z, inv_temperature * LOG2E)
            return m, s, t[0] if t else None
        except Exception as error:
            _give_up(error)
    return rows_eager.row_statistics(z, inv_temperature, with_entropy)


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
    if usable(z) and z.shape[1] > 1:
        inplace = out.data_ptr() == z.data_ptr()
        run = _GRADIENTS[inplace, b is not None]
        tensors = (z,) if inplace else (z, out)
        vectors = (m, log_s * LOG2E, a) if b is None else (m, log_s * LOG2E, a, b * LN2)
        try:
            return _compiled(run)(*tensors, *vectors, inv_temperature * LOG2E)
        except Exception as error:
            _give_up(error)
    rows_eager.write_row_gradients(z, out, m, log_s, inv_temperature, a, b)


def _give_up(error: Exception) -> None:
    _broken.append(repr(error))
    warnings.warn(
        f"log-probs run uncompiled (slower, same numbers): torch.compile failed with {error!r}. "
        "Install a C++ compiler, or pass backend='eager' to hide this."
    )


@cache
def _compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    # fullgraph: past the recompile limit raise (and go eager), never run the lines below uncompiled
    return torch.compile(run, dynamic=True, fullgraph=True)


def _exponents(z: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    m = z.amax(1)
    return m, (z - torch.where(m == -math.inf, 0.0, m)[:, None]) * scale


def _statistics(z: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    m, d = _exponents(z.float(), scale)
    return m, torch.exp2(d).sum(1)


def _statistics_entropy(z: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    m, d = _exponents(z.float(), scale)
    e = torch.exp2(d)
    return m, e.sum(1), (e * d.clamp(min=LOWEST)).sum(1) * LN2


def _gradients(z: Tensor, m: Tensor, log2_s: Tensor, a: Tensor, scale: float) -> Tensor:
    log2_p = (z.float() - m[:, None]) * scale - log2_s[:, None]
    return torch.where((a != 0)[:, None], torch.exp2(log2_p) * a[:, None], 0.0)


def _gradients_entropy(
    z: Tensor, m: Tensor, log2_s: Tensor, a: Tensor, b: Tensor, scale: float
) -> Tensor:
    log2_p = (z.float() - m[:, None]) * scale - log2_s[:, None]
    g = torch.exp2(log2_p) * (a[:, None] + b[:, None] * log2_p.clamp(min=LOWEST))
    return torch.where(((a != 0) | (b != 0))[:, None], g, 0.0)


def _overwrite(z, m, log2_s, a, scale) -> None:
    z.copy_(_gradients(z, m, log2_s, a, scale))


def _overwrite_entropy(z, m, log2_s, a, b, scale) -> None:
    z.copy_(_gradients_entropy(z, m, log2_s, a, b, scale))


def _write(z, out, m, log2_s, a, scale) -> None:
    out.copy_(_gradients(z, m, log2_s, a, scale))


def _write_entropy(z, out, m, log2_s, a, b, scale) -> None:
    out.copy_(_gradients_entropy(z, m, log2_s, a, b, scale))


_GRADIENTS = {
    (True, False): _overwrite,
    (True, True): _overwrite_entropy,
    (False, False): _write,
    (False, True): _write_entropy,
}
