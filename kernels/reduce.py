"""Second stage of every split reduction: out = scale * sum_p partial[p], p ascending, so that bits repeat."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import config
from .launch import ceil_div, launch
from .numeric import cast


@triton.jit(do_not_specialize=["parts", "rows"])
def _reduce_kernel(
    partial, out, parts, rows, columns, part_stride, ld_partial, ld_out, scale, BLOCK: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    row = index // columns
    column = index % columns
    inside = row < rows
    pointers = partial + row * ld_partial + column
    step = tl.cast(part_stride, tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(parts):
        total += tl.load(pointers, mask=inside, other=0.0)
        pointers += step
    total *= tl.cast(scale, tl.float32)
    tl.store(out + row * ld_out + column, cast(total, out.dtype.element_ty), mask=inside)


def reduce_parts(partial: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> None:
    """out[rows, columns] (any float dtype) = scale * partial[parts, rows, columns] (fp32) summed over parts."""
    parts, rows, columns = partial.shape
    if out.numel() == 0:
        return
    arguments = dict(
        partial=partial, out=out, parts=parts, rows=rows, columns=columns, part_stride=partial.stride(0),
        ld_partial=partial.stride(1), ld_out=out.stride(0), scale=float(scale), BLOCK=config.REDUCE_BLOCK,
    )  # fmt: skip
    grid = (ceil_div(rows * columns, config.REDUCE_BLOCK),)
    launch(_reduce_kernel, grid, arguments, out.device, num_warps=config.REDUCE_WARPS)
