"""One pass over X in the backward: every dA, and with dropout the low-rank part of dX.

    dA_i = dS_i^T dropout_i(X)            dX += sum_i mask_i * (dS_i A_i) / (1 - p)
    X [M, K], dS [M, R] fp32, A_i [r_i, K], dX [M, K] (in place)

The base part of dX is a GEMM (linear.py). Without dropout it also takes dS A in its accumulator, and this pass does
dA alone. With dropout both sums need the same mask, and regenerating it is the dearest step here: one pass makes it
once for both, where a masked GEMM epilogue would make it a second time and hold a second accumulator.

A program owns BLOCK_K columns and a strip of rows; the A's are stacked, and projection i's part of a dot is the
stack with the other projections' columns of dS zeroed, so that one accumulator [R, BLOCK_K] serves them all.
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
    launch,
    pad_rank,
    precision,
    processors,
    row_major,
    stack_rows,
)
from .linear import gemm
from .numeric import cast, split_left_dot, widen
from .reduce import reduce_parts


@triton.jit
def _masked_dots(
    seed, own, x_tile, ds_tile, a_tile, da_acc, update, rows, quads, quads_per_row, threshold,
    NEED_DA: tl.constexpr, NEED_DX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Both sums of one projection under its mask; `own` marks its columns of the stack, [1, BLOCK_R]."""
    keep = keep_mask(seed, rows, quads, quads_per_row, threshold)  # [BLOCK_M, BLOCK_K]
    ds_own = tl.where(own, ds_tile, 0.0)  # [BLOCK_M, BLOCK_R]
    if NEED_DA:
        x_kept = tl.where(keep, x_tile, tl.zeros_like(x_tile))
        da_acc = split_left_dot(ds_own, x_kept, da_acc, True, PRECISION)
    if NEED_DX:
        low = split_left_dot(ds_own, a_tile, tl.zeros_like(update), False, PRECISION)
        update += tl.where(keep, low, 0.0)
    return da_acc, update


@triton.jit(do_not_specialize=["M", "threshold", "strip_rows", "seed_0", "projections"])
def _x_pass_kernel(
    x, ds, a, seeds, da, dx, M, K, rank, own_rank, seed_0, projections, ld_x, ld_ds, ld_a, ld_dx, da_part_stride,
    strip_rows, quads_per_row, threshold, inv_keep,
    ONE: tl.constexpr, DROPOUT: tl.constexpr, NEED_DA: tl.constexpr, NEED_DX: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    k_tiles = tl.cdiv(K, BLOCK_K)
    k0 = pid % k_tiles * BLOCK_K
    strip = pid // k_tiles
    columns = k0 + tl.arange(0, BLOCK_K)
    quads = k0 // 4 + tl.arange(0, BLOCK_K // 4)
    ranks = tl.arange(0, BLOCK_R)
    r_k_inside = (ranks[:, None] < rank) & (columns[None, :] < K)
    a_tile = 0.0
    da_acc = 0.0
    if NEED_DX:
        a_pointers = a + ranks[:, None].to(tl.int64) * ld_a + columns[None, :]
        a_tile = cast(
            tl.load(a_pointers, mask=r_k_inside, other=0.0), dx.dtype.element_ty
        )  # [BLOCK_R, BLOCK_K]
    if NEED_DA:
        da_acc = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)

    m_start = strip.to(tl.int64) * strip_rows
    m_end = tl.minimum(m_start + strip_rows, M)
    for m in range(m_start, m_end, BLOCK_M):
        rows = m + tl.arange(0, BLOCK_M).to(tl.int64)
        m_r_inside = (rows[:, None] < m_end) & (ranks[None, :] < rank)
        m_k_inside = (rows[:, None] < m_end) & (columns[None, :] < K)
        ds_tile = tl.load(ds + rows[:, None] * ld_ds + ranks[None, :], mask=m_r_inside, other=0.0)
        x_tile = 0.0
        if NEED_DA:
            x_tile = tl.load(
                x + rows[:, None] * ld_x + columns[None, :], mask=m_k_inside, other=0.0
            )
        if DROPOUT:
            update = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
            if ONE:
                da_acc, update = _masked_dots(
                    tl.load(seeds + seed_0), ranks[None, :] < rank, x_tile, ds_tile, a_tile, da_acc, update, rows,
                    quads, quads_per_row, threshold, NEED_DA, NEED_DX, PRECISION,
                )  # fmt: skip
            else:  # a loop, not unrolled: one projection's mask in registers at a time
                for i in range(projections):
                    own = (ranks[None, :] >= i * own_rank) & (ranks[None, :] < (i + 1) * own_rank)
                    da_acc, update = _masked_dots(
                        tl.load(seeds + seed_0 + i), own, x_tile, ds_tile, a_tile, da_acc, update, rows,
                        quads, quads_per_row, threshold, NEED_DA, NEED_DX, PRECISION,
                    )  # fmt: skip
            if NEED_DX:
                dx_pointers = dx + rows[:, None] * ld_dx + columns[None, :]
                base = widen(tl.load(dx_pointers, mask=m_k_inside, other=0.0))
                total = cast(base + update * tl.cast(inv_keep, tl.float32), dx.dtype.element_ty)
                tl.store(dx_pointers, total, mask=m_k_inside)
        else:
            da_acc = split_left_dot(ds_tile, x_tile, da_acc, True, PRECISION)
    if NEED_DA:
        da += strip.to(tl.int64) * da_part_stride
        da_pointers = da + ranks[:, None].to(tl.int64) * K + columns[None, :]
        tl.store(da_pointers, da_acc, mask=r_k_inside)


def _passes(projections: int, rank: int, widest: int) -> list[tuple[int, int, int, int]]:
    """(first projection, projections, first row, rows) of each pass: as many whole projections as fit `widest`.

    A projection that is wider by itself takes several passes.
    """
    if rank <= widest:
        step = min(projections, widest // rank)
        return [
            (i, min(step, projections - i), i * rank, min(step, projections - i) * rank)
            for i in range(0, projections, step)
        ]
    return [
        (i, 1, i * rank + start, min(widest, rank - start))
        for i in range(projections)
        for start in range(0, rank, widest)
    ]


def x_pass(
    x: torch.Tensor | None,
    ds: torch.Tensor,
    lora_As: list[torch.Tensor],
    dropout_p: float,
    seeds: torch.Tensor | None,
    dx: torch.Tensor | None,
    need_dA: list[bool],
) -> list[torch.Tensor | None]:
    """dA_i [r_i, K] in each A's dtype where wanted; with dropout dx [M, K] is updated in place (None: not wanted).

    x [M, K] (None if no dA is wanted); ds [M, R] fp32, columns in the A's order; seeds int64 [P].
    """
    ranks = [a.shape[0] for a in lora_As]
    M, K = ds.shape[0], lora_As[0].shape[1]
    dropout = dropout_p > 0.0
    dx = dx if dropout else None
    das = [
        torch.empty(a.shape, dtype=a.dtype, device=a.device) if need else None
        for a, need in zip(lora_As, need_dA, strict=True)
    ]
    if M == 0 or K == 0:
        return [None if da is None else da.zero_() for da in das]
    if not any(need_dA) and dx is None:
        return das

    # With dropout every projection takes `rank` rows of the stack; without, the stack is one projection.
    rank, projections = (max(ranks), len(ranks)) if dropout else (sum(ranks), 1)
    starts = [i * rank if dropout else sum(ranks[:i]) for i in range(len(ranks))]
    if dropout and ds.shape[1] != rank * projections:  # unequal ranks: pad to the largest
        parts = ds.split(ranks, dim=1)
        ds = torch.zeros(M, rank * projections, dtype=torch.float32, device=ds.device)
        for start, part in zip(starts, parts, strict=True):
            ds[:, start : start + part.shape[1]] = part
    ds = row_major(ds)
    x = row_major(x) if x is not None and any(need_dA) else None
    like = x if x is not None else dx
    assert like is not None
    a = stack_rows(lora_As, rank) if dx is not None else None
    tile = config.x_pass(like.dtype, like.device, dropout, aligned(K, like.stride(0)))

    k_tiles, m_tiles = ceil_div(K, tile.k), ceil_div(M, tile.m)
    strips = max(1, min(m_tiles, config.WAVES * processors(like.device) // k_tiles))
    strip_rows = ceil_div(m_tiles, strips) * tile.m
    strips = ceil_div(M, strip_rows)
    da_parts = None
    if x is not None:
        da_parts = torch.empty(
            strips, rank * projections, K, dtype=torch.float32, device=like.device
        )
    for first, count, row, height in _passes(projections, rank, tile.n):
        arguments = dict(
            x=x, ds=ds[:, row : row + height], a=None if a is None else a[row : row + height], seeds=seeds,
            da=None if da_parts is None else da_parts[:, row : row + height], dx=dx, M=M, K=K, rank=height,
            own_rank=rank, seed_0=first, projections=count, ld_x=0 if x is None else x.stride(0),
            ld_ds=ds.stride(0), ld_a=0 if a is None else a.stride(0), ld_dx=0 if dx is None else dx.stride(0),
            da_part_stride=rank * projections * K, strip_rows=strip_rows, quads_per_row=ceil_div(K, 4),
            threshold=threshold_of(dropout_p), inv_keep=1.0 / (1.0 - dropout_p), ONE=count == 1, DROPOUT=dropout,
            NEED_DA=x is not None, NEED_DX=dx is not None, PRECISION=precision(like.dtype), BLOCK_M=tile.m,
            BLOCK_K=tile.k, BLOCK_R=pad_rank(height),
        )  # fmt: skip
        grid = (k_tiles * strips,)
        launch(
            _x_pass_kernel,
            grid,
            arguments,
            like.device,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    for da, start in zip(das, starts, strict=True):
        if da is not None:
            assert da_parts is not None
            reduce_parts(da_parts[:, start : start + da.shape[0]], da, 1.0 / (1.0 - dropout_p))
    return das


def grad_x(
    dys: list[torch.Tensor],
    x: torch.Tensor | None,
    ds: torch.Tensor,
    weights: list[torch.Tensor],
    lora_As: list[torch.Tensor],
    dropout_p: float,
    seeds: torch.Tensor | None,
    need_dx: bool,
    need_dA: list[bool],
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """(dX [M, K] or None, dA_i [r_i, K] or None) from dys [M, N_i], ds [M, R] fp32 and weights [N_i, K]."""
    dx = None
    if need_dx:
        transposed = [w.t() for w in weights]
        fused = dropout_p == 0.0 and ds.shape[1] > 0
        dx = gemm(
            dys, transposed, None, ds if fused else None, stack_rows(lora_As).t() if fused else None
        )
    return dx, x_pass(x, ds, lora_As, dropout_p, seeds, dx, need_dA)
