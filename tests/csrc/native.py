"""`fastlora._C` with tensors in place of pointers, and the same functions in plain torch, in fp64.

Outputs start as NaN, so that an element that a kernel forgets shows.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from fastlora import _C

CODES = {torch.float32: _C.F32, torch.bfloat16: _C.BF16, torch.float16: _C.F16}
M32 = 0xFFFFFFFF


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=dtype)


def strided(tensor: torch.Tensor, extra: int = 0) -> torch.Tensor:
    """A copy whose rows lie `extra` elements apart, beginning at an address that is aligned to its element only."""
    rows, cols = tensor.shape
    memory = torch.full((rows * (cols + extra) + 1,), math.nan, dtype=tensor.dtype)[1:]
    view = memory.as_strided((rows, cols), (cols + extra, 1))
    return view.copy_(tensor)


# ------------------------------------------------------------------------------------------------ the kernels


def philox_mask(rows: int, cols: int, p: float, seed: int, threads: int = 2) -> torch.Tensor:
    """1 where kept, 0 where dropped; the kernel itself writes 1 / (1 - p)."""
    out = torch.full((rows, cols), 7.0)
    _C.philox_mask(out.data_ptr(), rows, cols, p, seed, threads)
    assert ((out == 0) | (out == torch.tensor(1.0 / (1.0 - p), dtype=torch.float32))).all()
    out = (out != 0).to(torch.uint8)
    return out


def shrink(x, factors, seeds=None, p=0.0, threads=2, extra=0):
    """S [M, sum r] of several A [r, K]."""
    rows, cols = x.shape
    total = sum(a.shape[0] for a in factors)
    out = strided(poisoned(rows, total), extra)
    seeds = seeds or [0] * len(factors)
    proj = [(a.data_ptr(), CODES[a.dtype], a.shape[0], seed) for a, seed in zip(factors, seeds)]
    ld = x.stride(0), out.stride(0)
    _C.shrink(
        x.data_ptr(), CODES[x.dtype], ld[0], rows, cols, proj, p, out.data_ptr(), ld[1], threads
    )
    return out


def expand(y, s, b, scale, threads=2):
    rows, cols = y.shape
    _C.expand(
        *(y.data_ptr(), CODES[y.dtype], y.stride(0), rows, cols),
        *(s.data_ptr(), s.stride(0), s.shape[1], b.data_ptr(), CODES[b.dtype], scale, threads),
    )
    return y


def grad_dy(dy, s, b, scale, need_ds=True, need_db=True, threads=2, extra=0):
    rows, cols = dy.shape
    r = b.shape[1]
    ds = strided(poisoned(rows, r), extra) if need_ds else None
    db = poisoned(cols, r) if need_db else None
    _C.grad_dy(
        *(dy.data_ptr(), CODES[dy.dtype], dy.stride(0), rows, cols),
        *(s.data_ptr() if need_db else 0, s.stride(0), r),
        *(b.data_ptr() if need_ds else 0, CODES[b.dtype], scale),
        *((ds.data_ptr(), ds.stride(0)) if need_ds else (0, 0)),
        *(db.data_ptr() if need_db else 0, threads),
    )
    return ds, db


def grad_x(x, ds, factors, dx, seeds=None, p=0.0, need_da=None, threads=2):
    """The dA [r, K] of each factor (None where not needed); `dx` (or None) is added to in place."""
    rows, cols = ds.shape[0], factors[0].shape[1]
    need_da = [True] * len(factors) if need_da is None else need_da
    das = [poisoned(*a.shape) if need else None for a, need in zip(factors, need_da)]
    seeds = seeds or [0] * len(factors)
    proj = [
        (a.data_ptr(), CODES[a.dtype], a.shape[0], seed, 0 if da is None else da.data_ptr())
        for a, seed, da in zip(factors, seeds, das)
    ]
    _C.grad_x(
        *((x.data_ptr(), CODES[x.dtype], x.stride(0)) if any(need_da) else (0, 0, 0)),
        *(rows, cols, ds.data_ptr(), ds.stride(0), proj, p),
        *((dx.data_ptr(), CODES[dx.dtype], dx.stride(0)) if dx is not None else (0, 0, 0)),
        threads,
    )
    return das


def glu_forward(gate, up, activation, threads=2):
    out = torch.full_like(gate, math.nan)
    pointers = gate.data_ptr(), up.data_ptr(), out.data_ptr()
    _C.glu_forward(*pointers, CODES[gate.dtype], gate.numel(), activation, threads)
    return out


def glu_backward(dh, gate, up, activation, need_h=True, threads=2):
    dgate, dup, h = (torch.full_like(gate, math.nan) for _ in range(3))
    pointers = [t.data_ptr() for t in (dh, gate, up, dgate, dup)] + [h.data_ptr() if need_h else 0]
    _C.glu_backward(*pointers, CODES[gate.dtype], gate.numel(), activation, threads)
    return dgate, dup, h


# -------------------------------------------------------------------------------------------------- the truth


def philox_block(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Philox4x32-10 as `triton.language.random.philox_impl` writes it, on Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high_b, low_b = divmod(0xCD9E8D57 * c2, 1 << 32)
        high_a, low_a = divmod(0xD2511F53 * c0, 1 << 32)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & M32, (k1 + 0xBB67AE85) & M32
    return c0, c1, c2, c3


def words(first_row: int, rows: int, cols: int, seed: int) -> torch.Tensor:
    """The 32 random bits of every element of rows `first_row`.. of a matrix with `cols` columns, int64 [rows, cols].

    `philox_block` on arrays.
    """
    blocks = (cols + 3) // 4
    counter = np.arange(first_row * blocks, (first_row + rows) * blocks, dtype=np.uint64)
    high, low = np.uint64(32), np.uint64(M32)
    c0, c1, c2, c3 = counter & low, counter >> high, counter * np.uint64(0), counter * np.uint64(0)
    k0, k1 = seed & M32, (seed >> 32) & M32
    for _ in range(10):
        b, a = np.uint64(0xCD9E8D57) * c2, np.uint64(0xD2511F53) * c0
        c0, c1 = (b >> high) ^ c1 ^ np.uint64(k0), b & low
        c2, c3 = (a >> high) ^ c3 ^ np.uint64(k1), a & low
        k0, k1 = (k0 + 0x9E3779B9) & M32, (k1 + 0xBB67AE85) & M32
    out = np.stack([c0, c1, c2, c3], axis=1).reshape(rows, blocks * 4)[:, :cols]
    return torch.from_numpy(out.astype(np.int64))


def kept(rows: int, cols: int, p: float, seed: int) -> torch.Tensor:
    """bool [rows, cols]: the elements that dropout of probability `p` keeps."""
    if p == 0.0:
        return torch.ones(rows, cols, dtype=torch.bool)
    return words(0, rows, cols, seed) >= math.floor(p * 2**32)


def dropped(x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    """X̂ in fp64."""
    scaled = x.double() / (1 - p)
    return torch.where(kept(*x.shape, p, seed), scaled, torch.zeros_like(scaled))


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest error, relative to the root mean square of what is wanted."""
    if want.numel() == 0:
        return 0.0
    scale = want.double().square().mean().sqrt().clamp_min(1e-30)
    return ((got.double() - want.double()).abs().max() / scale).item()
