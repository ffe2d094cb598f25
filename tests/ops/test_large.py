"""L9: offsets beyond 2^31 elements, in memory of which only a few pages are ever touched."""

import mmap

import pytest
import torch

from fastlora import functional
from tests.helpers import fresh, projection, require_backend

STRIDE = 2**30 + 16  # elements from row to row: the third row lies beyond 2^31


def far(values: torch.Tensor) -> torch.Tensor:
    """The same rows, so far apart that 32 bits do not hold their offsets."""
    size = ((values.shape[0] - 1) * STRIDE + values.shape[1]) * values.element_size()
    memory = torch.frombuffer(mmap.mmap(-1, size), dtype=values.dtype)
    return memory.as_strided(values.shape, (STRIDE, 1)).copy_(values)


@pytest.mark.parametrize("backend", ["torch", "cpu", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_rows_beyond_32_bits(backend, dtype, dropout_p):
    require_backend(backend)
    parts = projection(48, 32, 4, dtype)
    x, dy = torch.randn(3, 48).to(dtype), torch.randn(3, 32).to(dtype)

    def run(x, dy):
        part = fresh(parts)
        x.requires_grad_()
        torch.manual_seed(3)
        y = functional.lora_linear(x, *part, dropout_p=dropout_p, backend=backend)
        return [y, *torch.autograd.grad(y, (x, *part[1:3]), dy)]

    near, distant = run(x.clone(), dy), run(far(x), far(dy))
    for name, one, other in zip(("y", "dx", "dA", "dB"), near, distant, strict=True):
        assert torch.equal(one, other), name
