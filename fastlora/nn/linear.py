"""A linear layer with a LoRA update: Y = X Wᵀ + bias + s · dropout(X) Aᵀ Bᵀ."""

import math

import torch
from torch import Tensor, nn

from ..backend import check_name
from ..functional import lora_linear
from ..ops.checks import check_probability
from ._common import check_adapter_dtype, check_plain, check_rank, scaling


class LoRALinear(nn.Module):
    """A frozen linear layer and a trainable low-rank update, computed together.

    Made by :meth:`from_linear`. At first ``lora_B`` is zero, so that the output is the base layer's.

    Attributes:
        weight: [N, K], the base layer's own Parameter, frozen.
        bias: [N] or None, the base layer's own, frozen.
        lora_A: [r, K], Kaiming-uniform at first.
        lora_B: [N, r], zero at first.
        scaling: lora_alpha / r, or lora_alpha / sqrt(r).

    Source: Hu et al., "LoRA", arXiv 2106.09685, section 4.1.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        r: int,
        lora_alpha: float,
        lora_dropout: float = 0.0,
        use_rslora: bool = False,
        adapter_dtype: torch.dtype = torch.float32,
        backend: str = "auto",
    ) -> None:
        check_rank(r)
        check_probability("lora_dropout", lora_dropout)
        check_adapter_dtype(adapter_dtype)
        check_name(backend)
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.r = r
        self.lora_alpha = lora_alpha
        self.lora_dropout = float(lora_dropout)
        self.scaling = scaling(r, lora_alpha, use_rslora)
        self.backend = backend
        self.weight = weight
        self.bias = bias
        self.lora_A = nn.Parameter(
            torch.empty(r, self.in_features, dtype=adapter_dtype, device=weight.device)
        )
        self.lora_B = nn.Parameter(
            torch.empty(self.out_features, r, dtype=adapter_dtype, device=weight.device)
        )
        self.reset_parameters()
        weight.requires_grad_(False)
        if bias is not None:
            bias.requires_grad_(False)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        r: int,
        lora_alpha: float,
        lora_dropout: float = 0.0,
        use_rslora: bool = False,
        adapter_dtype: torch.dtype = torch.float32,
        backend: str = "auto",
    ) -> "LoRALinear":
        """Wrap ``linear``: its Parameters are shared, not copied, and are frozen.

        Args:
            linear: the base layer; weight [N, K], bias [N] or None.
            r: rank, at least 1.
            lora_alpha: the update is scaled by lora_alpha / r.
            lora_dropout: dropout probability of the update's input, in [0, 1).
            use_rslora: scale by lora_alpha / sqrt(r) instead.
            adapter_dtype: dtype of ``lora_A`` and ``lora_B``; fp32 masters by default.
            backend: "auto", "triton", "cpu" or "torch".

        Raises:
            TypeError, ValueError: before anything is changed.
        """
        check_plain("linear", linear, nn.Linear)
        return cls(
            linear.weight,
            linear.bias,
            r=r,
            lora_alpha=lora_alpha,
            lora_dropout=lora_dropout,
            use_rslora=use_rslora,
            adapter_dtype=adapter_dtype,
            backend=backend,
        )

    def reset_parameters(self) -> None:
        """``lora_A`` Kaiming-uniform as ``nn.Linear``'s weight, ``lora_B`` zero: no update at first."""
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        return lora_linear(
            x,
            self.weight,
            self.lora_A,
            self.lora_B,
            self.scaling,
            self.bias,
            dropout_p=self.lora_dropout,
            training=self.training,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, r={self.r}, scaling={self.scaling:g}, "
            f"lora_dropout={self.lora_dropout:g}, adapter_dtype={self.lora_A.dtype}, "
            f"backend={self.backend!r}"
        )
