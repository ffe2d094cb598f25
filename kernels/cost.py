"""A model of what each candidate costs, for when nothing may be timed: bytes over bandwidth, FLOPs over their rate.

Its seconds are modelled, never measured, and only have to rank the candidates. Rates are what libraries reach, not
the data sheet's: about 80 % of it for tensor cores, 90 % for memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Problem(NamedTuple):
    """What a choice depends on. op: "forward", "backward" or "gemm"; rows: a bucket; features: N of each projection.

    detail: what else changes the work, such as layouts or gradients that nobody asked for.
    """

    op: str
    dtype: torch.dtype
    rows: int
    columns: int
    features: tuple[int, ...]
    ranks: tuple[int, ...]
    dropout: bool
    detail: str = ""

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        shape = f"M{self.rows} K{self.columns} N{'+'.join(map(str, self.features))}"
        ranks = "+".join(map(str, self.ranks))
        return f"{self.op} {name} {shape} r{ranks}{' dropout' if self.dropout else ''} {self.detail}".rstrip()


@dataclass(frozen=True)
class Rates:
    """bandwidth in bytes a second; half and tf32: FLOP/s of tensor cores; fp32: of CUDA cores; launch in seconds."""

    bandwidth: float
    half: float
    tf32: float
    fp32: float
    launch: float = 2e-6


# NVIDIA's data sheets of A100 80 GB, L40S, H200, B200 and RTX PRO 6000.
PARTS = {
    (8, 0): Rates(1.8e12, 250e12, 125e12, 16e12),
    (8, 9): Rates(0.78e12, 290e12, 145e12, 70e12),
    (9, 0): Rates(4.3e12, 790e12, 400e12, 50e12),
    (10, 0): Rates(7.2e12, 1800e12, 900e12, 60e12),
    (12, 0): Rates(1.6e12, 400e12, 200e12, 90e12),
}
# What our own GEMM reaches of the library's rate, assumed until a device has been timed: on tensor cores, where one
# accumulator takes what the library has as an epilogue, and on CUDA cores, where every thread fetches its operands.
TENSOR_CORES, CUDA_CORES = 0.93, 0.4


def rates(part: tuple[int, int]) -> Rates:
    """Of this capability, or of the nearest one below it."""
    known = [p for p in PARTS if p <= part]
    return PARTS[max(known)] if known else PARTS[8, 0]


def seconds(problem: Problem, names: Sequence[str], part: tuple[int, int]) -> dict[str, float]:
    """Modelled seconds of each candidate of an operation; for a GEMM's tiles their place in the table's own order."""
    if problem.op == "gemm":
        return {name: float(place) for place, name in enumerate(names, 1)}
    model = _Model(problem, rates(part))
    return {name: getattr(model, f"{problem.op}_{name}")() for name in names}


class _Model:
    """Seconds of the candidates of one problem."""

    def __init__(self, problem: Problem, rates: Rates) -> None:
        self.p, self.rates = problem, rates
        self.size = problem.dtype.itemsize
        half = problem.dtype != torch.float32
        tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
        self.rate = rates.half if half else rates.tf32 if tf32 else rates.fp32
        self.ours = TENSOR_CORES if half or tf32 else CUDA_CORES
        self.x = problem.rows * problem.columns * self.size
        self.ys = [problem.rows * n * self.size for n in problem.features]

    def _moved(self, size: float, launches: int = 1) -> float:
        return size / self.rates.bandwidth + launches * self.rates.launch

    def _gemms(self, efficiency: float) -> float:
        """The base's products, Y or dX: a launch each."""
        total = 0.0
        for n, y in zip(self.p.features, self.ys, strict=True):
            weight = n * self.p.columns * self.size
            work = 2 * self.p.rows * self.p.columns * n / (self.rate * efficiency)
            total += max(work, (self.x + y + weight) / self.rates.bandwidth) + self.rates.launch
        return total

    def forward_fused(self) -> float:
        return self._gemms(self.ours) + self._moved(self.x)

    def forward_library(self) -> float:
        return self._gemms(1.0) + self._moved(self.x) + sum(self._moved(2 * y) for y in self.ys)

    def forward_unfused(self) -> float:
        """Y is written, read and written; X is read for each projection, and masked into a copy first."""
        count = len(self.ys)
        branch = count * (self.x + (4 * self.x if self.p.dropout else 0))
        launches = count * (2 if self.p.dropout else 0)
        return (
            self._gemms(1.0)
            + self._moved(branch, count + launches)
            + sum(self._moved(2 * y) for y in self.ys)
        )

    def _passes(self) -> float:
        """dS and dB in one pass over every dY, dA in one over X, and the second stages of both."""
        return sum(self._moved(y) for y in self.ys) + self._moved(self.x) + 2 * self.rates.launch

    def backward_fused(self) -> float:
        return self._gemms(self.ours) + self._passes()

    def backward_library(self) -> float:
        return self._gemms(1.0) + self._passes() + self._moved(2 * self.x, 0)

    def backward_unfused(self) -> float:
        """Two passes over each dY, one over X for each dA, and dX read and written for each projection."""
        count = len(self.ys)
        branch = count * (3 * self.x + (7 * self.x if self.p.dropout else 0))
        launches = count * (4 + (4 if self.p.dropout else 0))
        return self._gemms(1.0) + self._moved(branch + 2 * sum(self.ys), launches)
