"""Beyond a plain backward: second order, vmap, forward AD, tracing, changes in place, lazy views."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fastlora import functional
from tests.helpers import fresh, masks, projection, relative_error, require_backend, unfused

BACKENDS = ("torch", "cpu", "triton")


@pytest.fixture(params=BACKENDS)
def backend(request):
    require_backend(request.param)
    return request.param


def mlp_plain(x, parts, keep, p):
    gate, up = (unfused(x, parts[i], keep[i], p) for i in (0, 1))
    return unfused(F.silu(gate) * up, parts[2], keep[2], p)


def second_order(run, x, parts):
    """Gradients of the squared norm of all first gradients."""
    x = x.detach().clone().requires_grad_()
    leaves = [x, *(t for part in parts for t in part[1:3])]
    first = torch.autograd.grad(run(x, parts).pow(2).sum(), leaves, create_graph=True)
    return torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("op", ["linear", "mlp"])
def test_second_order(backend, op, dropout_p):
    x = torch.randn(2, 5, 12)
    parts = [projection(12, 8, 3, bias=True)]
    keep = masks(x, 1, dropout_p, seed=5)
    if op == "mlp":
        parts = [projection(12, 8, 3), projection(12, 8, 2), projection(8, 12, 3)]
        keep = masks(x, 3, dropout_p, seed=5)
        # the hidden features have a mask of their own width
        keep[2] = masks(torch.empty(10, 8), 3, dropout_p, seed=5)[2]

    def fused(x, parts):
        torch.manual_seed(5)
        options = {"dropout_p": dropout_p, "backend": backend}
        if op == "linear":
            return functional.lora_linear(x, *parts[0], **options)
        return functional.lora_mlp(x, *parts, **options)

    def plain(x, parts):
        if op == "linear":
            return unfused(x, parts[0], keep[0], dropout_p)
        return mlp_plain(x, parts, keep, dropout_p)

    got = second_order(fused, x, [fresh(part) for part in parts])
    want = second_order(plain, x, [fresh(part) for part in parts])
    for one, other in zip(got, want, strict=True):
        assert relative_error(one, other) <= 1e-5


def test_second_order_of_an_embedding(backend):
    weight, A, B = torch.randn(11, 6), torch.randn(3, 11), torch.randn(6, 3)
    ids = torch.tensor([[1, 4, 1], [0, 9, 2]])

    def run(plain):
        leaves = [A.clone().requires_grad_(), B.clone().requires_grad_()]
        if plain:
            s = F.embedding(ids, leaves[0].T, 2)
            y = F.embedding(ids, weight) + 0.5 * s @ leaves[1].T
        else:
            y = functional.lora_embedding(ids, weight, *leaves, 0.5, padding_idx=2, backend=backend)
        first = torch.autograd.grad(y.pow(2).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves)

    for one, other in zip(run(False), run(True), strict=True):
        assert relative_error(one, other) <= 1e-5


def test_second_order_without_x_is_refused():
    """x is not kept for a frozen A: an error, never a wrong number."""
    weight, A, B, scaling, _ = projection(12, 8, 3)
    x = torch.randn(4, 12, requires_grad=True)
    y = functional.lora_linear(x, weight, A.detach(), B, scaling, backend="torch")
    with pytest.raises(RuntimeError, match="second-order gradients need its input x"):
        torch.autograd.grad(y.pow(2).sum(), [B], create_graph=True)


def test_forward_mode_vmap_and_batched_gradients(backend):
    parts = projection(12, 8, 3, bias=True)
    x, tangent = torch.randn(5, 12), torch.randn(5, 12)

    def ours(x):
        return functional.lora_linear(x, *parts, backend=backend)

    def plain(x):
        return unfused(x, parts)

    got, want = (torch.func.jvp(f, (x,), (tangent,)) for f in (ours, plain))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        got, want = (forward_ad.unpack_dual(f(dual)).tangent for f in (ours, plain))
        torch.testing.assert_close(got, want)
    batch = torch.randn(3, 5, 12)
    torch.testing.assert_close(torch.vmap(ours)(batch), torch.vmap(plain)(batch))
    leaf = x.clone().requires_grad_()
    rows = torch.eye(8)
    got, want = (
        torch.autograd.grad(f(leaf).sum(0), leaf, rows, is_grads_batched=True)[0]
        for f in (ours, plain)
    )
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("shape", [(6, 12), (2, 3, 12)])
def test_outputs_may_be_changed_in_place(backend, shape):
    parts = [projection(12, 8, 3), projection(12, 8, 3)]
    x = torch.randn(shape)

    def step(run):
        for part in parts:
            part[1].grad = part[2].grad = None
        q, k = run(x)
        q.mul_(0.5)
        k += 1
        (torch.relu_(k) * q).sum().backward()
        return [t.grad for part in parts for t in part[1:3]]

    got = step(lambda x: functional.lora_projections(x, *zip(*parts, strict=True), backend=backend))
    want = step(lambda x: [unfused(x, part) for part in parts])
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def test_traced_by_make_fx(backend):
    parts = projection(12, 8, 3)
    x, other = torch.randn(5, 12), torch.randn(5, 12)

    def run(x):
        return functional.lora_linear(x, *parts, backend=backend)

    with torch.no_grad():
        traced = make_fx(run)(x)
        assert torch.equal(traced(other), run(other))


def test_negated_views(backend):
    """A lazily negated x, factor or dY: memory holds the opposite of the values."""
    parts = projection(12, 8, 3)
    x, dy = torch.randn(5, 12), torch.randn(5, 8)

    def run(x, dy):
        x = x.detach().requires_grad_()
        y = functional.lora_linear(x, *parts, backend=backend)
        return [y, *torch.autograd.grad(y, [x, *parts[1:3]], dy)]

    got, want = run(torch._neg_view(-x), torch._neg_view(-dy)), run(x, dy)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rows", [3, 200])
def test_another_default_device_few_rows(backend, rows):
    """``torch.set_default_device`` says nothing about tensors that are there already."""
    parts, x = projection(12, 8, 3), torch.randn(rows, 12, requires_grad=True)
    for chosen in (backend, "auto"):
        with torch.device("meta"):
            y = functional.lora_linear(x, *parts, dropout_p=0.1, backend=chosen)
            y.sum().backward()
        assert y.device.type == "cpu"
        assert x.grad.isfinite().all()


def test_meta_tensors():
    weight, A, B, scaling, _ = (
        t.to("meta") if isinstance(t, torch.Tensor) else t for t in projection(12, 8, 3)
    )
    x = torch.empty(5, 12, device="meta")
    assert functional.lora_linear(x, weight, A, B, scaling, dropout_p=0.1).shape == (5, 8)
