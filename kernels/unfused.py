"""The unfused path: library operations one after the other, as PEFT runs them; masks are the kernels' own.

It serves a few tokens, where launches are all there is, and it is what no choice may be slower than. As in PEFT the
low-rank branch runs in the wider of x's and the factors' dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from .dropout import philox_mask


def _branch_dtype(*tensors: torch.Tensor) -> torch.dtype:
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    return dtype


def _scaled_mask(
    rows: int, columns: int, p: float, seeds: torch.Tensor, i: int, dtype: torch.dtype
) -> torch.Tensor:
    """What dropout_i multiplies with: 0, or 1 / (1 - p) where an element is kept."""
    return philox_mask(rows, columns, p, seeds[i : i + 1]).to(dtype).mul_(1.0 / (1.0 - p))


def projections_forward(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    lora_As: Sequence[torch.Tensor],
    lora_Bs: Sequence[torch.Tensor],
    scalings: Sequence[float],
    biases: Sequence[torch.Tensor | None] | None,
    dropout_p: float,
    seeds: torch.Tensor | None,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """See projections.projections_forward."""
    ranks = [a.shape[0] for a in lora_As]
    s = torch.empty(x.shape[0], sum(ranks), dtype=torch.float32, device=x.device)
    ys = []
    for i, (weight, a, b) in enumerate(zip(weights, lora_As, lora_Bs, strict=True)):
        dtype = _branch_dtype(x, a, b)
        x_i = x.to(dtype)
        if seeds is not None:
            x_i = x_i * _scaled_mask(x.shape[0], x.shape[1], dropout_p, seeds, i, dtype)
        s_i = x_i @ a.to(dtype).t()
        s[:, sum(ranks[:i]) : sum(ranks[: i + 1])] = s_i
        y = F.linear(x, weight, None if biases is None else biases[i])
        ys.append(_add_product(y, s_i, b.to(dtype).t(), scalings[i]))
    return ys, s


def projections_backward(
    dys: Sequence[torch.Tensor | None],
    x: torch.Tensor | None,
    s: torch.Tensor | None,
    weights: Sequence[torch.Tensor],
    lora_As: Sequence[torch.Tensor],
    lora_Bs: Sequence[torch.Tensor],
    scalings: Sequence[float],
    dropout_p: float,
    seeds: torch.Tensor | None,
    *,
    need_dx: bool,
    need_dA: Sequence[bool],
    need_dB: Sequence[bool],
) -> tuple[torch.Tensor | None, list[torch.Tensor | None], list[torch.Tensor | None]]:
    """See projections.projections_backward."""
    dx: torch.Tensor | None = None
    dAs: list[torch.Tensor | None] = [None] * len(weights)
    dBs: list[torch.Tensor | None] = [None] * len(weights)
    offset = 0
    for i, (dy, weight, a, b) in enumerate(zip(dys, weights, lora_As, lora_Bs, strict=True)):
        rank, start = a.shape[0], offset
        offset += rank
        if dy is None:
            continue
        dtype = _branch_dtype(dy, a, b)
        dy_i = dy.to(dtype)
        if need_dB[i] and s is not None:
            db = dy_i.t() @ s[:, start : start + rank].to(dtype)
            dBs[i] = db.mul_(scalings[i]).to(b.dtype)
        need_a = need_dA[i] and x is not None
        if not (need_dx or need_a):
            continue
        ds = (dy_i @ b.to(dtype)).mul_(scalings[i])
        mask = None
        if seeds is not None:
            mask = _scaled_mask(dy.shape[0], a.shape[1], dropout_p, seeds, i, dtype)
        if need_a and x is not None:
            dAs[i] = (ds.t() @ (x.to(dtype) if mask is None else x * mask)).to(a.dtype)
        if need_dx:
            dx = torch.mm(dy, weight) if dx is None else dx.addmm_(dy, weight)
            if mask is None:
                _add_product(dx, ds, a.to(dtype))
            else:
                dx.add_((ds @ a.to(dtype)).mul_(mask))
    return dx, dAs, dBs


def _add_product(
    y: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """y += scale * left @ right, which may be of a wider dtype."""
    if y.dtype == left.dtype:
        return y.addmm_(left, right, alpha=scale)
    return y.add_(left @ right, alpha=scale)
