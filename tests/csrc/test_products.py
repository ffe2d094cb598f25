"""shrink, expand, grad_dy and grad_x against fp64."""

import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.csrc import native
from tests.csrc.native import dropped, poisoned, strided

DTYPES = list(native.CODES)
# Four units in the last place of fp32, of the sum of the terms' magnitudes.
FP32 = 5e-7
# Half a unit in the last place, relative: results are rounded once.
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def ids(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def assert_close(got: torch.Tensor, want: torch.Tensor, size: torch.Tensor) -> None:
    """Within one rounding of the result and FP32 of `size`, the sum of the magnitudes of what was added."""
    assert got.shape == want.shape
    if want.numel() == 0:
        return
    excess = (got.double() - want).abs() - ROUNDING[got.dtype] * want.abs() - FP32 * size
    assert not excess.isnan().any(), "an element was not written, or read beyond its matrix"
    assert excess.max() <= 0, f"error exceeds the bar by {excess.max():.3e}"


def assert_product(got, a, b, *, plus=0.0):
    """got = plus + a @ b."""
    a, b = a.double(), b.double()
    plus = torch.as_tensor(plus).double()
    assert_close(got, plus + a @ b, plus.abs() + a.abs() @ b.abs())


class Case:
    """Random operands of one call: x [M, K], factors A [r, K] and B [K, r], s and ds [M, sum r]."""

    def __init__(self, rows, cols, ranks, dtype, factor_dtype, extra=0, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        self.x = strided(normal(rows, cols).to(dtype), extra)
        self.y = strided(normal(rows, cols).to(dtype), extra)
        self.a = [normal(r, cols).to(factor_dtype) for r in ranks]
        self.b = normal(cols, ranks[0]).to(factor_dtype)
        self.s = strided(normal(rows, sum(ranks)), extra)
        self.ranks, self.extra = ranks, extra
        self.seeds = [seed * 977 + 3 + i * 2**40 for i in range(len(ranks))]

    def check(self, p, threads):
        self.check_shrink(p, threads)
        self.check_expand(threads)
        self.check_grad_dy(threads)
        self.check_grad_x(p, threads)

    def check_shrink(self, p, threads):
        got = native.shrink(self.x, self.a, self.seeds, p, threads, self.extra)
        for part, a, seed in zip(got.split(self.ranks, dim=1), self.a, self.seeds):
            assert_product(part, dropped(self.x, p, seed), a.T)

    def check_expand(self, threads):
        s = self.s[:, : self.ranks[0]]
        got = native.expand(strided(self.y, self.extra), s, self.b, 0.7, threads)
        assert_product(got, 0.7 * s.double(), self.b.T, plus=self.y)

    def check_grad_dy(self, threads):
        s = self.s[:, : self.ranks[0]]
        ds, db = native.grad_dy(self.x, s, self.b, 0.7, threads=threads, extra=self.extra)
        assert_product(ds, 0.7 * self.x.double(), self.b)
        assert_product(db, 0.7 * self.x.double().T, s)

    def check_grad_x(self, p, threads):
        dx = strided(self.y, self.extra)
        want, size = self.y.double(), self.y.double().abs()
        das = native.grad_x(self.x, self.s, self.a, dx, self.seeds, p, threads=threads)
        parts = self.s.split(self.ranks, dim=1)
        for da, a, ds, seed in zip(das, self.a, parts, self.seeds):
            ds, a = ds.double(), a.double()
            assert_product(da, ds.T, dropped(self.x, p, seed))
            want = want + dropped(ds @ a, p, seed)
            size = size + ds.abs() @ a.abs() / (1 - p)
        assert_close(dx, want, size)


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("rank", [1, 3, 8, 13, 16, 24, 64, 256])
def test_ranks(rank, p, dtype):
    Case(53, 131, [rank], dtype, torch.float32).check(p, threads=2)


@pytest.mark.parametrize("rows", [1, 5, 12, 48, 49, 97])
@pytest.mark.parametrize("cols", [1, 2, 15, 17, 31, 33, 96, 97, 1536])
def test_shapes(rows, cols):
    Case(rows, cols, [16], torch.float32, torch.float32, extra=rows % 3).check(0.25, threads=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize("factor_dtype", DTYPES, ids=ids)
def test_dtypes(dtype, factor_dtype):
    """Activations and factors of any types together; the real widths of the demo's model."""
    Case(64, 576, [16, 16, 16], dtype, factor_dtype, extra=5).check(0.1, threads=2)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 110),
    cols=st.integers(1, 300),
    ranks=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    factor_dtype=st.sampled_from(DTYPES),
    extra=st.integers(0, 9),
    p=st.sampled_from([0.0, 0.05, 0.5, 0.95]),
    threads=st.integers(1, 2),
)
def test_anything(rows, cols, ranks, dtype, factor_dtype, extra, p, threads):
    Case(rows, cols, ranks, dtype, factor_dtype, extra).check(p, threads)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_more_rows_than_are_summed_at_once(threads):
    """S, dS and dB of over 4096 rows are put together from several parts; K is longer than wide."""
    Case(4096 * 2 + 77, 40, [5, 16], torch.float32, torch.float32).check(0.1, threads)


@pytest.mark.parametrize("threads", [1, 2])
def test_two_calls_give_the_same_bits(threads):
    case = Case(300, 576, [16, 13], torch.bfloat16, torch.float32)

    def everything():
        y, dx = case.y.clone(), case.y.clone()
        native.expand(y, case.s[:, :16], case.b, 0.5, threads)
        das = native.grad_x(case.x, case.s, case.a, dx, case.seeds, 0.1, threads=threads)
        s = native.shrink(case.x, case.a, case.seeds, 0.1, threads)
        return [
            s,
            y,
            dx,
            *das,
            *native.grad_dy(case.x, case.s[:, :16], case.b, 2.0, threads=threads),
        ]

    first = everything()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, everything()))


def test_only_what_is_wanted():
    case = Case(50, 100, [16, 4], torch.float32, torch.float32)
    s = case.s[:, :16]
    ds, db = native.grad_dy(case.x, s, case.b, 0.7)
    assert torch.equal(native.grad_dy(case.x, s, case.b, 0.7, need_db=False)[0], ds)
    assert torch.equal(native.grad_dy(case.x, s, case.b, 0.7, need_ds=False)[1], db)
    for p in (0.0, 0.2):
        full = case.y.clone()
        das = native.grad_x(case.x, case.s, case.a, full, case.seeds, p)
        some = native.grad_x(case.x, case.s, case.a, None, case.seeds, p, [False, True])
        assert some[0] is None
        assert torch.equal(some[1], das[1])
        only_dx = case.y.clone()  # x is a null pointer here
        native.grad_x(case.x, case.s, case.a, only_dx, case.seeds, p, [False, False])
        assert torch.equal(only_dx, full)


def test_shrink_and_grad_x_see_the_mask_of_philox_mask():
    """One-hot factors let every element of X̂ and every element of dX's mask through on its own."""
    rows, cols, p = 30, 77, 0.4
    x, eye = torch.randn(rows, cols), torch.eye(cols)
    mask = native.philox_mask(rows, cols, p, 99).float()
    want = torch.where(mask.bool(), x / (1 - p), torch.zeros(()))
    torch.testing.assert_close(native.shrink(x, [eye], [99], p), want, rtol=1e-6, atol=0)
    dx = torch.zeros(rows, cols)
    native.grad_x(x, x, [eye], dx, [99], p)
    torch.testing.assert_close(dx, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_pass_unless_they_are_dropped(bad):
    rows, cols, p, seed = 40, 64, 0.5, 5
    mask = native.philox_mask(rows, cols, p, seed).bool()
    x, a = torch.randn(rows, cols), torch.rand(4, cols) + 0.5
    x[3, mask[3].nonzero()[0]] = bad
    x[4, (~mask[4]).nonzero()[0]] = bad
    s = native.shrink(x, [a], [seed], p)
    assert (~s.isfinite()).any(1).nonzero().flatten().tolist() == [3]
    (da,) = native.grad_x(x, torch.rand(rows, 4) + 0.5, [a], None, [seed], p)
    assert (~da.isfinite()).any(0).nonzero().flatten().tolist() == mask[3].nonzero()[0].tolist()
    ds = torch.rand(rows, 4)
    ds[7] = bad
    dx = torch.zeros(rows, cols)
    native.grad_x(x, ds, [a], dx, [seed], p)
    assert torch.equal(~dx[7].isfinite(), mask[7])
    assert dx[:7].isfinite().all()
    y = torch.zeros(rows, cols)
    y[0, 0] = bad
    assert not native.expand(y, torch.ones(rows, 4), a.T.contiguous(), 1.0)[0, 0].isfinite()
    for gradient in native.grad_dy(y, torch.ones(rows, 4), a.T.contiguous(), 1.0):
        assert not gradient[0].isfinite().any()


def test_no_rows():
    """Nothing to add, so gradients are 0, not what was there before."""
    case = Case(0, 50, [16, 3], torch.float32, torch.float32)
    assert native.shrink(case.x, case.a).shape == (0, 19)
    assert all((da == 0).all() for da in native.grad_x(case.x, case.s, case.a, case.y))
    assert (native.grad_dy(case.x, case.s[:, :16], case.b, 1.0)[1] == 0).all()


def test_no_columns():
    """An empty sum is 0."""
    empty = torch.empty(4, 0)
    assert (native.shrink(empty, [torch.empty(3, 0)]) == 0).all()
    ds, _ = native.grad_dy(empty, torch.ones(4, 3), torch.empty(0, 3), 1.0)
    assert (ds == 0).all()


def test_more_than_two_to_the_31_elements():
    """Rows 2^30 elements apart: offsets need 64 bits. Only the pages of the rows themselves are touched."""
    rows, cols, ld = 3, 40, 2**30 + 8
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, (2 * ld + cols) * 2, flags=flags)
    except OSError as error:
        pytest.skip(f"no 4 GiB of address space here ({error}); to run it: raise `ulimit -v`")
    far = torch.frombuffer(memory, dtype=torch.bfloat16).as_strided((rows, cols), (ld, 1))
    case = Case(rows, cols, [8], torch.bfloat16, torch.float32)
    case.x = far.copy_(case.x)
    case.check_shrink(0.1, 1)
    case.check_grad_dy(1)
    dx = torch.zeros(rows, cols)
    near = native.grad_x(far.clone(), case.s, case.a, dx.clone(), case.seeds, 0.1)
    assert torch.equal(native.grad_x(far, case.s, case.a, dx, case.seeds, 0.1)[0], near[0])
    before = far.clone()
    assert_product(native.expand(far, case.s, case.b, 2.0), 2.0 * case.s, case.b.T, plus=before)


def test_neighbours_are_left_alone():
    """Nothing is written between the end of a row and the start of the next."""
    case = Case(20, 37, [5], torch.float16, torch.float32, extra=4)
    memory = torch.full((20 * 41,), 9.0, dtype=torch.float16)
    y = memory.as_strided((20, 37), (41, 1))
    native.expand(y, case.s, case.b, 1.0)
    native.grad_x(case.x, case.s, case.a, y, [1], 0.3)
    assert (memory.reshape(20, 41)[:, 37:] == 9.0).all()
    out = poisoned(20, 8)
    proj = [(case.a[0].data_ptr(), 0, 5, 1)]
    x = case.x
    native._C.shrink(x.data_ptr(), 2, x.stride(0), 20, 37, proj, 0.0, out.data_ptr(), 8, 1)
    assert out[:, 5:].isnan().all()
    assert out[:, :5].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=ids)
def test_every_half_precision_number_is_read_exactly(dtype):
    bits = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    for numbers in (
        bits.view(dtype).reshape(-1, 1),
        bits.view(dtype).reshape(-1, 256).contiguous(),
    ):
        a = torch.zeros(1, numbers.shape[1])
        a[0, 0] = 1.0
        finite = torch.where(numbers.isfinite(), numbers, 0)
        assert torch.equal(native.shrink(finite, [a])[:, 0], finite[:, 0].float())
    got = native.shrink(bits.view(dtype).reshape(-1, 1), [torch.ones(1, 1)])[:, 0]
    torch.testing.assert_close(got, bits.view(dtype).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cols", [1, 16], ids=["one by one", "vectors"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=ids)
def test_rounding_is_torchs(dtype, cols):
    """fp32 numbers of every exponent, ties among them, to the nearest; ties to even; NaN stays."""
    exponents = torch.arange(512, dtype=torch.int64).repeat_interleave(1024) << 23
    low = torch.randint(0, 1 << 23, exponents.shape)
    tie = torch.randint(0, 4, exponents.shape)
    low = torch.where(
        tie == 0, (low & ~0xFFFF) | 0x8000, torch.where(tie == 1, (low & ~0x1FFF) | 0x1000, low)
    )
    bits = exponents + low
    s = (
        torch.where(bits >= 2**31, bits - 2**32, bits)
        .to(torch.int32)
        .view(torch.float32)
        .reshape(-1, 1)
    )
    got = native.expand(torch.zeros(len(s), cols, dtype=dtype), s, torch.ones(cols, 1), 1.0)
    want = s.to(dtype).expand(-1, cols)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
