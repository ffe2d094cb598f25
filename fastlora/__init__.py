"""fastlora: fused LoRA layers for PEFT and PyTorch models.

    model = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear"))
    fastlora.fuse(model)               # same parameters, same checkpoints, same numbers
    print(fastlora.explain(model))     # what is fused, by which backend, and why not the rest

Importing this package starts no CUDA context, compiles nothing and imports neither transformers
nor peft; those are imported by the calls that need them.
"""

from typing import TYPE_CHECKING, Any

from . import functional, nn

if TYPE_CHECKING:
    from .peft import explain, fuse, unfuse

__version__ = "0.1.0"
__all__ = ["__version__", "explain", "functional", "fuse", "nn", "unfuse"]

_FROM_PEFT = ("explain", "fuse", "unfuse")


def __getattr__(name: str) -> Any:
    if name in _FROM_PEFT:
        from . import peft

        return getattr(peft, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
