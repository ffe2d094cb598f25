"""The operations under ``torch.compile`` and as custom ops."""

import pytest
import torch

from fastlora import functional
from fastlora.ops import _library
from tests.helpers import gradients, projection, relative_error, require_backend

BACKENDS = ("torch", "cpu")


@pytest.fixture(params=BACKENDS)
def backend(request):
    require_backend(request.param)
    torch._dynamo.reset()
    return request.param


def operations(backend):
    """name -> (function of (x, leaves), leaves)."""
    q, k = projection(16, 12, 4, bias=True), projection(16, 8, 2)
    gate, up, down = projection(16, 24, 2), projection(16, 24, 3), projection(24, 16, 2)

    def qkv(x, leaves):
        ys = functional.lora_projections(
            x,
            [q[0], k[0]],
            leaves[0::2],
            leaves[1::2],
            [q[3], k[3]],
            [q[4], None],
            dropout_p=0.2,
            backend=backend,
        )
        return torch.cat(ys, dim=-1)

    def mlp(x, leaves):
        parts = [
            (part[0], leaves[2 * i], leaves[2 * i + 1], part[3], None)
            for i, part in enumerate((gate, up, down))
        ]
        return functional.lora_mlp(x, *parts, dropout_p=0.2, backend=backend)

    return {
        "qkv": (qkv, [q[1], q[2], k[1], k[2]]),
        "mlp": (mlp, [leaf for part in (gate, up, down) for leaf in part[1:3]]),
    }


@pytest.mark.parametrize("name", ["qkv", "mlp"])
@pytest.mark.parametrize("train_x", [False, True])
def test_fullgraph_equals_eager(backend, name, train_x):
    """One graph without breaks, dropout on: the same bits as eager under the same seed."""
    function, leaves = operations(backend)[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")

    def run(function):
        for leaf in leaves:
            leaf.grad = None
        torch.manual_seed(5)
        x = torch.randn(2, 3, 16, requires_grad=train_x)
        y = function(x, leaves)
        y.square().sum().backward()
        return [y.detach(), *([x.grad] if train_x else []), *(leaf.grad for leaf in leaves)]

    for got, expected in zip(run(compiled), run(function), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


def test_fullgraph_embedding(backend):
    weight, ids = torch.randn(9, 6), torch.randint(0, 9, (2, 5))
    lora_A, lora_B = torch.randn(3, 9, requires_grad=True), torch.randn(6, 3, requires_grad=True)

    def function(lora_A, lora_B):
        return functional.lora_embedding(
            ids, weight, lora_A, lora_B, 0.5, padding_idx=2, backend=backend
        )

    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        y = call(lora_A, lora_B)
        results.append((y, *torch.autograd.grad(y.square().sum(), [lora_A, lora_B])))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_inductor_with_dynamic_shapes():
    """The default compiler, and a second row count in the same graph."""
    require_backend("cpu")
    torch._dynamo.reset()
    parts = projection(16, 12, 4)

    def function(x, lora_A, lora_B):
        return functional.lora_linear(x, parts[0], lora_A, lora_B, parts[3]).relu()

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for rows in (5, 9):
        x = torch.randn(rows, 16)
        assert relative_error(compiled(x, *parts[1:3]), function(x, *parts[1:3])) < 1e-6


def test_custom_ops_pass_opcheck(backend):
    q, k = projection(16, 12, 4, bias=True), projection(16, 8, 2)
    weights, As, Bs = ([part[i].detach() for part in (q, k)] for i in range(3))
    x, dy = torch.randn(5, 16), torch.randn(5, 8)
    seeds = torch.tensor([3, 4])
    check = torch.library.opcheck
    check(
        _library._projections_forward,
        (x, weights, As, Bs, [0.5, 2.0], [True, False], [q[4]], 0.3, seeds, backend),
    )
    s = torch.randn(5, 6)
    check(
        _library._projections_backward,
        (
            [False, True],
            [dy],
            x,
            s,
            weights,
            As,
            Bs,
            [0.5, 2.0],
            0.3,
            seeds,
            True,
            [True, True],
            [True, False],
            backend,
        ),
    )
    gate, up, dh = torch.randn(3, 5, 24)
    check(_library._glu_forward, (gate, up, "silu", backend))
    check(_library._glu_backward, (dh, gate, up, "gelu", backend))
    ids, table, A, B = torch.tensor([1, 2]), torch.randn(7, 4), torch.randn(2, 7), torch.randn(4, 2)
    check(_library._embedding_forward, (ids, table, A, B, 0.5, backend))
    check(_library._embedding_backward, (torch.randn(2, 4), ids, table, A, B, 0.5, 1, backend))


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_bf16_autocast_under_compile(backend):
    require_backend(backend)
    torch._dynamo.reset()
    parts = projection(16, 12, 4)

    def run(x, parts):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return [functional.lora_linear(x, parts[0][0], *parts[0][1:3], 0.5, backend=backend)]

    x, dy = torch.randn(6, 16), torch.randn(6, 12)
    eager = gradients(run, x, [parts], [dy])
    parts[1].grad = parts[2].grad = None
    compiled = gradients(torch.compile(run, fullgraph=True, backend="aot_eager"), x, [parts], [dy])
    for name in eager:
        assert torch.equal(compiled[name], eager[name]), name
