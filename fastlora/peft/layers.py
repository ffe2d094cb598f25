"""PEFT's LoRA layers with a fused forward.

``fuse`` sets ``layer.__class__`` of a ``peft.tuners.lora.layer.Linear`` to :class:`FusedLoraLinear`
(and of an ``Embedding`` to :class:`FusedLoraEmbedding`): the instance, its parameters, submodules
and hooks stay the very same objects, so everything that PEFT does to the layer goes on working.
One attribute is added, ``_fastlora`` (a :class:`LayerState`).

Whether a call can be fused is decided on every call, from the layer's present state: adapters are
added, switched, disabled and merged at any time, and modules grow hooks. ``linear_terms`` and
``embedding_terms`` either collect the operands of the fused operation or say why there are none;
``explain`` asks the very same functions.
"""

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import Embedding, Linear, LoraLayer
from torch import Tensor, nn
from torch.nn.modules import module as _torch_module
from torch.nn.parameter import Parameter
from transformers.pytorch_utils import Conv1D

from .. import functional
from ..nn._common import hooked
from ..ops import few_rows
from .merging import Merged, MergesExactly
from .source import embedding_is_scaled

_log = logging.getLogger("fastlora")
_DENSE = frozenset({Tensor, Parameter})  # not DTensor, not a quantised subclass

DISABLED = "the adapters are disabled"
MERGED = "the adapters are merged into the base weight"
SEVERAL = "several adapters are active at once"
GLOBAL_HOOK = "a global module hook is registered"
TENSOR_SCALING = "its scaling is a tensor, not a number (prepared for hot-swapping?)"
ABSENT = "the active adapter has no weights in this layer"
EXTRA_ARGUMENTS = "extra arguments in the call (such as adapter names mixed in one batch)"
_WISHED_FOR = frozenset({DISABLED, MERGED, ABSENT})  # nothing to warn of


class LayerState:
    """What ``fuse`` adds to a layer: attribute ``_fastlora``, never part of the ``state_dict``."""

    __slots__ = ("backend", "merged", "scope", "told")

    def __init__(self, backend: str, told: set[str]) -> None:
        self.backend = backend
        self.told = told  # reasons logged so far, shared by the layers of one `fuse`
        self.merged: Merged | None = None
        self.scope: Any = None  # set by the parent while its forward runs

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_state, (self.backend, self.told, self.merged)


def _restore_state(backend: str, told: set[str], merged: Merged | None) -> LayerState:
    state = LayerState(backend, told)
    state.merged = merged
    return state


class LinearTerms(NamedTuple):
    """Operands of one fused linear layer."""

    weight: Tensor  # [N, K]
    lora_A: Tensor  # [r, K]
    lora_B: Tensor  # [N, r]
    scaling: float
    bias: Tensor | None  # [N], with a trained lora_bias already in it
    dropout_p: float  # 0 when dropout is not training


def globally_hooked() -> bool:
    """Whether every module call of the process does more than its class's forward."""
    return bool(
        _torch_module._global_forward_hooks
        or _torch_module._global_forward_pre_hooks
        or _torch_module._global_backward_hooks
        or _torch_module._global_backward_pre_hooks
    )


def active_adapter(layer: LoraLayer, holder: Iterable[str]) -> tuple[str, str]:
    """The one adapter in use and an empty reason, or an empty name and the reason."""
    names = layer._active_adapter
    names = [names] if isinstance(names, str) else names
    present = [name for name in names if name in holder]
    if len(present) == 1:
        return present[0], ""
    return "", SEVERAL if present else ABSENT


def variant_of(layer: LoraLayer, name: str) -> str:
    """What an adapter is if it has a forward of its own (DoRA and others); empty for plain LoRA."""
    variants = layer.__dict__.get("lora_variant")
    if variants or layer.use_dora.get(name):
        variant = variants.get(name) if variants else None
        if variant is None and not layer.use_dora.get(name):
            return ""
        kind = "DoRA" if variant is None else type(variant).__name__
        return f"adapter {name!r} is a variant of LoRA ({kind})"
    return ""


def linear_terms(layer: Linear) -> LinearTerms | str:
    """Operands of a linear LoRA layer as it stands, or the reason for leaving it to PEFT.

    Runs on every call: attribute look-ups go past ``nn.Module.__getattr__`` where they can.
    """
    if layer._disable_adapters:
        return DISABLED
    if layer.merged_adapters:
        return MERGED
    if globally_hooked():
        return GLOBAL_HOOK
    modules = layer._modules
    As = modules["lora_A"]._modules
    active = layer._active_adapter
    if type(active) is not str:
        active = active[0] if len(active) == 1 else ""
    if active not in As:
        active, reason = active_adapter(layer, As)
        if reason:
            return reason
    if reason := variant_of(layer, active):
        return reason
    base, lora_A = modules["base_layer"], As[active]
    lora_B = modules["lora_B"]._modules[active]
    dropout = modules["lora_dropout"]._modules[active]
    if hooked(base) or hooked(lora_A) or hooked(lora_B) or hooked(dropout):
        return "its base layer, lora_A, lora_B or dropout module carries a hook"
    if type(lora_A) is not nn.Linear or type(lora_B) is not nn.Linear:
        return "lora_A or lora_B is not a plain nn.Linear (parametrised?)"
    if type(dropout) is nn.Identity:
        p = 0.0
    elif type(dropout) is nn.Dropout:
        p = dropout.p if dropout.training else 0.0
        if p >= 1.0:
            return "its dropout drops everything"
    else:
        return f"its dropout is {type(dropout).__name__}, not nn.Dropout"
    if type(base) is not nn.Linear and type(base) is not Conv1D:
        return base_reason(base)
    weight, bias = _parameter(base, "weight"), _parameter(base, "bias")
    A, B = _parameter(lora_A, "weight"), _parameter(lora_B, "weight")
    bias_B = _parameter(lora_B, "bias")
    if type(weight) not in _DENSE or type(A) not in _DENSE or type(B) not in _DENSE:
        return f"its weights are not plain tensors ({type(weight).__name__}, {type(A).__name__})"
    if weight.requires_grad:
        return "its base weight is being trained as well"
    if weight.is_meta:
        return "its base weight is on the meta device"
    if type(base) is Conv1D:
        weight = weight.t()
    scaling = layer.scaling[active]
    if isinstance(scaling, Tensor):
        return TENSOR_SCALING
    if bias_B is not None:
        bias = bias_B * scaling if bias is None else bias + bias_B * scaling
    return LinearTerms(weight, A, B, scaling, bias, p)


def _parameter(module: nn.Module, name: str) -> Any:
    parameters = module._parameters
    # FSDP1 takes parameters out of the dictionary and puts plain tensors in their place.
    return parameters[name] if name in parameters else getattr(module, name)


def linear_can_be_fused(base: nn.Module) -> str:
    """Why a base layer keeps its LoRA layer unfused whatever its adapters; empty if it does not."""
    if type(base) is not nn.Linear and type(base) is not Conv1D:
        return base_reason(base)
    return ""


def embedding_can_be_fused(base: nn.Module) -> str:
    """The same for embeddings: nn.Embedding, or one that only multiplies with its embed_scale."""
    if type(base) is nn.Embedding:
        return ""
    kind: Any = type(base)
    if isinstance(base, nn.Embedding) and embedding_is_scaled(kind):
        return ""
    return base_reason(base)


def base_reason(base: nn.Module) -> str:
    kind = f"{type(base).__module__}.{type(base).__qualname__}"
    return f"its base layer is a {kind}, not a plain nn.Linear, Conv1D or nn.Embedding"


def fall_back(state: LayerState, reason: str) -> None:
    """Log ``reason`` once for the layers of one ``fuse``."""
    if torch.compiler.is_compiling() or reason in state.told:
        return
    state.told.add(reason)
    level = logging.INFO if reason in _WISHED_FOR else logging.WARNING
    _log.log(level, "fastlora: a layer runs PEFT's own forward: %s", reason)


class FusedLoraLinear(MergesExactly, Linear):
    """``peft.tuners.lora.layer.Linear`` whose forward is one operation where it can be."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # An offloading hook may keep this bound method beyond `unfuse`: no zero-argument super().
        state = self.__dict__.get("_fastlora")
        if state is None:
            return Linear.forward(self, x, *args, **kwargs)
        if args or kwargs:
            fall_back(state, EXTRA_ARGUMENTS)
            return Linear.forward(self, x, *args, **kwargs)
        terms = linear_terms(self)
        if isinstance(terms, str) or type(x) not in _DENSE:
            fall_back(state, terms if isinstance(terms, str) else "x is not a plain tensor")
            return Linear.forward(self, x)
        weight, lora_A, lora_B, scaling, bias, p = terms
        if few_rows.few(x, weight, p, state.backend):
            # the layer has checked its operands: no second time, in a call this short
            return few_rows.lora_linear(x, weight, lora_A, lora_B, scaling, bias, p)
        scope = state.scope
        if scope is not None and not torch.compiler.is_compiling():
            y = scope.take(self, x, terms)
            if y is not None:
                return y
        return functional.lora_linear(
            x, weight, lora_A, lora_B, scaling, bias, dropout_p=p, backend=state.backend
        )


class EmbeddingTerms(NamedTuple):
    """Operands of one fused embedding."""

    weight: Tensor  # [V, D]
    lora_A: Tensor  # [r, V]
    lora_B: Tensor  # [D, r]
    scaling: float
    padding_idx: int | None
    embed_scale: Tensor | float | None


def embedding_terms(layer: Embedding) -> EmbeddingTerms | str:
    """Operands of a LoRA embedding as it stands, or the reason for leaving it to PEFT."""
    if layer._disable_adapters:
        return DISABLED
    if layer.merged_adapters:
        return MERGED
    As, Bs = layer.lora_embedding_A._parameters, layer.lora_embedding_B._parameters
    active, reason = active_adapter(layer, As)
    if reason:
        return reason
    if reason := variant_of(layer, active):
        return reason
    base = layer.base_layer
    if hooked(base):
        return "its base layer carries a hook"
    if globally_hooked():
        return GLOBAL_HOOK
    if isinstance(layer.scaling[active], Tensor):
        return TENSOR_SCALING
    scale = None
    if type(base) is not nn.Embedding:
        if reason := embedding_can_be_fused(base):
            return reason
        scale = base.embed_scale
        if isinstance(scale, Tensor) and scale.numel() != 1:
            return "its embed_scale is not a scalar"
    if base.max_norm is not None or base.sparse or base.scale_grad_by_freq:
        return "its base embedding uses max_norm, sparse or scale_grad_by_freq"
    if getattr(layer, "tp_layer", None) is not None:
        return "its embedding is split by tensor parallelism"
    weight, A, B = base.weight, As[active], Bs[active]
    if type(weight) not in _DENSE or type(A) not in _DENSE or type(B) not in _DENSE:
        return f"its weights are not plain tensors ({type(weight).__name__}, {type(A).__name__})"
    if weight.requires_grad:
        return "its base weight is being trained as well"
    if weight.is_meta:
        return "its base weight is on the meta device"
    return EmbeddingTerms(weight, A, B, layer.scaling[active], base.padding_idx, scale)


class FusedLoraEmbedding(MergesExactly, Embedding):
    """``peft.tuners.lora.layer.Embedding`` whose forward is one operation where it can be."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        state = self.__dict__.get("_fastlora")
        if state is None:
            return Embedding.forward(self, x, *args, **kwargs)
        terms: EmbeddingTerms | str = EXTRA_ARGUMENTS
        if not args and not kwargs:
            terms = embedding_terms(self) if type(x) in _DENSE else "x is not a plain tensor"
        if isinstance(terms, str):
            fall_back(state, terms)
            return Embedding.forward(self, x, *args, **kwargs)
        weight, lora_A, lora_B, scaling, padding_idx, embed_scale = terms
        return functional.lora_embedding(
            x,
            weight,
            lora_A,
            lora_B,
            scaling,
            padding_idx=padding_idx,
            embed_scale=embed_scale,
            backend=state.backend,
        )
