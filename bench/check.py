"""Whether a peer's result may be timed: its error against an fp64 reference.

One layer, fp32: within 1e-5, relative. Half types: at most twice the error of the unfused path
(PEFT's layers, same dtype, same inputs), or 1e-5 where that path is more exact still. Errors are
relative to the reference tensor: root mean square over root mean square, and largest over largest.

A whole model: rounding errors grow from layer to layer, in two equally good paths not equally in
each tensor. There the bar is twice the unfused path's error over all the layers' gradients of one
kind, and for each single tensor twice it in fp32, four times in a half type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

EXACT = 1e-5
FACTOR = 2.0
MODEL_FACTOR = {torch.float32: 2.0, torch.bfloat16: 4.0, torch.float16: 4.0}
PEAK = 2.0  # how much further than the mean the largest of many errors may be
OWN_UNITS = 4.0  # torch's own path, one layer in a half type: units in the last place
# Torch's own path, a whole model: enough to tell rounding (up to 0.12 in bf16) from another model.
MODEL_OWN = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.5}


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


def pooled(got: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, Error]:
    """Error over all layers' gradients of one kind, such as every lora_A of a q_proj.

    Each tensor counts by its own reference's size, so that a large one hides no small one.
    """
    kinds: dict[str, list[Error]] = {}
    for name, expected in reference.items():
        kind = ".".join(part for part in name.split(".")[-4:])
        kinds.setdefault(kind, []).append(error(got[name], expected))
    return {
        f"{kind} of all layers": Error(
            math.sqrt(math.fsum(e.rms**2 for e in members) / len(members)),
            max(e.peak for e in members),
        )
        for kind, members in kinds.items()
        if len(members) > 1
    }


def judge(
    found: Mapping[str, Error],
    dtype: torch.dtype,
    unfused: Mapping[str, Error] | None = None,
    *,
    factor: float | None = None,
    own: float | None = None,
) -> Verdict:
    """Holds errors against the bar.

    unfused: the unfused path's errors against the same reference, None for torch's own paths.
    factor: how many times the unfused path's error is allowed; without it FACTOR in a half type and
        nothing in fp32. own: the bar of torch's own paths; without it EXACT in fp32 and OWN_UNITS
        units in the last place in a half type.
    """
    half = dtype != torch.float32
    if factor is None:
        factor = FACTOR if half else 0.0
    if own is None:
        own = OWN_UNITS * torch.finfo(dtype).eps if half else EXACT
    complaints, worst, nearest = [], ("", math.nan, math.nan), -1.0
    for name, e in found.items():
        limit = peak_limit = own
        if unfused is not None:
            limit = max(EXACT, factor * unfused[name].rms)
            peak_limit = max(EXACT, PEAK * factor * unfused[name].peak)
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


def judge_model(
    found: Mapping[str, Error],
    kinds: Mapping[str, Error],
    dtype: torch.dtype,
    unfused: tuple[dict[str, Error], dict[str, Error]] | None = None,
) -> Verdict:
    """The same for a whole model: `found` a tensor each, `kinds` as `pooled` gives them.

    unfused: both of the unfused path, None for torch's own.
    """
    single, together = unfused or (None, None)
    own = MODEL_OWN[dtype]
    if single is not None:
        # The loss is one number: by chance the unfused path may hit it to the last digit.
        rounding = Error(*[max(EXACT, torch.finfo(dtype).eps / 2) / MODEL_FACTOR[dtype]] * 2)
        single = single | {"loss": max(single["loss"], rounding, key=lambda e: e.rms)}
    verdict = judge(found, dtype, single, factor=MODEL_FACTOR[dtype], own=own)
    over_layers = judge(kinds, dtype, together, factor=FACTOR, own=own)
    return verdict if verdict.wrong else over_layers
