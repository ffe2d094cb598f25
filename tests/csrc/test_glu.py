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
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12 * 2}
SMALLEST = {torch.float32: 1e-36, torch.bfloat16: 1e-36, torch.float16: 2.0**-25}


def operands(n, dtype):
    gate = torch.cat([torch.linspace(-30, 30, n - n // 2), torch.randn(n // 2) * 2])
    return gate.to(dtype), torch.randn(n).to(dtype), torch.randn(n).to(dtype)


def exact(dh, gate, up, activation):
    gate, up = gate.double().requires_grad_(), up.double().requires_grad_()
    h = activation(gate) * up
    return *torch.autograd.grad(h, (gate, up), dh.double()), h.detach()


def assert_close(got, want, relative, size):
    """Within `relative` of the value, or of `size`, the size of the terms whose sum it is."""
    bar = ROUNDING[got.dtype] * want.abs() * (1 + 1e-5) + relative * size + SMALLEST[got.dtype]
    excess = (got.double() - want).abs() - bar
    assert excess.max() <= 0, f"error exceeds the bar by {excess.max():.3e}"


@pytest.mark.parametrize("dtype", list(native.CODES), ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("n", [1, 7, 33, 100_003])
def test_against_fp64(n, name, dtype):
    code, activation = ACTIVATIONS[name]
    gate, up, dh = operands(n, dtype)
    dgate, dup, h = exact(dh, gate, up, activation)
    # gelu's argument is exact only to an ulp, which its exponential multiplies by g^2 (silu: g; tanh: g^3).
    power = {"silu": 1, "gelu": 2, "gelu_tanh": 3}[name]
    spread = 1 + 0.1 * gate.double().abs() ** power
    assert_close(native.glu_forward(gate, up, code), h, 1e-6, h.abs() * spread)
    got = native.glu_backward(dh, gate, up, code)
    assert_close(got[2], h, 1e-6, h.abs() * spread)
    assert_close(got[1], dup, 1e-6, dup.abs() * spread)
    assert_close(got[0], dgate, 1e-6, (dh.double() * up.double()).abs() + dgate.abs())
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
    gate = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1e30, -1e30, 3e38, -3e38, 89, -89, 1e-40])
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_rounding_is_torchs(dtype):
    """Every half-precision number, times numbers that make ties, overflow and subnormals: torch's own rounding."""
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
    y, ones = numbers.reshape(256, 256).clone(), torch.full((256, 1), 1.0)
    for factor in (1.0, 3.0, 2.0**-12, 1 + 2.0**-8, 1 + 2.0**-11, 65519.0):
        b = torch.full((256, 1), 1.0)
        s = torch.full((256, 1), 1.0)
        out = native.expand(torch.zeros_like(y), s, b, factor)
        assert torch.equal(out, torch.full_like(out, factor))
        wide = native.shrink(y, [torch.eye(256)])
        assert torch.equal(wide.nan_to_num(7.0), nan_rows(y.float()).nan_to_num(7.0))
        row = y.float()[:, :1] * factor
        got = native.expand(torch.zeros(256, 8, dtype=dtype), row, ones[:8].clone(), 1.0)
        assert torch.equal(got.nan_to_num(7.0), row.to(dtype).expand(256, 8).nan_to_num(7.0))


def nan_rows(x):
    """x @ eye in exact arithmetic: a row that holds a NaN or an infinity is NaN, but for 0 * inf."""
    return x @ torch.eye(x.shape[1])
