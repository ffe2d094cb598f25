"""What the LoRA modules share: their arguments' checks and the scaling."""

import math
import numbers

import torch


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


def scaling(r: int, lora_alpha: float, use_rslora: bool) -> float:
    """alpha / r, or alpha / sqrt(r) (rsLoRA, Kalajdzievski, arXiv 2312.03732)."""
    if not isinstance(lora_alpha, numbers.Real):
        raise TypeError(f"lora_alpha: got {type(lora_alpha).__name__}, takes a number")
    return float(lora_alpha) / (math.sqrt(r) if use_rslora else r)
