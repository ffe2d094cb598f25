"""Exact results, unfused peers and the bars of accuracy that all tests share."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastlora import backend as fastlora_backend
from fastlora.ops import dropout

HALF = (torch.bfloat16, torch.float16)

Projection = tuple[Tensor, Tensor, Tensor, float, Tensor | None]


def require_backend(name: str) -> None:
    """Skip, saying what would run it, where a backend cannot serve on this machine."""
    state = fastlora_backend.status(name)
    if not state.ok:
        pytest.skip(f"backend {name}: {state.reason}; to run it: {state.fix}")


def relative_error(got: Tensor, exact: Tensor) -> float:
    """‖got − exact‖ / ‖exact‖ in fp64; the plain norm of the difference where exact is zero."""
    got, exact = got.double(), exact.double()
    if got.numel() == 0:
        return 0.0
    scale = exact.norm().item()
    return (got - exact).norm().item() / (scale if scale > 0.0 else 1.0)


def assert_accurate(
    name: str, got: Tensor, unfused: Tensor, exact: Tensor, dtype: torch.dtype
) -> None:
    """Half types: at most twice the unfused path's error. fp32: within 1e-5. fp64: within 1e-12."""
    assert got.shape == exact.shape, f"{name}: {tuple(got.shape)}, not {tuple(exact.shape)}"
    error = relative_error(got, exact)
    if dtype in HALF:
        # A path that happens to be exact (an error of 0) leaves room for one rounding of the result.
        bar = max(2.0 * relative_error(unfused, exact), torch.finfo(dtype).eps / 4)
    else:
        bar = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    assert error <= bar, f"{name}: relative error {error:.3g} is beyond {bar:.3g}"


def projection(
    columns: int,
    rows: int,
    rank: int,
    dtype: torch.dtype = torch.float32,
    adapter_dtype: torch.dtype | None = None,
    bias: bool = False,
    generator: torch.Generator | None = None,
) -> Projection:
    """A random (weight, lora_A, lora_B, scaling, bias) whose two terms are of one size."""
    adapter_dtype = adapter_dtype or dtype

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight = (draw(rows, columns) / columns**0.5).to(dtype)
    lora_A = (draw(rank, columns) / columns**0.5).to(adapter_dtype).requires_grad_()
    lora_B = (draw(rows, rank) / rank**0.5).to(adapter_dtype).requires_grad_()
    return weight, lora_A, lora_B, 0.75, draw(rows).to(dtype) if bias else None


def unfused(
    x: Tensor, parts: Projection, mask: Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    """A LoRA layer in plain ops, as PEFT writes it, with a given dropout mask."""
    weight, lora_A, lora_B, scaling, bias = parts
    result = F.linear(x, weight, bias)
    branch = x.to(lora_A.dtype)
    if mask is not None:
        branch = branch * mask.view(x.shape) / (1.0 - dropout_p)
    update = F.linear(F.linear(branch, lora_A), lora_B) * scaling
    return (result + update).to(result.dtype)


def masks(
    x: Tensor, count: int, dropout_p: float, seed: int, generator: torch.Generator | None = None
) -> list[Tensor | None]:
    """The masks that ``count`` projections of ``x`` draw right after ``torch.manual_seed(seed)``."""
    if dropout_p == 0.0:
        return [None] * count
    if generator is None:
        torch.manual_seed(seed)
    seeds = dropout.draw_seeds(count, x.device, generator)
    rows, columns = x.numel() // max(x.shape[-1], 1), x.shape[-1]
    return [dropout.keep_mask(seeds[i], rows, columns, dropout_p) for i in range(count)]


def double(parts: Projection) -> Projection:
    """The same projection in fp64, its factors fresh leaves."""
    weight, lora_A, lora_B, scaling, bias = parts
    return (
        weight.double(),
        lora_A.detach().double().requires_grad_(lora_A.requires_grad),
        lora_B.detach().double().requires_grad_(lora_B.requires_grad),
        scaling,
        None if bias is None else bias.double(),
    )


def fresh(parts: Projection) -> Projection:
    """The same projection with fresh leaves, so that gradients do not mix."""
    weight, lora_A, lora_B, scaling, bias = parts
    return (
        weight,
        lora_A.detach().clone().requires_grad_(lora_A.requires_grad),
        lora_B.detach().clone().requires_grad_(lora_B.requires_grad),
        scaling,
        bias,
    )


Run = Callable[[Tensor, Sequence[Projection]], Sequence[Tensor]]


def gradients(
    run: Run, x: Tensor, parts: Sequence[Projection], dys: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Outputs and every gradient of ``run(x, parts)`` under the output gradients ``dys``."""
    x = x.detach().clone().requires_grad_()
    ys = run(x, parts)
    torch.autograd.backward(list(ys), [dy.to(y.dtype) for dy, y in zip(dys, ys, strict=True)])
    result = {f"y{i}": y.detach() for i, y in enumerate(ys)}
    result["dx"] = x.grad
    for i, part in enumerate(parts):
        result[f"dA{i}"], result[f"dB{i}"] = part[1].grad, part[2].grad
    return result


def check_against_exact(
    fused: Run, plain: Run, x: Tensor, parts: Sequence[Projection], dys: Sequence[Tensor]
) -> None:
    """Hold ``fused`` to the bars: outputs and every gradient, against ``plain`` in fp64."""
    dtype = x.dtype
    got = gradients(fused, x, [fresh(part) for part in parts], dys)
    peer = gradients(plain, x, [fresh(part) for part in parts], dys)
    exact = gradients(plain, x.double(), [double(part) for part in parts], dys)
    for name, value in got.items():
        assert value.dtype == peer[name].dtype, f"{name}: {value.dtype}, not {peer[name].dtype}"
        assert_accurate(name, value, peer[name], exact[name], dtype)
