"""Drop-in modules over :mod:`fastlora.functional`, for models without PEFT."""

from .embedding import LoRAEmbedding
from .linear import LoRALinear

__all__ = ["LoRAEmbedding", "LoRALinear"]
