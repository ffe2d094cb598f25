"""How many kernels one layer launches: our own and the library's, counted on meta tensors as for an H200."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastlora.kernels.dispatch import OPERATIONS, forcing
from fastlora.kernels.launch import recording
from fastlora.kernels.projections import projections_backward, projections_forward

FORWARD, BACKWARD = 3, 6  # of one LoRA linear; PEFT takes 6 and about 10
NO_LAUNCH = {"promote_types", "empty", "empty_strided", "new_empty", "empty_like"}


class _Library(TorchDispatchMode):
    """Names of the library's operations that launch: all but allocations and views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if not (func.is_view or name in NO_LAUNCH):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def count(candidate, features, dropout_p, M=8192, K=4096, rank=16):
    """(forward, backward): names of what is launched for projections of these features."""

    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="meta")

    x, weights = meta(M, K), [meta(n, K) for n in features]
    As = [meta(rank, K, dtype=torch.float32) for _ in features]
    Bs = [meta(n, rank, dtype=torch.float32) for n in features]
    scalings, each = [2.0] * len(features), [True] * len(features)
    seeds = meta(len(features), dtype=torch.int64) if dropout_p else None
    dys, found = [meta(M, n) for n in features], []
    with forcing(candidate), recording((9, 0)) as ours, _Library() as library:
        _, s = projections_forward(x, weights, As, Bs, scalings, None, dropout_p, seeds)
        found.append([launch.kernel.__name__ for launch in ours] + library.names)
        ours.clear()
        library.names.clear()
        projections_backward(
            dys, x, s, weights, As, Bs, scalings, dropout_p, seeds,
            need_dx=True, need_dA=each, need_dB=each,
        )  # fmt: skip
        found.append([launch.kernel.__name__ for launch in ours] + library.names)
    return found


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("candidate", ["fused", "library"])
@pytest.mark.parametrize("M", [1, 600, 8192])
def test_one_linear(candidate, dropout_p, M):
    forward, backward = count(candidate, (4096,), dropout_p, M)
    assert len(forward) <= FORWARD, forward
    assert len(backward) <= BACKWARD, backward


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("candidate", ["fused", "library"])
def test_query_key_value(candidate, dropout_p):
    """At most 2.5 times one linear's."""
    forward, backward = count(candidate, (4096, 1024, 1024), dropout_p)
    assert len(forward) <= 2.5 * FORWARD, forward
    assert len(backward) <= 2.5 * BACKWARD, backward


def test_meter_counts_the_library():
    """The unfused candidate launches library operations alone, and more of them."""
    forward, backward = count(OPERATIONS[-1], (4096,), 0.0)
    assert not [name for name in forward + backward if name.endswith("_kernel")]
    assert len(forward) >= 3 and len(backward) >= 5, (forward, backward)
