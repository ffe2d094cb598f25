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


def check_dropout(lora_dropout: float) -> None:
    """Raise unless ``lora_dropout`` is a number in [0, 1)."""
    if not isinstance(lora_dropout, numbers.Real):
        raise TypeError(
            f"lora_dropout: got {type(lora_dropout).__name__}, takes a number in [0, 1)"
        )
    if not 0.0 <= lora_dropout < 1.0:
        raise ValueError(f"lora_dropout: got {lora_dropout}, takes a number in [0, 1)")


def check_adapter_dtype(dtype: torch.dtype) -> None:
    """Raise unless ``dtype`` is a floating dtype that the operations take."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ValueError(f"adapter_dtype: got {dtype}, takes float32, bfloat16, float16 or float64")


def check_plain(name: str, layer: nn.Module, kind: type[nn.Module]) -> None:
    """Raise ``TypeError`` where ``layer`` does more than ``kind``, which the wrapper would drop."""
    if not isinstance(layer, kind):
        raise TypeError(f"{name}: got {type(layer).__name__}, takes torch.nn.{kind.__name__}")
    reason = ""
    if type(layer).forward is not kind.forward or "forward" in layer.__dict__:
        reason = "a forward of its own"
    elif parametrize.is_parametrized(layer):
        reason = "a parametrization"
    elif not isinstance(layer._parameters.get("weight"), nn.Parameter):
        reason = "a weight that is not a Parameter (pruned?)"
    elif isinstance(layer.weight, nn.parameter.UninitializedParameter):
        reason = "no shape yet: call it once"
    elif (
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
    ):
        reason = "a hook"
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
