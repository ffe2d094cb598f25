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

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import config
from .dropout import keep_mask, threshold_of
from .launch import ceil_div, launch, pad_rank, precision, processors, row_major, stack_rows
from .linear import gemm
from .numeric import cast, split_left_dot
from .reduce import reduce_parts


@triton.jit(do_not_specialize=["M", "threshold", "strip_rows"])
def _x_pass_kernel(
    x, ds, a, seeds, da, dx, M, K, rank, ld_x, ld_ds, ld_a, ld_dx, da_part_stride, strip_rows, quads_per_row,
    threshold, inv_keep,
    SEEDS: tl.constexpr, BOUNDS: tl.constexpr, DROPOUT: tl.constexpr, NEED_DA: tl.constexpr,
    NEED_DX: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    k_tiles = tl.cdiv(K, BLOCK_K)
    k0 = pid % k_tiles * BLOCK_K
    strip = pid // k_tiles
    columns = k0 + tl.arange(0, BLOCK_K)
    ranks = tl.arange(0, BLOCK_R)
    r_k_inside = (ranks[:, None] < rank) & (columns[None, :] < K)
    if NEED_DX:
        a_pointers = a + ranks[:, None].to(tl.int64) * ld_a + columns[None, :]
        a_tile = cast(tl.load(a_pointers, mask=r_k_inside, other=0.0), dx.dtype.element_ty)  # [BLOCK_R, BLOCK_K]
    if NEED_DA:
        da_acc = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)

    m_start = strip.to(tl.int64) * strip_rows
    m_end = tl.minimum(m_start + strip_rows, M)
    for m in range(m_start, m_end, BLOCK_M):
        rows = m + tl.arange(0, BLOCK_M).to(tl.int64)
        m_r_inside = (rows[:, None] < m_end) & (ranks[None, :] < rank)
        m_k_inside = (rows[:, None] < m_end) & (columns[None, :] < K)
        ds_tile = tl.load(ds + rows[:, None] * ld_ds + ranks[None, :], mask=m_r_inside, other=0.0)  # [BLOCK_M, BLOCK_R]
        if NEED_DA:
            x_tile = tl.load(x + rows[:, None] * ld_x + columns[None, :], mask=m_k_inside, other=0.0)
        if DROPOUT:
            if NEED_DX:
                update = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
            for i in tl.static_range(len(SEEDS)):
                quads = k0 // 4 + tl.arange(0, BLOCK_K // 4)
                keep = keep_mask(tl.load(seeds + SEEDS[i]), rows, quads, quads_per_row, threshold)
                own = (ranks[None, :] >= BOUNDS[i]) & (ranks[None, :] < BOUNDS[i + 1])
                ds_own = tl.where(own, ds_tile, tl.zeros_like(ds_tile))
                if NEED_DA:
                    x_kept = tl.where(keep, x_tile, tl.zeros_like(x_tile))
                    da_acc = split_left_dot(ds_own, x_kept, da_acc, True, PRECISION)
                if NEED_DX:
                    low = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
                    low = split_left_dot(ds_own, a_tile, low, False, PRECISION)
                    update += tl.where(keep, low, 0.0)
            if NEED_DX:
                dx_pointers = dx + rows[:, None] * ld_dx + columns[None, :]
                base = tl.load(dx_pointers, mask=m_k_inside, other=0.0).to(tl.float32)
                tl.store(dx_pointers, cast(base + update * tl.cast(inv_keep, tl.float32), dx.dtype.element_ty), mask=m_k_inside)
        else:
            da_acc = split_left_dot(ds_tile, x_tile, da_acc, True, PRECISION)
    if NEED_DA:
        da += strip.to(tl.int64) * da_part_stride
        da_pointers = da + ranks[:, None].to(tl.int64) * K + columns[None, :]
        tl.store(da_pointers, da_acc, mask=r_k_inside)


@dataclass(frozen=True)
class _Segment:
    """Rows [start, stop) of the stacked A's that belong to one projection and fit one pass."""

    projection: int
    start: int
    stop: int


def _passes(ranks: list[int], widest: int) -> list[list[_Segment]]:
    """Cut the stack of ranks into passes of at most `widest` rows; a projection is split only if it is wider."""
    passes: list[list[_Segment]] = [[]]
    offset = 0
    for projection, rank in enumerate(ranks):
        for start in range(offset, offset + rank, widest):
            segment = _Segment(projection, start, min(start + widest, offset + rank))
            if passes[-1] and segment.stop - passes[-1][0].start > widest:
                passes.append([])
            passes[-1].append(segment)
        offset += rank
    return passes


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
    K = lora_As[0].shape[1]
    M = ds.shape[0]
    dropout = dropout_p > 0.0
    dx = dx if dropout else None
    das = [torch.empty_like(a, memory_format=torch.contiguous_format) if n else None for a, n in zip(lora_As, need_dA, strict=True)]
    if M == 0 or K == 0:
        return [None if da is None else da.zero_() for da in das]
    if not any(need_dA) and dx is None:
        return das
    ds = row_major(ds)
    x = row_major(x) if x is not None and any(need_dA) else None
    like = x if x is not None else dx
    assert like is not None
    a = stack_rows(lora_As) if dx is not None else None
    tile = config.x_pass(like.dtype, like.device, sum(ranks), dropout)

    k_tiles, m_tiles = ceil_div(K, tile.k), ceil_div(M, tile.m)
    strips = max(1, min(m_tiles, config.WAVES * processors(like.device) // k_tiles))
    strip_rows = ceil_div(m_tiles, strips) * tile.m
    strips = ceil_div(M, strip_rows)
    da_parts = (
        torch.empty(strips, sum(ranks), K, dtype=torch.float32, device=like.device) if x is not None else None
    )
    for segments in _passes(ranks, tile.n):
        r0, r1 = segments[0].start, segments[-1].stop
        if dx is None and not any(need_dA[g.projection] for g in segments):
            continue
        bounds = tuple(g.start - r0 for g in segments) + (r1 - r0,)
        arguments = dict(
            x=x, ds=ds[:, r0:r1], a=None if a is None else a[r0:r1], seeds=seeds,
            da=None if da_parts is None else da_parts[:, r0:r1], dx=dx, M=M, K=K, rank=r1 - r0,
            ld_x=0 if x is None else x.stride(0), ld_ds=ds.stride(0), ld_a=0 if a is None else a.stride(0),
            ld_dx=0 if dx is None else dx.stride(0), da_part_stride=sum(ranks) * K, strip_rows=strip_rows,
            quads_per_row=ceil_div(K, 4), threshold=threshold_of(dropout_p), inv_keep=1.0 / (1.0 - dropout_p),
            SEEDS=tuple(g.projection for g in segments), BOUNDS=bounds, DROPOUT=dropout, NEED_DA=x is not None,
            NEED_DX=dx is not None, PRECISION=precision(like.dtype), BLOCK_M=tile.m, BLOCK_K=tile.k,
            BLOCK_R=min(pad_rank(r1 - r0), tile.n),
        )  # fmt: skip
        launch(
            _x_pass_kernel, (k_tiles * strips,), arguments, like.device, num_warps=tile.warps, num_stages=tile.stages
        )
    offset = 0
    for da, rank in zip(das, ranks, strict=True):
        if da is not None:
            reduce_parts(da_parts[:, offset : offset + rank], da, 1.0 / (1.0 - dropout_p))
        offset += rank
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
        dx = gemm(dys, transposed, None, ds if fused else None, stack_rows(lora_As).t() if fused else None)
    return dx, x_pass(x, ds, lora_As, dropout_p, seeds, dx, need_dA)
