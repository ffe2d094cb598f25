"""Few rows take plain ops: the same results as the fused operation, to the same bars (L17)."""

import itertools

import pytest
import torch
from torch import nn

from fastlora import functional
from fastlora.nn import LoRALinear
from fastlora.ops import few_rows, lora_linear
from tests.helpers import (
    check_against_exact,
    masks,
    projection,
    relative_error,
    require_backend,
    unfused,
)

pytestmark = pytest.mark.usefixtures("poisoned_empty")
# (dtype, that of the adapters, dropout_p); with dropout, fp64 takes the fused operation
CASES = [
    *itertools.product(
        (torch.float32, torch.bfloat16, torch.float16), (None, torch.float32), (0.0, 0.3)
    ),
    (torch.float64, None, 0.0),
]


@pytest.fixture
def no_operation(monkeypatch):
    """Fail where the fused operation is called after all."""

    def refuse(*args, **kwargs):
        raise AssertionError("the path for few rows was not taken")

    monkeypatch.setattr(lora_linear, "lora_linear", refuse)


@pytest.mark.parametrize(("dtype", "adapter_dtype", "dropout_p"), CASES)
@pytest.mark.parametrize("leading", [(), (1,), (7,), (2, 3), (0,)], ids=str)
def test_few_rows_are_as_exact(no_operation, dtype, adapter_dtype, leading, dropout_p):
    if dropout_p:
        require_backend("cpu")
    x = torch.randn(*leading, 63, dtype=torch.float64).to(dtype)
    parts = projection(63, 41, 5, dtype, adapter_dtype, bias=True)
    keep = masks(x, 1, dropout_p, seed=11)

    def ours(x, parts):
        torch.manual_seed(11)
        return [functional.lora_linear(x, *parts[0], dropout_p=dropout_p)]

    def plain(x, parts):
        return [unfused(x, parts[0], keep[0], dropout_p)]

    dy = torch.randn(*leading, 41, dtype=torch.float64).to(dtype)
    check_against_exact(ours, plain, x, [parts], [dy])


def test_few_rows_and_many_rows_agree(monkeypatch):
    """One layer on both sides of the limit, with one seed: the same mask, the same result."""
    require_backend("cpu")
    layer = LoRALinear.from_linear(nn.Linear(32, 24), r=4, lora_alpha=8, lora_dropout=0.3)
    nn.init.normal_(layer.lora_B)
    x = torch.randn(4, 3, 32)
    results = []
    for limit in (16, 0):
        monkeypatch.setattr(few_rows, "LIMIT_WITH_DROPOUT", limit)
        torch.manual_seed(4)
        results.append(layer(x))
    assert relative_error(*results) <= 1e-6


def test_few_rows_draw_from_the_generator_given():
    require_backend("cpu")
    parts = projection(32, 24, 4)
    x = torch.randn(3, 32)
    first, second = (
        functional.lora_linear(
            x, *parts, dropout_p=0.5, generator=torch.Generator().manual_seed(seed)
        )
        for seed in (3, 3)
    )
    assert torch.equal(first, second)


def test_where_few_rows_end(monkeypatch):
    """How many rows are few; none are where a backend was named, or in autocast, or compiled."""
    require_backend("cpu")
    weight = torch.ones(1)

    def few(rows, p=0.0, backend="auto", dtype=torch.float32):
        return few_rows.few(torch.ones(rows, 32, dtype=dtype), weight.to(dtype), p, backend)

    assert few(128)
    assert not few(129)
    assert few(16, 0.3)
    assert not few(17, 0.3)
    assert not few(1, backend="torch")
    with torch.autocast("cpu", torch.bfloat16):
        assert not few(1)
    monkeypatch.setattr(few_rows, "has_fast_gemm", lambda dtype: dtype == torch.float32)
    assert few(7, dtype=torch.bfloat16)
    assert not few(8, dtype=torch.bfloat16)  # from here on the fused operation widens, and wins
    monkeypatch.setenv("FASTLORA_BACKEND", "torch")
    assert not few(1)
