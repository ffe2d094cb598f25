"""Several LoRA projections of one X (q/k/v, gate/up), as one operation.

    S_i  = X̂_i A_iᵀ                       shrink, for all projections in one pass over X
    Y_i  = X W_iᵀ + bias_i + s_i S_i B_iᵀ  expand
    dS_i = s_i dY_i B_i    dB_i = s_i dY_iᵀ S_i             one pass over dY_i
    dA_i = dS_iᵀ X̂_i                                       one pass over X for all
    dX   = Σ_i dY_i W_i + mask_i ⊙ (dS_i A_i) / (1 - p)

X̂_i = dropout_i(X), each projection with its own mask, regenerated from its seed and never stored.
LoRA: Hu et al., arXiv 2106.09685, section 4.1. Saved for backward: X and S, beside the parameters.
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


class LoRAProjections(torch.autograd.Function):
    """The operation above, in eager mode and traced by ``torch.compile``."""

    @staticmethod
    def forward(
        ctx: Any,
        backend: str,
        dropout_p: float,
        seeds: Tensor | None,  # int64 [P]
        scalings: tuple[float, ...],
        x: Tensor,  # [..., K]
        *parameters: Tensor,  # P weights, P biases (or None), P lora_A, P lora_B
    ) -> tuple[Tensor, ...]:
        count = len(scalings)
        implementation = _library.implementation(backend)
        ys, s = _forward(implementation, dropout_p, seeds, scalings, x, parameters)
        needs = ctx.needs_input_grad[5:]
        save_x, save_s = any(needs[2 * count : 3 * count]), any(needs[3 * count :])
        ctx.save_for_backward(
            x if save_x else None,
            s if save_s else None,
            seeds,
            *parameters,
        )
        ctx.set_materialize_grads(False)
        ctx.backend, ctx.dropout_p, ctx.scalings = backend, dropout_p, scalings
        ctx.x_shape = x.shape
        return tuple([shaped(y, x.shape[:-1]) for y in ys])

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        x, s, seeds, *parameters = ctx.saved_tensors
        if differentiable_backward(dys):
            return None, None, None, None, *_twice_differentiable(ctx, x, seeds, parameters, dys)
        count = len(ctx.scalings)
        weights, biases = parameters[:count], parameters[count : 2 * count]
        lora_As, lora_Bs = parameters[2 * count : 3 * count], parameters[3 * count :]
        need_dx, needs = ctx.needs_input_grad[4], ctx.needs_input_grad[5:]
        dys_2d = [None if dy is None else as_rows(dy) for dy in dys]
        dtype, device_type = _kind(dys, x, weights[0])
        with without_autocast(device_type):
            dx, dAs, dBs = _library.implementation(ctx.backend).projections_backward(
                dys_2d,
                None if x is None else as_rows(x),
                s,
                in_dtype(weights, dtype),
                lora_As,
                lora_Bs,
                ctx.scalings,
                ctx.dropout_p,
                seeds,
                need_dx=need_dx,
                need_dA=needs[2 * count : 3 * count],
                need_dB=needs[3 * count :],
            )
            d_biases = [
                bias_gradient(dy, bias) if need and dy is not None else None
                for dy, bias, need in zip(dys_2d, biases, needs[count : 2 * count], strict=True)
            ]
        if dx is not None:
            dx = dx.view(ctx.x_shape)
        return None, None, None, None, dx, *([None] * count), *d_biases, *dAs, *dBs


def _forward(
    implementation: Any,
    dropout_p: float,
    seeds: Tensor | None,
    scalings: Sequence[float],
    x: Tensor,
    parameters: Sequence[Tensor],
) -> tuple[list[Tensor], Tensor]:
    """Outputs [M, N_i] and the stacked S, of parameters ordered as in :class:`LoRAProjections`."""
    count = len(scalings)
    return implementation.projections_forward(
        as_rows(x),
        in_dtype(parameters[:count], x.dtype),
        parameters[2 * count : 3 * count],
        parameters[3 * count :],
        scalings,
        in_dtype(parameters[count : 2 * count], x.dtype),
        dropout_p,
        seeds,
    )


def _plain(
    dropout_p: float,
    seeds: Tensor | None,
    scalings: Sequence[float],
    x: Tensor,
    *parameters: Tensor,
) -> tuple[Tensor, ...]:
    """The operation in plain differentiable ops."""
    ys, _ = _forward(reference, dropout_p, seeds, scalings, x, parameters)
    return tuple(y.reshape(*x.shape[:-1], y.shape[1]) for y in ys)


def _twice_differentiable(
    ctx: Any,
    x: Tensor | None,
    seeds: Tensor | None,
    parameters: Sequence[Tensor],
    dys: Sequence[Tensor | None],
) -> list[Tensor | None]:
    count, needs = len(ctx.scalings), ctx.needs_input_grad[4:]
    if x is None:  # Y is linear in x: dX does not depend on it, dB does
        if any(needs[1 + 3 * count :]):
            refuse_second_order("lora_projections")
        like = next(dy for dy in dys if dy is not None)
        x = torch.zeros(ctx.x_shape, dtype=like.dtype, device=like.device).requires_grad_()
    plain = functools.partial(_plain, ctx.dropout_p, seeds, ctx.scalings)
    with without_autocast(x.device.type):
        return differentiate(plain, (x, *parameters), needs, dys)


def _kind(dys: Sequence[Tensor | None], *others: Tensor | None) -> tuple[torch.dtype, str]:
    """Dtype and device type of the first gradient that is there (else of the first other)."""
    for tensor in (*dys, *others):
        if tensor is not None:
            return tensor.dtype, tensor.device.type
    raise AssertionError("at least the weights are tensors")


def lora_projections(
    backend: str,
    x: Tensor,
    weights: Sequence[Tensor],
    lora_As: Sequence[Tensor],
    lora_Bs: Sequence[Tensor],
    scalings: Sequence[float],
    biases: Sequence[Tensor | None],
    dropout_p: float,
    seeds: Tensor | None,
) -> tuple[Tensor, ...]:
    """Apply the operation; arguments are checked by :mod:`fastlora.functional`."""
    if transformed():
        return _plain(dropout_p, seeds, scalings, x, *weights, *biases, *lora_As, *lora_Bs)  # type: ignore[arg-type]
    return LoRAProjections.apply(
        backend, dropout_p, seeds, tuple(scalings), x, *weights, *biases, *lora_As, *lora_Bs
    )
