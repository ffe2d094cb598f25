"""S = dropout(X) A^T for all projections of one X.

    X [M, K], A_i [r_i, K]  ->  S [M, R = sum r_i] fp32

p == 0: the A's are stacked and X meets them in one dot.
p > 0: each projection has its own mask. The programs of one tile of X are neighbours in launch order, so that X
comes from memory once and from L2 for the other projections; on an H200 the Philox rounds, which are each
projection's own anyhow, are then the longer part (about 15 issue slots an element against 2 bytes of X).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import config
from .dropout import keep_mask, threshold_of
from .launch import (
    aligned,
    ceil_div,
    keeps_fp32,
    launch,
    matrix_layout,
    pad_rank,
    precision,
    processors,
    row_major,
    stack_rows,
)
from .numeric import split_dot, widen
from .reduce import Sum, reduce_sums


@triton.jit(do_not_specialize=["M", "threshold", "split_stride", "split_tiles"])
def _shrink_kernel(
    x, a, seeds, out, M, K, rank, ld_x, ld_a, ld_out, split_stride, split_tiles, quads_per_row, threshold, scale,
    GROUPS: tl.constexpr, CHUNKS: tl.constexpr, DROPOUT: tl.constexpr, A_TRANS: tl.constexpr,
    EVEN_K: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    split = tl.program_id(1)
    group = pid % GROUPS  # fastest: the groups of a tile of X run side by side
    projection = group // CHUNKS
    r0 = (group % CHUNKS) * BLOCK_R

    rows = (pid // GROUPS).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    ranks = r0 + tl.arange(0, BLOCK_R)
    a_rows = (projection * rank + ranks).to(tl.int64)
    # Counted in tiles: the start is then a known multiple of BLOCK_K, and loads stay 16 bytes wide.
    first_tile = split * split_tiles
    last_tile = tl.minimum(first_tile + split_tiles, tl.cdiv(K, BLOCK_K))
    k_start = first_tile * BLOCK_K
    columns = k_start + tl.arange(0, BLOCK_K)
    x_pointers = x + rows[:, None] * ld_x + columns[None, :]
    if A_TRANS:  # stored [K, R]
        a_pointers = a + columns[:, None].to(tl.int64) * ld_a + a_rows[None, :]
        a_step = tl.cast(BLOCK_K, tl.int64) * ld_a
    else:  # stored [R, K]
        a_pointers = a + a_rows[:, None] * ld_a + columns[None, :]
        a_step = tl.cast(BLOCK_K, tl.int64)
    if DROPOUT:
        seed = tl.load(seeds + projection)
        quads = k_start // 4 + tl.arange(0, BLOCK_K // 4)

    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for _ in range(first_tile, last_tile):
        x_inside = rows[:, None] < M
        a_inside = ranks[None, :] < rank if A_TRANS else ranks[:, None] < rank
        if not EVEN_K:
            x_inside = x_inside & (columns[None, :] < K)
            a_inside = a_inside & (columns[:, None] < K if A_TRANS else columns[None, :] < K)
            columns += BLOCK_K
        x_tile = tl.load(x_pointers, mask=x_inside, other=0.0)  # [BLOCK_M, BLOCK_K]
        a_tile = widen(tl.load(a_pointers, mask=a_inside, other=0.0))
        if not A_TRANS:
            a_tile = tl.trans(a_tile)  # [BLOCK_K, BLOCK_R]
        if DROPOUT:
            keep = keep_mask(seed, rows, quads, quads_per_row, threshold)
            x_tile = tl.where(keep, x_tile, tl.zeros_like(x_tile))
            quads += BLOCK_K // 4
        acc = split_dot(x_tile, a_tile, acc, SPLIT, PRECISION)
        x_pointers += BLOCK_K
        a_pointers += a_step
    acc *= tl.cast(scale, tl.float32)

    out += split.to(tl.int64) * split_stride + projection * rank
    inside = (rows[:, None] < M) & (ranks[None, :] < rank)
    tl.store(out + rows[:, None] * ld_out + ranks[None, :], acc, mask=inside)


def thin_product(
    x: torch.Tensor,
    a: torch.Tensor,
    out: torch.Tensor,
    scale: float = 1.0,
    projections: int = 1,
    dropout_p: float = 0.0,
    seeds: torch.Tensor | None = None,
) -> torch.Tensor:
    """Parts [P, M, projections * r] fp32 whose sum is scale * x A^T, x streamed once.

    x [M, K], A [projections * r, K] row-major or a transposed view; with dropout projection i has mask i of x. One
    part is `out` itself, fp32 with unit-stride rows; of more, the sum into `out` is still due.
    """
    x = row_major(x)
    M, K = x.shape
    if out.numel() == 0 or K == 0:
        return out.zero_()[None]
    a, ld_a, a_trans = matrix_layout(a)
    rank = out.shape[1] // projections
    dropout = dropout_p > 0.0
    tile = config.shrink(x.dtype, x.device, M, rank, dropout, aligned(K, x.stride(0)))
    block_r = min(pad_rank(rank), tile.n)
    chunks = ceil_div(rank, block_r)
    groups = projections * chunks
    programs = ceil_div(M, tile.m) * groups

    # Rows alone may not fill the device: K is then split.
    k_tiles = ceil_div(K, tile.k)
    splits = max(1, min(k_tiles // 4, config.SHRINK_WAVES * processors(x.device) // programs, 64))
    split_tiles = ceil_div(k_tiles, splits)
    splits = ceil_div(k_tiles, split_tiles)
    parts = out[None]
    if splits > 1:
        parts = torch.empty(splits, *out.shape, dtype=torch.float32, device=x.device)
    arguments = dict(
        x=x, a=a, seeds=seeds, out=parts, M=M, K=K, rank=rank, ld_x=x.stride(0), ld_a=ld_a, ld_out=parts.stride(1),
        split_stride=parts.stride(0), split_tiles=split_tiles, quads_per_row=ceil_div(K, 4),
        threshold=threshold_of(dropout_p), scale=float(scale), GROUPS=groups, CHUNKS=chunks, DROPOUT=dropout,
        A_TRANS=a_trans, EVEN_K=K % tile.k == 0, SPLIT=keeps_fp32(a, x), PRECISION=precision(x.dtype),
        BLOCK_M=tile.m, BLOCK_K=tile.k, BLOCK_R=block_r,
    )  # fmt: skip
    grid = (programs, splits)
    launch(_shrink_kernel, grid, arguments, x.device, num_warps=tile.warps, num_stages=tile.stages)
    return parts


def shrink(
    x: torch.Tensor, lora_As: list[torch.Tensor], dropout_p: float, seeds: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(S [M, R] fp32, its parts [P, M, R]) of x [M, K] and lora_As [r_i, K] (any float dtype).

    One part is S itself; of more, their sum into S is still due. seeds int64 [P] when dropout_p > 0.
    """
    ranks = [a.shape[0] for a in lora_As]
    rank = max(ranks)
    padded = dropout_p > 0.0 and min(ranks) < rank  # each projection's mask meets as many rows
    columns = rank * len(ranks) if padded else sum(ranks)
    s = torch.empty(x.shape[0], columns, dtype=torch.float32, device=x.device)
    if dropout_p == 0.0:
        return s, thin_product(x, stack_rows(lora_As), s)
    scale = 1.0 / (1.0 - dropout_p)
    parts = thin_product(x, stack_rows(lora_As, rank), s, scale, len(ranks), dropout_p, seeds)
    if padded:
        if parts.shape[0] > 1:
            reduce_sums([Sum(parts, s, 1.0)])
        s = torch.cat([s[:, i * rank : i * rank + r] for i, r in enumerate(ranks)], dim=1)
        parts = s[None]
    return s, parts
