"""LoRA on an embedding against fp64."""

import pytest
import torch
from torch.nn import functional as F

from fastlora.kernels import embedding_backward, embedding_forward
from tests.helpers import assert_accurate

from .cases import DTYPES

pytestmark = pytest.mark.usefixtures("poisoned_empty")

V, SCALE, PADDING = 41, 0.5, 3


def plain(dy, ids, weight, lora_A, lora_B, padding_idx):
    lora_A, lora_B = lora_A.detach().requires_grad_(), lora_B.detach().requires_grad_()
    rows = F.embedding(ids, lora_A.t(), padding_idx=padding_idx)
    y = (F.embedding(ids, weight) + (rows @ lora_B.t()) * SCALE).to(weight.dtype)
    da, db = torch.autograd.grad(y, (lora_A, lora_B), dy)
    return {"y": y.detach(), "dA": da, "dB": db}


def draw(M, D, rank, dtype, adapter_dtype):
    ids = torch.randint(0, V, (M,))
    ids[: M // 2] = PADDING  # many repeats of one id
    weight = torch.randn(V, D, dtype=torch.float64).to(dtype)
    lora_A = torch.randn(rank, V, dtype=torch.float64).to(adapter_dtype)
    lora_B = (torch.randn(D, rank, dtype=torch.float64) / rank**0.5).to(adapter_dtype)
    return torch.randn(M, D, dtype=torch.float64).to(dtype), ids, weight, lora_A, lora_B


@pytest.mark.parametrize(
    "padding_idx", [None, PADDING, PADDING - V], ids=["none", "id", "negative"]
)
@pytest.mark.parametrize(("M", "D", "rank"), [(1, 1, 1), (17, 63, 4), (40, 80, 13), (70, 16, 70)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_fp64(dtype, M, D, rank, padding_idx):
    dtype = DTYPES[dtype]
    dy, ids, weight, lora_A, lora_B = draw(M, D, rank, dtype, dtype)
    da, db = embedding_backward(dy, ids, weight, lora_A, lora_B, SCALE, padding_idx)
    got = {"y": embedding_forward(ids, weight, lora_A, lora_B, SCALE), "dA": da, "dB": db}
    peer = plain(dy, ids, weight, lora_A, lora_B, padding_idx)
    exact = plain(dy.double(), ids, weight.double(), lora_A.double(), lora_B.double(), padding_idx)
    for name, value in got.items():
        assert value.dtype == dtype
        assert_accurate(name, value, peer[name], exact[name], dtype)


def test_fp32_factors_of_a_half_embedding():
    dy, ids, weight, lora_A, lora_B = draw(30, 40, 8, torch.bfloat16, torch.float32)
    da, db = embedding_backward(dy, ids, weight, lora_A, lora_B, SCALE, None)
    exact = plain(dy.double(), ids, weight.double(), lora_A.double(), lora_B.double(), None)
    for got, name in ((da, "dA"), (db, "dB")):
        assert got.dtype == torch.float32
        assert (got - exact[name]).norm() / exact[name].norm() < 2e-5


def test_layouts_and_id_types():
    dy, ids, weight, lora_A, lora_B = draw(20, 33, 4, torch.float32, torch.float32)
    expected = embedding_forward(ids, weight, lora_A, lora_B, SCALE)
    turned = [t.t().contiguous().t() for t in (weight, lora_A, lora_B)]
    assert torch.equal(embedding_forward(ids, *turned, SCALE), expected)
    assert torch.equal(embedding_forward(ids.int(), weight, lora_A, lora_B, SCALE), expected)
    every_second = torch.stack([ids, ids + 1], 1)[:, 0]
    assert torch.equal(embedding_forward(every_second, weight, lora_A, lora_B, SCALE), expected)
    first = embedding_backward(dy, ids, weight, lora_A, lora_B, SCALE, None)
    second = embedding_backward(dy.t().contiguous().t(), ids.int(), *turned, SCALE, None)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_unknown_ids_give_nan_rows():
    _, ids, weight, lora_A, lora_B = draw(6, 10, 2, torch.float32, torch.float32)
    expected = embedding_forward(ids, weight, lora_A, lora_B, SCALE)
    ids[1], ids[4] = V, -1
    got = embedding_forward(ids, weight, lora_A, lora_B, SCALE)
    assert got[[1, 4]].isnan().all()
    assert torch.equal(got[[0, 2, 3, 5]], expected[[0, 2, 3, 5]])


def test_no_tokens():
    dy, ids, weight, lora_A, lora_B = draw(0, 10, 2, torch.float32, torch.float32)
    assert embedding_forward(ids, weight, lora_A, lora_B, SCALE).shape == (0, 10)
    da, db = embedding_backward(dy, ids, weight, lora_A, lora_B, SCALE, None)
    assert torch.equal(da, torch.zeros(2, V))
    assert torch.equal(db, torch.zeros(10, 2))
