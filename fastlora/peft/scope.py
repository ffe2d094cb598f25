"""Projections that share an x, computed at the first one's call and handed out at the others'."""

import logging
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional
from ..ops._common import autocast_enabled
from .layers import FusedLoraLinear, LinearTerms, linear_terms

_log = logging.getLogger("fastlora")


def joins(layer: Any) -> bool:
    """Whether a layer may be computed before its own call: nothing may change its x on the way."""
    return type(layer) is FusedLoraLinear and not (
        layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or "forward" in layer.__dict__
    )


class _Kept(NamedTuple):
    """An output computed ahead, with all that it depends on."""

    x: Tensor
    version: int
    setting: tuple[bool, bool]
    terms: LinearTerms
    y: Tensor


class Scope:
    """One group of projections during one forward of their parent, in one thread.

    Another thread that shares the model computes its projections alone meanwhile.
    """

    __slots__ = ("_backend", "_kept", "_layers", "_parent", "_thread")

    def __init__(self, parent: nn.Module, names: tuple[str, ...], backend: str) -> None:
        self._parent = parent
        self._backend = backend
        self._layers: list[Any] = [parent._modules[name] for name in names]
        self._kept: dict[int, _Kept] | None = None  # None until the first call
        self._thread = threading.get_ident()

    @property
    def foreign(self) -> bool:
        """Whether another thread opened it."""
        return self._thread != threading.get_ident()

    def take(self, layer: FusedLoraLinear, x: Tensor, terms: LinearTerms) -> Tensor | None:
        """The layer's output for ``x``, computed with its siblings'; None: compute it alone."""
        if self.foreign or x.is_inference():  # the latter's changes in place leave no trace
            return None
        if self._kept is None:
            return self._compute(layer, x, terms)
        kept = self._kept.pop(id(layer), None)
        if kept is None:
            return None
        same_x = kept.x is x and kept.version == x._version and kept.setting == _setting(x)
        if same_x and _same(kept.terms, terms):
            return kept.y
        self._mismatch(terms)
        return None

    def _compute(self, layer: FusedLoraLinear, x: Tensor, terms: LinearTerms) -> Tensor | None:
        if not joins(layer) or not any(other is layer for other in self._layers):
            return None
        self._kept = kept = {}
        members, operands = [layer], [terms]
        for other in self._layers:
            if other is not layer and joins(other):
                theirs = linear_terms(other)
                if isinstance(theirs, LinearTerms) and theirs.dropout_p == terms.dropout_p:
                    members.append(other)
                    operands.append(theirs)
        if len(members) == 1:
            return None
        weights, As, Bs, scalings, biases, _ = zip(*operands, strict=True)
        ys = functional.lora_projections(
            x, weights, As, Bs, scalings, biases, dropout_p=terms.dropout_p, backend=self._backend
        )
        for member, theirs, y in zip(members[1:], operands[1:], ys[1:], strict=True):
            kept[id(member)] = _Kept(x, x._version, _setting(x), theirs, y)
        return ys[0]

    def _mismatch(self, terms: LinearTerms) -> None:
        self._kept = {}
        state = self._parent.__dict__.get("_fastlora")
        if state is None or state.mismatched:
            return
        state.mismatched = "its projections were called with different inputs"
        # With dropout, going on alone would draw other masks in a recomputation of this forward.
        state.dissolved = terms.dropout_p == 0.0
        _log.warning("fastlora: %s: %s", type(self._parent).__name__, state.mismatched)

    def close(self) -> None:
        self._kept = {}


def _setting(x: Tensor) -> tuple[bool, bool]:
    return torch.is_grad_enabled(), autocast_enabled(x.device.type)


def _same(a: LinearTerms, b: LinearTerms) -> bool:
    return (
        (a.weight is b.weight or a.weight.data_ptr() == b.weight.data_ptr())
        and a.lora_A is b.lora_A
        and a.lora_B is b.lora_B
        and a.scaling == b.scaling
        and a.dropout_p == b.dropout_p
    )
