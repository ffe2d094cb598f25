"""Counting what autograd keeps for the backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass
class SavedForBackward:
    """Storages that autograd saved: unique ones, parameters and buffers of the model left out."""

    storages: dict[int, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Sum of the saved storages' sizes, in bytes."""
        return sum(self.storages.values())


@contextmanager
def saved_for_backward(model: nn.Module | None = None) -> Iterator[SavedForBackward]:
    """Count the bytes that autograd saves for backward inside the ``with`` block.

    Args:
        model: its parameters and buffers are not counted, being there anyway.

    Yields:
        an object whose ``.bytes`` is the running count. Keep the loss alive until it is read.
    """
    kept = set()
    if model is not None:
        for tensor in (*model.parameters(), *model.buffers()):
            kept.add(tensor.untyped_storage().data_ptr())
    saved = SavedForBackward()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in kept:
            saved.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
