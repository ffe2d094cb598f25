"""A LoRA layer on a handful of rows: plain differentiable ops, without an autograd Function.

There is next to nothing to fuse in a few rows, and what a call costs is what its Python and its
dispatch cost. Forward and backward of a 576 × 576 layer of rank 16 on one row, fp32, one thread:
PEFT 324 µs, the fused operation 473 µs, these four ops 288 µs; they cross between 128 and 256 rows
without dropout, near 16 with it (the mask is then stored, which the fused operation never does).
"""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import backend as _backend
from . import dropout
from ._common import WIDEN_ROWS, autocast_enabled, has_fast_gemm, intercepted, transformed

LIMIT = 128
LIMIT_WITH_DROPOUT = 16


def few(x: Tensor, weight: Tensor, dropout_p: float, backend: str) -> bool:
    """Whether x [..., K] has so few rows that plain ops serve it best.

    Never under ``torch.compile``, nor where a backend was named: these take the fused operation.
    """
    if backend != "auto" or torch.compiler.is_compiling():
        return False
    limit = LIMIT if dropout_p == 0.0 else LIMIT_WITH_DROPOUT
    if x.dim() == 0 or x.numel() > limit * x.shape[-1]:
        return False
    dtype, on_cpu = x.dtype, x.is_cpu
    if dtype != weight.dtype or autocast_enabled("cpu" if on_cpu else x.device.type):
        return False
    if _backend.named_by_environment():
        return False
    if dropout_p == 0.0 and (not on_cpu or dtype == torch.float32):
        return True
    if not on_cpu or dtype == torch.float64 or _native() is None:
        return dropout_p == 0.0
    if dropout_p > 0.0 and (intercepted() or transformed()):
        return False  # the mask is written through a raw pointer
    return has_fast_gemm(dtype) or x.numel() < WIDEN_ROWS * x.shape[-1]


@functools.cache
def _native() -> Any:
    """The C++ extension, None where it was not built."""
    return importlib.import_module("fastlora._C") if _backend.status("cpu").ok else None


def lora_linear(
    x: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float,
    bias: Tensor | None,
    dropout_p: float,
    generator: torch.Generator | None = None,
) -> Tensor:
    """``fastlora.functional.lora_linear`` for few rows; the same mask from the same seed."""
    wide = None
    if bias is not None and bias.dtype != x.dtype:  # an fp32 lora_bias is in it
        bias, wide = None, bias
    y = F.linear(x, weight, bias)
    if dropout_p > 0.0:
        x = x * _scaled_mask(x, dropout_p, generator)  # fp32, whatever x is
    if not x.dtype == lora_A.dtype == lora_B.dtype:
        branch = torch.promote_types(torch.promote_types(x.dtype, lora_A.dtype), lora_B.dtype)
        x, lora_A, lora_B = x.to(branch), lora_A.to(branch), lora_B.to(branch)
    result = torch.add(y, F.linear(F.linear(x, lora_A), lora_B), alpha=scaling)
    if wide is not None:
        result = result + wide
    return result if result.dtype == y.dtype else result.to(y.dtype)


def _scaled_mask(x: Tensor, p: float, generator: torch.Generator | None) -> Tensor:
    """What dropout multiplies x with, in fp32: 0, or 1 / (1 - p) where an element is kept."""
    columns = x.shape[-1]
    rows = x.numel() // max(columns, 1)
    mask = torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
    seed = dropout.draw_seeds(1, x.device, generator).item()
    _native().philox_mask(mask.data_ptr(), rows, columns, p, seed, torch.get_num_threads())
    return mask
