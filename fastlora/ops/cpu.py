"""The ``cpu`` backend: ATen's GEMMs for the base, ``fastlora._C`` for all that streams.

One pass over X forward (every projection's dropout and shrink), one over dY (dS and dB), one over X
backward (every dA, and the low-rank part of dX added in place), instead of an eager op for each.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import _C
from . import reference
from ._common import WIDEN_ROWS, has_fast_gemm

_CODES = {torch.float32: _C.F32, torch.bfloat16: _C.BF16, torch.float16: _C.F16}
_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


def _gemm_dtype(dtype: torch.dtype, rows: int) -> torch.dtype:
    if rows >= WIDEN_ROWS and not has_fast_gemm(dtype):
        return torch.float32
    return dtype


def _factor(tensor: Tensor) -> Tensor:
    """A factor as the kernels take it: contiguous, in one of their dtypes."""
    if tensor.dtype not in _CODES:
        tensor = tensor.float()
    return tensor.resolve_neg().contiguous()


def projections_forward(
    x: Tensor,
    weights: Sequence[Tensor],
    lora_As: Sequence[Tensor],
    lora_Bs: Sequence[Tensor],
    scalings: Sequence[float],
    biases: Sequence[Tensor | None],
    dropout_p: float,
    seeds: Tensor | None,
) -> tuple[list[Tensor], Tensor]:
    """See :func:`fastlora.ops.reference.projections_forward`."""
    rows, columns = x.shape
    threads = torch.get_num_threads()
    ranks = reference.ranks(lora_As)
    s = torch.empty(rows, sum(ranks), dtype=torch.float32, device="cpu")
    seed_list = [0] * len(ranks) if seeds is None else seeds.tolist()
    factors = [_factor(lora_A) for lora_A in lora_As]
    _C.shrink(
        x.data_ptr(),
        _CODES[x.dtype],
        x.stride(0),
        rows,
        columns,
        [
            (factor.data_ptr(), _CODES[factor.dtype], rank, seed)
            for factor, rank, seed in zip(factors, ranks, seed_list, strict=True)
        ],
        dropout_p if seeds is not None else 0.0,
        s.data_ptr(),
        s.stride(0),
        threads,
    )
    gemm_dtype = _gemm_dtype(x.dtype, rows)
    x_gemm = x.to(gemm_dtype)
    ys, start = [], s.data_ptr()
    for weight, lora_B, scaling, bias, rank in zip(
        weights, lora_Bs, scalings, biases, ranks, strict=True
    ):
        bias_gemm = None if bias is None else bias.to(gemm_dtype)
        y = F.linear(x_gemm, weight.to(gemm_dtype), bias_gemm)
        factor = _factor(lora_B)
        _C.expand(
            y.data_ptr(),
            _CODES[y.dtype],
            y.stride(0),
            rows,
            y.shape[1],
            start,
            s.stride(0),
            rank,
            factor.data_ptr(),
            _CODES[factor.dtype],
            scaling,
            threads,
        )
        start += 4 * rank
        ys.append(y.to(x.dtype))
    return ys, s


def projections_backward(
    dys: Sequence[Tensor | None],
    x: Tensor | None,
    s: Tensor | None,
    weights: Sequence[Tensor],
    lora_As: Sequence[Tensor],
    lora_Bs: Sequence[Tensor],
    scalings: Sequence[float],
    dropout_p: float,
    seeds: Tensor | None,
    *,
    need_dx: bool,
    need_dA: Sequence[bool],
    need_dB: Sequence[bool],
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """See :func:`fastlora.ops.reference.projections_backward`."""
    present = [(i, dy) for i, dy in enumerate(dys) if dy is not None]
    dAs: list[Tensor | None] = [None] * len(dys)
    dBs: list[Tensor | None] = [None] * len(dys)
    if not present:
        return None, dAs, dBs
    rows, dtype = present[0][1].shape[0], present[0][1].dtype
    threads = torch.get_num_threads()
    seed_list = [0] * len(dys) if seeds is None else seeds.tolist()
    ranks = reference.ranks(lora_As)
    gemm_dtype = _gemm_dtype(dtype, rows)

    ds = torch.empty(rows, sum(ranks[i] for i, _ in present), dtype=torch.float32, device="cpu")
    ds_start = ds.data_ptr()
    dx: Tensor | None = None
    grad_x_terms, keep_alive, wants_dA = [], [], False
    for i, dy in present:
        want_dA, want_dB = need_dA[i] and x is not None, need_dB[i] and s is not None
        factor = _factor(lora_Bs[i])
        dB = torch.empty(factor.shape, dtype=torch.float32, device="cpu") if want_dB else None
        _C.grad_dy(
            dy.data_ptr(),
            _CODES[dtype],
            dy.stride(0),
            rows,
            dy.shape[1],
            s.data_ptr() + 4 * sum(ranks[:i]) if want_dB and s is not None else 0,
            s.stride(0) if s is not None else 0,
            ranks[i],
            factor.data_ptr(),
            _CODES[factor.dtype],
            scalings[i],
            ds_start if need_dx or want_dA else 0,
            ds.stride(0),
            dB.data_ptr() if dB is not None else 0,
            threads,
        )
        dBs[i] = None if dB is None else dB.to(lora_Bs[i].dtype)
        if need_dx:
            dy_gemm, weight = dy.to(gemm_dtype), weights[i].to(gemm_dtype)
            dx = torch.mm(dy_gemm, weight) if dx is None else dx.addmm_(dy_gemm, weight)
        factor = _factor(lora_As[i])
        dA = torch.empty(factor.shape, dtype=torch.float32, device="cpu") if want_dA else None
        wants_dA = wants_dA or want_dA
        keep_alive.append((i, factor, dA))
        grad_x_terms.append(
            (
                factor.data_ptr(),
                _CODES[factor.dtype],
                ranks[i],
                seed_list[i],
                dA.data_ptr() if dA is not None else 0,
            )
        )
        ds_start += 4 * ranks[i]
    if need_dx or wants_dA:
        _C.grad_x(
            x.data_ptr() if wants_dA and x is not None else 0,
            _CODES[dtype],
            x.stride(0) if wants_dA and x is not None else 0,
            rows,
            lora_As[0].shape[1],
            ds.data_ptr(),
            ds.stride(0),
            grad_x_terms,
            dropout_p if seeds is not None else 0.0,
            dx.data_ptr() if dx is not None else 0,
            _CODES[gemm_dtype],
            dx.stride(0) if dx is not None else 0,
            threads,
        )
    for i, _, dA in keep_alive:
        dAs[i] = None if dA is None else dA.to(lora_As[i].dtype)
    return None if dx is None else dx.to(dtype), dAs, dBs


def _glu(kernel: Callable[..., None], tensors: Sequence[Tensor], activation: str) -> None:
    """Run an elementwise kernel over contiguous tensors of one dtype and size."""
    kernel(
        *(tensor.data_ptr() for tensor in tensors),
        _CODES[tensors[0].dtype],
        tensors[0].numel(),
        _ACTIVATIONS[activation],
        torch.get_num_threads(),
    )


def glu_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """See :func:`fastlora.ops.reference.glu_forward`."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _glu(_C.glu_forward, (gate, up, out), activation)
    return out


def glu_backward(
    dh: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`fastlora.ops.reference.glu_backward`."""
    dh, gate, up = dh.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup, h = torch.empty_like(gate), torch.empty_like(gate), torch.empty_like(gate)
    _glu(_C.glu_backward, (dh, gate, up, dgate, dup, h), activation)
    return dgate, dup, h


# A look-up and a product of rank-r rows: nothing here that ATen does not already stream.
embedding_forward = reference.embedding_forward


def embedding_backward(
    dy: Tensor,
    input_ids: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scale: float,
    padding_idx: int | None,
) -> tuple[Tensor, Tensor]:
    """See :func:`fastlora.ops.reference.embedding_backward`.

    dA is summed in its own layout, [r, V]: a gradient of [V, r], as of ``F.embedding``, would have
    to be transposed whole. On the CPU scatter_add_ adds equal ids in their order.
    """
    ds, dB = reference.embedding_gradients(dy, input_ids, lora_A, lora_B, scale, padding_idx)
    dA = torch.zeros(lora_A.shape, dtype=ds.dtype, device="cpu")
    dA.scatter_add_(1, input_ids.long().expand(lora_A.shape[0], -1), ds.T)
    return dA.to(lora_A.dtype), dB
