"""The tests' inputs have few rows: without this they would all take the path for few rows."""

import pytest
import torch

from fastlora.peft import few_rows


@pytest.fixture(autouse=True)
def _always_the_fused_operations(request, monkeypatch):
    if "few_rows" not in request.node.name:
        monkeypatch.setattr(few_rows, "LIMIT", 0)
        monkeypatch.setattr(few_rows, "LIMIT_WITH_DROPOUT", 0)


@pytest.fixture(autouse=True)
def _one_thread(_two_threads_and_a_seed):
    """On these sizes two threads wait for each other more than they work."""
    torch.set_num_threads(1)
