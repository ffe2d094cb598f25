"""The bits of dropout: Philox4x32-10, the same on every instruction set and in triton.language.random."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.csrc import native

ONES = 0xFFFFFFFF
# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN, ids=["zeros", "ones", "pi"])
def test_reference_gives_the_known_answers(counter, key, output):
    assert native.philox_block(counter, key) == output


def test_arrays_are_the_same_as_integers():
    for seed in (0, 2**64 - 1, 0x299F31D0A4093822):
        want = [native.philox_block((q, 0, 0, 0), (seed & ONES, seed >> 32)) for q in range(6, 12)]
        assert native.words(2, 2, 12, seed).flatten().tolist() == [
            w for block in want for w in block
        ]


@pytest.mark.parametrize("seed", [0, 42, -1, 2**63 + 12345])
def test_every_word_to_the_last_bit(seed):
    """A word u is kept at p = u / 2^32 and dropped at the next p: so the kernel has exactly this word."""
    cols = 48
    want = native.words(0, 1, cols, seed)[0].tolist()
    if seed == 0:
        assert tuple(want[:4]) == KNOWN[0][2]
    for col, word in enumerate(want):
        assert native.philox_mask(1, cols, word / 2**32, seed)[0, col] == 1
        if word < ONES:
            assert native.philox_mask(1, cols, (word + 1) / 2**32, seed)[0, col] == 0


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    cols=st.integers(1, 230),
    p=st.floats(0.0, 1.0, exclude_max=True),
    seed=st.integers(-(2**63), 2**64 - 1),
    threads=st.integers(1, 2),
)
def test_masks(rows, cols, p, seed, threads):
    got = native.philox_mask(rows, cols, p, seed, threads)
    assert torch.equal(got.bool(), native.kept(rows, cols, p, seed))
    assert got.max() <= 1


def test_threads_do_not_change_the_mask():
    masks = [native.philox_mask(200, 301, 0.3, 7, threads) for threads in (1, 2, 5)]
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])
    assert torch.equal(masks[0][-3:].bool(), native.words(197, 3, 301, 7) >= int(0.3 * 2**32))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_the_share_kept_is_one_minus_p(p):
    """Within five standard deviations; so is the share of neighbours that are both kept."""
    mask = native.philox_mask(1000, 1000, p, 2024).double()
    for share, want in [
        (mask.mean(), 1 - p),
        ((mask[:, 1:] * mask[:, :-1]).mean(), (1 - p) ** 2),
        ((mask[1:] * mask[:-1]).mean(), (1 - p) ** 2),
    ]:
        assert abs(share.item() - want) <= 5 * (0.5 / 1000)
    if p == 0.0:
        assert mask.all()


def test_seeds_give_different_masks():
    masks = [native.philox_mask(8, 64, 0.5, seed) for seed in (0, 1, 1 << 32, -1)]
    assert len({bytes(mask.numpy().tobytes()) for mask in masks}) == len(masks)


def test_empty():
    assert native.philox_mask(0, 5, 0.5, 1).numel() == 0
    assert native.philox_mask(5, 0, 0.5, 1).numel() == 0
