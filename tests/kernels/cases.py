"""Random projections, what the kernels make of them, and the exact and unfused results to hold that against."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastlora import kernels
from fastlora.ops.dropout import keep_mask
from tests.helpers import (
    Projection,
    assert_accurate,
    double,
    fresh,
    gradients,
    projection,
    relative_error,
    unfused,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALING = 0.75  # what tests.helpers.projection uses


@dataclass
class Case:
    """One X with its projections, the gradients of their outputs, and the seeds of their masks."""

    x: Tensor
    parts: list[Projection]
    dys: list[Tensor]
    dropout_p: float
    seeds: Tensor | None

    @property
    def scalings(self) -> list[float]:
        return [part[3] for part in self.parts]


def case(
    M: int,
    K: int,
    Ns: tuple[int, ...],
    ranks: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    dropout_p: float = 0.0,
    adapter_dtype: torch.dtype | None = None,
    bias: bool = True,
) -> Case:
    x = torch.randn(M, K, dtype=torch.float64).to(dtype)
    parts = [
        projection(K, n, r, dtype, adapter_dtype, bias) for n, r in zip(Ns, ranks, strict=True)
    ]
    dys = [torch.randn(M, n, dtype=torch.float64).to(dtype) for n in Ns]
    # Both words of the key count, so seeds fill 64 bits, signs included.
    seeds = torch.randint(-(2**63), 2**63 - 1, (len(Ns),)) if dropout_p else None
    return Case(x, parts, dys, dropout_p, seeds)


def forward(c: Case) -> tuple[list[Tensor], Tensor]:
    weights, lora_As, lora_Bs, scalings, biases = (
        list(column) for column in zip(*c.parts, strict=True)
    )
    with torch.no_grad():
        return kernels.projections_forward(
            c.x, weights, lora_As, lora_Bs, scalings, biases, c.dropout_p, c.seeds
        )


def backward(
    c: Case, s: Tensor | None, *, need_dx=True, need_dA=None, need_dB=None, x=True, dys=None
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    weights, lora_As, lora_Bs, scalings, _ = (list(column) for column in zip(*c.parts, strict=True))
    count = len(weights)
    with torch.no_grad():
        return kernels.projections_backward(
            c.dys if dys is None else dys,
            c.x if x else None,
            s,
            weights,
            lora_As,
            lora_Bs,
            scalings,
            c.dropout_p,
            c.seeds,
            need_dx=need_dx,
            need_dA=[True] * count if need_dA is None else need_dA,
            need_dB=[True] * count if need_dB is None else need_dB,
        )


def run(c: Case) -> dict[str, Tensor]:
    """Outputs and every gradient of the kernels, by name."""
    ys, s = forward(c)
    dx, dAs, dBs = backward(c, s)
    result = {f"y{i}": y for i, y in enumerate(ys)} | {"dx": dx}
    for i, (da, db) in enumerate(zip(dAs, dBs, strict=True)):
        result |= {f"dA{i}": da, f"dB{i}": db}
    return result


def check(c: Case, factor_bar: float | None = None) -> None:
    """Outputs and every gradient: half types at most twice the unfused path's error, fp32 within 1e-5.

    `factor_bar` bounds the relative error of dA and dB instead.
    """
    M, K = c.x.shape
    keep = [
        None if c.seeds is None else keep_mask(seed, M, K, c.dropout_p)
        for seed in (c.seeds if c.seeds is not None else c.parts)
    ]

    def plain(x, parts):
        return [unfused(x, part, keep[i], c.dropout_p) for i, part in enumerate(parts)]

    got = run(c)
    peer = gradients(plain, c.x, [fresh(part) for part in c.parts], c.dys)
    exact = gradients(plain, c.x.double(), [double(part) for part in c.parts], c.dys)
    for name, value in got.items():
        assert value.dtype == peer[name].dtype, name
        assert_accurate(name, value, peer[name], exact[name], c.x.dtype)
        if factor_bar is not None and name.startswith(("dA", "dB")):
            assert relative_error(value, exact[name]) < factor_bar, name
