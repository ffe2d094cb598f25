"""Set-up of the tests of ``fuse``."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(_two_threads_and_a_seed):
    """On these sizes two threads wait for each other more than they work."""
    torch.set_num_threads(1)
