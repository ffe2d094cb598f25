"""What every launcher shares: the launch itself, the device's figures, and views that kernels can walk.

Kernels take rows of unit-stride elements with a 64-bit row stride; the helpers here turn any tensor
into that, without a copy where the layout already serves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

INTERPRETED = (0, 0)  # the interpreter's "capability"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Launch:
    """One recorded launch: the kernel, its grid, its arguments by name and its launch options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int


_recorders: list[list[Launch]] = []
_assumed: list[tuple[int, int]] = []


@contextlib.contextmanager
def recording(capability: tuple[int, int] = (9, 0)) -> Iterator[list[Launch]]:
    """Record launches instead of running them, choosing tiles as for a GPU of this capability.

    This is how the registry learns what the launchers ask for, with tensors on the meta device.
    """
    launches: list[Launch] = []
    _recorders.append(launches)
    _assumed.append(capability)
    try:
        yield launches
    finally:
        _recorders.pop()
        _assumed.pop()


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: dict[str, Any],
    device: torch.device,
    *,
    num_warps: int,
    num_stages: int = 1,
) -> None:
    """Run `kernel` on `device` (the tensors' own, whatever the current one is)."""
    if _recorders:
        _recorders[-1].append(Launch(kernel, grid, arguments, num_warps, num_stages))
        return
    under = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with under:
        kernel[grid](**arguments, num_warps=num_warps, num_stages=num_stages)


@cache
def _cuda_capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@cache
def _cuda_processors(index: int | None) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def assumed() -> bool:
    """Whether launches are recorded, for a GPU that is only assumed."""
    return bool(_assumed)


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of `device`; (0, 0), INTERPRETED, stands for the interpreter."""
    if _assumed:
        return _assumed[-1]
    return _cuda_capability(device.index) if device.type == "cuda" else INTERPRETED


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of `device`. The interpreter counts 1: a few splits, and quick."""
    if _assumed:
        return 132
    return _cuda_processors(device.index) if device.type == "cuda" else 1


def precision(dtype: torch.dtype) -> str:
    """`input_precision` for dots on `dtype`: TF32 only where torch's own matmuls are allowed it."""
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32":
        return "ieee"
    return "tf32"  # half types ignore it


def aligned(*sizes: int) -> bool:
    """Whether Triton may load 16 bytes at a time along and across these sizes and strides (it asks for 16s)."""
    return all(size % 16 == 0 for size in sizes)


def keeps_fp32(factor: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether a factor has bits that x's dtype would drop: its dots are then split in two."""
    return factor.element_size() > x.element_size() and x.dtype != torch.float32


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def pad_rank(rank: int) -> int:
    """Smallest power of two that holds `rank` and that `tl.dot` takes (at least 16)."""
    return max(16, triton.next_power_of_2(rank))


def row_major(t: torch.Tensor) -> torch.Tensor:
    """A 2-D `t` whose last dimension has unit stride: itself, or a contiguous copy."""
    return t if t.stride(1) == 1 or t.shape[1] == 1 else t.contiguous()


def matrix_layout(w: torch.Tensor) -> tuple[torch.Tensor, int, bool]:
    """(tensor, row stride, transposed) of a weight: row-major, or the transposed view of a row-major one."""
    if w.stride(1) == 1:
        return w, w.stride(0), False
    if w.stride(0) == 1:
        return w, w.stride(1), True
    w = w.contiguous()
    return w, w.stride(0), False


def stack_rows(rows: list[torch.Tensor], height: int = 0) -> torch.Tensor:
    """Row-wise stack of [r_i, K] matrices; with `height`, each is padded with zero rows to it."""
    if len(rows) == 1 and rows[0].shape[0] >= height:
        return row_major(rows[0])
    if all(r.shape[0] >= height for r in rows):
        return torch.cat(rows)
    dtype = rows[0].dtype if len({r.dtype for r in rows}) == 1 else torch.float32
    out = torch.zeros(len(rows), height, rows[0].shape[1], dtype=dtype, device=rows[0].device)
    for i, r in enumerate(rows):
        out[i, : r.shape[0]] = r
    return out.view(-1, rows[0].shape[1])


def check_dtype(name: str, t: torch.Tensor) -> None:
    if t.dtype not in FLOATS:
        raise TypeError(
            f"{name} has dtype {t.dtype}; the Triton kernels take float32, bfloat16 or float16"
        )
