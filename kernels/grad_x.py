"""One pass over X in the backward: every dA, and where a library's GEMM made dX the low-rank part of that.

    dA_i = dS_i^T dropout_i(X)            dX += sum_i mask_i * (dS_i A_i) / (1 - p)
    X [M, K], dS [M, R] fp32, A_i [r_i, K], dX [M, K] (in place)

Our own GEMM takes dX's part into its accumulator, mask and all (linear.py), and this pass then does dA alone. Beside a
library's GEMM one pass makes each mask once for both.

A program owns BLOCK_K columns and a strip of rows. The A's are stacked; projection i's part of a dot is the stack with
the other projections' columns of dS zeroed, so that one accumulator [R, BLOCK_K] serves as many as fit it; the rest
are the business of further programs, side by side in launch order.
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
from .low_rank import Masks
from .numeric import cast, split_left_dot, widen
from .reduce import Sum, reduce_sums


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


@triton.jit(
    do_not_specialize=["M", "threshold", "strip_rows", "projections", "first_pass", "passes"]
)
def _x_pass_kernel(
    x, ds, a, seeds, da, dx, M, K, rank, projections, together, first_pass, passes, ld_x, ld_ds, ld_a, ld_dx,
    da_part_stride, strip_rows, quads_per_row, threshold, inv_keep,
    ONE: tl.constexpr, CHUNKS: tl.constexpr, DROPOUT: tl.constexpr, NEED_DA: tl.constexpr, NEED_DX: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    # Which rows of the stack: `together` whole projections, or a chunk of one that is wider than BLOCK_R.
    this = first_pass + pid % passes
    pid = pid // passes
    first = this // CHUNKS * together  # projection
    count = tl.minimum(together, projections - first)
    within = this % CHUNKS * BLOCK_R
    row = first * rank + within
    height = tl.minimum(count * rank - within, BLOCK_R)

    k_tiles = tl.cdiv(K, BLOCK_K)
    k0 = pid % k_tiles * BLOCK_K
    strip = pid // k_tiles
    columns = k0 + tl.arange(0, BLOCK_K)
    quads = k0 // 4 + tl.arange(0, BLOCK_K // 4)
    ranks = tl.arange(0, BLOCK_R)
    ds += row
    r_k_inside = (ranks[:, None] < height) & (columns[None, :] < K)
    a_tile = 0.0
    da_acc = 0.0
    if NEED_DX:
        a_pointers = a + (row + ranks)[:, None].to(tl.int64) * ld_a + columns[None, :]
        a_tile = cast(
            tl.load(a_pointers, mask=r_k_inside, other=0.0), dx.dtype.element_ty
        )  # [BLOCK_R, BLOCK_K]
    if NEED_DA:
        da_acc = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)

    m_start = strip.to(tl.int64) * strip_rows
    m_end = tl.minimum(m_start + strip_rows, M)
    for m in range(m_start, m_end, BLOCK_M):
        rows = m + tl.arange(0, BLOCK_M).to(tl.int64)
        m_r_inside = (rows[:, None] < m_end) & (ranks[None, :] < height)
        m_k_inside = (rows[:, None] < m_end) & (columns[None, :] < K)
        ds_tile = tl.load(ds + rows[:, None] * ld_ds + ranks[None, :], mask=m_r_inside, other=0.0)
        x_tile = 0.0
        if NEED_DA:
            x_tile = tl.load(
                x + rows[:, None] * ld_x + columns[None, :], mask=m_k_inside, other=0.0
            )
        update = 0.0
        if NEED_DX:
            update = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        if not DROPOUT:
            if NEED_DA:
                da_acc = split_left_dot(ds_tile, x_tile, da_acc, True, PRECISION)
            if NEED_DX:
                update = split_left_dot(ds_tile, a_tile, update, False, PRECISION)
        elif ONE:
            da_acc, update = _masked_dots(
                tl.load(seeds + first), ranks[None, :] < height, x_tile, ds_tile, a_tile, da_acc, update, rows,
                quads, quads_per_row, threshold, NEED_DA, NEED_DX, PRECISION,
            )  # fmt: skip
        else:  # a loop, not unrolled: one projection's mask in registers at a time
            for i in range(count):
                own = (ranks[None, :] >= i * rank) & (ranks[None, :] < (i + 1) * rank)
                da_acc, update = _masked_dots(
                    tl.load(seeds + first + i), own, x_tile, ds_tile, a_tile, da_acc, update, rows,
                    quads, quads_per_row, threshold, NEED_DA, NEED_DX, PRECISION,
                )  # fmt: skip
        if NEED_DX:
            dx_pointers = dx + rows[:, None] * ld_dx + columns[None, :]
            base = widen(tl.load(dx_pointers, mask=m_k_inside, other=0.0))
            total = cast(base + update * tl.cast(inv_keep, tl.float32), dx.dtype.element_ty)
            tl.store(dx_pointers, total, mask=m_k_inside)
    if NEED_DA:
        da += strip.to(tl.int64) * da_part_stride + row.to(tl.int64) * K
        da_pointers = da + ranks[:, None].to(tl.int64) * K + columns[None, :]
        tl.store(da_pointers, da_acc, mask=r_k_inside)


def x_pass(
    x: torch.Tensor | None,
    ds: torch.Tensor,
    lora_As: list[torch.Tensor],
    rank: int,
    dropout_p: float,
    seeds: torch.Tensor | None,
    dx: torch.Tensor | None,
    need_dA: list[bool],
) -> list[torch.Tensor | None]:
    """dA_i [r_i, K] in each A's dtype where wanted; dx [M, K] (None: not wanted) is updated in place.

    x [M, K] (None if no dA is wanted); ds [M, R] fp32: with dropout `rank` columns for every A, else as many as it
    has rows; seeds int64 [P] with dropout.
    """
    ranks = [a.shape[0] for a in lora_As]
    M, K = ds.shape[0], lora_As[0].shape[1]
    dropout = dropout_p > 0.0
    das = [
        torch.empty(a.shape, dtype=a.dtype, device=a.device) if need else None
        for a, need in zip(lora_As, need_dA, strict=True)
    ]
    if M == 0 or K == 0:
        return [None if da is None else da.zero_() for da in das]
    x = row_major(x) if x is not None and any(need_dA) else None
    like = x if x is not None else dx
    if like is None:
        return das

    # Without dropout the stack is one projection.
    projections = len(ranks) if dropout else 1
    starts = [i * rank if dropout else sum(ranks[:i]) for i in range(len(ranks))]
    rank = rank if dropout else sum(ranks)
    ds = row_major(ds)
    a = stack_rows(lora_As, rank if dropout else 0) if dx is not None else None
    vectors = aligned(K, like.stride(0))
    tile = config.x_pass(like.dtype, like.device, dropout, dx is not None, vectors)
    block_r = min(pad_rank(rank * projections), tile.n)
    together = max(1, min(projections, block_r // rank))
    chunks = ceil_div(rank, block_r)
    passes = ceil_div(projections, together) * chunks

    k_tiles, m_tiles = ceil_div(K, tile.k), ceil_div(M, tile.m)
    waves = config.X_PASS_WAVES_DROPOUT if dropout else config.X_PASS_WAVES
    strips = max(1, min(m_tiles, waves * processors(like.device) // k_tiles))
    strip_rows = ceil_div(m_tiles, strips) * tile.m
    strips = ceil_div(M, strip_rows)
    da_parts = None
    if x is not None:
        da_parts = torch.empty(
            strips, rank * projections, K, dtype=torch.float32, device=like.device
        )
    # Passes that update dX in place wait for each other; those that only sum dA share a launch.
    each = passes if dx is None else 1
    for first_pass in range(0, passes, each):
        arguments = dict(
            x=x, ds=ds, a=a, seeds=seeds, da=da_parts, dx=dx, M=M, K=K, rank=rank, projections=projections,
            together=together, first_pass=first_pass, passes=each, ld_x=0 if x is None else x.stride(0),
            ld_ds=ds.stride(0), ld_a=0 if a is None else a.stride(0), ld_dx=0 if dx is None else dx.stride(0),
            da_part_stride=rank * projections * K, strip_rows=strip_rows, quads_per_row=ceil_div(K, 4),
            threshold=threshold_of(dropout_p), inv_keep=1.0 / (1.0 - dropout_p), ONE=together == 1, CHUNKS=chunks,
            DROPOUT=dropout, NEED_DA=x is not None, NEED_DX=dx is not None, PRECISION=precision(like.dtype),
            BLOCK_M=tile.m, BLOCK_K=tile.k, BLOCK_R=block_r,
        )  # fmt: skip
        grid = (k_tiles * strips * each,)
        launch(
            _x_pass_kernel,
            grid,
            arguments,
            like.device,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    if da_parts is not None:
        reduce_sums(
            [
                Sum(da_parts[:, start : start + da.shape[0]], da, 1.0 / (1.0 - dropout_p))
                for da, start in zip(das, starts, strict=True)
                if da is not None
            ]
        )
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
    library: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """(dX [M, K] or None, dA_i [r_i, K] or None) from dys [M, N_i], ds [M, R] fp32 and weights [N_i, K].

    library: the base part of dX is the library's, updated in the pass over X.
    """
    ranks = [a.shape[0] for a in lora_As]
    rank = max(ranks)
    if dropout_p > 0.0 and min(ranks) < rank:  # every projection takes as many columns
        parts = ds.split(ranks, dim=1)
        ds = torch.zeros(ds.shape[0], rank * len(ranks), dtype=torch.float32, device=ds.device)
        for i, part in enumerate(parts):
            ds[:, i * rank : i * rank + part.shape[1]] = part
    dx = None
    if need_dx and library:
        dx = torch.mm(dys[0], weights[0])
        for dy, w in zip(dys[1:], weights[1:], strict=True):
            dx.addmm_(dy, w)
    elif need_dx:
        masks = None if seeds is None else Masks(dropout_p, seeds, rank)
        stack = stack_rows(lora_As, 0 if masks is None else rank)
        transposed = [w.t() for w in weights]
        dx = gemm(dys, transposed, None, ds, stack.t(), 1.0 / (1.0 - dropout_p), masks)
    das = x_pass(x, ds, lora_As, rank, dropout_p, seeds, dx if library else None, need_dA)
    return dx, das
