"""Y += scale * S B^T, in place, for a Y that a library GEMM made.

    Y [M, N], S [M, R] fp32 (or its parts [P, M, R], which are summed on the way and stored), B [N, R]

Reads and writes Y once: what a GEMM with the update in its accumulator saves, and what a faster GEMM must make good.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import config
from .launch import ceil_div, launch, pad_rank, precision, row_major
from .numeric import cast, split_left_dot, widen


@triton.jit(do_not_specialize=["M", "parts"])
def _expand_kernel(
    y, parts_s, s, b, M, N, rank, parts, part_stride, ld_part, ld_s, ld_b, ld_y, scale,
    STORE_S: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    n_tiles = tl.cdiv(N, BLOCK_N)
    pid_n = pid % n_tiles
    rows = (pid // n_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    y_pointers = y + rows[:, None] * ld_y + columns[None, :]
    acc = widen(tl.load(y_pointers, mask=inside, other=0.0))  # [BLOCK_M, BLOCK_N]
    for r0 in tl.range(0, rank, BLOCK_R, num_stages=1):
        ranks = r0 + tl.arange(0, BLOCK_R)
        s_inside = (rows[:, None] < M) & (ranks[None, :] < rank)
        pointers = parts_s + rows[:, None] * ld_part + ranks[None, :]
        s_tile = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for _ in range(parts):  # in order, so that bits repeat
            s_tile += tl.load(pointers, mask=s_inside, other=0.0)
            pointers += tl.cast(part_stride, tl.int64)
        if STORE_S and pid_n == 0:
            tl.store(s + rows[:, None] * ld_s + ranks[None, :], s_tile, mask=s_inside)
        b_inside = (columns[:, None] < N) & (ranks[None, :] < rank)
        b_tile = tl.load(b + columns[:, None] * ld_b + ranks[None, :], mask=b_inside, other=0.0)
        s_tile *= tl.cast(scale, tl.float32)
        acc = split_left_dot(
            s_tile, tl.trans(cast(b_tile, y.dtype.element_ty)), acc, False, PRECISION
        )
    tl.store(y_pointers, cast(acc, y.dtype.element_ty), mask=inside)


def expand(
    y: torch.Tensor, parts: torch.Tensor, lora_B: torch.Tensor, scaling: float, s: torch.Tensor
) -> None:
    """y [M, N] += scaling * S lora_B^T in place; S = s [M, r] fp32, first summed from parts [P, M, r] if P > 1."""
    if y.numel() == 0:
        return
    M, N = y.shape
    rank = lora_B.shape[1]
    lora_B = row_major(lora_B)
    tile = config.expand(y.dtype, y.device)
    arguments = dict(
        y=y, parts_s=parts, s=s, b=lora_B, M=M, N=N, rank=rank, parts=parts.shape[0], part_stride=parts.stride(0),
        ld_part=parts.stride(1), ld_s=s.stride(0), ld_b=lora_B.stride(0), ld_y=y.stride(0), scale=float(scaling),
        STORE_S=parts.shape[0] > 1, PRECISION=precision(y.dtype), BLOCK_M=tile.m, BLOCK_N=tile.n,
        BLOCK_R=min(pad_rank(rank), tile.k),
    )  # fmt: skip
    grid = (ceil_div(M, tile.m) * ceil_div(N, tile.n),)
    launch(_expand_kernel, grid, arguments, y.device, num_warps=tile.warps, num_stages=tile.stages)
