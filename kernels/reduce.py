"""Second stage of every split reduction: out = scale * sum_p partial[p], p ascending, so that bits repeat.

One launch serves all the sums that are ready at the same time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import config
from .launch import ceil_div, launch
from .numeric import cast


class Sum(NamedTuple):
    """A reduction that is due: out [rows, columns] = scale * partial [parts, rows, columns] (fp32), over parts."""

    partial: torch.Tensor
    out: torch.Tensor
    scale: float


@triton.jit(do_not_specialize=["parts", "rows", "first"])
def _reduce_kernel(
    partial, out, parts, rows, columns, part_stride, ld_partial, ld_out, scale, first, BLOCK: tl.constexpr
):  # fmt: skip
    pid = tl.program_id(0)
    for i in tl.static_range(len(partial)):
        if (pid >= first[i]) & (pid < first[i + 1]):
            index = (pid - first[i]).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
            row = index // columns[i]
            column = index % columns[i]
            inside = row < rows[i]
            pointers = partial[i] + row * ld_partial[i] + column
            step = tl.cast(part_stride[i], tl.int64)
            total = tl.zeros((BLOCK,), tl.float32)
            for _ in range(parts[i]):
                total += tl.load(pointers, mask=inside, other=0.0)
                pointers += step
            total *= tl.cast(scale[i], tl.float32)
            total = cast(total, out[i].dtype.element_ty)
            tl.store(out[i] + row * ld_out[i] + column, total, mask=inside)


def reduce_sums(sums: list[Sum]) -> None:
    """Carry out every sum of the list."""
    sums = [s for s in sums if s.out.numel()]
    if not sums:
        return
    first = [0]
    for s in sums:
        first.append(first[-1] + ceil_div(s.out.numel(), config.REDUCE_BLOCK))
    arguments = dict(
        partial=tuple(s.partial for s in sums), out=tuple(s.out for s in sums),
        parts=tuple(s.partial.shape[0] for s in sums), rows=tuple(s.out.shape[0] for s in sums),
        columns=tuple(s.out.shape[1] for s in sums), part_stride=tuple(s.partial.stride(0) for s in sums),
        ld_partial=tuple(s.partial.stride(1) for s in sums), ld_out=tuple(s.out.stride(0) for s in sums),
        scale=tuple(float(s.scale) for s in sums), first=tuple(first), BLOCK=config.REDUCE_BLOCK,
    )  # fmt: skip
    launch(
        _reduce_kernel, (first[-1],), arguments, sums[0].out.device, num_warps=config.REDUCE_WARPS
    )
