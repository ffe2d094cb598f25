"""The peers of a row: what is run beside fastlora, and how each is made from the same base module.

A peer that cannot run here raises `Unavailable` with the reason, and the reason is reported.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.registry import ALPHA, RANK


class Unavailable(Exception):
    """This peer cannot run this row here; the message says why."""


@dataclass
class Built:
    """call: takes the inputs. module: the same thing, for its parameters. note: a word for the row."""

    call: Callable[..., Any]
    module: nn.Module
    note: str = ""


@dataclass(frozen=True)
class Peer:
    """build: makes the peer from a base module of its own and the names of the layers to adapt."""

    title: str
    build: Callable[[nn.Module, list[str], float], Built]


def frozen(net: nn.Module, targets: list[str], dropout: float) -> Built:
    """The base alone, nothing to train: no LoRA layer can be faster than this."""
    net.requires_grad_(False)
    return Built(net, net)


def peft(net: nn.Module, targets: list[str], dropout: float) -> Built:
    """PEFT's own layers with PEFT's defaults, adapters in fp32 included."""
    return Built(*[_peft_model(net, targets, dropout).base_model.model] * 2)


def compiled(net: nn.Module, targets: list[str], dropout: float) -> Built:
    """torch.compile of PEFT's layers, for these exact shapes."""
    module = peft(net, targets, dropout).module
    torch._dynamo.reset()  # every row compiles the same forward; the recompile limit is 8
    return Built(torch.compile(module, dynamic=False), module)


def fastlora(net: nn.Module, targets: list[str], dropout: float) -> Built:
    """The same PEFT layers after `fastlora.fuse`."""
    try:
        import fastlora as package

        fuse, explain = package.fuse, package.explain
    except (ImportError, AttributeError) as missing:
        raise Unavailable(f"fastlora.fuse cannot be imported: {missing}") from missing
    model = _peft_model(net, targets, dropout)
    fuse(model)
    rows = explain(model).rows
    fused = [row for row in rows if row.fused]
    if not fused:
        raise Unavailable("nothing was fused: " + "; ".join(sorted({row.reason for row in rows})))
    backends = "/".join(sorted({str(row.backend) for row in fused}))
    return Built(
        model.base_model.model,
        model.base_model.model,
        f"{len(fused)} of {len(rows)} layers fused, backend {backends}",
    )


PEERS: dict[str, Peer] = {
    "frozen": Peer("frozen base (the limit)", frozen),
    "peft": Peer("PEFT", peft),
    "compile": Peer("torch.compile of PEFT", compiled),
    "fastlora": Peer("fastlora", fastlora),
}


def _peft_model(net: nn.Module, targets: list[str], dropout: float) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=dropout, target_modules=targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(net, config)
    fill_adapters(model)
    return model.train()


def fill_adapters(model: nn.Module, b_std: float = 0.1) -> None:
    """Gives every adapter values of its own, the same ones for every peer.

    PEFT starts B at zero, which makes dA zero and hides whatever is wrong with it. The low-rank
    term comes out at about the size of the base's output for unit inputs and the default b_std.
    """
    source = torch.Generator().manual_seed(20)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            continue
        is_a = "lora_A" in name or "lora_embedding_A" in name
        std = 1.0 / math.sqrt(parameter.shape[1]) if is_a else b_std
        if "lora_embedding_A" in name:  # one row of A's transpose is one token's S
            std = 1.0
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=source) * std)
