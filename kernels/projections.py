"""The fused projections of one X, forward and backward: which kernel runs when.

S_i = dropout_i(X) A_i^T                    Y_i = X W_i^T + bias_i + s_i S_i B_i^T
dS_i = s_i dY_i B_i    dB_i = s_i dY_i^T S_i
dA_i = dS_i^T dropout_i(X)                  dX = sum_i dY_i W_i + mask_i * (dS_i A_i) / (1 - p)

Each has three candidates (dispatch.py): with the update in our GEMM's accumulator, beside the library's GEMM, and
unfused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from . import unfused
from .dispatch import OPERATIONS, Problem, bucket, choose
from .expand import expand
from .grad_dy import grad_dy
from .grad_x import grad_x
from .launch import check_dtype
from .linear import linear
from .reduce import Sum, reduce_sums
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

    def run(name: str) -> tuple[list[torch.Tensor], torch.Tensor]:
        if name == "unfused":
            return unfused.projections_forward(
                x, weights, lora_As, lora_Bs, scalings, biases, dropout_p, seeds
            )
        return _forward(
            name == "library", x, weights, lora_As, lora_Bs, scalings, biases, dropout_p, seeds
        )

    problem = _problem("forward", x, weights, lora_As, dropout_p)
    return run(choose(problem, x.device, OPERATIONS, run))


def _forward(
    library: bool,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    lora_As: Sequence[torch.Tensor],
    lora_Bs: Sequence[torch.Tensor],
    scalings: Sequence[float],
    biases: Sequence[torch.Tensor | None] | None,
    dropout_p: float,
    seeds: torch.Tensor | None,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    s, parts = shrink(x, list(lora_As), dropout_p, seeds)
    if parts.shape[0] > 1 and not library:  # expand sums them on its way
        reduce_sums([Sum(parts, s, 1.0)])
    biases = [None] * len(weights) if biases is None else biases
    ranks = [b.shape[1] for b in lora_Bs]
    s_each = s.split(ranks, dim=1)
    if library:
        ys = [F.linear(x, w, bias) for w, bias in zip(weights, biases, strict=True)]
        expand(ys, list(parts.split(ranks, dim=2)), list(lora_Bs), list(scalings), list(s_each))
    else:
        each = zip(weights, biases, s_each, lora_Bs, scalings, strict=True)
        ys = [linear(x, w, bias, s_i, b, scaling) for w, bias, s_i, b, scaling in each]
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
    live = [i for i, dy in enumerate(dys) if dy is not None]
    if not live:
        return None, [None] * count, [None] * count
    like = dys[live[0]]
    assert like is not None
    check_dtype("dy", like)

    def run(
        name: str,
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None], list[torch.Tensor | None]]:
        args = (dys, x, s, weights, lora_As, lora_Bs, scalings, dropout_p, seeds)
        if name == "unfused":
            return unfused.projections_backward(
                *args, need_dx=need_dx, need_dA=need_dA, need_dB=need_dB
            )
        return _backward(name == "library", *args, need_dx, need_dA, need_dB)

    # Without a dX there is no GEMM to choose.
    names = OPERATIONS if need_dx else ("fused", "unfused")
    wanted = f"{'X' * need_dx}{'A' * any(need_dA)}{'B' * any(need_dB)}"
    problem = _problem(
        "backward", like, [weights[i] for i in live], [lora_As[i] for i in live], dropout_p, wanted
    )
    return run(choose(problem, like.device, names, run))


def _backward(
    library: bool,
    dys: Sequence[torch.Tensor | None],
    x: torch.Tensor | None,
    s: torch.Tensor | None,
    weights: Sequence[torch.Tensor],
    lora_As: Sequence[torch.Tensor],
    lora_Bs: Sequence[torch.Tensor],
    scalings: Sequence[float],
    dropout_p: float,
    seeds: torch.Tensor | None,
    need_dx: bool,
    need_dA: Sequence[bool],
    need_dB: Sequence[bool],
) -> tuple[torch.Tensor | None, list[torch.Tensor | None], list[torch.Tensor | None]]:
    count = len(weights)
    dAs: list[torch.Tensor | None] = [None] * count
    dBs: list[torch.Tensor | None] = [None] * count
    given = {i: dy for i, dy in enumerate(dys) if dy is not None}
    live = list(given)
    like = given[live[0]]
    ranks = [a.shape[0] for a in lora_As]
    starts = [sum(ranks[:i]) for i in range(count)]
    need_ds = [need_dx or need_dA[i] for i in range(count)]
    ds = torch.empty(
        like.shape[0], sum(ranks[i] for i in live), dtype=torch.float32, device=like.device
    )
    offset = 0
    sums: list[Sum] = []
    for i, dy in given.items():
        s_i = None if s is None else s[:, starts[i] : starts[i] + ranks[i]]
        ds_i = ds[:, offset : offset + ranks[i]]
        if not need_ds[i] and any(need_ds):
            ds_i.zero_()  # its columns are still read with the others'
        dBs[i] = grad_dy(
            dy, s_i, lora_Bs[i], scalings[i], ds_i if need_ds[i] else None, need_dB[i], sums
        )
        offset += ranks[i]
    reduce_sums(sums)

    if not (need_dx or any(need_dA[i] for i in live)):
        return None, dAs, dBs
    if seeds is not None and len(live) < count:
        seeds = torch.stack([seeds[i] for i in live])  # no copy from the host
    dx, live_dAs = grad_x(
        list(given.values()), x, ds, [weights[i] for i in live], [lora_As[i] for i in live],
        dropout_p, seeds, need_dx, [need_dA[i] for i in live], library,
    )  # fmt: skip
    for i, da in zip(live, live_dAs, strict=True):
        dAs[i] = da
    return dx, dAs, dBs


def _problem(
    op: str,
    like: torch.Tensor,
    weights: Sequence[torch.Tensor],
    lora_As: Sequence[torch.Tensor],
    dropout_p: float,
    wanted: str = "",
) -> Problem:
    layouts = "".join("t" if w.stride(1) != 1 else "n" for w in weights)
    adapters = str(lora_As[0].dtype).removeprefix("torch.")
    return Problem(
        op, like.dtype, bucket(like.shape[0]), weights[0].shape[1], tuple([w.shape[0] for w in weights]),
        tuple([a.shape[0] for a in lora_As]), dropout_p > 0.0, f"{layouts} {adapters} {wanted}".rstrip(),
    )  # fmt: skip
