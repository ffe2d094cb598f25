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


@triton.jit
def _expand_tile(
    pid, y, parts_s, s, b, M, N, rank, parts, part_stride, ld_part, ld_s, ld_b, ld_y, scale,
    STORE_S: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
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


@triton.jit(do_not_specialize=["M", "parts", "first"])
def _expand_kernel(
    ys, parts_s, ss, bs, M, Ns, ranks, first, parts, part_stride, ld_part, ld_s, ld_bs, ld_ys, scales,
    STORE_S: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    for i in tl.static_range(len(ys)):
        if (pid >= first[i]) & (pid < first[i + 1]):
            _expand_tile(
                pid - first[i], ys[i], parts_s[i], ss[i], bs[i], M, Ns[i], ranks[i], parts, part_stride, ld_part,
                ld_s, ld_bs[i], ld_ys[i], scales[i], STORE_S, PRECISION, BLOCK_M, BLOCK_N, BLOCK_R,
            )  # fmt: skip


def expand(
    ys: list[torch.Tensor],
    parts: list[torch.Tensor],
    lora_Bs: list[torch.Tensor],
    scalings: list[float],
    ss: list[torch.Tensor],
) -> None:
    """ys[i] [M, N_i] += scalings[i] * S_i lora_Bs[i]^T in place, of all i in one launch.

    S_i = ss[i] [M, r_i] fp32, first summed from parts[i] [P, M, r_i] if P > 1: columns of one S and of its parts.
    """
    M = ys[0].shape[0]
    if M == 0:
        return
    tile = config.expand(ys[0].dtype, ys[0].device)
    lora_Bs = [row_major(b) for b in lora_Bs]
    first = [0]
    for y in ys:
        first.append(first[-1] + ceil_div(M, tile.m) * ceil_div(y.shape[1], tile.n))
    if first[-1] == 0:
        return
    rank = max(b.shape[1] for b in lora_Bs)
    arguments = dict(
        ys=tuple(ys), parts_s=tuple(parts), ss=tuple(ss), bs=tuple(lora_Bs), M=M, Ns=tuple(y.shape[1] for y in ys),
        ranks=tuple(b.shape[1] for b in lora_Bs), first=tuple(first), parts=parts[0].shape[0],
        part_stride=parts[0].stride(0), ld_part=parts[0].stride(1), ld_s=ss[0].stride(0),
        ld_bs=tuple(b.stride(0) for b in lora_Bs), ld_ys=tuple(y.stride(0) for y in ys),
        scales=tuple(float(s) for s in scalings), STORE_S=parts[0].shape[0] > 1, PRECISION=precision(ys[0].dtype),
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_R=min(pad_rank(rank), tile.k),
    )  # fmt: skip
    launch(
        _expand_kernel,
        (first[-1],),
        arguments,
        ys[0].device,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
