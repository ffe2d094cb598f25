"""Single layers as rows: how they are built and stepped, and their truth in fp64."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench import masks
from bench.check import Wrong
from bench.peers import PEERS
from bench.registry import ALPHA, RANK, Case

SEED = 1234
SCALING = ALPHA / RANK


class Projection(nn.Module):
    """One linear layer, as `target_modules` finds it."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(k, n, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.q_proj(x),)


class QueryKeyValue(nn.Module):
    """Three projections of one x, as in grouped-query attention."""

    def __init__(self, hidden: int, key_value: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, key_value, bias=False)
        self.v_proj = nn.Linear(hidden, key_value, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, features: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, features)

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        return (self.embed_tokens(ids),)


class Mlp(nn.Module):
    """Transformers' own Llama MLP; returned as a tuple, as the other layers are."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaMLP

        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=1
        )
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.mlp(x),)


BASES: dict[str, tuple[type[nn.Module], tuple[str, ...]]] = {
    "linear": (Projection, ("q_proj",)),
    "qkv": (QueryKeyValue, ("q_proj", "k_proj", "v_proj")),
    "mlp": (Mlp, ("gate_proj", "up_proj", "down_proj")),
    "embedding": (Embedding, ("embed_tokens",)),
}

# Features of each output. Not asked of the layer: a compiled one would compile once more for it.
OUTPUTS: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "linear": lambda dims: (dims[1],),
    "qkv": lambda dims: (dims[0], dims[1], dims[1]),
    "mlp": lambda dims: (dims[0],),
    "embedding": lambda dims: (dims[1],),
}


@functools.lru_cache(maxsize=1)
def _base(op: str, dims: tuple[int, ...], dtype: torch.dtype) -> nn.Module:
    base = BASES[op][0](*dims)
    source = torch.Generator().manual_seed(SEED)
    for parameter in base.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=source)
    return base.to(dtype).requires_grad_(False).train()


class LayerWork:
    """One peer of a row of single layers. Raises `bench.peers.Unavailable` where it cannot run.

    step(): one forward and backward, gradients dropped at the end: what is timed.
    results(): the same step's outputs and gradients. reference(): their truth.
    """

    def __init__(self, case: Case, peer: str, dropout: float) -> None:
        self.case, self.peer, self.dropout = case, peer, dropout
        self.dtype = getattr(torch, case.dtype)
        self.targets = BASES[case.op][1]
        base = _base(case.op, case.dims, self.dtype)
        own = copy.deepcopy(base, {id(p): p for p in base.parameters()})  # one W for all peers
        built = PEERS[peer].build(own, list(self.targets), dropout)
        self.call, self.net, self.note = built.call, built.module, built.note

        source = torch.Generator().manual_seed(SEED + 1)
        if case.op == "embedding":
            self.x = torch.randint(case.dims[0], (case.m,), generator=source)
        else:
            x = torch.randn(case.m, case.dims[0], generator=source)
            self.x = x.to(self.dtype).requires_grad_()
        self.grads = tuple(
            torch.randn(case.m, n, generator=source).to(self.dtype)
            for n in OUTPUTS[case.op](case.dims)
        )
        self.trained = [p for p in self.net.parameters() if p.requires_grad]
        self.leaves = [*self.trained, *([self.x] if self.x.requires_grad else [])]

    def step(self) -> None:
        ys = self.call(self.x)
        if self.leaves:
            torch.autograd.backward(ys, self.grads)
            for leaf in self.leaves:
                leaf.grad = None

    def projection(self, name: str) -> Mapping[str, Any]:
        """A target's parameters: "W", and "A" and "B" where it has adapters."""
        (module,) = [m for path, m in self.net.named_modules() if path.split(".")[-1] == name]
        if not hasattr(module, "base_layer"):
            return {"W": module.weight}
        prefix = "lora_embedding_" if self.case.op == "embedding" else "lora_"
        a, b = (getattr(module, f"{prefix}{letter}")["default"] for letter in "AB")
        return {
            "W": module.base_layer.weight,
            "A": getattr(a, "weight", a),
            "B": getattr(b, "weight", b),
        }

    def results(self) -> dict[str, Tensor]:
        torch.manual_seed(SEED + 2)
        ys = self.call(self.x)
        found = {f"y{i}": y.detach().clone() for i, y in enumerate(ys)}
        if self.leaves:
            torch.autograd.backward(ys, self.grads)
        if self.x.requires_grad:
            found["dx"] = _taken(self.x, "x")
        for name in self.targets:
            for letter, parameter in self.projection(name).items():
                if parameter.requires_grad:
                    found[f"d{letter} of {name}"] = _taken(parameter, f"{letter} of {name}")
        return found

    def dropped(self) -> dict[str, Tensor]:
        """The mask of each target, 1 where kept, under the seed that `results` uses."""
        if not self.dropout or self.peer == "frozen":
            return {}
        return masks.recover(self, SEED + 2)

    def reference(self, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The truth in fp64, with the masks that this peer dropped by."""
        x = self.x.detach()
        weights = {
            name: {letter: value.detach() for letter, value in self.projection(name).items()}
            for name in self.targets
        }
        if self.case.op == "embedding":  # only the rows looked up: the table is large
            weights["embed_tokens"]["W"] = weights["embed_tokens"]["W"][x]
        weights = {n: {k: v.double() for k, v in parts.items()} for n, parts in weights.items()}
        for parts in weights.values():
            for letter in ("A", "B"):
                if letter in parts:
                    parts[letter].requires_grad_()
        x = x if self.case.op == "embedding" else x.double().requires_grad_()

        def adapted(name: str, value: Tensor) -> Tensor:
            """Y = X W^T + s (mask X / (1 - p)) A^T B^T"""
            parts = weights[name]
            y = value @ parts["W"].T
            if "A" in parts:
                if name in kept:
                    value = value * kept[name] / (1.0 - self.dropout)
                y = y + SCALING * (value @ parts["A"].T) @ parts["B"].T
            return y

        if self.case.op == "embedding":
            parts = weights["embed_tokens"]
            y = parts["W"]
            if "A" in parts:
                y = y + SCALING * F.embedding(x, parts["A"].T) @ parts["B"].T
            ys: tuple[Tensor, ...] = (y,)
        elif self.case.op == "mlp":
            h = F.silu(adapted("gate_proj", x)) * adapted("up_proj", x)
            ys = (adapted("down_proj", h),)
        else:
            ys = tuple(adapted(name, x) for name in self.targets)
        found = {f"y{i}": y.detach() for i, y in enumerate(ys)}
        if any(y.requires_grad for y in ys):
            torch.autograd.backward(ys, tuple(g.double() for g in self.grads))
        if x.requires_grad and x.grad is not None:
            found["dx"] = x.grad
        for name, parts in weights.items():
            for letter in ("A", "B"):
                if letter in parts:
                    found[f"d{letter} of {name}"] = parts[letter].grad
        return found


def _taken(leaf: Tensor, name: str) -> Tensor:
    if leaf.grad is None:
        raise Wrong(f"gradient of {name}: not computed")
    gradient, leaf.grad = leaf.grad, None
    return gradient
