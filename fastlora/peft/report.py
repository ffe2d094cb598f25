"""What ``explain`` returns."""

import re
from dataclasses import dataclass
from typing import Any

from peft.tuners.lora.layer import Embedding, Linear, LoraLayer
from torch import nn
from torch.distributed.tensor import DTensor

from .. import backend as _backend
from .groups import group_of
from .layers import LayerState, embedding_terms, linear_terms

_NEVER = "fuse has not been called since PEFT made this layer"


@dataclass(frozen=True)
class Row:
    """One LoRA layer.

    ``name`` as in ``model.named_modules()``; ``kind`` "linear", "projections", "mlp", "embedding",
    or the name of a PEFT class that has no fused form; ``backend`` "triton", "cpu", "torch", or
    "peft" where PEFT's own forward runs; ``reason`` why, or what it is computed with.
    """

    name: str
    kind: str
    fused: bool
    backend: str
    reason: str


@dataclass(frozen=True)
class Explanation:
    """Rows, one a LoRA layer in the model's order. Printed, equal layers share a line."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        lines: dict[tuple[str, ...], int] = {}
        for row in self.rows:
            pattern = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", row.name)
            key = (pattern, row.kind, "yes" if row.fused else "no", row.backend, row.reason)
            lines[key] = lines.get(key, 0) + 1
        table: list[tuple[str, ...]] = [("layer", "count", "kind", "fused", "backend", "reason")]
        table += [(key[0], str(count), *key[1:]) for key, count in lines.items()]
        widths = [max(len(line[i]) for line in table) for i in range(6)]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in table
        ]
        fused = sum(row.fused for row in self.rows)
        return "\n".join([*text, f"{fused} of {len(self.rows)} LoRA layers are fused"])


def row_of(
    name: str,
    layer: LoraLayer,
    parent: nn.Module | None,
    child: str,
    obstacle: str,
    sharded: bool,
) -> Row:
    """The row of one layer. ``sharded``: FSDP2 gathers its parameters before they are used."""
    kind = type(layer).__name__  # such as Conv2d or a quantised Linear8bitLt
    if isinstance(layer, Linear | Embedding):
        kind = "linear" if isinstance(layer, Linear) else "embedding"
    state = layer.__dict__.get("_fastlora")
    if not isinstance(state, LayerState):
        return Row(name, kind, False, "peft", obstacle or _NEVER)
    if "forward" in layer.__dict__:
        return Row(name, kind, False, "peft", "its forward was replaced on the instance")
    terms: Any = embedding_terms(layer) if kind == "embedding" else linear_terms(layer)
    weight = layer.get_base_layer().weight
    gathered = sharded and isinstance(weight, DTensor)
    if isinstance(terms, str) and not gathered:
        return Row(name, kind, False, "peft", terms)
    try:
        backend = _backend.choose(state.backend, weight.device, weight.dtype)
    except ValueError as error:
        return Row(name, kind, False, "none", str(error))
    if gathered:
        return Row(name, kind, True, backend, "once FSDP2 has gathered its parameters")
    if kind == "embedding":
        return Row(name, kind, True, backend, "")
    kind, note = group_of(parent, child)
    return Row(name, kind, True, backend, note)
