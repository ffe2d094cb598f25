"""Whether a peer's result may be timed: its error against an fp64 reference.

fp32: within 1e-5, relative. Half types: at most twice the error of the unfused path (PEFT's layers,
same dtype, same inputs), or 1e-5 where that path is more exact still. Errors are relative to the
reference tensor: root mean square over root mean square, and largest over largest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

EXACT = 1e-5
FACTOR = 2.0
PEAK_FACTOR = 4.0  # the largest of many errors varies more between two equally good paths
OWN_BAR = 4.0  # torch's own paths in a half type: a few units in the last place


class Wrong(ValueError):
    """A result that no error can be measured of: a tensor missing, a mask that is none."""


@dataclass(frozen=True)
class Error:
    """Relative error of one tensor: root mean square, and at its worst element."""

    rms: float
    peak: float


@dataclass(frozen=True)
class Verdict:
    """wrong: what is wrong, "" if nothing. worst: the tensor nearest its bar, its rms error, its bar."""

    wrong: str
    worst: str = ""
    rms: float = math.nan
    limit: float = math.nan


def error(got: Tensor, reference: Tensor) -> Error:
    """Relative error of `got` against `reference` (fp64, same shape); inf where got is not finite."""
    difference = (got.detach().double() - reference).abs()
    if not bool(torch.isfinite(difference).all()):
        return Error(math.inf, math.inf)
    if reference.numel() == 0:
        return Error(0.0, 0.0)
    size, largest = float(reference.square().mean().sqrt()), float(reference.abs().max())
    if largest == 0.0:
        exact = float(difference.max()) == 0.0
        return Error(0.0, 0.0) if exact else Error(math.inf, math.inf)
    return Error(float(difference.square().mean().sqrt()) / size, float(difference.max()) / largest)


def errors(got: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, Error]:
    """Error of every tensor of the reference. Raises Wrong on a missing or misshapen one."""
    found = {}
    for name, expected in reference.items():
        if name not in got:
            raise Wrong(f"{name}: not computed")
        if got[name].shape != expected.shape:
            raise Wrong(
                f"{name}: got shape {tuple(got[name].shape)}, takes {tuple(expected.shape)}"
            )
        found[name] = error(got[name], expected)
    return found


def judge(
    found: Mapping[str, Error],
    dtype: torch.dtype,
    unfused: Mapping[str, Error] | None = None,
    *,
    relative: bool = False,
) -> Verdict:
    """Holds errors against the bar.

    unfused: the unfused path's errors against the same reference; None for torch's own paths, whose
    bar in a half type is 4 units in the last place. relative: use the unfused path's errors as the
    bar in fp32 too, for a whole model, whose own rounding errors grow from layer to layer.
    """
    complaints, worst, nearest = [], ("", math.nan, math.nan), -1.0
    for name, e in found.items():
        limit = peak_limit = EXACT
        if unfused is not None and name in unfused and (dtype != torch.float32 or relative):
            limit = max(limit, FACTOR * unfused[name].rms)
            peak_limit = max(peak_limit, PEAK_FACTOR * unfused[name].peak)
        elif dtype != torch.float32:
            limit = peak_limit = OWN_BAR * torch.finfo(dtype).eps
        elif relative:
            limit = peak_limit = 1e-3
        # Written so that a NaN is a complaint.
        if not (e.rms <= limit and e.peak <= peak_limit):
            complaints.append(
                f"{name}: relative error {e.rms:.2g} (worst element {e.peak:.2g}), "
                f"takes {limit:.2g} ({peak_limit:.2g})"
            )
        nearness = e.rms / limit if math.isfinite(e.rms) else math.inf
        if nearness > nearest:
            nearest, worst = nearness, (name, e.rms, limit)
    more = f" and {len(complaints) - 3} more" if len(complaints) > 3 else ""
    return Verdict("; ".join(complaints[:3]) + more, *worst)
