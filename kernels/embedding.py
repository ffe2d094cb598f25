"""LoRA on an embedding: gather and expand in one kernel.

    E = A[:, ids]^T      Y = W[ids] + s * E B^T
    dE = s * dY B        dA[:, v] = sum over ids == v of dE (not for padding_idx)        dB = s * dY^T E
    ids [M], W [V, D], A [r, V], B [D, r]

An id outside [0, V) gives a row of NaN rather than another row's values or a stray read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import config
from .grad_dy import grad_dy
from .launch import ceil_div, check_dtype, launch, pad_rank, precision, row_major
from .numeric import cast, dot, widen
from .reduce import Sum, reduce_sums


@triton.jit(do_not_specialize=["M"])
def _embedding_kernel(
    ids, w, a, b, y, M, V, D, rank, ld_w, ld_a, ld_b, ld_y, scale,
    PRECISION: tl.constexpr, RANK_CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    d_tiles = tl.cdiv(D, BLOCK_D)
    rows = (pid // d_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = pid % d_tiles * BLOCK_D + tl.arange(0, BLOCK_D)
    token = tl.load(ids + rows, mask=rows < M, other=0).to(tl.int64)  # [BLOCK_M]
    known = (token >= 0) & (token < V)
    half = w.dtype.element_ty

    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for chunk in tl.static_range(RANK_CHUNKS):
        ranks = chunk * BLOCK_R + tl.arange(0, BLOCK_R)
        a_pointers = a + ranks[None, :].to(tl.int64) * ld_a + token[:, None]
        e = tl.load(
            a_pointers, mask=known[:, None] & (ranks[None, :] < rank), other=0.0
        )  # [BLOCK_M, BLOCK_R]
        b_pointers = b + columns[:, None].to(tl.int64) * ld_b + ranks[None, :]
        b_inside = (columns[:, None] < D) & (ranks[None, :] < rank)
        b_tile = tl.load(b_pointers, mask=b_inside, other=0.0)  # [BLOCK_D, BLOCK_R]
        acc = dot(cast(e, half), tl.trans(cast(b_tile, half)), acc, PRECISION)
    acc *= tl.cast(scale, tl.float32)

    w_pointers = w + token[:, None] * ld_w + columns[None, :]
    base = widen(tl.load(w_pointers, mask=known[:, None] & (columns[None, :] < D), other=0.0))
    acc = tl.where(known[:, None], acc + base, float("nan"))
    inside = (rows[:, None] < M) & (columns[None, :] < D)
    tl.store(
        y + rows[:, None] * ld_y + columns[None, :], cast(acc, y.dtype.element_ty), mask=inside
    )


def embedding_forward(
    input_ids: torch.Tensor,
    weight: torch.Tensor,
    lora_A: torch.Tensor,
    lora_B: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Y [M, D] in weight's dtype: input_ids [M] integer, weight [V, D], lora_A [r, V], lora_B [D, r]."""
    check_dtype("weight", weight)
    M, (V, D), rank = input_ids.shape[0], weight.shape, lora_A.shape[0]
    y = torch.empty(M, D, dtype=weight.dtype, device=weight.device)
    if y.numel() == 0:
        return y
    input_ids = input_ids.contiguous()
    weight, lora_A, lora_B = row_major(weight), row_major(lora_A), row_major(lora_B)
    tile = config.embedding(weight.dtype)
    block_r = min(pad_rank(rank), tile.k)
    arguments = dict(
        ids=input_ids, w=weight, a=lora_A, b=lora_B, y=y, M=M, V=V, D=D, rank=rank, ld_w=weight.stride(0),
        ld_a=lora_A.stride(0), ld_b=lora_B.stride(0), ld_y=D, scale=float(scale), PRECISION=precision(weight.dtype),
        RANK_CHUNKS=ceil_div(rank, block_r), BLOCK_M=tile.m, BLOCK_D=tile.n, BLOCK_R=block_r,
    )  # fmt: skip
    grid = (ceil_div(M, tile.m) * ceil_div(D, tile.n),)
    launch(
        _embedding_kernel, grid, arguments, y.device, num_warps=tile.warps, num_stages=tile.stages
    )
    return y


def embedding_backward(
    dy: torch.Tensor,
    input_ids: torch.Tensor,
    weight: torch.Tensor,
    lora_A: torch.Tensor,
    lora_B: torch.Tensor,
    scale: float,
    padding_idx: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dA [r, V], dB [D, r]) in the parameters' dtypes from dy [M, D].

    The scatter into dA is torch's, which sorts the ids: the same bits on every run.
    """
    rank, V = lora_A.shape
    ids = input_ids.to(torch.int64)
    e = lora_A.index_select(1, ids).t().to(torch.float32)  # [M, r]
    de = torch.empty(ids.shape[0], rank, dtype=torch.float32, device=dy.device)
    sums: list[Sum] = []
    db = grad_dy(dy, e, lora_B, scale, de, True, sums)
    assert db is not None
    reduce_sums(sums)
    pad = -1 if padding_idx is None else padding_idx % V
    da = torch.ops.aten.embedding_dense_backward(de, ids, V, pad, False)  # [V, r]
    return da.t().to(lora_A.dtype).contiguous(), db
