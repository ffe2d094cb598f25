"""Which elements a layer's dropout keeps, read off the layer's own outputs.

A peer's dropout may be any function of (seed, element), so no peer's generator is asked: the layer
is run with parameters and an input under which its output spells the mask. With W = 0, x = 1,
B's first r rows the identity and row i of A holding 1, 2, 4, … in columns of its own, the output's
column i is s/(1-p) times a binary number whose digits are the mask of those columns. Same seed,
same shapes, training mode, gradients on: the very call that is checked, with other numbers in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bench.check import Wrong
from bench.registry import ALPHA, RANK

if TYPE_CHECKING:
    from bench.layers import LayerWork

OPEN = 8.0  # silu(8) = 7.997: a gate that lets the other factor through


def recover(work: LayerWork, seed: int) -> dict[str, Tensor]:
    """The mask of each target of `work`, fp64, 1 where kept, 0 where dropped.

    Raises Wrong where the outputs spell no mask, where a mask keeps another share than 1 - p
    (by more than six standard deviations), or where two projections have one mask between them.
    """
    p = work.dropout
    found: dict[str, Tensor] = {}
    with _borrowed(work):
        for target in work.targets:
            found[target] = _mask(work, target, seed)
    for target, mask in found.items():
        kept, count = float(mask.mean()), mask.numel()
        if abs(kept - (1 - p)) > 6 * math.sqrt(p * (1 - p) / count):
            raise Wrong(f"dropout of {target}: keeps {kept:.4f} of the elements, takes {1 - p:g}")
    names = list(found)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            a, b = found[first], found[second]
            # 256 coins of p = 0.1 fall the same way twice in one run of 10^19.
            if a.numel() >= 256 and a.shape == b.shape and torch.equal(a, b):
                raise Wrong(f"dropout of {first} and {second}: one mask, takes one for each")
    return found


def _mask(work: LayerWork, target: str, seed: int) -> Tensor:
    """One target's mask [M, K], 16 columns a rank row in fp32, 5 in a half type's few digits."""
    digits = 16 if work.dtype == torch.float32 else 5
    a = work.projection(target)["A"]
    k = a.shape[1]
    for name in work.targets:
        parts = work.projection(name)
        for parameter in parts.values():
            parameter.zero_()
    parts = work.projection(target)
    rank = torch.arange(RANK)
    parts["B"][rank, rank] = 1.0
    spell = _surroundings(work, target)

    values = torch.arange(2**digits, dtype=torch.float64)
    table = spell(values * (ALPHA / RANK) / (1.0 - work.dropout))
    powers = 2.0 ** torch.arange(digits)
    mask = torch.empty(work.case.m, k, dtype=torch.float64)
    for start in range(0, k, digits * RANK):
        columns = torch.arange(start, min(start + digits * RANK, k))
        row, digit = (columns - start) // digits, (columns - start) % digits
        a.zero_()
        a[row, columns] = powers[digit].to(a.dtype)
        torch.manual_seed(seed)
        with torch.enable_grad():
            ys = work.call(work.x)
        y = ys[work.targets.index(target) if len(ys) > 1 else 0].detach().double()
        number = _nearest(y[:, :RANK], table, target)
        mask[:, columns] = ((number[:, row] >> digit) & 1).double()
    return mask


def _surroundings(work: LayerWork, target: str) -> Callable[[Tensor], Tensor]:
    """Sets what lies around the target; returns how the target's output reads from outside."""
    if work.case.op != "mlp":
        return lambda value: value
    gate, up, down = (work.projection(name)["W"] for name in work.targets)
    unit = torch.arange(RANK)
    silu = torch.nn.functional.silu
    if target != "gate_proj":
        gate[:, 0] = OPEN
    if target != "up_proj":
        up[:, 0] = 1.0
    if target == "down_proj":
        opened = float(silu(torch.tensor(OPEN, dtype=torch.float64)))
        return lambda value: value * opened
    down[unit, unit] = 1.0
    if target == "gate_proj":
        return silu
    return lambda value: value * float(silu(torch.tensor(OPEN, dtype=torch.float64)))


def _nearest(y: Tensor, table: Tensor, target: str) -> Tensor:
    """The index in `table` (rising) of each y. Raises Wrong where y lies between two entries."""
    index = torch.searchsorted((table[1:] + table[:-1]) / 2, y.contiguous())
    gap = float((table[1:] - table[:-1]).min())
    off = float((y - table[index]).abs().max()) if y.numel() else 0.0
    if not off < 0.45 * gap:
        raise Wrong(
            f"dropout of {target}: its output is {off / gap:.2g} steps away from any mask's; "
            "takes kept elements multiplied by 1 / (1 - p) and the others zero"
        )
    return index


@contextmanager
def _borrowed(work: LayerWork) -> Iterator[None]:
    """Lends the layer's parameters and input (set to ones) and puts their values back."""
    tensors = [*work.net.parameters(), work.x]
    values = [tensor.detach().clone() for tensor in tensors]
    with torch.no_grad():
        work.x.fill_(1.0)
        try:
            yield
        finally:
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
