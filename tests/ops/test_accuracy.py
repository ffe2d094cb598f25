"""Every backend against fp64: the outputs and every gradient, over dtypes and shapes."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastlora import functional
from tests.helpers import (
    check_against_exact,
    masks,
    projection,
    require_backend,
    unfused,
)

pytestmark = pytest.mark.usefixtures("poisoned_empty")

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# (leading dimensions, in_features, out_features of each projection, ranks)
SHAPES = {
    "one": ((1,), 1, (1,), (1,)),
    "17x63": ((17,), 63, (17,), (4,)),
    "3d": ((2, 5), 64, (48,), (8,)),
    "4d-odd": ((2, 3, 4), 63, (65,), (13,)),
    "qkv": ((24,), 64, (64, 32, 32), (8, 4, 8)),
    "qkv-ranks": ((9,), 63, (17, 63, 1), (1, 13, 4)),
    "no-rows": ((0,), 16, (8, 24), (4, 2)),
}
LARGE = {
    "736x1504": ((63,), 736, (1504,), (64,)),
    "1504x736": ((130,), 1504, (736, 192), (16, 8)),
}
BACKENDS = ("torch", "cpu", "triton")


def check(backend, dtype, shape, dropout_p, adapter_dtype=None, bias=True):
    leading, columns, outs, ranks = shape
    x = torch.randn(*leading, columns, dtype=torch.float64).to(dtype)
    parts = [
        projection(columns, rows, rank, dtype, adapter_dtype, bias)
        for rows, rank in zip(outs, ranks, strict=True)
    ]
    dys = [torch.randn(*leading, rows, dtype=torch.float64).to(dtype) for rows in outs]
    keep = masks(x, len(parts), dropout_p, seed=11)

    def fused(x, parts):
        torch.manual_seed(11)
        return functional.lora_projections(
            x, *zip(*parts, strict=True), dropout_p=dropout_p, backend=backend
        )

    def plain(x, parts):
        return [unfused(x, part, keep[i], dropout_p) for i, part in enumerate(parts)]

    check_against_exact(fused, plain, x, parts, dys)


def cases(names):
    for backend in BACKENDS:
        for dtype in DTYPES:
            if dtype == "fp64" and backend != "torch":
                continue  # the kernels take fp32 and half types; fp64 is the reference's
            for name in names:
                yield pytest.param(backend, DTYPES[dtype], name, id=f"{backend}-{dtype}-{name}")


@pytest.mark.parametrize(("backend", "dtype", "name"), list(cases(SHAPES)))
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_projections(backend, dtype, name, dropout_p):
    require_backend(backend)
    check(backend, dtype, SHAPES[name], dropout_p)


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_large_on_cpu(name, dropout_p, dtype):
    require_backend("cpu")
    check("cpu", dtype, LARGE[name], dropout_p, bias=False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_fp32_adapters(backend, dtype):
    """fp32 masters under half activations: gradients come back in fp32, at the unfused accuracy."""
    require_backend(backend)
    check(backend, dtype, SHAPES["qkv"], 0.1, adapter_dtype=torch.float32)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.integers(0, 70),
    columns=st.integers(1, 150),
    outs=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    rank=st.sampled_from([1, 2, 3, 7, 8, 13, 16, 31, 64]),
    dropout_p=st.sampled_from([0.0, 0.1, 0.5]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_shape_on_cpu(rows, columns, outs, rank, dropout_p, dtype):
    require_backend("cpu")
    check("cpu", dtype, ((rows,), columns, tuple(outs), (rank,) * len(outs)), dropout_p)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_gradcheck_projections(dropout_p, bias):
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    parts = [projection(6, rows, 2, torch.float64, bias=bias) for rows in (4, 5)]
    biases = [b.requires_grad_() if b is not None else None for *_, b in parts]

    def run(x, *leaves):
        torch.manual_seed(1)
        return functional.lora_projections(
            x,
            [part[0] for part in parts],
            leaves[0:2],
            leaves[2:4],
            [0.5, 2.0],
            leaves[4:6] if bias else None,
            dropout_p=dropout_p,
        )

    leaves = [part[1] for part in parts] + [part[2] for part in parts] + (biases if bias else [])
    assert torch.autograd.gradcheck(run, (x, *leaves))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_gradcheck_mlp(activation, dropout_p):
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    gate, up = (projection(6, 5, 2, torch.float64, bias=True) for _ in range(2))
    down = projection(5, 6, 3, torch.float64, bias=True)
    leaves = [t.requires_grad_() for part in (gate, up, down) for t in (part[1], part[2], part[4])]

    def run(x, *leaves):
        torch.manual_seed(1)
        named = [
            (part[0], leaves[3 * i], leaves[3 * i + 1], part[3], leaves[3 * i + 2])
            for i, part in enumerate((gate, up, down))
        ]
        return functional.lora_mlp(x, *named, activation=activation, dropout_p=dropout_p)

    assert torch.autograd.gradcheck(run, (x, *leaves))


def test_gradcheck_embedding():
    ids = torch.tensor([[0, 2, 2], [5, 1, 2]])
    weight = torch.randn(7, 4, dtype=torch.float64)
    lora_A = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    lora_B = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda A, B: functional.lora_embedding(ids, weight, A, B, 0.7, embed_scale=1.5),
        (lora_A, lora_B),
    )
