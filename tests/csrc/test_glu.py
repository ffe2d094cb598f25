"""glu_forward and glu_backward against torch in fp64."""

import math

import pytest
import torch
from torch.nn import functional as F

from tests.csrc import native

ACTIVATIONS = {
    "silu": (0, F.silu),
    "gelu": (1, F.gelu),
    "gelu_tanh": (2, lambda x: F.gelu(x, approximate="tanh")),
}
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.float32: 1e-36, torch.bfloat16: 1e-36, torch.float16: 2.0**-25}


def operands(n, dtype):
    gate = torch.cat([torch.linspace(-30, 30, n - n // 2), torch.randn(n // 2) * 2])
    return gate.to(dtype), torch.randn(n).to(dtype), torch.randn(n).to(dtype)


def exact(dh, gate, up, activation):
    gate, up = gate.double().requires_grad_(), up.double().requires_grad_()
    h = activation(gate) * up
    return *torch.autograd.grad(h, (gate, up), dh.double()), h.detach()


def assert_close(got, want, relative, absolute):
    """One rounding of the result, `relative` of its value, and `absolute`."""
    bar = (ROUNDING[got.dtype] + relative) * want.abs() + absolute + SMALLEST[got.dtype]
    excess = (got.double() - want).abs() - bar
    assert excess.max() <= 0, f"error exceeds the bar by {excess.max():.3e}"


@pytest.mark.parametrize("dtype", list(native.CODES), ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("n", [1, 7, 33, 100_003])
def test_against_fp64(n, name, dtype):
    code, activation = ACTIVATIONS[name]
    gate, up, dh = operands(n, dtype)
    dgate, dup, h = exact(dh, gate, up, activation)
    got = native.glu_backward(dh, gate, up, code)
    u, d = up.double().abs(), dh.double().abs()
    assert_close(got[2], h, 5e-7, 1e-7 * u)
    assert_close(got[1], dup, 5e-7, 1e-7 * d)
    assert_close(got[0], dgate, 5e-7, 5e-7 * d * u)
    assert torch.equal(got[2], native.glu_forward(gate, up, code))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_no_worse_than_torch_near_zero(name):
    """Where gates live: the worst error over [-6, 6] is at most one and a half times that of torch's fp32."""
    code, activation = ACTIVATIONS[name]
    gate = torch.linspace(-6, 6, 200_001)
    one = torch.ones_like(gate)
    want = activation(gate.double())
    ours = (native.glu_forward(gate, one, code).double() - want).abs().max()
    assert ours <= 1.5 * (activation(gate).double() - want).abs().max()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_ends(name):
    """NaN and infinities, and numbers whose exponential overflows, as torch has them."""
    code, activation = ACTIVATIONS[name]
    gate = torch.tensor(
        [math.nan, math.inf, -math.inf, 0.0, 1e30, -1e30, 3e38, -3e38, 89, -89, 1e-40]
    )
    one = torch.ones_like(gate)
    got, want = native.glu_forward(gate, one, code), activation(gate)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-36, equal_nan=True)
    nan = torch.full_like(gate, math.nan)
    assert native.glu_forward(gate, nan, code).isnan().all()
    assert all(g.isnan().all() for g in native.glu_backward(nan, gate, one, code)[:2])
    assert native.glu_backward(one, nan, one, code)[0].isnan().all()


def test_h_is_optional():
    gate, up, dh = operands(50, torch.float32)
    with_h, without = (native.glu_backward(dh, gate, up, 0, need_h=need) for need in (True, False))
    assert torch.equal(with_h[0], without[0])
    assert torch.equal(with_h[1], without[1])
    assert without[2].isnan().all()
