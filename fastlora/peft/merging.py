"""Merging that can be undone to the bit.

PEFT adds ``s B A`` to the base weight in place and subtracts it again: in bf16 every round loses
bits, and a weight that another module shares (``lm_head`` and ``embed_tokens``) changes there too.
Here merging works on a copy under a new Parameter, and unmerging puts the original Parameter back.
The price is the memory of the copy while the adapter stays merged.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter


class Merged:
    """The original parameters of a merged base layer, beside the ones that took their place."""

    __slots__ = ("current", "marks", "original")

    def __init__(self, base: nn.Module, names: list[str]) -> None:
        self.original: dict[str, Parameter] = {name: getattr(base, name) for name in names}
        self.current: dict[str, Parameter] = {}
        for name, parameter in self.original.items():
            copy = Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            self.current[name] = base._parameters[name] = copy
        self.marks: dict[str, tuple[int, int]] = {}

    def __getstate__(self) -> tuple[Any, ...]:
        return self.original, self.current, self._moved() == set()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.original, self.current, intact = state
        self.marks = {}
        if intact:
            self.mark()

    def mark(self) -> None:
        """Take the parameters as they are now for the merged ones."""
        self.marks = {name: _mark(parameter) for name, parameter in self.current.items()}

    def _moved(self) -> set[str]:
        return {name for name, p in self.current.items() if self.marks.get(name) != _mark(p)}

    def intact(self, base: nn.Module) -> bool:
        """Whether nobody has replaced or written to the merged parameters (``load_state_dict``)."""
        same = all(base._parameters.get(name) is p for name, p in self.current.items())
        return same and not self._moved()

    def put_back(self, base: nn.Module) -> None:
        """Undo: the base layer holds its original Parameter objects again."""
        base._parameters.update(self.original)

    def keep(self, base: nn.Module, shared: Callable[[Parameter], bool]) -> None:
        """Leave the merged values as PEFT would: in the original Parameter, unless it is shared."""
        for name, original in self.original.items():
            if base._parameters.get(name) is self.current[name] and not shared(original):
                original.data = self.current[name].data
                base._parameters[name] = original


def _mark(parameter: Tensor) -> tuple[int, int]:
    return parameter._version, parameter.data_ptr()


class MergesExactly:
    """Mixin over a PEFT layer: ``merge`` and ``unmerge`` as described above."""

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """PEFT's ``merge``, on a copy of the base weight."""
        layer: Any = self
        state = layer.__dict__.get("_fastlora")
        base = layer.get_base_layer()
        fresh = state is not None and not layer.merged_adapters
        if fresh and _plain(base):
            names = ["weight"]
            chosen = layer.active_adapters if adapter_names is None else adapter_names
            if any(layer.lora_bias.get(name) for name in chosen) and base.bias is not None:
                names.append("bias")
            state.merged = Merged(base, names)
        try:
            super().merge(safe_merge=safe_merge, adapter_names=adapter_names)  # type: ignore[misc]
        finally:
            if state is not None and state.merged is not None:
                if layer.merged_adapters:
                    state.merged.mark()
                else:
                    state.merged.put_back(base)
                    state.merged = None

    def unmerge(self) -> None:
        """PEFT's ``unmerge``; exact where ``merge`` kept the original."""
        layer: Any = self
        state = layer.__dict__.get("_fastlora")
        merged = None if state is None else state.merged
        if merged is not None:
            state.merged = None
            base, adapters = layer.get_base_layer(), layer._get_available_adapters()
            # An adapter deleted while merged stays in the weight for good: so it is in PEFT.
            if merged.intact(base) and adapters.issuperset(layer.merged_adapters):
                merged.put_back(base)
                layer.merged_adapters.clear()
                return
        super().unmerge()  # type: ignore[misc]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """``nn.Module._apply`` (``.to()``, ``.half()``, …), which the original parameters follow."""
        state = self.__dict__.get("_fastlora")
        merged = None if state is None else state.merged
        layer: Any = self
        intact = merged is not None and merged.intact(layer.get_base_layer())
        super()._apply(fn, recurse)  # type: ignore[misc]
        if merged is not None:
            base = layer.get_base_layer()
            with torch.no_grad():
                for name, original in merged.original.items():
                    moved = fn(original.data)
                    if torch._has_compatible_shallow_copy_type(original.data, moved):
                        original.data = moved
                    else:
                        merged.original[name] = Parameter(moved, original.requires_grad)
                    if intact:  # the parameter may have been replaced, not just moved
                        merged.current[name] = base._parameters[name]
            if intact:
                merged.mark()
        return self


def _plain(base: nn.Module) -> bool:
    """Whether the base weight is a frozen, ordinary parameter that a copy can stand in for."""
    weight = base._parameters.get("weight")
    return type(weight) is Parameter and not weight.requires_grad and not weight.is_meta
