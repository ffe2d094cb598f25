"""Shrink, GEMM, the dY pass and the X pass, together as a backend runs them, against fp64."""

import dataclasses

import pytest
import torch

from fastlora.kernels import config, dispatch, expand, grad_dy, grad_x, linear, reduce
from fastlora.kernels.projections import projections_forward
from fastlora.kernels.reduce import Sum
from fastlora.ops.dropout import dropout, keep_mask
from tests.helpers import relative_error

from . import cases
from .cases import DTYPES, backward, case, check, forward, run

pytestmark = pytest.mark.usefixtures("poisoned_empty")

# (M, K, out_features, ranks)
SHAPES = {
    "one": (1, 1, (1,), (1,)),
    "17x63": (17, 63, (17,), (4,)),
    "rows-of-tiles": (70, 100, (130,), (8,)),
    "qkv": (33, 96, (96, 40, 17), (8, 8, 8)),
    "qkv-ranks": (9, 63, (17, 65, 1), (1, 13, 4)),
    "rank-64": (66, 80, (72,), (64,)),
    "rank-70": (20, 64, (64, 16), (70, 3)),
    "split-k": (5, 1504, (33,), (16,)),
}


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    # Half types take one path: each shape runs in fp32 and in one of them.
    [("fp32", shape) for shape in SHAPES]
    + [("bf16", s) for s in ("one", "17x63", "qkv-ranks", "rank-70", "split-k")]
    + [("fp16", s) for s in ("17x63", "rows-of-tiles", "rank-64")],
)
def test_against_fp64(dtype, shape, dropout_p):
    check(case(*SHAPES[shape], DTYPES[dtype], dropout_p))


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_fp32_adapters_keep_their_bits(dtype, dropout_p):
    """The factors' gradients are nearly fp32's: 2e-5, where a factor rounded to bf16 would give 2e-3."""
    c = case(*SHAPES["qkv"], DTYPES[dtype], dropout_p, adapter_dtype=torch.float32)
    check(c, factor_bar=2e-5)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_two_runs_give_the_same_bits(dropout_p):
    c = case(70, 100, (65, 33), (8, 4), torch.bfloat16, dropout_p)
    first, second = run(c), run(c)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_no_rows(dropout_p):
    c = case(0, 16, (8, 24), (4, 2), torch.float32, dropout_p)
    result = run(c)
    assert result["y1"].shape == (0, 24)
    assert result["dx"].shape == (0, 16)
    assert torch.equal(result["dA0"], torch.zeros(4, 16))
    assert torch.equal(result["dB1"], torch.zeros(24, 2))


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_only_what_is_needed(dropout_p):
    """Each result alone is the one of the full run, and what is not needed is None."""
    c = case(20, 65, (33, 40), (4, 8), torch.float32, dropout_p)
    _, s = forward(c)
    dx, dAs, dBs = backward(c, s)
    none = [None, None]

    got = backward(c, None, need_dA=[False, False], need_dB=[False, False], x=False)
    assert torch.equal(got[0], dx)
    assert got[1:] == (none, none)

    got = backward(c, None, need_dx=False, need_dA=[False, True], need_dB=[False, False])
    assert got[0] is None and got[1][0] is None and got[2] == none
    torch.testing.assert_close(got[1][1], dAs[1], rtol=1e-5, atol=1e-5)

    got = backward(c, s, need_dx=False, need_dA=[False, False], need_dB=[True, False], x=False)
    assert got[0] is None and got[1] == none and got[2][1] is None
    assert torch.equal(got[2][0], dBs[0])


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_an_output_that_was_not_used(dropout_p):
    """A missing dY counts as zero for dX, and its factors get no gradient; masks stay with their projections."""
    c = case(20, 64, (33, 40, 17), (4, 8, 4), torch.float32, dropout_p)
    _, s = forward(c)
    dys = [c.dys[0], None, c.dys[2]]
    dx, dAs, dBs = backward(c, s, dys=dys)
    assert dAs[1] is None and dBs[1] is None
    zero = backward(c, s, dys=[c.dys[0], torch.zeros_like(c.dys[1]), c.dys[2]])
    torch.testing.assert_close(dx, zero[0], rtol=1e-5, atol=1e-5)
    for i in (0, 2):
        torch.testing.assert_close(dAs[i], zero[1][i], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dBs[i], zero[2][i], rtol=1e-5, atol=1e-5)
    assert backward(c, s, dys=[None] * 3) == (None, [None] * 3, [None] * 3)


def _spread(t: torch.Tensor) -> torch.Tensor:
    """The same values in rows that are further apart, the gaps filled with NaN."""
    wide = torch.full((t.shape[0], t.shape[1] + 5), float("nan"), dtype=t.dtype)
    wide[:, : t.shape[1]] = t.detach()
    return wide[:, : t.shape[1]]


def _turned(t: torch.Tensor) -> torch.Tensor:
    """The same values as a transposed view: a Conv1D weight, an uncooperative activation."""
    return t.detach().t().contiguous().t()


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("layout", [_spread, _turned], ids=["spread", "transposed"])
def test_layouts_do_not_change_a_bit(layout, dropout_p):
    c = case(35, 70, (65, 20), (8, 4), torch.bfloat16, dropout_p)
    strided = dataclasses.replace(
        c,
        x=layout(c.x),
        dys=[layout(dy) for dy in c.dys],
        parts=[(layout(w), layout(a), layout(b), scale, bias) for w, a, b, scale, bias in c.parts],
    )
    expected, got = run(c), run(strided)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=0)


def test_expanded_gradient():
    """The gradient of a sum is one element, expanded."""
    c = case(20, 33, (17,), (4,))
    ones = dataclasses.replace(c, dys=[torch.ones(1, 1).expand(20, 17)])
    plain = dataclasses.replace(c, dys=[torch.ones(20, 17)])
    expected, got = run(plain), run(ones)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy, interpreting
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_sums_beyond_half_precision_become_infinite():
    """fp16: S = 1e5 does not fit; an inf is seen by a loss scaler, and a NaN is not what it is."""
    x, a = torch.full((3, 16), 100.0).half(), torch.full((1, 16), 62.5)
    b, w = torch.full((8, 1), 1.0), torch.zeros(8, 16).half()
    ys, s = projections_forward(x, [w], [a], [b], [1.0], None, 0.0, None)
    assert torch.equal(s, torch.full((3, 1), 1e5))
    assert torch.equal(ys[0], torch.full((3, 8), float("inf")).half())


@pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning"
)  # numpy, interpreting
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradients_pass_through(bad, dropout_p):
    """A loss scaler must see them: in every gradient they touch, and in no other row of dX."""
    c = case(10, 33, (17,), (4,), torch.float16, dropout_p)
    c.dys[0][3, 5] = bad
    result = run(c)
    assert not result["dx"][3].isfinite().any()
    assert result["dx"][[0, 1, 2, 4]].isfinite().all()
    assert not result["dB0"][5].isfinite().any()
    assert not result["dA0"].isfinite().all()


def _tiles(table):
    return [pytest.param(tile, id=name) for name, tile in table.items() if name != "interpreted"]


@pytest.mark.parametrize("tile", _tiles(config.GEMM))
def test_gemm_tiles(tile, monkeypatch):
    """The tiles that GPUs use, each once: every one masks its overrun."""
    monkeypatch.setitem(config.GEMM, "interpreted", tile)
    check(case(tile.m + 3, tile.k + 5, (tile.n + 7,), (20,), bias=True))


@pytest.mark.parametrize("tile", _tiles(config.SHRINK))
def test_shrink_tiles(tile, monkeypatch):
    monkeypatch.setitem(config.SHRINK, "interpreted", tile)
    c = case(tile.m + 3, tile.k + 3, (1, 1), (70, 9), torch.float32, 0.1)
    _, s = forward(c)
    exact = [
        dropout(c.x.double(), seed, 0.1) @ part[1].detach().double().t()
        for seed, part in zip(c.seeds, c.parts, strict=True)
    ]
    assert relative_error(s, torch.cat(exact, 1)) < 1e-6


@pytest.mark.parametrize("tile", _tiles(config.GRAD_DY))
def test_grad_dy_tiles(tile, monkeypatch):
    monkeypatch.setitem(config.GRAD_DY, "interpreted", tile)
    M, N = tile.m + 3, tile.n + 3
    for rank in (9, 70):  # one pass for both sums, and a pass for each
        dy, s, b = torch.randn(M, N), torch.randn(M, rank), torch.randn(N, rank)
        ds = torch.empty_like(s)
        sums = []
        db = grad_dy.grad_dy(dy, s, b, 0.5, ds, True, sums)
        reduce.reduce_sums(sums)
        assert relative_error(ds, 0.5 * dy.double() @ b.double()) < 1e-6
        assert relative_error(db, 0.5 * dy.double().t() @ s.double()) < 1e-6


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("tile", _tiles(config.X_PASS))
def test_x_pass_tiles(tile, dropout_p, monkeypatch):
    """Two projections in one pass where they fit, and a rank that no pass holds."""
    monkeypatch.setitem(config.X_PASS, "interpreted", tile)
    M, K = tile.m + 3, tile.k + 3
    x, seeds = torch.randn(M, K), torch.tensor([3, -4])
    for ranks, update in (((9, 9), True), ((70, 70), True), ((9, 9, 9), False), ((70, 70), False)):
        rank, columns = ranks[0], sum(ranks)
        As = [torch.randn(rank, K) for _ in ranks]
        ds = torch.randn(M, columns)
        dx = torch.randn(M, K) if update else None
        base = dx.double() if update else None
        das = grad_x.x_pass(x, ds, As, rank, dropout_p, seeds, dx, [True] * len(As))
        for seed, ds_i, a, da in zip(seeds, ds.split(ranks, 1), As, das, strict=False):
            keep = keep_mask(seed, M, K, dropout_p) / (1 - dropout_p)
            assert relative_error(da, ds_i.double().t() @ (x * keep.double())) < 1e-6
            if base is not None:
                base += keep.double() * (ds_i.double() @ a.double())
        if base is not None:
            assert relative_error(dx, base) < 1e-6


@pytest.mark.parametrize("tile", _tiles(config.EXPAND))
def test_expand_tiles(tile, monkeypatch):
    """In place, of Y's with longer rows, of two projections at once, with S in three parts and in one."""
    monkeypatch.setitem(config.EXPAND, "interpreted", tile)
    M, features = tile.m + 3, (tile.n + 3, 7)
    for ranks, count in (((9, 4), 3), ((70, 2), 1)):
        ys = [torch.randn(M, n + 5)[:, :n] for n in features]
        bs = [torch.randn(n, r) for n, r in zip(features, ranks, strict=True)]
        parts = torch.randn(count, M, sum(ranks))
        s = torch.full((M, sum(ranks)), float("nan")) if count > 1 else parts[0]
        expected = [
            y.double() + scale * part.double().sum(0) @ b.double().t()
            for y, scale, part, b in zip(ys, (0.5, -3.0), parts.split(ranks, 2), bs, strict=True)
        ]
        expand.expand(ys, list(parts.split(ranks, 2)), bs, [0.5, -3.0], list(s.split(ranks, 1)))
        assert all(relative_error(y, e) < 1e-6 for y, e in zip(ys, expected, strict=True))
        assert relative_error(s, parts.double().sum(0)) < 1e-6


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=list(DTYPES))
@pytest.mark.parametrize("candidate", ["library", "unfused"])
def test_other_candidates(candidate, dtype, dropout_p):
    """The same results as the fused one's, within the same bars; fp32 factors beside half-precision activations too."""
    with dispatch.forcing(candidate):
        check(case(35, 70, (65, 20), (8, 4), dtype, dropout_p, adapter_dtype=dtype))
        check(case(7, 2100, (9,), (3,), dtype, dropout_p, adapter_dtype=torch.float32))


def test_gemm_sums_several_products():
    xs = [torch.randn(20, k) for k in (33, 64)]
    ws = [torch.randn(17, k) for k in (33, 64)]
    expected = sum(x.double() @ w.double().t() for x, w in zip(xs, ws, strict=True))
    torch.testing.assert_close(
        linear.gemm(xs, ws, None, None, None).double(), expected, rtol=1e-5, atol=1e-5
    )


def test_reduction_order_is_the_parts_order():
    """1e8 + 1 - 1e8 in fp32, part by part, is 0; any other order gives 1."""
    partial = torch.tensor([1e8, 1.0, -1e8]).view(3, 1, 1)
    out = torch.empty(1, 1)
    other = torch.empty(2, 3)
    reduce.reduce_sums([Sum(partial, out, 3.0), Sum(torch.ones(4, 2, 3), other, 0.5)])
    assert out.item() == 0.0
    assert torch.equal(other, torch.full((2, 3), 2.0))


def test_dtype_is_checked():
    c = cases.case(3, 8, (8,), (2,))
    with pytest.raises(TypeError, match=r"x has dtype torch\.float64"):
        forward(dataclasses.replace(c, x=c.x.double()))
