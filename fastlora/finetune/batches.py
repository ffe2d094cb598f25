"""Batches of rows of like length, in an order that is a function of (seed, epoch) alone.

Trainer's own length-grouped sampler draws its order from torch's global generator, so a resumed run cannot draw it
again; this one can. It also shuffles the batches, so that a run does not go through each stretch from long to short.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .encoding import IGNORED

POOL = 50  # batches sorted together: within 1 % of the padding of a full sort from about 20 up, and still a shuffle


class LengthBuckets(torch.utils.data.Sampler[int]):
    """Indices such that each run of `batch_size` of them has rows of like length.

    Args:
        lengths: tokens of each row.
        batch_size: rows that go through the model together, over all processes.
        seed: of the shuffle; epoch e draws from (seed, e).
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int):
        self.lengths = list(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of this epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        # At least four pools where there are enough batches, so that small data are shuffled too.
        pool = self.batch_size * max(1, min(POOL, len(order) // (self.batch_size * 4)))
        batches: list[list[int]] = []
        for start in range(0, len(order), pool):
            block = sorted(order[start : start + pool], key=lambda row: -self.lengths[row])
            batches += [
                block[i : i + self.batch_size] for i in range(0, len(block), self.batch_size)
            ]
        # Only the last batch may be short: anywhere else it would shift every batch behind it.
        whole = [batch for batch in batches if len(batch) == self.batch_size]
        short = [batch for batch in batches if len(batch) < self.batch_size]
        for index in torch.randperm(len(whole), generator=generator).tolist():
            yield from whole[index]
        for batch in short:
            yield from batch


def padding_share(order: Sequence[int], lengths: Sequence[int], batch_size: int) -> float:
    """Share of a pass's tokens that are padding, when rows in this order are padded to their batch's longest."""
    total = 0
    for start in range(0, len(order), batch_size):
        batch = [lengths[row] for row in order[start : start + batch_size]]
        total += max(batch) * len(batch)
    return 1 - sum(lengths[row] for row in order) / total if total else 0.0


@dataclass(frozen=True)
class Collator:
    """Pads on the right: `input_ids` with `pad_id`, `labels` with -100, `attention_mask` with 0; all int64 [B, L]."""

    pad_id: int
    multiple_of: int = 1

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        length = -(-longest // self.multiple_of) * self.multiple_of
        ids = torch.full((len(rows), length), self.pad_id, dtype=torch.int64)
        labels = torch.full_like(ids, IGNORED)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            n = len(row["input_ids"])
            ids[i, :n] = torch.tensor(row["input_ids"])
            labels[i, :n] = torch.tensor(row["labels"])
            mask[i, :n] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}
