"""The dropout mask: Philox's published words, and the bits of the torch path."""

import pytest
import torch
import triton
import triton.language as tl

from fastlora.kernels import philox_mask
from fastlora.kernels.dropout import keep_mask
from fastlora.ops import dropout

# Random123's known answer for philox4x32-10 with counter 0 and key 0.
WORDS = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)


@pytest.mark.parametrize("column", range(4))
def test_known_answer_to_the_last_bit(column):
    """A threshold at the word keeps its element, one above drops it: all four words, in their order."""
    seed = torch.zeros(1, dtype=torch.int64)
    kept = philox_mask(1, 4, WORDS[column] / 2**32, seed)
    dropped = philox_mask(1, 4, (WORDS[column] + 1) / 2**32, seed)
    assert kept[0, column] == 1
    assert dropped[0, column] == 0


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 4), (17, 63), (33, 130), (40, 64)])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**32, -(2**63), 0x0123456789ABCDEF])
def test_same_bits_as_torch(rows, columns, seed):
    p = 0.3
    seeds = torch.tensor([seed])
    expected = dropout.keep_mask(seeds[0], rows, columns, p)
    assert torch.equal(philox_mask(rows, columns, p, seeds).bool(), expected)


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.5, 1 - 2**-32, 1 - 2**-53])
def test_extreme_probabilities(p):
    seeds = torch.tensor([5])
    expected = dropout.keep_mask(seeds[0], 16, 32, p)
    assert torch.equal(philox_mask(16, 32, p, seeds).bool(), expected)


def test_empty():
    assert philox_mask(0, 5, 0.1, torch.tensor([1])).shape == (0, 5)
    assert philox_mask(5, 0, 0.1, torch.tensor([1])).shape == (5, 0)


@triton.jit
def _rows_from_kernel(out, seeds, first_row, quads_per_row, threshold, BLOCK_M: tl.constexpr):
    rows = first_row + tl.arange(0, BLOCK_M).to(tl.int64)
    keep = keep_mask(tl.load(seeds), rows, tl.arange(0, 4), quads_per_row, threshold)
    offsets = tl.arange(0, BLOCK_M)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out + offsets, keep.to(tl.uint8))


def test_counters_beyond_32_bits():
    """Element indices past 2^34 use the counter's second word."""
    first_row, quads_per_row, p = 2**31 + 5, 1024, 0.5
    seeds = torch.tensor([-77])
    out = torch.empty(16, 16, dtype=torch.uint8)
    _rows_from_kernel[(1,)](out, seeds, first_row, quads_per_row, dropout.threshold(p), BLOCK_M=16)
    counters = (first_row + torch.arange(16))[:, None] * quads_per_row + torch.arange(4)
    assert int(counters.max()) > 2**32
    words = dropout.philox(seeds[0], counters).view(16, 16)
    assert torch.equal(out.bool(), words >= dropout.threshold(p))
