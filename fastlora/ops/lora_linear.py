"""One linear layer with a low-rank update: the one-projection case of ``lora_projections``.

    Y = X Wᵀ + bias + s · dropout(X) Aᵀ Bᵀ

LoRA: Hu et al., arXiv 2106.09685, section 4.1.
"""

from torch import Tensor

from .lora_projections import lora_projections


def lora_linear(
    backend: str,
    x: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float,
    bias: Tensor | None,
    dropout_p: float,
    seeds: Tensor | None,
) -> Tensor:
    """Apply the operation; arguments are checked by :mod:`fastlora.functional`."""
    (y,) = lora_projections(
        backend, x, (weight,), (lora_A,), (lora_B,), (scaling,), (bias,), dropout_p, seeds
    )
    return y
