"""SwiGLU and GeGLU against fp64."""

import pytest
import torch
from torch.nn import functional as F

from fastlora.kernels import glu_backward, glu_forward
from tests.helpers import assert_accurate

from .cases import DTYPES

pytestmark = pytest.mark.usefixtures("poisoned_empty")

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
SHAPES = {"one": (1,), "17x63": (17, 63), "1504": (3, 1504), "3d": (2, 5, 31)}


def plain(dh, gate, up, activation):
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    h = ACTIVATIONS[activation](gate) * up
    return {
        "h": h.detach(),
        **dict(zip(("dgate", "dup"), torch.autograd.grad(h, (gate, up), dh), strict=True)),
    }


def fused(dh, gate, up, activation):
    dgate, dup, h = glu_backward(dh, gate, up, activation)
    assert torch.equal(h, glu_forward(gate, up, activation))
    return {"h": h, "dgate": dgate, "dup": dup}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_against_fp64(activation, dtype, shape):
    inputs = [
        (2 * torch.randn(SHAPES[shape], dtype=torch.float64)).to(DTYPES[dtype]) for _ in range(3)
    ]
    kept = [t.clone() for t in inputs]
    got = fused(*inputs, activation)
    peer = plain(*inputs, activation)
    exact = plain(*(t.double() for t in inputs), activation)
    for name, value in got.items():
        assert_accurate(name, value, peer[name], exact[name], DTYPES[dtype])
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))


def test_halves_of_one_tensor():
    """gate and up as a fused projection gives them, and a gradient that is a transposed view."""
    both = torch.randn(6, 2 * 21)
    gate, up = both[:, :21], both[:, 21:]
    dh = torch.randn(21, 6).t()
    expected = fused(dh.contiguous(), gate.contiguous(), up.contiguous(), "silu")
    got = fused(dh, gate, up, "silu")
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy, interpreting exp
def test_large_arguments():
    """Far from zero the activations are 0 or the identity: nothing overflows on the way."""
    gate = torch.tensor([-1e4, -100.0, -30.0, 30.0, 100.0, 1e4])
    for activation in ACTIVATIONS:
        h = glu_forward(gate, torch.ones(6), activation)
        torch.testing.assert_close(h, ACTIVATIONS[activation](gate), rtol=1e-5, atol=1e-9)
        assert all(
            t.isfinite().all() for t in glu_backward(torch.ones(6), gate, torch.ones(6), activation)
        )


def test_empty_and_unknown():
    nothing = torch.empty(0, 5)
    assert glu_forward(nothing, nothing, "gelu").shape == (0, 5)
    assert [t.shape for t in glu_backward(nothing, nothing, nothing, "gelu")] == [(0, 5)] * 3
    with pytest.raises(ValueError, match="activation is 'relu'"):
        glu_forward(torch.ones(2), torch.ones(2), "relu")
    with pytest.raises(TypeError, match="gate has dtype"):
        glu_forward(torch.ones(2).double(), torch.ones(2).double(), "silu")
