"""Dropout masks from Philox4x32-10, a function of (seed, element index): nothing is stored, every pass regenerates.

For row m and column c of X[M, K]:  e = m * (ceil(K / 4) * 4) + c;  counter = (e >> 2 as two 32-bit words, 0, 0);
key = the 64-bit seed;  u = output word e & 3;  kept iff u >= floor(p * 2^32).
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The C++ and torch paths give the same bits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from . import config
from .launch import ceil_div, launch


def threshold_of(p: float) -> int:
    """Smallest 32-bit word that is kept at dropout probability `p` in [0, 1)."""
    return math.floor(p * 2.0**32)


@triton.jit
def keep_mask(seed, rows, quad_columns, quads_per_row, threshold):
    """Kept elements of a tile, bool [BM, 4 * BQ]; rows int64 [BM], quad_columns [BQ] = first column / 4.

    Four neighbours of a row share a counter, so the rounds run on [BM, BQ] and the four words are interleaved.
    They are compared first: a bool is what then moves between registers.
    """
    q = rows[:, None] * quads_per_row + quad_columns[None, :]  # [BM, BQ] int64
    c0 = q.to(tl.uint32)
    c1 = (q >> 32).to(tl.uint32)
    zero = c0 * 0
    u0, u1, u2, u3 = tl.philox(seed, c0, c1, zero, zero)
    t = tl.cast(threshold, tl.uint32)
    keep = tl.join(tl.join(u0 >= t, u2 >= t), tl.join(u1 >= t, u3 >= t))  # [BM, BQ, 2, 2]
    return keep.reshape(rows.shape[0], 4 * quad_columns.shape[0])


@triton.jit(do_not_specialize=["M", "threshold"])
def _mask_kernel(
    out, seeds, M, K, ld_out, quads_per_row, threshold, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):
    k_tiles = tl.cdiv(K, BLOCK_K)
    pid = tl.program_id(0)
    rows = (pid // k_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k0 = (pid % k_tiles) * BLOCK_K
    columns = k0 + tl.arange(0, BLOCK_K)
    quads = k0 // 4 + tl.arange(0, BLOCK_K // 4)
    keep = keep_mask(tl.load(seeds), rows, quads, quads_per_row, threshold)
    inside = (rows[:, None] < M) & (columns[None, :] < K)
    tl.store(out + rows[:, None] * ld_out + columns[None, :], keep.to(tl.uint8), mask=inside)


def philox_mask(rows: int, columns: int, p: float, seed: torch.Tensor) -> torch.Tensor:
    """The keep mask itself, uint8 [rows, columns]; `seed` int64 [1]. For tests and tools: training never stores it."""
    out = torch.empty(rows, columns, dtype=torch.uint8, device=seed.device)
    if out.numel():
        tile = config.MASK
        arguments = dict(
            out=out, seeds=seed, M=rows, K=columns, ld_out=columns, quads_per_row=ceil_div(columns, 4),
            threshold=threshold_of(p), BLOCK_M=tile.m, BLOCK_K=tile.k,
        )  # fmt: skip
        grid = (ceil_div(rows, tile.m) * ceil_div(columns, tile.k),)
        launch(_mask_kernel, grid, arguments, out.device, num_warps=tile.warps)
    return out
