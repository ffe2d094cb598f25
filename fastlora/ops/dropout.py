"""Counter-based dropout: the mask is a function of (seed, element index) and is never stored.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), with the key
(low, high 32 bits of the seed). Element (m, k) of X [M, K] has index e = m * 4 * ceil(K / 4) + k, so
that every row starts a fresh counter; its word is number e mod 4 of counter e // 4. An element is
kept when its word is at least floor(p * 2^32). The C++ and the Triton kernels draw the same bits.
"""

import torch

_ROUND = (0xD2511F53, 0xCD9E8D57)
_KEY = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def draw_seeds(
    count: int, device: torch.device, generator: torch.Generator | None = None
) -> torch.Tensor:
    """``count`` int64 seeds from torch's generator, on ``device`` so that no kernel waits for them.

    ``torch.manual_seed`` and the RNG state that activation checkpointing restores replay them.
    """
    return torch.randint(
        0, 2**63 - 1, (count,), dtype=torch.int64, device=device, generator=generator
    )


def threshold(p: float) -> int:
    """Words below this are dropped: floor(p * 2^32)."""
    return int(p * 4294967296.0)


def _mul(constant: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a product of 32-bit words held in int64 (which wraps, harmlessly)."""
    product = word * constant
    return (product >> 32) & _LOW, product & _LOW


def philox(seed: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Philox4x32-10 words [..., 4] (int64 holding 32 bits) of int64 ``counters`` under ``seed``."""
    c0, c1 = counters & _LOW, (counters >> 32) & _LOW
    c2 = c3 = torch.zeros_like(counters)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        high0, low0 = _mul(_ROUND[0], c0)
        high1, low1 = _mul(_ROUND[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY[0]) & _LOW, (k1 + _KEY[1]) & _LOW
    return torch.stack((c0, c1, c2, c3), dim=-1)


def keep_mask(seed: torch.Tensor, rows: int, columns: int, p: float) -> torch.Tensor:
    """Boolean mask [rows, columns] of the elements that dropout with probability ``p`` keeps."""
    groups = (columns + 3) // 4
    counters = torch.arange(rows * groups, dtype=torch.int64, device=seed.device)
    words = philox(seed, counters).view(rows, 4 * groups)[:, :columns]
    return words >= threshold(p)


def dropout(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    """X [M, K] with elements dropped with probability ``p``, the kept ones scaled by 1 / (1 - p)."""
    mask = keep_mask(seed, x.shape[0], x.shape[1], p)
    return torch.where(mask, x / (1.0 - p), torch.zeros((), dtype=x.dtype, device=x.device))
