"""An embedding table with a low-rank update.

    Y = (W[ids] + s (Aᵀ)[ids] Bᵀ) · embed_scale        A [r, V], B [D, r], as PEFT lays them out

Only the ids are saved for backward: the looked-up rows of A are looked up again. The padding row
gets no gradient, and there is no dropout, as in PEFT. LoRA: Hu et al., arXiv 2106.09685.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from . import _library, reference
from ._common import (
    as_rows,
    differentiable_backward,
    differentiate,
    shaped,
    transformed,
    without_autocast,
)


class LoRAEmbedding(torch.autograd.Function):
    """The operation above, before ``embed_scale``."""

    @staticmethod
    def forward(
        ctx: Any,
        backend: str,
        scale: float,
        padding_idx: int | None,
        input_ids: Tensor,  # integer [...]
        weight: Tensor,  # [V, D]
        lora_A: Tensor,  # [r, V]
        lora_B: Tensor,  # [D, r]
    ) -> Tensor:
        y = _library.implementation(backend).embedding_forward(
            input_ids.reshape(-1), weight, lora_A, lora_B, scale
        )
        ctx.save_for_backward(input_ids, weight, lora_A, lora_B)
        ctx.backend, ctx.scale, ctx.padding_idx = backend, scale, padding_idx
        return shaped(y, input_ids.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        input_ids, weight, lora_A, lora_B = ctx.saved_tensors
        if differentiable_backward((dy,)):
            plain = functools.partial(_plain, ctx.scale, ctx.padding_idx, input_ids, weight)
            with without_autocast(dy.device.type):
                found = differentiate(plain, (lora_A, lora_B), ctx.needs_input_grad[5:], (dy,))
            return None, None, None, None, None, *found
        with without_autocast(dy.device.type):
            dA, dB = _library.implementation(ctx.backend).embedding_backward(
                as_rows(dy),
                input_ids.reshape(-1),
                weight,
                lora_A,
                lora_B,
                ctx.scale,
                ctx.padding_idx,
            )
        need_A, need_B = ctx.needs_input_grad[5:]
        return None, None, None, None, None, dA if need_A else None, dB if need_B else None


def _plain(
    scale: float,
    padding_idx: int | None,
    input_ids: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
) -> tuple[Tensor]:
    """The operation in plain differentiable ops."""
    return (reference.embedding_forward(input_ids, weight, lora_A, lora_B, scale, padding_idx),)


def lora_embedding(
    backend: str,
    input_ids: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scale: float,
    padding_idx: int | None,
) -> Tensor:
    """Apply the operation; arguments are checked by :mod:`fastlora.functional`."""
    if transformed():
        return _plain(scale, padding_idx, input_ids, weight, lora_A, lora_B)[0]
    return LoRAEmbedding.apply(backend, scale, padding_idx, input_ids, weight, lora_A, lora_B)
