"""The low-rank update of an accumulator, plain or under dropout's masks, for every GEMM here.

    acc + scale * S B^T                         S [M, R] fp32, B [N, R]
    scale * sum_i mask_i * (S_i B_i^T)          projection i: its own columns of S and B, its own mask

Without a mask the update follows the GEMM's main loop, as a few more steps of K. Under masks it is where the
accumulator starts: one projection's update is masked where it lies, so that no second accumulator lives beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .dropout import keep_mask
from .numeric import cast, split_left_dot


@dataclass(frozen=True)
class Masks:
    """Dropout of an update: projection i takes `rank` columns of S and has the mask of seeds[i] (int64 [P])."""

    p: float
    seeds: torch.Tensor
    rank: int


@triton.jit
def low_rank(
    acc, s, b, rows, M, columns, N, first, rank, ld_s, ld_b, scale, half,
    B_TRANS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """acc + scale * S[rows, first : first + rank] B[columns, the same]^T, acc [BLOCK_M, BLOCK_N]."""
    # Rows and columns past the end repeat the last ones and are never stored: no mask on the unit-stride axis' loads.
    safe_rows = tl.minimum(rows, M - 1)
    safe_columns = tl.minimum(columns, N - 1)
    # Short steps, one at a time: the accumulator is live and leaves few registers for these tiles.
    for r0 in tl.range(0, rank, BLOCK_R, num_stages=1):
        ranks = r0 + tl.arange(0, BLOCK_R)
        s_pointers = s + safe_rows[:, None] * ld_s + (first + ranks)[None, :]
        s_tile = tl.load(s_pointers, mask=ranks[None, :] < rank, other=0.0)  # [BLOCK_M, BLOCK_R]
        s_tile *= tl.cast(scale, tl.float32)
        if B_TRANS:  # stored [R, N]
            b_pointers = b + (first + ranks)[:, None].to(tl.int64) * ld_b + columns[None, :]
            b_inside = (ranks[:, None] < rank) & (columns[None, :] < N)
            b_tile = tl.load(b_pointers, mask=b_inside, other=0.0)  # [BLOCK_R, BLOCK_N]
        else:  # stored [N, R]
            b_pointers = b + safe_columns[:, None] * ld_b + (first + ranks)[None, :]
            b_tile = tl.trans(tl.load(b_pointers, mask=ranks[None, :] < rank, other=0.0))
        acc = split_left_dot(s_tile, cast(b_tile, half), acc, False, PRECISION)
    return acc


@triton.jit
def masked_low_rank(
    s, b, seeds, rows, M, columns, N, n0, projections, rank, ld_s, ld_b, scale, quads_per_row, threshold, half,
    ONE: tl.constexpr, B_TRANS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """scale * sum_i mask_i * (S_i B_i^T), [BLOCK_M, BLOCK_N]; n0 is the first of `columns`."""
    quads = n0 // 4 + tl.arange(0, BLOCK_N // 4)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if ONE:
        total = low_rank(
            total, s, b, rows, M, columns, N, 0, rank, ld_s, ld_b, scale, half, B_TRANS, PRECISION, BLOCK_R
        )  # fmt: skip
        keep = keep_mask(tl.load(seeds), rows, quads, quads_per_row, threshold)
        total = tl.where(keep, total, 0.0)
    else:
        for i in range(projections):
            part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            part = low_rank(
                part, s, b, rows, M, columns, N, i * rank, rank, ld_s, ld_b, scale, half, B_TRANS, PRECISION, BLOCK_R
            )  # fmt: skip
            keep = keep_mask(tl.load(seeds + i), rows, quads, quads_per_row, threshold)
            total += tl.where(keep, part, 0.0)
    return total
