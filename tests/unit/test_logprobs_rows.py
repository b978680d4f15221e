"""The compiled and the Triton rows give the eager rows' numbers."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from megatron_rl_loss.errors import InputError
from megatron_rl_loss.logprobs import backends, rows_compiled, rows_eager
from megatron_rl_loss.logprobs.vocab_parallel import vocab_parallel_log_probs
from tests.reference import log_probs as reference

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def check_rows(rows: ModuleType, dtype: torch.dtype, with_entropy: bool, inplace: bool) -> None:
    """Compares `rows` with the eager ones on odd rows: -inf, NaN, +inf, masked, padded."""
    torch.manual_seed(0)
    full = (torch.randn(8, 501) * 3).to(dtype)
    full[2, 5], full[3], full[6, 100] = -math.inf, math.nan, math.inf
    full[5, :130] = -math.inf
    z, width = full[:, :490], 490
    got = rows.row_statistics(z, 0.7, with_entropy)
    want = rows_eager.row_statistics(z, 0.7, with_entropy)
    assert (got[2] is None) == (want[2] is None) == (not with_entropy)
    clean = [0, 1, 2, 4, 5, 7]
    for x, y in zip(got, want, strict=True):
        if x is not None:
            torch.testing.assert_close(x[clean], y[clean], rtol=1e-5, atol=1e-5)
    assert got[1][[3, 6]].isnan().all()
    a = torch.randn(8)
    b = torch.randn(8) if with_entropy else None
    for vector in (a,) if b is None else (a, b):
        vector[[3, 7]] = 0
    vectors = (want[0], want[1].log(), 0.7, a, b)
    out, ref = (
        (full.clone(), torch.zeros_like(full))
        if inplace
        else torch.full((2, 8, 501), 9.0).to(dtype)
    )
    source = out if inplace else full
    rows.write_row_gradients(source[:, :width], out[:, :width], *vectors)
    rows_eager.write_row_gradients(z, ref[:, :width], *vectors)
    torch.testing.assert_close(
        out[clean, :width], ref[clean, :width], rtol=4 * torch.finfo(dtype).eps, atol=1e-6
    )
    assert not out[[3, 7], :width].any() and out[6, 100].isnan()
    beyond = full[:6, width:] if inplace else torch.full_like(full[:6, width:], 9.0)
    assert torch.equal(out[:6, width:].nan_to_num(), beyond.nan_to_num())


@pytest.mark.parametrize(
    "dtype, with_entropy, inplace",
    [(torch.bfloat16, True, True), (torch.float32, True, False), (torch.bfloat16, False, True)],
)
def test_compiled_rows_equal_eager_rows(dtype, with_entropy, inplace):
    check_rows(rows_compiled, dtype, with_entropy, inplace)
    assert not rows_compiled._broken, rows_compiled._broken


def run_python(code: str, **env: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, timeout=240
    )
    assert result.returncode == 0, result.stderr.decode()[-4000:]


INTERPRETED = """
import torch
from megatron_rl_loss.logprobs import rows_triton
from tests.unit.test_logprobs_rows import check_public_function, check_rows
rows_triton.FORWARD_BLOCK, rows_triton.BACKWARD_BLOCK = 64, 128
for min_programs, dtype, with_entropy, inplace in (
    (1, torch.float32, True, False),
    (32, torch.float32, False, True),
    (32, torch.bfloat16, True, True),
    (1, torch.float16, False, False),
):
    rows_triton.MIN_PROGRAMS = min_programs
    check_rows(rows_triton, dtype, with_entropy, inplace)
check_public_function("triton")
"""

COMPILED_FOR_H200 = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megatron_rl_loss.logprobs import rows_triton as rows

def check(kernel, pointers, integers, block, with_entropy):
    types = {name: "*" + dtype for name, dtype in pointers.items()} | dict.fromkeys(integers, "i32")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(types))}
    types |= {"inv_temperature": "fp32", "WITH_ENTROPY": "constexpr", "BLOCK": "constexpr"}
    source = ASTSource(kernel, types, {"WITH_ENTROPY": with_entropy, "BLOCK": block}, aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert "ld.global.v4" in binary.asm["ptx"], "logits are not read in 16-byte pieces"

vectors = dict.fromkeys(("m_ptr", "log_s_ptr", "a_ptr", "b_ptr"), "fp32")
for dtype, with_entropy in (("bf16", True), ("fp16", False), ("fp32", True)):
    check(rows._statistics_kernel, {"z_ptr": dtype, "stats_ptr": "fp32"},
          ("row_stride", "num_rows", "num_columns", "width"), rows.FORWARD_BLOCK, with_entropy)
    check(rows._gradients_kernel, {"z_ptr": dtype, "out_ptr": dtype, **vectors},
          ("z_stride", "out_stride", "num_columns"), rows.BACKWARD_BLOCK, with_entropy)
"""


def check_public_function(backend: str) -> None:
    """Values and gradients of the public function through `backend`, against float64."""
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 3, 77) * 3, torch.randint(0, 70, (2, 3))
    g, h = torch.randn(2, 2, 3)
    leaf = logits.clone().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(
        leaf * 1, labels, with_entropy=True, temperature=0.7, vocab_size=70, backend=backend
    )
    (g * log_probs + h * entropy).sum().backward()
    want = reference.log_probs_and_entropy(logits, labels, 0.7, 70)
    assert (log_probs - want[0]).abs().max() < 1e-5
    assert (entropy - want[1]).abs().max() < 1e-5
    assert (leaf.grad - reference.gradient(logits, labels, g, h, 0.7, 70)).abs().max() < 1e-5


@pytest.mark.parametrize("backend", ["eager", "compiled"])
def test_public_function_is_right_through_each_backend(backend):
    check_public_function(backend)


@needs_triton
def test_triton_rows_under_the_interpreter_equal_eager_rows_and_float64():
    run_python(INTERPRETED, TRITON_INTERPRET="1")


@needs_triton
def test_triton_rows_compile_for_h200_with_16_byte_loads():
    run_python(COMPILED_FOR_H200, TRITON_INTERPRET="0")


def test_failed_compilation_warns_once_and_gives_eager_numbers(monkeypatch):
    monkeypatch.setattr(rows_compiled, "_broken", [])
    monkeypatch.setattr(rows_compiled, "_compiled", lambda run: 1 / 0)
    with pytest.warns(UserWarning, match="run uncompiled"):
        check_public_function("compiled")
    assert len(rows_compiled._broken) == 1


def test_small_calls_on_cpu_are_not_compiled():
    assert backends.choose_rows(torch.empty(8, 8)) is rows_eager
    assert backends.choose_rows(torch.empty(1 << 10, 1 << 15, device="meta")) is rows_eager
    large = torch.empty(1, 1).expand(1 << 10, 1 << 15)
    assert backends.choose_rows(large) is rows_compiled


def test_unknown_backend_is_refused():
    with pytest.raises(InputError, match="backend must be one of eager, compiled, triton"):
        vocab_parallel_log_probs(torch.zeros(1, 2), torch.zeros(1).long(), backend="cuda")
