"""Fused LoRA as a drop-in for PEFT: ``fuse``, ``unfuse`` and ``explain``.

``fuse`` swaps the classes of instances, in place and reversibly; see :mod:`fastlora.peft.layers`
for single layers and :mod:`fastlora.peft.groups` for layers computed together.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from peft.tuners.lora.layer import Embedding, Linear, LoraLayer
from torch import nn
from torch.distributed.fsdp import FSDPModule

from .. import backend as _backend
from . import groups as _groups
from .layers import (
    FusedLoraEmbedding,
    FusedLoraLinear,
    LayerState,
    embedding_can_be_fused,
    linear_can_be_fused,
)
from .report import Explanation, Row, row_of
from .source import reads_weight_only

__all__ = ["Explanation", "Row", "explain", "fuse", "unfuse"]

GROUPS = ("projections", "mlp")
_FUSED: dict[type, type] = {Linear: FusedLoraLinear, Embedding: FusedLoraEmbedding}
_PLAIN = {fused: plain for plain, fused in _FUSED.items()}

_log = logging.getLogger("fastlora")
Model = TypeVar("Model", bound=nn.Module)


def fuse(model: Model, *, backend: str = "auto", groups: Iterable[str] = GROUPS) -> Model:
    """Let the LoRA layers of a PEFT model run as fused operations, in place.

    Parameters, ``state_dict`` keys, hooks and everything PEFT does to a model stay as they are. A
    layer that cannot be fused, or cannot be just now (disabled, merged, DoRA, several adapters at
    once, a hook inside it), runs PEFT's own forward; ``explain`` says which and why. Calling it
    again takes in layers that PEFT has added since, and the arguments of the last call hold.

    Args:
        model: anything with LoRA layers in it, ``PeftModel`` or not, compiled or not.
        backend: "auto", or "triton", "cpu", "torch" to insist on one.
        groups: what to compute together: "projections" (q/k/v and others of one x), "mlp".

    Returns:
        the model itself.

    Raises:
        TypeError: ``model`` is not a module, or ``groups`` not a collection of strings.
        ValueError: no LoRA layer in the model, an unknown backend or group, a backend named outright
            that cannot serve, an adapter that its model would never call. Nothing is changed then.
    """
    _check_model(model)
    _backend.check_name(backend)
    chosen = _check_groups(groups)
    layers = _lora_layers(model)
    if not layers:
        raise ValueError(
            "model: got one without a LoRA layer, takes a PEFT model "
            "(peft.get_peft_model or peft.inject_adapter_in_model comes first)"
        )
    _refuse_unreachable(model, layers)
    reasons = {name: cannot_be_fused(layer) for name, layer in layers.items()}
    for name, layer in layers.items():
        if not reasons[name]:
            weight = layer.get_base_layer().weight
            if not weight.is_meta:
                _backend.choose(backend, weight.device, weight.dtype)

    told: set[str] = set()
    for name, layer in layers.items():
        state = layer.__dict__.get("_fastlora")
        if state is not None:
            state.backend = backend
        elif not reasons[name]:
            layer.__class__ = _FUSED[type(layer)]
            layer.__dict__["_fastlora"] = LayerState(backend, told)
    for parent in _parents(model):
        _groups.regroup(parent, backend, chosen)
    _say_what_is_left(reasons)
    return model


def unfuse(model: Model) -> Model:
    """Undo :func:`fuse`: the very model that PEFT made, with the state its adapters have by now.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: a fused layer was wrapped by ``fully_shard`` afterwards. Nothing is changed then.
    """
    _check_model(model)
    modules = list(model.modules())
    for module in modules:
        swapped = type(module) in _PLAIN or "_fastlora_original" in type(module).__dict__
        if "_fastlora" in module.__dict__ and not swapped:
            raise ValueError(
                f"model: got a {type(module).__name__} that fully_shard made of a fused layer, "
                "takes a model whose layers were not sharded one by one after fuse"
            )
    for module in modules:
        if isinstance(module.__dict__.get("_fastlora"), _groups.ParentState):
            _groups.release(module)
    for module in modules:
        state = module.__dict__.get("_fastlora")
        if isinstance(state, LayerState):
            if state.merged is not None:
                layer: Any = module
                state.merged.keep(layer.get_base_layer(), lambda p: _is_shared(p, modules))
            del module.__dict__["_fastlora"]
            module.__class__ = _PLAIN[type(module)]
    return model


def explain(model: nn.Module) -> Explanation:
    """What each LoRA layer of the model would run if it were called now, and why.

    Returns:
        an :class:`Explanation`: ``rows``, one a layer, and a table when printed.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: no LoRA layer in the model.
    """
    _check_model(model)
    layers = _lora_layers(model)
    if not layers:
        raise ValueError("model: got one without a LoRA layer, takes a PEFT model")
    gathered = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    rows = []
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        prefixes = {name[:i] for i, letter in enumerate(name) if letter == "."} | {"", name}
        rows.append(
            row_of(
                name,
                layer,
                model.get_submodule(parent) if name else None,
                child,
                cannot_be_fused(layer),
                sharded=bool(gathered & prefixes),
            )
        )
    return Explanation(tuple(rows))


def cannot_be_fused(layer: LoraLayer) -> str:
    """Why ``fuse`` leaves a layer alone for good; empty where it does not."""
    if isinstance(layer, FusedLoraLinear | FusedLoraEmbedding):
        return ""
    if isinstance(layer, FSDPModule):
        return "it was sharded on its own by fully_shard; fuse before sharding"
    if type(layer) not in _FUSED:
        return f"PEFT's {type(layer).__module__}.{type(layer).__name__} has no fused form"
    if "forward" in layer.__dict__:
        return "its forward was replaced on the instance (by an offloading hook, for one)"
    base = layer.get_base_layer()
    if layer.base_layer is not base:
        return "its base layer is an adapter layer itself"
    can = linear_can_be_fused if type(layer) is Linear else embedding_can_be_fused
    return can(base)


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, takes a torch.nn.Module")


def _check_groups(groups: Iterable[str]) -> frozenset[str]:
    takes = f"takes a collection of {', '.join(map(repr, GROUPS))}"
    if isinstance(groups, str) or not isinstance(groups, Iterable):
        raise TypeError(f"groups: got {groups!r}, {takes}")
    chosen = list(groups)
    for group in chosen:
        if group not in GROUPS:
            raise ValueError(f"groups: got {group!r} among them, {takes}")
    return frozenset(chosen)


def _lora_layers(model: nn.Module) -> dict[str, LoraLayer]:
    return {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}


def _parents(model: nn.Module) -> Iterator[nn.Module]:
    """Modules with a fused layer among their children, and those grouped before."""
    for module in model.modules():
        children = module._modules.values()
        if "_fastlora" not in module.__dict__:
            if any(isinstance(child, FusedLoraLinear) for child in children):
                yield module
        elif isinstance(module.__dict__["_fastlora"], _groups.ParentState):
            yield module


def _refuse_unreachable(model: nn.Module, layers: dict[str, LoraLayer]) -> None:
    """Refuse adapters on layers whose parent multiplies with ``layer.weight`` and never calls them.

    PEFT's ``weight`` is the base weight, so such an adapter takes no part in the model.
    """
    for name in layers:
        parent_name, _, child = name.rpartition(".")
        parent = model.get_submodule(parent_name) if name else None
        if parent is not None and child in reads_weight_only(_groups.original_class(type(parent))):
            raise ValueError(
                f"model: got an adapter on {name!r}, which {type(parent).__name__}.forward knows "
                f"by its weight alone (self.{child}.weight) and never calls, so that the adapter "
                "would never be trained; takes target_modules that are called"
            )


def _is_shared(parameter: nn.Parameter, modules: list[nn.Module]) -> bool:
    return any(p is parameter for module in modules for p in module._parameters.values())


def _say_what_is_left(reasons: dict[str, str]) -> None:
    counts = Counter(reason for reason in reasons.values() if reason)
    if counts:
        _log.warning(
            "fastlora: %d of %d LoRA layers keep PEFT's own forward: %s",
            counts.total(),
            len(reasons),
            "; ".join(f"{count} × {reason}" for reason, count in counts.items()),
        )
