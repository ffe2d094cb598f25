"""Set-up shared by every tier: Triton's interpreter, two threads, poisoned ``torch.empty``."""

import importlib
import os
import sys
from pathlib import Path

# The checkout holds a folder `kernels`, a name that a package of the ecosystem owns: installed
# packages come first.
_ROOT = str(Path(__file__).resolve().parent.parent)
sys.path[:] = [entry for entry in sys.path if entry not in ("", _ROOT)] + [_ROOT]

# Before any kernel is decorated: the Triton kernels' own code then runs on CPU tensors.
os.environ.setdefault("TRITON_INTERPRET", "1")
# No test reaches for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def _two_threads_and_a_seed():
    torch.set_num_threads(2)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _fused_operations(request, monkeypatch):
    """The tests' inputs have few rows: without this many would take the path for few rows."""
    if "few_rows" not in request.node.name:
        few_rows = importlib.import_module("fastlora.ops.few_rows")
        monkeypatch.setattr(few_rows, "LIMIT", 0)
        monkeypatch.setattr(few_rows, "LIMIT_WITH_DROPOUT", 0)


@pytest.fixture
def poisoned_empty(monkeypatch):
    """``torch.empty`` and friends filled with NaN: memory read before it is written shows."""

    def poison(tensor):
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        return tensor

    for name in ("empty", "empty_like", "empty_strided"):
        real = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *args, _real=real, **kwargs: poison(_real(*args, **kwargs))
        )
    real_new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda self, *args, **kwargs: poison(real_new_empty(self, *args, **kwargs)),
    )
