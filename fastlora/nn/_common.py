"""What the LoRA modules share: their arguments' checks and the scaling."""

import math
import numbers

import torch
from torch import nn
from torch.nn.utils import parametrize


def check_rank(r: int) -> None:
    """Raise unless ``r`` is an integer of at least 1."""
    if not isinstance(r, int) or isinstance(r, bool):
        raise TypeError(f"r: got {type(r).__name__}, takes an integer >= 1")
    if r < 1:
        raise ValueError(f"r: got {r}, takes an integer >= 1")


def check_adapter_dtype(dtype: torch.dtype) -> None:
    """Raise unless ``dtype`` is a floating dtype that the operations take."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ValueError(f"adapter_dtype: got {dtype}, takes float32, bfloat16, float16 or float64")


def hooked(module: nn.Module) -> bool:
    """Whether calling ``module`` does more than its class's forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def check_plain(name: str, layer: nn.Module, kind: type[nn.Module]) -> None:
    """Raise ``TypeError`` where ``layer`` does more than ``kind``, which the wrapper would drop."""
    if not isinstance(layer, kind):
        raise TypeError(f"{name}: got {type(layer).__name__}, takes torch.nn.{kind.__name__}")
    reason = ""
    if type(layer).forward is not kind.forward:
        reason = "a forward of its own"
    elif parametrize.is_parametrized(layer):
        reason = "a parametrization"
    elif not isinstance(layer._parameters.get("weight"), nn.Parameter):
        reason = "a weight that is not a Parameter (pruned?)"
    elif isinstance(layer.weight, nn.parameter.UninitializedParameter):
        reason = "no shape yet: call it once"
    elif hooked(layer):
        reason = "a hook, or a forward of its own"
    if reason:
        raise TypeError(
            f"{name}: got a {type(layer).__name__} with {reason}, "
            f"takes a plain torch.nn.{kind.__name__}"
        )


def scaling(r: int, lora_alpha: float, use_rslora: bool) -> float:
    """alpha / r, or alpha / sqrt(r) (rsLoRA, Kalajdzievski, arXiv 2312.03732)."""
    if not isinstance(lora_alpha, numbers.Real):
        raise TypeError(f"lora_alpha: got {type(lora_alpha).__name__}, takes a number")
    if lora_alpha != lora_alpha:
        raise ValueError("lora_alpha: got nan, takes a number")
    if not isinstance(use_rslora, bool):
        raise TypeError(f"use_rslora: got {type(use_rslora).__name__}, takes a bool")
    return float(lora_alpha) / (math.sqrt(r) if use_rslora else r)
