"""Which of the three row backends runs: Triton on CUDA, inductor on CPU, eager anywhere."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from types import ModuleType

from torch import Tensor

from ..errors import InputError
from . import rows_compiled, rows_eager

BACKENDS = ("eager", "compiled", "triton")


def choose_rows(z: Tensor, backend: str | None = None) -> ModuleType:
    """Returns the module whose `row_statistics` and `write_row_gradients` handle logits like `z`.

    Args:
        z: logits; only device, dtype and size count.
        backend: "eager", "compiled" or "triton" to insist; None chooses: Triton on CUDA where it
            is installed, compiled on CPU from 2^25 logits on, else eager.

    Raises:
        InputError: unknown name, or Triton asked for and not installed.
    """
    if backend not in (None, *BACKENDS):
        raise InputError(f"backend must be one of {', '.join(BACKENDS)} or None, got {backend!r}.")
    if backend == "triton" or (backend is None and z.is_cuda):
        rows = _triton_rows()
        if rows is not None:
            return rows
        if backend == "triton":
            raise InputError("backend='triton' needs the package triton; install it or pass None.")
    large = z.numel() >= rows_compiled.MIN_ELEMENTS
    if backend == "compiled" or (backend is None and large and rows_compiled.usable(z)):
        return rows_compiled
    return rows_eager


@lru_cache(maxsize=1)
def _triton_rows() -> ModuleType | None:
    try:
        return import_module(".rows_triton", __package__)
    except ImportError:
        return None
