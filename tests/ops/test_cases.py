"""What users of LoRA layers have reported, each on every backend: the input and the right result."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fastlora import functional
from fastlora.memory import saved_for_backward
from tests.helpers import gradients, masks, projection, relative_error, require_backend, unfused

pytestmark = pytest.mark.usefixtures("poisoned_empty")

BACKENDS = ("torch", "cpu", "triton")


@pytest.fixture(params=BACKENDS)
def backend(request):
    require_backend(request.param)
    return request.param


def run_one(x, parts, **options):
    weight, lora_A, lora_B, scaling, bias = parts
    return functional.lora_linear(x, weight, lora_A, lora_B, scaling, bias, **options)


@pytest.mark.parametrize("kind", ["transposed", "expanded", "sliced"])
def test_gradient_that_is_a_view(backend, kind):
    """L1: dY transposed, expanded (stride 0) or sliced gives what a contiguous dY gives."""
    parts = projection(16, 12, 4)
    x = torch.randn(6, 16)
    dy = {
        "transposed": torch.randn(12, 6).T,
        "expanded": torch.randn(1, 1).expand(6, 12),
        "sliced": torch.randn(6, 40)[:, 3:27:2],
    }[kind]

    def run(x, parts):
        return [run_one(x, parts[0], backend=backend)]

    got = gradients(run, x, [parts], [dy])
    parts = (
        parts[0],
        parts[1].detach().requires_grad_(),
        parts[2].detach().requires_grad_(),
        *parts[3:],
    )
    expected = gradients(run, x, [parts], [dy.contiguous()])
    for name in got:
        assert torch.equal(got[name], expected[name]), name


@pytest.mark.parametrize("view", ["transposed", "sliced", "expanded", "broadcast-batch"])
def test_input_that_is_a_view(backend, view):
    """Non-contiguous x of any kind, against the unfused layer."""
    parts = projection(16, 12, 4, bias=True)
    x = {
        "transposed": torch.randn(16, 6).T,
        "sliced": torch.randn(6, 64)[:, ::4],
        "expanded": torch.randn(1, 16).expand(6, 16),
        "broadcast-batch": torch.randn(1, 3, 16).expand(4, 3, 16),
    }[view]
    assert relative_error(run_one(x, parts, backend=backend), unfused(x, parts)) < 1e-6


def test_transposed_weight(backend):
    """GPT-2's Conv1D keeps W as [K, N]: its transposed view serves as the weight."""
    weight, *rest = projection(24, 40, 4)
    view = weight.T.contiguous().T
    dy, x = torch.randn(5, 40), torch.randn(5, 24)
    results = []
    for w in (weight, view):
        leaf = x.clone().requires_grad_()
        y = run_one(leaf, (w, *rest), backend=backend)
        y.backward(dy)
        results.append((y, leaf.grad))
    assert relative_error(results[1][0], results[0][0]) < 1e-6
    assert relative_error(results[1][1], results[0][1]) < 1e-6


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_mixed_dtypes(backend, x_dtype, weight_dtype):
    """L2: one compute dtype (x's), gradients in each parameter's own dtype."""
    parts = projection(16, 12, 4, weight_dtype, torch.float32)
    x = torch.randn(6, 16).to(x_dtype).requires_grad_()
    y = run_one(x, parts, backend=backend)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == x_dtype
    assert parts[1].grad.dtype == parts[2].grad.dtype == torch.float32


def test_autocast(backend):
    """L2: fp32 parameters under autocast compute in its dtype; a backward outside it is the same."""
    parts = projection(32, 24, 4, bias=True)
    x = torch.randn(6, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = run_one(x, parts, backend=backend)
        peer = unfused(x, parts)
    assert y.dtype == peer.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert parts[1].grad.dtype == torch.float32
    exact = unfused(x.double(), tuple(t.double() if torch.is_tensor(t) else t for t in parts))
    assert relative_error(y, exact) <= 2 * relative_error(peer, exact)


def test_retain_graph_and_shared_input(backend):
    """L4: two layers of one x that another Function saved; twice backward, the same gradients."""
    first, second = projection(16, 12, 4), projection(16, 8, 2)
    x = torch.randn(6, 16, requires_grad=True)
    shared = torch.sigmoid(x)  # sigmoid saves its output, which both layers read
    before = shared.detach().clone()
    loss = (
        run_one(shared, first, dropout_p=0.2, backend=backend).square().sum()
        + run_one(shared, second, backend=backend).square().sum()
    )
    leaves = [x, first[1], first[2], second[1], second[2]]
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    twice = torch.autograd.grad(loss, leaves)
    assert torch.equal(shared, before)
    for a, b in zip(once, twice, strict=True):
        assert torch.equal(a, b)


def test_mlp_saves_nothing_that_it_writes(backend):
    """L4 for the MLP, whose backward makes three buffers of the saved ones' size."""
    gate, up, down = projection(16, 24, 2), projection(16, 24, 2), projection(24, 16, 2)
    x = torch.randn(6, 16, requires_grad=True)
    loss = functional.lora_mlp(x, gate, up, down, backend=backend).square().sum()
    once = torch.autograd.grad(loss, [x, gate[1], down[1]], retain_graph=True)
    twice = torch.autograd.grad(loss, [x, gate[1], down[1]])
    for a, b in zip(once, twice, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_replays_the_mask(backend, use_reentrant):
    """L5: the recomputed mask is the same one, so the gradients are, bit for bit."""
    parts = projection(16, 12, 4)

    def run(wrap):
        for leaf in parts[1:3]:
            leaf.grad = None
        torch.manual_seed(8)
        x = torch.randn(6, 16, requires_grad=True)
        layer = lambda x: run_one(x, parts, dropout_p=0.3, backend=backend)  # noqa: E731
        y = checkpoint(layer, x, use_reentrant=use_reentrant) if wrap else layer(x)
        torch.rand(3)  # the generator moves on between forward and backward
        y.square().sum().backward()
        return y.detach(), x.grad, parts[1].grad, parts[2].grad

    for got, expected in zip(run(True), run(False), strict=True):
        assert torch.equal(got, expected)


def test_frozen_input_still_trains_the_adapter(backend):
    """L5: x from a frozen embedding does not require grad; A and B learn all the same."""
    parts = projection(16, 12, 4)
    run_one(torch.randn(6, 16), parts, backend=backend).square().sum().backward()
    assert parts[1].grad.abs().sum() > 0
    assert parts[2].grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("x_grad", "a_grad", "b_grad"),
    [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1)],
)
def test_only_what_is_needed(backend, x_grad, a_grad, b_grad):
    """A frozen part costs no gradient and saves nothing; the others' gradients are unchanged."""
    rows, columns, outs, rank = 40, 32, 24, 4

    def run(flags):
        torch.manual_seed(1)
        parts = projection(columns, outs, rank)
        x = torch.randn(rows, columns)
        for leaf, flag in zip((x, parts[1], parts[2]), flags, strict=True):
            leaf.requires_grad_(bool(flag))
        torch.manual_seed(2)
        with saved_for_backward() as saved:
            y = run_one(x, parts, dropout_p=0.25, backend=backend)
        y.backward(torch.ones_like(y))
        own = sum(t.untyped_storage().nbytes() for t in parts[:3])
        return (x.grad, parts[1].grad, parts[2].grad), saved.bytes - own

    flags = (x_grad, a_grad, b_grad)
    everything, _ = run((1, 1, 1))
    some, extra = run(flags)
    for gradient, whole, flag in zip(some, everything, flags, strict=True):
        assert (gradient is not None) == bool(flag)
        if flag:
            torch.testing.assert_close(gradient, whole, rtol=1e-6, atol=1e-7)
    expected = a_grad * rows * columns * 4 + b_grad * rows * rank * 4 + 8  # 8: the seed
    assert extra == expected


def test_dropout_reaches_dx_and_differs_by_projection(backend):
    """L6: with W = 0 and all-ones factors, dX is zero exactly where every mask drops."""
    x = torch.ones(8, 20, requires_grad=True)
    weight = torch.zeros(4, 20)
    lora_A, lora_B = torch.ones(1, 20), torch.ones(4, 1)
    keep = masks(x, 2, 0.5, seed=6)
    torch.manual_seed(6)
    ys = functional.lora_projections(
        x, [weight] * 2, [lora_A] * 2, [lora_B] * 2, [1.0, 1.0], dropout_p=0.5, backend=backend
    )
    (ys[0].sum() + ys[1].sum()).backward()
    assert torch.equal(x.grad, 4 * 2.0 * (keep[0].float() + keep[1].float()))
    assert not torch.equal(keep[0], keep[1])
    assert torch.equal(ys[0][:, 0], 2.0 * keep[0].sum(1))


def test_no_dropout_when_not_training(backend):
    """L6: eval mode draws nothing from the generator and drops nothing."""
    parts, x = projection(16, 12, 4), torch.randn(6, 16)
    state = torch.get_rng_state()
    y = run_one(x, parts, dropout_p=0.5, training=False, backend=backend)
    assert torch.equal(torch.get_rng_state(), state)
    assert relative_error(y, unfused(x, parts)) < 1e-6


def test_private_generator(backend):
    parts, x = projection(16, 12, 4), torch.randn(6, 16)
    state = torch.get_rng_state()
    ys = [
        run_one(
            x, parts, dropout_p=0.5, generator=torch.Generator().manual_seed(s), backend=backend
        )
        for s in (1, 1, 2)
    ]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(ys[0], ys[1])
    assert not torch.equal(ys[0], ys[2])


@pytest.mark.parametrize("rank", [1, 3, 8, 13, 64, 256])
@pytest.mark.parametrize("rows", [0, 1, 15])
def test_ranks_and_row_counts(backend, rank, rows):
    """L8, on the backend's own tiles."""
    parts = projection(33, 29, rank)
    x = torch.randn(rows, 33, requires_grad=True)
    y = run_one(x, parts, backend=backend)
    y.sum().backward()
    assert relative_error(y, unfused(x, parts)) < 1e-5
    assert x.grad.shape == x.shape
    assert parts[1].grad.isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradients_pass_through(backend, bad):
    """A loss scaler must see them, in every gradient."""
    parts, x = projection(16, 12, 4), torch.randn(6, 16, requires_grad=True)
    y = run_one(x, parts, backend=backend)
    dy = torch.ones_like(y)
    dy[2, 3] = bad
    y.backward(dy)
    for gradient in (x.grad, parts[1].grad, parts[2].grad):
        assert not gradient.isfinite().all()


def test_deterministic(backend):
    parts, x = projection(96, 80, 8), torch.randn(70, 96)
    dy = torch.randn(70, 80)

    def run():
        torch.manual_seed(3)
        return gradients(
            lambda x, p: [run_one(x, p[0], dropout_p=0.1, backend=backend)],
            x,
            [copy.deepcopy(parts)],
            [dy],
        )

    first, second = run(), run()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_one_output_unused(backend):
    """A projection whose output no loss sees gets no gradient, and the others' are right."""
    q, k = projection(16, 12, 4), projection(16, 8, 2)
    x = torch.randn(6, 16, requires_grad=True)
    y, _ = functional.lora_projections(x, *zip(q, k, strict=True), backend=backend)
    y.square().sum().backward()
    assert k[1].grad is None
    alone = torch.autograd.grad(unfused(x, q).square().sum(), [x, q[1], q[2]])
    for got, expected in zip((x.grad, q[1].grad, q[2].grad), alone, strict=True):
        assert relative_error(got, expected) < 1e-5


def test_base_bias_can_train(backend):
    """PEFT's bias="all" trains the base layers' biases."""
    weight, lora_A, lora_B, scaling, bias = projection(16, 12, 4, bias=True)
    bias.requires_grad_()
    run_one(torch.randn(6, 16), (weight, lora_A, lora_B, scaling, bias), backend=backend).backward(
        torch.ones(6, 12)
    )
    assert torch.equal(bias.grad, torch.full((12,), 6.0))


@pytest.mark.parametrize("rows", [64, 512])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_bytes_saved_are_x_and_s(backend, rows, dropout_p):
    """Saved for backward, to the byte: X and S, the seed, and the parameters that are there anyway."""
    if backend == "triton" and rows > 64:
        pytest.skip("the interpreter needs minutes here; rows=64 runs the same code")
    parts = projection(64, 48, 8)
    x = torch.randn(rows, 64, requires_grad=True)
    own = sum(t.untyped_storage().nbytes() for t in parts[:3])
    with saved_for_backward() as saved:
        y = run_one(x, parts, dropout_p=dropout_p, backend=backend)
    assert y.requires_grad
    assert saved.bytes - own == rows * 64 * 4 + rows * 8 * 4 + (8 if dropout_p else 0)


def test_grad_scaler_skips_an_overflow(backend):
    """P7: fp16 activations, fp32 masters: an overflowing step is skipped, and the next one is not."""
    weight, lora_A, lora_B, scaling, _ = projection(16, 12, 4, torch.float16, torch.float32)
    optimizer = torch.optim.SGD([lora_A, lora_B], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    x = torch.randn(6, 16).half()
    before = lora_A.detach().clone()
    for factor in (1e4, 1e-3):
        optimizer.zero_grad()
        y = functional.lora_linear(x, weight, lora_A, lora_B, scaling, backend=backend)
        scaler.scale((y * factor).float().mean()).backward()
        finite = bool(lora_A.grad.isfinite().all())
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(lora_A, before) == (not finite)
    assert finite
