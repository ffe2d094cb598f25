"""Arithmetic that must mean the same compiled and interpreted.

Triton's interpreter keeps bfloat16 as raw 16-bit integers: a dot on them multiplies the integers, and a cast to
bfloat16 truncates. Under the interpreter (a compile-time constant, so that compiled code pays nothing) operands
are widened before a dot and rounded to nearest even before the cast.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def widen(x):
    """x (any float type) in fp32."""
    # Exact either way, and many times quicker than the interpreter's own cast.
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b in fp32."""
    if INTERPRETED:
        if a.dtype == tl.bfloat16:
            a = widen(a)
        if b.dtype == tl.bfloat16:
            b = widen(b)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """x (any float type) as `dtype`, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16 and x.dtype != tl.bfloat16:
        x = x.to(tl.float32)
        bits = x.to(tl.uint32, bitcast=True)
        is_nan = x != x
        bits = tl.where(is_nan, bits | 0x400000, bits + 0x7FFF + ((bits >> 16) & 1))
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def _rest(x, high):
    """What rounding took from x; nothing where it overflowed, so that the inf stays one (inf - inf is NaN)."""
    return tl.where(tl.abs(high) < float("inf"), x - high, 0.0)


@triton.jit
def split_dot(a, b, acc, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a @ b with fp32 b taken in a's dtype: rounded, or with SPLIT as its rounding and the rest of it.

    Two half-precision dots keep 16 bits of b in bfloat16 (22 in float16) where one keeps 8 (11). Against the pass
    over a they cost next to nothing, and S and dS lose nothing on their way, as they do in an unfused path.
    """
    high = cast(b, a.dtype)
    acc = dot(a, high, acc, PRECISION)
    if SPLIT and a.dtype != tl.float32:
        acc = dot(a, cast(_rest(b, widen(high)), a.dtype), acc, PRECISION)
    return acc


@triton.jit
def split_left_dot(a, b, acc, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a @ b (a^T @ b if TRANSPOSED) with fp32 a taken in b's dtype, always split."""
    high = cast(a, b.dtype)
    acc = dot(tl.trans(high) if TRANSPOSED else high, b, acc, PRECISION)
    if b.dtype != tl.float32:
        low = cast(_rest(a, widen(high)), b.dtype)
        acc = dot(tl.trans(low) if TRANSPOSED else low, b, acc, PRECISION)
    return acc
