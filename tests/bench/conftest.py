"""One thread: the suite's own tests run on tiny shapes and measure nothing."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(_two_threads_and_a_seed):
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(2)
