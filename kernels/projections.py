"""The fused projections of one X, forward and backward: which kernel runs when.

S_i = dropout_i(X) A_i^T                    Y_i = X W_i^T + bias_i + s_i S_i B_i^T
dS_i = s_i dY_i B_i    dB_i = s_i dY_i^T S_i
dA_i = dS_i^T dropout_i(X)                  dX = sum_i dY_i W_i + mask_i * (dS_i A_i) / (1 - p)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .grad_dy import grad_dy
from .grad_x import grad_x
from .launch import check_dtype
from .linear import linear
from .shrink import shrink


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
    """(ys [M, N_i] in x's dtype, s [M, sum r_i] fp32).

    x [M, K]; weights [N_i, K] in x's dtype, possibly transposed views; lora_As [r_i, K] and lora_Bs [N_i, r_i] in
    any float dtype; seeds int64 [P] on x's device when dropout_p > 0. Raises TypeError for other dtypes of x.
    """
    check_dtype("x", x)
    s = shrink(x, list(lora_As), dropout_p, seeds)
    ys, offset = [], 0
    for i, (w, b) in enumerate(zip(weights, lora_Bs, strict=True)):
        rank = b.shape[1]
        bias = None if biases is None else biases[i]
        ys.append(linear(x, w, bias, s[:, offset : offset + rank], b, scalings[i]))
        offset += rank
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
    """(dx [M, K] or None, dAs, dBs), the latter in each parameter's dtype, None where not needed or dy is None.

    dys [M, N_i] in x's dtype; x None when no dA is wanted, s None when no dB is; the rest as in projections_forward.
    """
    count = len(weights)
    dAs: list[torch.Tensor | None] = [None] * count
    dBs: list[torch.Tensor | None] = [None] * count
    given = {i: dy for i, dy in enumerate(dys) if dy is not None}
    live = list(given)
    if not live:
        return None, dAs, dBs
    like = given[live[0]]
    check_dtype("dy", like)

    ranks = [a.shape[0] for a in lora_As]
    starts = [sum(ranks[:i]) for i in range(count)]
    need_ds = [need_dx or need_dA[i] for i in range(count)]
    ds = torch.empty(
        like.shape[0], sum(ranks[i] for i in live), dtype=torch.float32, device=like.device
    )
    offset = 0
    for i, dy in given.items():
        s_i = None if s is None else s[:, starts[i] : starts[i] + ranks[i]]
        ds_i = ds[:, offset : offset + ranks[i]]
        if not need_ds[i] and any(need_ds):
            ds_i.zero_()  # its columns are still read with the others'
        dBs[i] = grad_dy(dy, s_i, lora_Bs[i], scalings[i], ds_i if need_ds[i] else None, need_dB[i])
        offset += ranks[i]

    if need_dx or any(need_dA[i] for i in live):
        if seeds is not None and len(live) < count:
            seeds = torch.stack([seeds[i] for i in live])  # no copy from the host
        dx, live_dAs = grad_x(
            list(given.values()), x, ds, [weights[i] for i in live], [lora_As[i] for i in live],
            dropout_p, seeds, need_dx, [need_dA[i] for i in live],
        )  # fmt: skip
        for i, da in zip(live, live_dAs, strict=True):
            dAs[i] = da
        return dx, dAs, dBs
    return None, dAs, dBs
