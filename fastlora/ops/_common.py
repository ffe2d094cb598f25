"""What the operations' autograd Functions share."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Below this many rows, widening W costs more than a slow half-precision GEMM on the CPU saves.
WIDEN_ROWS = 8


@functools.cache
def has_fast_gemm(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of ``dtype`` with instructions made for it.

    Where it does not, ATen's half-precision GEMM reaches about a sixth of fp32's rate, and
    widening to fp32 first is both faster and more exact.
    """
    checks: tuple[str, ...]
    if dtype == torch.bfloat16:
        checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    elif dtype == torch.float16:
        checks = ("_is_amx_fp16_supported",)
    else:
        return True
    return any(getattr(torch.cpu, check, lambda: False)() for check in checks)


def as_rows(tensor: Tensor) -> Tensor:
    """``tensor`` [..., K] as [M, K] whose rows are each contiguous and do not overlap.

    Gradients arrive transposed or expanded (stride 0) as well; those are copied.
    """
    columns = tensor.shape[-1]
    rows = tensor.reshape(-1, columns)
    if rows.stride(1) != 1 or (rows.stride(0) < columns and rows.shape[0] > 1):
        return rows.contiguous()
    return rows


def in_dtype(tensors: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """``tensors`` (or None) in ``dtype``, the very same objects where they already are."""
    return [t if t is None or t.dtype == dtype else t.to(dtype) for t in tensors]


def without_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """Autocast off: the operations choose their own dtypes, and fp32 accumulators stay fp32."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def bias_gradient(dy: Tensor, bias: Tensor) -> Tensor:
    """Column sums of dY [M, N], accumulated in fp32 (fp64 for fp64), in the bias's dtype."""
    wide = torch.float64 if dy.dtype == torch.float64 else torch.float32
    return dy.sum(0, dtype=wide).to(bias.dtype)
