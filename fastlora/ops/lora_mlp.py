"""A gated MLP whose three linear layers carry LoRA, as one operation.

    G, U = X W_gᵀ + s_g X̂_g A_gᵀ B_gᵀ,  X W_uᵀ + s_u X̂_u A_uᵀ B_uᵀ     (biases left out)
    H    = act(G) ⊙ U                                                  never saved
    Y    = H W_dᵀ + s_d Ĥ A_dᵀ B_dᵀ

Saved for backward: X, G, U and the two S. H is recomputed in the pass over G and U that makes their
gradients anyhow. GLU variants: Shazeer, arXiv 2002.05202, section 2.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _library, reference
from ._common import (
    as_rows,
    bias_gradient,
    differentiable_backward,
    differentiate,
    in_dtype,
    refuse_second_order,
    shaped,
    transformed,
    without_autocast,
)


class LoRAMLP(torch.autograd.Function):
    """The operation above. Parameters come in the order gate, up, down within each kind."""

    @staticmethod
    def forward(
        ctx: Any,
        backend: str,
        activation: str,
        dropout_p: float,
        seeds: Tensor | None,  # int64 [3]
        scalings: tuple[float, float, float],
        x: Tensor,  # [..., K]
        *parameters: Tensor,  # 3 weights, 3 biases (or None), 3 lora_A, 3 lora_B
    ) -> Tensor:
        weights, biases, lora_As, lora_Bs = _by_kind(parameters)
        impl = _library.implementation(backend)
        casted, casted_biases = in_dtype(weights, x.dtype), in_dtype(biases, x.dtype)
        (gate, up), s_in = impl.projections_forward(
            as_rows(x),
            casted[:2],
            lora_As[:2],
            lora_Bs[:2],
            scalings[:2],
            casted_biases[:2],
            dropout_p,
            None if seeds is None else seeds[:2],
        )
        (y,), s_down = impl.projections_forward(
            impl.glu_forward(gate, up, activation),
            casted[2:],
            lora_As[2:],
            lora_Bs[2:],
            scalings[2:],
            casted_biases[2:],
            dropout_p,
            None if seeds is None else seeds[2:],
        )
        need_x, needs = ctx.needs_input_grad[5], ctx.needs_input_grad[6:]
        need_bias, need_A, need_B = needs[3:6], needs[6:9], needs[9:]
        below = need_x or any(need_A[:2]) or any(need_B[:2]) or any(need_bias[:2])
        save_gate = below or need_A[2]
        ctx.save_for_backward(
            x if any(need_A[:2]) else None,
            gate if save_gate else None,
            up if save_gate else None,
            s_in if any(need_B[:2]) else None,
            s_down if need_B[2] else None,
            seeds,
            *parameters,
        )
        ctx.backend, ctx.activation, ctx.dropout_p, ctx.scalings = (
            backend,
            activation,
            dropout_p,
            scalings,
        )
        ctx.x_shape, ctx.below = x.shape, below
        return shaped(y, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, s_in, s_down, seeds, *parameters = ctx.saved_tensors
        if differentiable_backward((dy,)):
            if x is None:
                refuse_second_order("lora_mlp")
            plain = functools.partial(_plain, ctx.activation, ctx.dropout_p, seeds, ctx.scalings)
            with without_autocast(dy.device.type):
                found = differentiate(plain, (x, *parameters), ctx.needs_input_grad[5:], (dy,))
            return None, None, None, None, None, *found
        need_x, needs = ctx.needs_input_grad[5], ctx.needs_input_grad[6:]
        with without_autocast(dy.device.type):
            dx, gradients = _mlp_backward(
                ctx, as_rows(dy), x, gate, up, s_in, s_down, seeds, parameters, need_x, needs
            )
        if dx is not None:
            dx = dx.view(ctx.x_shape)
        return None, None, None, None, None, dx, *gradients


def _by_kind(parameters: Sequence[Tensor]) -> tuple[Sequence[Tensor], ...]:
    return parameters[:3], parameters[3:6], parameters[6:9], parameters[9:]


def _plain(
    activation: str,
    dropout_p: float,
    seeds: Tensor | None,
    scalings: Sequence[float],
    x: Tensor,
    *parameters: Tensor,
) -> tuple[Tensor]:
    """The operation in plain differentiable ops."""
    weights, biases, lora_As, lora_Bs = _by_kind(parameters)
    weights, biases = in_dtype(weights, x.dtype), in_dtype(biases, x.dtype)

    def projections(h: Tensor, which: slice) -> list[Tensor]:
        ys, _ = reference.projections_forward(
            h,
            weights[which],
            lora_As[which],
            lora_Bs[which],
            scalings[which],
            biases[which],
            dropout_p,
            None if seeds is None else seeds[which],
        )
        return ys

    gate, up = projections(as_rows(x), slice(0, 2))
    (y,) = projections(reference.glu_forward(gate, up, activation), slice(2, 3))
    return (y.reshape(*x.shape[:-1], y.shape[1]),)


def _mlp_backward(
    ctx: Any,
    dy: Tensor,
    x: Tensor | None,
    gate: Tensor | None,
    up: Tensor | None,
    s_in: Tensor | None,
    s_down: Tensor | None,
    seeds: Tensor | None,
    parameters: Sequence[Tensor],
    need_x: bool,
    needs: Sequence[bool],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """dX and the gradients of the twelve parameters (the three weights' are always None)."""
    weights, biases, lora_As, lora_Bs = _by_kind(parameters)
    need_bias, need_A, need_B = needs[3:6], needs[6:9], needs[9:]
    impl = _library.implementation(ctx.backend)
    casted = in_dtype(weights, dy.dtype)
    down = (casted[2:], lora_As[2:], lora_Bs[2:], ctx.scalings[2:], ctx.dropout_p)
    seeds_in = None if seeds is None else seeds[:2]
    seeds_down = None if seeds is None else seeds[2:]

    # H is needed only for dA of the down projection, and the pass over G and U makes it on the way;
    # so dH comes first, without it.
    dh, _, (dB_down,) = impl.projections_backward(
        [dy],
        None,
        s_down,
        *down,
        seeds_down,
        need_dx=ctx.below,
        need_dA=[False],
        need_dB=need_B[2:],
    )
    dA_down = None
    dx, dAs, dBs = None, [None, None], [None, None]
    d_biases: list[Tensor | None] = [None, None, None]
    if need_bias[2]:
        d_biases[2] = bias_gradient(dy, biases[2])
    if ctx.below:
        dgate, dup, h = impl.glu_backward(dh, gate, up, ctx.activation)
        dx, dAs, dBs = impl.projections_backward(
            [dgate, dup],
            None if x is None else as_rows(x),
            s_in,
            casted[:2],
            lora_As[:2],
            lora_Bs[:2],
            ctx.scalings[:2],
            ctx.dropout_p,
            seeds_in,
            need_dx=need_x,
            need_dA=need_A[:2],
            need_dB=need_B[:2],
        )
        for i, grad in enumerate((dgate, dup)):
            if need_bias[i]:
                d_biases[i] = bias_gradient(grad, biases[i])
    elif need_A[2]:
        h = impl.glu_forward(gate, up, ctx.activation)
    if need_A[2]:
        _, (dA_down,), _ = impl.projections_backward(
            [dy], h, None, *down, seeds_down, need_dx=False, need_dA=[True], need_dB=[False]
        )
    return dx, [None, None, None, *d_biases, *dAs, dA_down, *dBs, dB_down]


def lora_mlp(
    backend: str,
    x: Tensor,
    weights: Sequence[Tensor],
    lora_As: Sequence[Tensor],
    lora_Bs: Sequence[Tensor],
    scalings: Sequence[float],
    biases: Sequence[Tensor | None],
    activation: str,
    dropout_p: float,
    seeds: Tensor | None,
) -> Tensor:
    """Apply the operation; arguments are checked by :mod:`fastlora.functional`."""
    if transformed():
        parameters: Any = (*weights, *biases, *lora_As, *lora_Bs)
        return _plain(activation, dropout_p, seeds, scalings, x, *parameters)[0]
    return LoRAMLP.apply(
        backend,
        activation,
        dropout_p,
        seeds,
        tuple(scalings),
        x,
        *weights,
        *biases,
        *lora_As,
        *lora_Bs,
    )
