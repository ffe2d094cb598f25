"""What the operations' autograd Functions share."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Below this many rows, widening W costs more than a slow half-precision GEMM on the CPU saves.
WIDEN_ROWS = 8


@functools.cache
def has_fast_gemm(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of ``dtype`` with instructions made for it.

    Where it does not, ATen's half-precision GEMM reaches about a sixth of fp32's rate, and
    widening to fp32 first is both faster and more exact.
    """
    checks: tuple[str, ...]
    if dtype == torch.bfloat16:
        checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    elif dtype == torch.float16:
        checks = ("_is_amx_fp16_supported",)
    else:
        return True
    return any(getattr(torch.cpu, check, lambda: False)() for check in checks)


def as_rows(tensor: Tensor) -> Tensor:
    """``tensor`` [..., K] as [M, K] whose rows are each contiguous and do not overlap.

    Gradients arrive transposed or expanded (stride 0) as well; those are copied.
    """
    columns = tensor.shape[-1]
    rows = tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)
    if not torch.compiler.is_compiling() and rows.is_neg():
        return rows.resolve_neg().contiguous()  # lazily negated: its memory holds the opposite
    if rows.stride(1) != 1 or (rows.stride(0) < columns and rows.shape[0] > 1):
        return rows.contiguous()
    return rows


def shaped(rows: Tensor, leading: Sequence[int]) -> Tensor:
    """``rows`` [M, N] as [*leading, N], not as a view: an output of a Function may be changed in place."""
    if len(leading) == 1:
        return rows
    return torch.ops.aten._unsafe_view(rows, [*leading, rows.shape[1]])


def in_dtype(tensors: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """``tensors`` (or None) in ``dtype``, the very same objects where they already are."""
    return [t if t is None or t.dtype == dtype else t.to(dtype) for t in tensors]


def autocast_enabled(device_type: str) -> bool:
    """``torch.is_autocast_enabled``, which does not know the meta device."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def without_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """Autocast off: the operations choose their own dtypes, and fp32 accumulators stay fp32."""
    if autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def bias_gradient(dy: Tensor, bias: Tensor) -> Tensor:
    """Column sums of dY [M, N], accumulated in fp32 (fp64 for fp64), in the bias's dtype."""
    wide = torch.float64 if dy.dtype == torch.float64 else torch.float32
    return dy.sum(0, dtype=wide).to(bias.dtype)


def intercepted() -> bool:
    """Whether a dispatch mode (``make_fx``, fake tensors, FLOP counters) is on: it sees no raw pointers."""
    return torch._C._len_torch_dispatch_stack() > 0


def transformed() -> bool:
    """Whether a ``torch.func`` transform or forward-mode AD is on, for which the Functions have no rule.

    Plain differentiable ops serve then.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def differentiable_backward(dys: Sequence[Tensor | None]) -> bool:
    """Whether a backward has to be made of plain ops: ``create_graph=True``, or batched gradients."""
    if torch.compiler.is_compiling():
        return False
    return torch.is_grad_enabled() or transformed() or any(map(_batched, dys))


def _batched(dy: Tensor | None) -> bool:
    """Whether ``torch.autograd.grad(..., is_grads_batched=True)`` made it, by a vmap of its own."""
    return dy is not None and torch._C._functorch.is_legacy_batchedtensor(dy)


def differentiate(
    plain: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    dys: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients of ``plain(*inputs)`` that can be differentiated again, None where not needed."""
    with torch.enable_grad():
        # Aliases: one input may be computed from another, and the gradient must stop at this call.
        aliases = [None if t is None else t.view_as(t) for t in inputs]
        ys = plain(*aliases)
        pairs = [(y, dy) for y, dy in zip(ys, dys, strict=True) if dy is not None]
        wanted = [a for a, need in zip(aliases, needs, strict=True) if need and a is not None]
        found = iter(
            torch.autograd.grad(
                [y for y, _ in pairs],
                wanted,
                [dy for _, dy in pairs],
                create_graph=True,
                allow_unused=True,
            )
        )
    return [
        next(found) if need and a is not None else None
        for a, need in zip(aliases, needs, strict=True)
    ]


def refuse_second_order(what: str) -> None:
    """Raise where a second-order gradient needs what was not kept."""
    raise RuntimeError(
        f"{what}: second-order gradients need its input x, which was not kept, since lora_A is frozen; "
        "let lora_A require grad, or call fastlora.unfuse(model)"
    )
