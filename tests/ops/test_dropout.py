"""Philox bits: known answers, statistics, replay."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastlora.ops import dropout


def test_known_answers():
    """Random123's known-answer vectors for philox4x32-10 whose upper counter words are zero.

    kat_vectors of Random123 1.14 (Salmon et al.): counter 0, key 0. The vectors with other upper
    counter words are held against the C++ kernel and against Triton in their own tests.
    """
    words = dropout.philox(torch.tensor(0), torch.tensor([0]))
    assert [hex(word) for word in words[0].tolist()] == [
        "0x6627e8d5",
        "0xe169c58d",
        "0xbc57ac4c",
        "0x9b00dbd8",
    ]


@given(
    seed=st.integers(0, 2**63 - 1),
    counter=st.integers(0, 2**62),
)
def test_against_python_integers(seed, counter):
    """The int64 tensor arithmetic, which wraps, against exact Python integers."""
    c = [counter & 0xFFFFFFFF, counter >> 32, 0, 0]
    k = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (p1 >> 32) ^ c[1] ^ k[0],
            p1 & 0xFFFFFFFF,
            (p0 >> 32) ^ c[3] ^ k[1],
            p0 & 0xFFFFFFFF,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    assert dropout.philox(torch.tensor(seed), torch.tensor([counter]))[0].tolist() == c


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_rate_and_scale(p):
    """The share kept is 1 - p to four standard deviations, and the kept ones are scaled by 1/(1-p)."""
    x = torch.ones(500, 401)
    dropped = dropout.dropout(x, torch.tensor(7), p)
    kept = (dropped != 0).double().mean().item()
    deviation = (p * (1 - p) / x.numel()) ** 0.5
    assert abs(kept - (1 - p)) < 4 * deviation
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)])


def test_rows_and_seeds_are_unlike():
    first = dropout.keep_mask(torch.tensor(1), 64, 63, 0.5)
    second = dropout.keep_mask(torch.tensor(2), 64, 63, 0.5)
    for other in (second, first.roll(1, 0), first.roll(1, 1)):
        agreement = (first == other).double().mean().item()
        assert 0.45 < agreement < 0.55


def test_seeds_follow_the_generator():
    torch.manual_seed(3)
    first = dropout.draw_seeds(3, torch.device("cpu"))
    torch.manual_seed(3)
    again = dropout.draw_seeds(3, torch.device("cpu"))
    own = dropout.draw_seeds(3, torch.device("cpu"), torch.Generator().manual_seed(3))
    assert torch.equal(first, again)
    assert torch.equal(first, own)
    assert first.unique().numel() == 3
