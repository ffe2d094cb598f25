"""dS and dB in one pass over dY.

    dS = s * dY B      dB = s * dY^T S
    dY [M, N], B [N, r], S [M, r] fp32  ->  dS [M, r] fp32, dB [N, r]

A program owns BLOCK_N columns and a strip of rows. dB of its columns grows in registers along the strip; its share
of dS leaves row block by row block. Both are partial sums in a workspace, added in order by a second kernel:
no atomics. The workspace of dS is (N / BLOCK_N) * M * r floats, written and read once: at rank 16 in half types a
quarter of dY's own bytes (BLOCK_N = 256), at rank 64 as many again. Above half, dS is a pass of its own instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import config
from .launch import (
    aligned,
    ceil_div,
    keeps_fp32,
    launch,
    pad_rank,
    precision,
    processors,
    row_major,
)
from .numeric import split_dot, widen
from .reduce import Sum
from .shrink import thin_product


@triton.jit(do_not_specialize=["M", "strip_rows", "ds_part_stride"])
def _grad_dy_kernel(
    dy, s, b, ds, db, M, N, rank, ld_dy, ld_s, ld_b, ds_part_stride, db_part_stride, strip_rows,
    NEED_DS: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    n_tiles = tl.cdiv(N, BLOCK_N)
    pid_n = pid % n_tiles
    strip = pid // n_tiles
    columns = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    ranks = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    n_r_inside = (columns[:, None] < N) & (ranks[None, :] < rank)
    if NEED_DS:
        b_tile = tl.load(b + columns[:, None] * ld_b + ranks[None, :], mask=n_r_inside, other=0.0)
        b_tile = widen(b_tile)  # [BLOCK_N, BLOCK_R]
        ds += pid_n.to(tl.int64) * ds_part_stride
    db_acc = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)

    m_start = strip.to(tl.int64) * strip_rows
    m_end = tl.minimum(m_start + strip_rows, M)
    for m in range(m_start, m_end, BLOCK_M):
        rows = m + tl.arange(0, BLOCK_M).to(tl.int64)
        m_r_inside = (rows[:, None] < m_end) & (ranks[None, :] < rank)
        dy_inside = (rows[:, None] < m_end) & (columns[None, :] < N)
        dy_tile = tl.load(dy + rows[:, None] * ld_dy + columns[None, :], mask=dy_inside, other=0.0)
        s_tile = tl.load(s + rows[:, None] * ld_s + ranks[None, :], mask=m_r_inside, other=0.0)
        db_acc = split_dot(tl.trans(dy_tile), s_tile, db_acc, True, PRECISION)
        if NEED_DS:
            ds_tile = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
            ds_tile = split_dot(dy_tile, b_tile, ds_tile, SPLIT, PRECISION)
            tl.store(ds + rows[:, None] * rank + ranks[None, :], ds_tile, mask=m_r_inside)
    db += strip.to(tl.int64) * db_part_stride
    tl.store(db + columns[:, None] * rank + ranks[None, :], db_acc, mask=n_r_inside)


def grad_dy(
    dy: torch.Tensor,
    s: torch.Tensor | None,
    lora_B: torch.Tensor,
    scaling: float,
    ds: torch.Tensor | None,
    need_dB: bool,
    sums: list[Sum],
) -> torch.Tensor | None:
    """Fill ds [M, r] fp32 (None: not wanted) and return dB [N, r] in lora_B's dtype (None: not wanted).

    dy [M, N]; s [M, r] fp32 (None: dB is not wanted); lora_B [N, r] any float dtype. Both hold their values once
    the sums that are appended to `sums` have been carried out.
    """
    N, rank = lora_B.shape
    M = dy.shape[0]
    db = torch.empty(N, rank, dtype=lora_B.dtype, device=dy.device) if need_dB else None
    if M == 0 or N == 0:
        if ds is not None:
            ds.zero_()
        return None if db is None else db.zero_()
    if ds is None and db is None:
        return None
    dy, lora_B = row_major(dy), row_major(lora_B)
    tile = config.grad_dy(dy.dtype, dy.device, rank, aligned(N, dy.stride(0)))
    if ds is not None and (not need_dB or 2 * rank * 4 > 0.5 * tile.n * dy.element_size()):
        parts = thin_product(dy, lora_B.t(), ds, scaling)
        if parts.shape[0] > 1:
            sums.append(Sum(parts, ds, 1.0))
        ds = None
    if db is None or s is None:
        return None
    s = row_major(s)
    block_r = min(pad_rank(rank), tile.k)
    n_tiles = ceil_div(N, tile.n)
    m_tiles = ceil_div(M, tile.m)
    strips = max(1, min(m_tiles, int(config.GRAD_DY_FILL * processors(dy.device)) // n_tiles))
    strip_rows = ceil_div(m_tiles, strips) * tile.m
    strips = ceil_div(M, strip_rows)
    ds_parts = None
    if ds is not None:
        ds_parts = torch.empty(n_tiles, M, rank, dtype=torch.float32, device=dy.device)
        sums.append(Sum(ds_parts, ds, scaling))
    db_parts = torch.empty(strips, N, rank, dtype=torch.float32, device=dy.device)
    sums.append(Sum(db_parts, db, scaling))
    arguments = dict(
        dy=dy, s=s, b=lora_B, ds=ds_parts, db=db_parts, M=M, N=N, rank=rank, ld_dy=dy.stride(0),
        ld_s=s.stride(0), ld_b=lora_B.stride(0), ds_part_stride=M * rank,
        db_part_stride=N * rank, strip_rows=strip_rows, NEED_DS=ds is not None,
        SPLIT=keeps_fp32(lora_B, dy), PRECISION=precision(dy.dtype), BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_R=block_r,
    )  # fmt: skip
    grid = (n_tiles * strips, ceil_div(rank, block_r))
    launch(
        _grad_dy_kernel, grid, arguments, dy.device, num_warps=tile.warps, num_stages=tile.stages
    )
    return db
