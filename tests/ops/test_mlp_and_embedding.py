"""``lora_mlp`` and ``lora_embedding`` on every backend against fp64: outputs and every gradient."""

import pytest
import torch
from torch.nn import functional as F

from fastlora import functional
from tests.helpers import (
    check_against_exact,
    double,
    fresh,
    masks,
    projection,
    relative_error,
    require_backend,
    unfused,
)

pytestmark = pytest.mark.usefixtures("poisoned_empty")

BACKENDS = ("torch", "cpu", "triton")
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}


def mlp_parts(columns, hidden, ranks, dtype, bias):
    gate = projection(columns, hidden, ranks[0], dtype, bias=bias)
    up = projection(columns, hidden, ranks[1], dtype, bias=bias)
    return [gate, up, projection(hidden, columns, ranks[2], dtype, bias=bias)]


def mlp_masks(x, hidden, dropout_p, seed):
    """Masks of gate, up and down: the third belongs to an input of ``hidden`` columns."""
    keep = masks(x, 3, dropout_p, seed)
    if dropout_p:
        wide = torch.empty(*x.shape[:-1], hidden)
        keep[2] = masks(wide, 3, dropout_p, seed)[2]
    return keep


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_mlp(backend, dtype, activation, dropout_p):
    require_backend(backend)
    columns, hidden = 32, 49
    parts = mlp_parts(columns, hidden, (4, 8, 3), dtype, bias=activation == "gelu")
    x = torch.randn(2, 9, columns, dtype=torch.float64).to(dtype)
    keep = mlp_masks(x, hidden, dropout_p, seed=5)

    def fused(x, parts):
        torch.manual_seed(5)
        y = functional.lora_mlp(
            x, *parts, activation=activation, dropout_p=dropout_p, backend=backend
        )
        return [y]

    def plain(x, parts):
        gate = unfused(x, parts[0], keep[0], dropout_p)
        up = unfused(x, parts[1], keep[1], dropout_p)
        return [unfused(ACTIVATIONS[activation](gate) * up, parts[2], keep[2], dropout_p)]

    dy = torch.randn(2, 9, columns, dtype=torch.float64).to(dtype)
    check_against_exact(fused, plain, x, parts, [dy])


@pytest.mark.parametrize(
    "frozen",
    ["x", "gate_A", "gate_B", "up_A", "down_A", "down_B", "below", "all_but_down_A", "adapters"],
)
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_mlp_with_frozen_parts(frozen, backend):
    """Whatever is frozen gets no gradient, and changes no other gradient."""
    require_backend(backend)
    names = ["gate_A", "gate_B", "up_A", "up_B", "down_A", "down_B"]
    groups = {
        "below": ["x", *names[:4]],
        "all_but_down_A": ["x", *names[:4], "down_B"],
        "adapters": names,
    }
    off = groups.get(frozen, [frozen])

    def run(off):
        torch.manual_seed(2)
        parts = mlp_parts(16, 24, (2, 3, 4), torch.float32, bias=False)
        x = torch.randn(5, 16)
        leaves = {"x": x}
        for name, (i, j) in zip(names, [(i, j) for i in range(3) for j in (1, 2)], strict=True):
            leaves[name] = parts[i][j]
        for name, leaf in leaves.items():
            leaf.requires_grad_(name not in off)
        torch.manual_seed(4)
        functional.lora_mlp(x, *parts, dropout_p=0.2, backend=backend).square().sum().backward()
        return {name: leaf.grad for name, leaf in leaves.items()}

    whole, partial = run([]), run(off)
    for name, gradient in partial.items():
        if name in off:
            assert gradient is None, name
        else:
            torch.testing.assert_close(gradient, whole[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [1, 13])
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32], ids=str)
def test_embedding(backend, dtype, rank, ids_dtype):
    """L7: embed_scale scales the update too, and the padding row of A gets no gradient."""
    require_backend(backend)
    vocabulary, dim, padding = 41, 24, 3
    weight = torch.randn(vocabulary, dim, dtype=torch.float64).to(dtype)
    lora_A = torch.randn(rank, vocabulary, dtype=torch.float64).to(dtype).requires_grad_()
    lora_B = torch.randn(dim, rank, dtype=torch.float64).to(dtype).requires_grad_()
    ids = torch.randint(0, vocabulary, (3, 17), dtype=ids_dtype)
    ids[0, :4] = padding
    dy = torch.randn(3, 17, dim, dtype=torch.float64).to(dtype)

    def plain(parts):
        weight, lora_A, lora_B, *_ = parts
        s = F.embedding(ids, lora_A.T, padding_idx=padding)
        return (F.embedding(ids, weight) + F.linear(s, lora_B) * 0.7) * 1.5

    def fused(parts):
        weight, lora_A, lora_B, *_ = parts
        return functional.lora_embedding(
            ids,
            weight,
            lora_A,
            lora_B,
            0.7,
            padding_idx=padding,
            embed_scale=1.5,
            backend=backend,
        )

    def run(function, parts):
        y = function(parts)
        y.backward(dy.to(y.dtype))
        return {"y": y.detach(), "dA": parts[1].grad, "dB": parts[2].grad}

    parts = (weight, lora_A, lora_B, 0.7, None)
    got, peer, exact = run(fused, fresh(parts)), run(plain, fresh(parts)), run(plain, double(parts))
    for name, value in got.items():
        assert value.dtype == peer[name].dtype
        bar = 1e-5
        if dtype != torch.float32:
            bar = max(2 * relative_error(peer[name], exact[name]), torch.finfo(dtype).eps / 4)
        assert relative_error(value, exact[name]) <= bar, name
    assert got["dA"][:, padding].abs().max() == 0.0
