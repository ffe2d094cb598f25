"""One GEMM with a low-rank update in its accumulator, for the forward and for dX.

    Y = sum_i X_i W_i^T + bias + scale * S B^T
    dX = sum_i dY_i W_i + scale * sum_i mask_i * (dS_i A_i)
    X_i [M, K_i], W_i [N, K_i], bias [N], S [M, R] fp32, B [N, R]  ->  Y [M, N], accumulated in fp32

Forward: one X, B is LoRA's B. dX: X_i are the dY_i, W_i the transposed weights, S is dS, B the stacked A's
transposed: the gradients of all projections meet in one accumulator and dX is written once.
Without a mask the update is added after the main loop as a few more steps of K. With one it is where the
accumulator starts: masked in place, so that no second accumulator lives beside it, and no pass over dX is needed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from . import config
from .dispatch import Problem, bucket, choose
from .dropout import threshold_of
from .launch import aligned, ceil_div, launch, matrix_layout, pad_rank, precision, row_major
from .low_rank import Masks, low_rank, masked_low_rank
from .numeric import cast, dot, widen


@triton.jit
def tile_of(pid, m_tiles, n_tiles, GROUP_M: tl.constexpr):
    """(row, column) of a tile: GROUP_M rows of tiles walk N together, so that their X and W tiles meet in L2."""
    first_m = pid // (GROUP_M * n_tiles) * GROUP_M
    group_m = tl.minimum(m_tiles - first_m, GROUP_M)
    return first_m + pid % (GROUP_M * n_tiles) % group_m, pid % (GROUP_M * n_tiles) // group_m


@triton.jit(do_not_specialize=["M", "projections", "threshold"])
def _gemm_kernel(
    xs, ws, bias, s, b, seeds, y, M, N, Ks, ld_xs, ld_ws, ld_s, ld_b, ld_y, projections, rank, scale,
    quads_per_row, threshold,
    W_TRANS: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LORA: tl.constexpr,
    DROPOUT: tl.constexpr, ONE: tl.constexpr, B_TRANS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    m_tiles = tl.cdiv(M, BLOCK_M)
    n_tiles = tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = tile_of(tl.program_id(0), m_tiles, n_tiles, GROUP_M)
    rows = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe_rows = tl.minimum(rows, M - 1)
    safe_columns = tl.minimum(columns, N - 1)
    ks = tl.arange(0, BLOCK_K)
    half = xs[0].dtype.element_ty

    if DROPOUT:
        acc = masked_low_rank(
            s, b, seeds, rows, M, columns, N, pid_n * BLOCK_N, projections, rank, ld_s, ld_b, scale,
            quads_per_row, threshold, half, ONE, B_TRANS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_R,
        )  # fmt: skip
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in tl.static_range(len(xs)):
        K = Ks[i]
        x_pointers = xs[i] + safe_rows[:, None] * ld_xs[i] + ks[None, :]
        if W_TRANS[i]:  # stored [K, N]
            w_pointers = ws[i] + ks[:, None].to(tl.int64) * ld_ws[i] + columns[None, :]
            w_step = tl.cast(BLOCK_K, tl.int64) * ld_ws[i]
        else:  # stored [N, K]
            w_pointers = ws[i] + safe_columns[:, None] * ld_ws[i] + ks[None, :]
            w_step = tl.cast(BLOCK_K, tl.int64)
        for k in range(0, K, BLOCK_K):
            if EVEN_K:
                x_tile = tl.load(x_pointers)  # [BLOCK_M, BLOCK_K]
            else:
                x_tile = tl.load(x_pointers, mask=ks[None, :] < K - k, other=0.0)
            if W_TRANS[i]:
                if EVEN_K:
                    w_tile = tl.load(
                        w_pointers, mask=columns[None, :] < N, other=0.0
                    )  # [BLOCK_K, BLOCK_N]
                else:
                    inside = (ks[:, None] < K - k) & (columns[None, :] < N)
                    w_tile = tl.load(w_pointers, mask=inside, other=0.0)
            else:
                if EVEN_K:
                    w_tile = tl.trans(tl.load(w_pointers))
                else:
                    w_tile = tl.trans(tl.load(w_pointers, mask=ks[None, :] < K - k, other=0.0))
            acc = dot(x_tile, w_tile, acc, PRECISION)
            x_pointers += BLOCK_K
            w_pointers += w_step

    if HAS_LORA and not DROPOUT:
        acc = low_rank(
            acc, s, b, rows, M, columns, N, 0, rank, ld_s, ld_b, scale, half, B_TRANS, PRECISION, BLOCK_R
        )  # fmt: skip
    if HAS_BIAS:
        acc += widen(tl.load(bias + columns, mask=columns < N, other=0.0))[None, :]
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(
        y + rows[:, None] * ld_y + columns[None, :], cast(acc, y.dtype.element_ty), mask=inside
    )


def gemm(
    xs: list[torch.Tensor],
    weights: list[torch.Tensor],
    bias: torch.Tensor | None,
    s: torch.Tensor | None,
    b: torch.Tensor | None,
    scale: float = 1.0,
    masks: Masks | None = None,
) -> torch.Tensor:
    """Y [M, N] in xs[0]'s dtype; weights [N, K_i] and b [N, R] row-major or transposed views; s [M, R] fp32."""
    x = xs[0]
    M, N = x.shape[0], weights[0].shape[0]
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    xs = [row_major(t) for t in xs]
    layouts = [matrix_layout(w) for w in weights]
    lds = [*(t.stride(0) for t in xs), *(ld for _, ld, _ in layouts)]
    vectors = aligned(*(t.shape[1] for t in xs), *lds)
    rank, ld_s, ld_b, b_trans = 0, 0, 0, False
    if s is not None and b is not None:
        rank = b.shape[1] if masks is None else masks.rank
        b, ld_b, b_trans = matrix_layout(b)
        s = row_major(s)
        ld_s = s.stride(0)
    count = 1 if masks is None else masks.seeds.shape[0]
    shared: dict[str, Any] = dict(
        xs=tuple(xs), ws=tuple(w for w, _, _ in layouts), bias=bias, s=s, b=b,
        seeds=None if masks is None else masks.seeds, y=y, M=M, N=N, Ks=tuple(t.shape[1] for t in xs),
        ld_xs=tuple(t.stride(0) for t in xs), ld_ws=tuple(ld for _, ld, _ in layouts), ld_s=ld_s, ld_b=ld_b,
        ld_y=N, projections=count, rank=rank, scale=float(scale), quads_per_row=ceil_div(N, 4),
        threshold=0 if masks is None else threshold_of(masks.p),
        W_TRANS=tuple(trans for _, _, trans in layouts), HAS_BIAS=bias is not None, HAS_LORA=rank > 0,
        DROPOUT=masks is not None, ONE=count == 1, B_TRANS=b_trans, PRECISION=precision(x.dtype),
        BLOCK_R=min(pad_rank(rank), config.gemm_ranks(x.device)), GROUP_M=config.GROUP_M,
    )  # fmt: skip

    def run(name: str) -> torch.Tensor:
        tile = config.GEMM[name]
        arguments = shared | dict(
            EVEN_K=all(t.shape[1] % tile.k == 0 for t in xs), BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k,
        )  # fmt: skip
        grid = (ceil_div(M, tile.m) * ceil_div(N, tile.n),)
        launch(
            _gemm_kernel, grid, arguments, x.device, num_warps=tile.warps, num_stages=tile.stages
        )
        return y

    names = config.gemm(x.dtype, x.device, M, N, vectors, 0 if masks is None else count)
    detail = f"{''.join('t' if trans else 'n' for _, _, trans in layouts)}{' odd' * (not vectors)}"
    problem = Problem(
        "gemm", x.dtype, bucket(M), N, shared["Ks"], (rank,), masks is not None, f"{detail} {count}"
    )  # fmt: skip
    return run(choose(problem, x.device, names, run))


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    s: torch.Tensor,
    lora_B: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Y = X W^T + bias + scaling * S B^T: x [M, K], weight [N, K], s [M, r] fp32, lora_B [N, r] -> [M, N]."""
    return gemm([x], [weight], bias, s, lora_B, scaling)
