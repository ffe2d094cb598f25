"""Layers computed together: projections that share an x, and whole gated MLPs.

The parent of such layers gets a subclass of its own class, of the same name, whose forward opens a
:class:`Scope` for its projections (or is one ``lora_mlp`` call). Nothing outlives the parent's
forward: not the x, not an output that nobody fetched, however the forward ends. What is grouped
depends only on the calls inside, so that a checkpointed forward and its recomputation agree.
"""

import copyreg
import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import activations

from .. import functional
from ..nn._common import hooked
from ..ops import few_rows
from .layers import _DENSE, FusedLoraLinear, LinearTerms, linear_terms
from .scope import Scope, joins
from .source import GatedMLP, gated_mlp, shared_inputs

_SOME_DROPOUT = 0.5

_SILU = (nn.SiLU, activations.SiLUActivation)
_GELU_TANH = (
    activations.GELUTanh,
    activations.NewGELUActivation,
    activations.FastGELUActivation,
    activations.AccurateGELUActivation,
)


def activation_kind(activation: Any) -> str | None:
    """``lora_mlp``'s name for an activation module or function, None for one it does not have."""
    if activation is F.silu or type(activation) in _SILU:
        return "silu"
    if activation is F.gelu or type(activation) is activations.GELUActivation:
        return "gelu"
    if type(activation) is nn.GELU:
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    if type(activation) in _GELU_TANH:
        return "gelu_tanh"
    return None


class ParentState:
    """What ``fuse`` adds to a parent, as attribute ``_fastlora``: names only, so copies are whole."""

    def __init__(
        self, backend: str, projections: tuple[tuple[str, ...], ...], mlp: GatedMLP | None
    ) -> None:
        self.backend = backend
        self.projections = projections
        self.mlp = mlp
        self.mismatched = ""  # why the projections do not share an x after all
        self.dissolved = False

    def names(self) -> set[str]:
        names = {name for group in self.projections for name in group}
        return names | (set(self.mlp[:3]) if self.mlp else set())


def plan(parent: nn.Module, backend: str, groups: frozenset[str]) -> ParentState | None:
    """What to group under ``parent``, whose layers are fused already; None for nothing."""
    cls = original_class(type(parent))
    if "forward" in parent.__dict__ and type(parent) is cls:
        return None  # replaced on the instance: ours would never run
    if any("__init_subclass__" in base.__dict__ for base in cls.__mro__[:-1]):
        return None  # making a subclass would run it: it may want arguments, or keep a register
    children = parent._modules

    def fused(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if isinstance(children.get(name), FusedLoraLinear))

    mlp = gated_mlp(cls) if "mlp" in groups else None
    if mlp and (len(fused(mlp[:3])) < 3 or activation_kind(_activation(parent, mlp)) is None):
        mlp = None
    projections: tuple[tuple[str, ...], ...] = ()
    if "projections" in groups:
        projections = tuple(g for g in map(fused, shared_inputs(cls)) if len(g) > 1)
    if mlp is None and not projections:
        return None
    return ParentState(backend, projections, mlp)


def _activation(parent: nn.Module, mlp: GatedMLP) -> Any:
    return getattr(parent, mlp.activation, None)


def _mlp(parent: nn.Module, state: ParentState, mlp: GatedMLP, x: Any) -> Tensor | None:
    """The whole MLP as one operation, or None where some part of it needs its own call."""
    if type(x) not in _DENSE or few_rows.few(x, x, _SOME_DROPOUT, state.backend):
        return None  # few by any measure: no time to collect operands in
    operands = mlp_operands(parent, mlp)
    if isinstance(operands, str):
        return None
    kind, gate, up, down = operands
    if few_rows.few(x, gate.weight, gate.dropout_p, state.backend):
        return None
    return functional.lora_mlp(
        x,
        gate[:5],
        up[:5],
        down[:5],
        activation=kind,
        dropout_p=gate.dropout_p,
        backend=state.backend,
    )


def mlp_operands(
    parent: nn.Module, mlp: GatedMLP
) -> tuple[str, LinearTerms, LinearTerms, LinearTerms] | str:
    """Activation name and terms of gate, up and down, or why the MLP is not one operation now."""
    children = parent._modules
    activation = children.get(mlp.activation)
    if activation is None:
        activation = _activation(parent, mlp)
    elif hooked(activation):
        return "its activation carries a hook"
    kind = activation_kind(activation)
    if kind is None:
        return f"its activation {type(activation).__name__} is not SiLU or GELU"
    found = []
    for name in mlp[:3]:
        layer = children.get(name)
        if type(layer) is not FusedLoraLinear or hooked(layer):
            return f"{name} is not a fused layer, or carries a hook"
        terms = linear_terms(layer)
        if isinstance(terms, str):
            return terms
        found.append(terms)
    gate, up, down = found
    if not gate.dropout_p == up.dropout_p == down.dropout_p:
        return "its layers have different dropout probabilities"
    return kind, gate, up, down


def original_class(cls: type) -> type:
    """The class that a parent had before ``fuse``."""
    return cls.__dict__.get("_fastlora_original", cls)


def grouping_class(original: type) -> type:
    """Subclass of ``original``, of the same name, that computes its layers together."""
    return _grouping_class(original, original.forward)  # type: ignore[attr-defined]


@functools.cache
def _grouping_class(original: Any, plain_forward: Any) -> type:
    # For this very forward: where a class's has been replaced since (as Liger Kernel and others do), ours
    # steps aside until the next `fuse`.

    @functools.wraps(plain_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # An offloading hook may keep this bound method beyond `unfuse`: no zero-argument super().
        state = self.__dict__.get("_fastlora")
        if state is None or original.forward is not plain_forward:
            return original.forward(self, *args, **kwargs)
        if state.mlp is not None and len(args) == 1 and not kwargs:
            y = _mlp(self, state, state.mlp, args[0])
            if y is not None:
                return y
        if not state.projections or state.dissolved or torch.compiler.is_compiling():
            return plain_forward(self, *args, **kwargs)
        return _forward_in_scopes(plain_forward, self, state, args, kwargs)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        super(cls, self).__setattr__(name, value)
        state = self.__dict__.get("_fastlora")
        if state is not None and name in state.names() and not isinstance(value, FusedLoraLinear):
            _heal(self, state)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        reduced = super(cls, self).__reduce_ex__(protocol)
        if reduced[0] is copyreg.__newobj__ and reduced[1] == (cls,):  # type: ignore[attr-defined]
            return _new, (original,), *reduced[2:]
        return reduced

    namespace = {
        "__doc__": original.__doc__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__reduce_ex__": __reduce_ex__,
        "__setattr__": __setattr__,
        "_fastlora_original": original,
        "_fastlora_forward": plain_forward,
        "forward": forward,
    }
    make: Any = type(original)  # its metaclass
    cls: Any = make(original.__name__, (original,), namespace)
    return cls


def _forward_in_scopes(
    plain_forward: Any, parent: nn.Module, state: ParentState, args: Any, kwargs: Any
) -> Any:
    children, scopes, opened = parent._modules, [], []
    for names in state.projections:
        scope = Scope(parent, names, state.backend)
        scopes.append(scope)
        for name in names:
            theirs = children[name].__dict__.get("_fastlora")  # type: ignore[union-attr]
            if theirs is not None and (theirs.scope is None or not theirs.scope.foreign):
                theirs.scope = scope
                opened.append(theirs)
    try:
        return plain_forward(parent, *args, **kwargs)
    finally:
        for theirs in opened:
            theirs.scope = None
        for scope in scopes:
            scope.close()


def _new(original: type) -> nn.Module:
    """An empty instance for ``copy`` and ``pickle`` to fill."""
    cls: Any = grouping_class(original)  # type: ignore[arg-type]
    return cls.__new__(cls)


def _heal(parent: Any, state: ParentState) -> None:
    """Back to the original class once PEFT has unloaded the last fused layer."""
    children = parent._modules
    if not any(isinstance(children.get(name), FusedLoraLinear) for name in state.names()):
        release(parent)


def release(parent: Any) -> None:
    """Undo the swap of a parent's class."""
    if type(parent) is not original_class(type(parent)):
        parent.__class__ = original_class(type(parent))
        parent.__dict__.pop("_fastlora", None)


def regroup(parent: Any, backend: str, groups: frozenset[str]) -> None:
    """Group the fused layers under ``parent`` anew: swap its class, or give it back."""
    state, before = plan(parent, backend, groups), parent.__dict__.get("_fastlora")
    if state is None:
        release(parent)
        return
    if isinstance(before, ParentState):
        state.mismatched, state.dissolved = before.mismatched, before.dissolved
    parent.__dict__["_fastlora"] = state
    cls: Any = type(parent)
    if "_fastlora_original" in cls.__dict__ or not hasattr(cls, "_fastlora_original"):
        parent.__class__ = grouping_class(original_class(cls))
    # else `fully_shard` has made a subclass of ours: it stays


def replaced_since(parent: nn.Module) -> bool:
    """Whether the forward of the parent's class is another one than ``fuse`` has read."""
    cls: Any = type(parent)
    return cls._fastlora_original.forward is not cls._fastlora_forward


class GroupOf(NamedTuple):
    """How a layer would be computed if its parent were called now."""

    kind: str  # "linear", "projections" or "mlp"
    note: str


def group_of(parent: nn.Module | None, name: str) -> GroupOf:
    """What ``explain`` says of layer ``name`` (fused, with terms) under ``parent``."""
    state = None if parent is None else parent.__dict__.get("_fastlora")
    if parent is None or not isinstance(state, ParentState):
        return GroupOf("linear", "")
    if replaced_since(parent):
        return GroupOf("linear", "not grouped: its parent's class has another forward since fuse")
    note = ""
    if state.mlp is not None and name in state.mlp[:3]:
        operands = mlp_operands(parent, state.mlp)
        if not isinstance(operands, str):
            names_left = ", ".join(n for n in state.mlp[:3] if n != name)
            return GroupOf("mlp", f"one operation with {names_left}")
        note = f"not grouped: {operands}"
    for names in state.projections:
        if name not in names:
            continue
        if state.dissolved:
            return GroupOf("linear", f"not grouped: {state.mismatched}")
        mine = linear_terms(parent._modules[name])  # type: ignore[arg-type]
        siblings: dict[str, Any] = {n: parent._modules[n] for n in names if n != name}
        others = [n for n, s in siblings.items() if joins(s) and _together(linear_terms(s), mine)]
        if others and joins(parent._modules[name]):
            return GroupOf("projections", f"one pass over x with {', '.join(others)}")
        note = note or "not grouped: no sibling can be computed with it now"
    return GroupOf("linear", note)


def _together(a: LinearTerms | str, b: LinearTerms | str) -> bool:
    both = isinstance(a, LinearTerms) and isinstance(b, LinearTerms)
    return both and a.dropout_p == b.dropout_p  # type: ignore[union-attr]
