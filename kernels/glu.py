"""SwiGLU and GeGLU, forward and backward, one pass each.

    h = act(gate) * up
    dgate = dh * up * act'(gate)      dup = dh * act(gate)      h again, for the down projection's dB and dA

act: silu g * sigmoid(g); gelu g * Phi(g); gelu_tanh 0.5 g (1 + tanh(u)) = g * sigmoid(2u),
u = sqrt(2/pi) (g + 0.044715 g^3). Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202. Computed in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import config
from .launch import ceil_div, check_dtype, launch
from .numeric import cast, widen

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


@triton.jit
def _activation(g, KIND: tl.constexpr):
    """(act(g), act'(g)) in fp32."""
    if KIND == 0:
        sigma = tl.sigmoid(g)
        value = g * sigma
        slope = sigma + value * (1.0 - sigma)
    elif KIND == 1:
        phi = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        value = g * phi
        slope = phi + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)
    else:
        sigma = tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
        value = g * sigma
        slope = sigma + value * (1.0 - sigma) * 1.5957691216057308 * (1.0 + 0.134145 * g * g)
    return value, slope


@triton.jit(do_not_specialize=["rows"])
def _glu_forward_kernel(
    gate, up, h, rows, columns, ld_gate, ld_up, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    tiles = tl.cdiv(columns, BLOCK)
    pid = tl.program_id(0).to(tl.int64)
    row = pid // tiles
    c = pid % tiles * BLOCK + tl.arange(0, BLOCK)
    inside = c < columns
    g = widen(tl.load(gate + row * ld_gate + c, mask=inside, other=0.0))
    u = widen(tl.load(up + row * ld_up + c, mask=inside, other=0.0))
    value, _ = _activation(g, KIND)
    tl.store(h + row * columns + c, cast(value * u, h.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _glu_backward_kernel(
    dh, gate, up, dgate, dup, h, rows, columns, ld_dh, ld_gate, ld_up, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    tiles = tl.cdiv(columns, BLOCK)
    pid = tl.program_id(0).to(tl.int64)
    row = pid // tiles
    c = pid % tiles * BLOCK + tl.arange(0, BLOCK)
    inside = c < columns
    d = widen(tl.load(dh + row * ld_dh + c, mask=inside, other=0.0))
    g = widen(tl.load(gate + row * ld_gate + c, mask=inside, other=0.0))
    u = widen(tl.load(up + row * ld_up + c, mask=inside, other=0.0))
    value, slope = _activation(g, KIND)
    out = row * columns + c
    tl.store(dgate + out, cast(d * u * slope, dgate.dtype.element_ty), mask=inside)
    tl.store(dup + out, cast(d * value, dup.dtype.element_ty), mask=inside)
    tl.store(h + out, cast(value * u, h.dtype.element_ty), mask=inside)


def _rows(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], int, int]:
    """The tensors as [rows, columns] of unit-stride rows, and that shape; one row when all are contiguous."""
    shape = tensors[0].shape
    if all(t.is_contiguous() for t in tensors):
        return [t.view(1, -1) for t in tensors], 1, tensors[0].numel()
    flat = [
        t.reshape(-1, shape[-1]) for t in tensors
    ]  # a copy only where rows are not evenly spaced
    flat = [t if t.stride(1) == 1 else t.contiguous() for t in flat]
    return flat, flat[0].shape[0], shape[-1]


def _kind(activation: str) -> int:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; it takes one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]


def glu_forward(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """h = act(gate) * up, any shape, in gate's dtype; activation "silu", "gelu" or "gelu_tanh"."""
    kind = _kind(activation)
    check_dtype("gate", gate)
    h = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if h.numel() == 0:
        return h
    (gate, up), rows, columns = _rows(gate, up)
    arguments = dict(
        gate=gate, up=up, h=h, rows=rows, columns=columns, ld_gate=gate.stride(0), ld_up=up.stride(0), KIND=kind,
        BLOCK=config.GLU_BLOCK,
    )  # fmt: skip
    grid = (rows * ceil_div(columns, config.GLU_BLOCK),)
    launch(_glu_forward_kernel, grid, arguments, h.device, num_warps=config.GLU_WARPS)
    return h


def glu_backward(
    dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dgate, dup, h) in the inputs' shape and dtype; nothing given is written over."""
    kind = _kind(activation)
    check_dtype("gate", gate)
    dgate, dup, h = (
        torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(3)
    )
    if h.numel() == 0:
        return dgate, dup, h
    (dh, gate, up), rows, columns = _rows(dh, gate, up)
    arguments = dict(
        dh=dh, gate=gate, up=up, dgate=dgate, dup=dup, h=h, rows=rows, columns=columns, ld_dh=dh.stride(0),
        ld_gate=gate.stride(0), ld_up=up.stride(0), KIND=kind, BLOCK=config.GLU_BLOCK,
    )  # fmt: skip
    grid = (rows * ceil_div(columns, config.GLU_BLOCK),)
    launch(_glu_backward_kernel, grid, arguments, h.device, num_warps=config.GLU_WARPS)
    return dgate, dup, h
