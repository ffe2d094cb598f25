"""Tile shapes, by shape and part, in one place, each with the reason for its numbers.

Every row below is compiled for sm_80 and sm_90 by the tests: no spills, shared memory within the part's limit.
A `Tile` names the sizes of one program: m rows of tokens, n columns of the output, k steps of the reduction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .launch import INTERPRETED, capability, ceil_div, precision, processors


@dataclass(frozen=True)
class Tile:
    """Sizes of one program's tile, its warps and its pipeline stages."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# Programs of a shrink a multiprocessor should find: two resident ones hide each other's latency, the rest evens out
# the tail.
SHRINK_WAVES = 4

# A strip of rows costs a partial sum of dB (or dA) that is written and read once more. Below all of the processors a
# streaming pass already saturates memory: 3/4 of them need 50 GB/s each on an H200, half of what one can take.
GRAD_DY_FILL = 0.75
X_PASS_WAVES, X_PASS_WAVES_DROPOUT = (
    1,
    2,
)  # under masks the pass is bound by Philox, and wants the warps

# Tile rows that walk N together: 8 * 128 rows of X and 8 tiles of W are 4 MiB at K = 4096, well inside any L2.
GROUP_M = 8

# Ranks a step of the GEMM's low-rank update: 32 would spill beside a 128 x 256 accumulator.
GEMM_RANKS = 16

MASK = Tile(32, 64, 64, 4, 1)

# Reduction of partials: memory bound; 1024 floats a program are 8 a thread, two 16-byte loads in flight each.
REDUCE_BLOCK, REDUCE_WARPS = 1024, 4

# GLU: memory bound; 1024 elements over 128 threads are one 16-byte load a tensor in half types.
GLU_BLOCK, GLU_WARPS = 1024, 4

GEMM = {
    # The largest accumulator that two warp groups hold (128 registers a thread): the most reuse a byte of shared
    # memory; three stages are 144 KiB of sm_90's 227.
    "half_90_wide": Tile(128, 256, 64, 8, 3),
    # Where 128 x 256 leaves processors idle, and everywhere on sm_80, where 128 x 256 spills: 64 registers a thread.
    "half_square": Tile(128, 128, 64, 8, 3),
    # Updates of several projections, each under its own mask, are a second tile beside the accumulator: half of it.
    "half_masks": Tile(64, 128, 64, 8, 3),
    # Up to 64 tokens: one warp group's row of tiles, narrow in N so that more processors read W.
    "half_64": Tile(64, 64, 128, 4, 3),
    # A few tokens (decoding): W is read once, and that is all the time there is. 16 rows are the least `tl.dot` takes.
    "half_16": Tile(16, 64, 128, 4, 4),
    # Rows that no 16-byte load fits: every element is a load and a register, so that tiles must be small.
    "half_odd": Tile(64, 64, 32, 4, 2),
    # fp32 on CUDA cores: operands live in registers beside the accumulators, and 4 warps spill on sm_90.
    "ieee": Tile(64, 64, 32, 8, 2),
    "ieee_16": Tile(16, 64, 64, 8, 2),
    # fp32 rounded to TF32 in tensor cores: as half_square with twice the bytes an element.
    "tf32": Tile(128, 128, 32, 8, 3),
    "tf32_16": Tile(16, 64, 64, 4, 3),
    # The interpreter's cost is the number of programs and steps, about 1 ms an operation: wide tiles.
    "interpreted": Tile(64, 128, 128, 4, 1),
}


def gemm(
    dtype: torch.dtype, device: torch.device, M: int, N: int, vectors: bool, masks: int
) -> tuple[str, ...]:
    """Names in GEMM that may serve an output [M, N], the likeliest first.

    masks: how many of dropout's masks the accumulator starts under: their words leave no room for the widest tile.
    """
    part = capability(device)
    if part == INTERPRETED:
        return ("interpreted",)
    if dtype == torch.float32:
        kind = precision(dtype)
        return (kind, f"{kind}_16") if M > 16 else (f"{kind}_16", kind)
    if not vectors:
        return ("half_odd",)
    if M <= 16:
        return "half_16", "half_64"
    if M <= 64:
        return "half_64", "half_square"
    if masks > 1:
        return "half_masks", "half_64"
    if part >= (9, 0) and not masks:
        wide = ceil_div(M, 128) * ceil_div(N, 256) >= processors(device)
        return ("half_90_wide", "half_square") if wide else ("half_square", "half_90_wide")
    return "half_square", "half_64"


def gemm_ranks(device: torch.device) -> int:
    """Ranks a step of the GEMM's low-rank update."""
    return 64 if capability(device) == INTERPRETED else GEMM_RANKS


# k bounds the ranks of a step. Memory bound: a program reads and writes 128 contiguous elements of 32 rows at once.
EXPAND = {
    "half": Tile(32, 128, 64, 4, 1),
    "fp32": Tile(32, 64, 32, 4, 1),
    "interpreted": Tile(64, 128, 64, 4, 1),
}


def expand(dtype: torch.dtype, device: torch.device) -> Tile:
    """Tile of the in-place expand."""
    if capability(device) == INTERPRETED:
        return EXPAND["interpreted"]
    return EXPAND["fp32" if dtype == torch.float32 else "half"]


# n bounds the ranks of one program; wider stacks run as more programs.
SHRINK = {
    # Memory bound: 8 KiB of X a stage, three stages in flight, four programs a multiprocessor at 16 ranks.
    "half": Tile(64, 64, 64, 4, 4),
    # fp32 A of 64 ranks is twice the bytes of 64 rows of X: 128 rows a program halve what it takes from L2.
    "half_64": Tile(128, 64, 64, 8, 3),
    # With masks it is bound by Philox instead: 8 warps share the rounds, whose words take 64 registers a thread at 4.
    "half_90_dropout": Tile(64, 64, 128, 8, 3),
    # Before wgmma operands pass through registers: a quarter of the tile, or it spills at 64 ranks.
    "half_80_dropout": Tile(32, 64, 64, 8, 3),
    "half_16": Tile(16, 64, 128, 4, 4),
    "half_odd": Tile(64, 64, 64, 8, 2),
    "fp32": Tile(32, 64, 64, 8, 2),
    "interpreted": Tile(64, 64, 256, 4, 1),
}


def shrink(
    dtype: torch.dtype, device: torch.device, M: int, rank: int, dropout: bool, vectors: bool
) -> Tile:
    """Tile of S = X A^T."""
    part = capability(device)
    if part == INTERPRETED:
        return SHRINK["interpreted"]
    if dtype == torch.float32:
        return SHRINK["fp32"]
    if not vectors:
        return SHRINK["half_odd"]
    if M <= 16 and not dropout:
        return SHRINK["half_16"]
    if dropout:
        return SHRINK["half_90_dropout" if part >= (9, 0) else "half_80_dropout"]
    return SHRINK["half_64" if rank > 32 and M >= 1024 else "half"]


# k bounds the ranks of one program.
GRAD_DY = {
    # dY is used twice from shared memory; wide in N, because the workspace of dS is a row for every tile of columns.
    "half_90": Tile(64, 256, 32, 8, 3),
    "half_90_64": Tile(64, 128, 64, 8, 3),
    # Without wgmma dY passes through registers, once plain and once transposed: a quarter of the tile.
    "half_80": Tile(32, 128, 32, 8, 3),
    "half_80_64": Tile(32, 64, 64, 8, 3),
    "half_odd": Tile(64, 64, 32, 8, 2),
    "fp32": Tile(32, 64, 32, 8, 2),
    "interpreted": Tile(64, 128, 64, 4, 1),
}


def grad_dy(dtype: torch.dtype, device: torch.device, rank: int, vectors: bool) -> Tile:
    """Tile of the dY pass."""
    part = capability(device)
    if part == INTERPRETED:
        return GRAD_DY["interpreted"]
    if dtype == torch.float32:
        return GRAD_DY["fp32"]
    if not vectors:
        return GRAD_DY["half_odd"]
    return GRAD_DY[f"half_{90 if part >= (9, 0) else 80}{'_64' if rank > 32 else ''}"]


# n bounds the stacked ranks of one pass.
X_PASS = {
    # dA of 64 ranks by 128 columns is 64 registers a thread, and X streams at 16 KiB a stage.
    "half_90": Tile(64, 64, 128, 4, 3),
    "half_80": Tile(64, 64, 64, 4, 3),
    # Mask, Philox words, low-rank product and its sum are four tiles of [m, k] in registers: 64 x 128 spills.
    "half_90_dropout": Tile(64, 64, 64, 8, 2),
    "half_80_dropout": Tile(32, 64, 64, 8, 2),  # and so does 64 x 64 without wgmma
    # Beside a library's GEMM the update of dX and its A are two more tiles.
    "half_90_update": Tile(64, 64, 64, 8, 2),
    "half_80_update": Tile(64, 64, 32, 8, 2),
    "half_odd": Tile(32, 64, 64, 8, 2),
    "fp32": Tile(32, 64, 64, 8, 2),
    "fp32_dropout": Tile(
        32, 32, 32, 8, 2
    ),  # as half_90_dropout, and operands of FMAs in registers too
    "interpreted": Tile(64, 64, 256, 4, 1),
}


def x_pass(
    dtype: torch.dtype, device: torch.device, dropout: bool, update: bool, vectors: bool
) -> Tile:
    """Tile of the X pass of the backward; update: it updates dX too."""
    part = capability(device)
    if part == INTERPRETED:
        return X_PASS["interpreted"]
    if dtype == torch.float32:
        return X_PASS["fp32_dropout" if dropout else "fp32"]
    if not vectors:
        return X_PASS["half_odd"]
    kind = "_dropout" if dropout else "_update" if update else ""
    return X_PASS[f"half_{90 if part >= (9, 0) else 80}{kind}"]


# k bounds the ranks of one step.
EMBEDDING = {
    "half": Tile(32, 64, 64, 4, 1),
    "fp32": Tile(32, 64, 32, 4, 1),
}


def embedding(dtype: torch.dtype) -> Tile:
    """Tile of the embedding's gather and expand."""
    return EMBEDDING["fp32" if dtype == torch.float32 else "half"]
