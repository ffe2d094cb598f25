"""An embedding table with a LoRA update: Y = (W[ids] + s (Aᵀ)[ids] Bᵀ) · embed_scale."""

import torch
from torch import Tensor, nn

from ..backend import check_name
from ..functional import lora_embedding
from ._common import check_adapter_dtype, check_plain, check_rank, scaling


class LoRAEmbedding(nn.Module):
    """A frozen embedding and a trainable low-rank update of its table.

    Made by :meth:`from_embedding`. At first ``lora_A`` is zero and ``lora_B`` normal, as in PEFT, so
    that the output is the base layer's.

    Attributes:
        weight: [V, D], the base layer's own Parameter, frozen.
        lora_A: [r, V]. lora_B: [D, r].
        scaling: lora_alpha / r, or lora_alpha / sqrt(r).
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        r: int,
        lora_alpha: float,
        use_rslora: bool = False,
        adapter_dtype: torch.dtype = torch.float32,
        padding_idx: int | None = None,
        embed_scale: float | None = None,
        backend: str = "auto",
    ) -> None:
        check_rank(r)
        check_adapter_dtype(adapter_dtype)
        check_name(backend)
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self.r = r
        self.lora_alpha = lora_alpha
        self.scaling = scaling(r, lora_alpha, use_rslora)
        self.padding_idx = padding_idx
        self.embed_scale = embed_scale
        self.backend = backend
        self.weight = weight
        self.lora_A = nn.Parameter(
            torch.empty(r, self.num_embeddings, dtype=adapter_dtype, device=weight.device)
        )
        self.lora_B = nn.Parameter(
            torch.empty(self.embedding_dim, r, dtype=adapter_dtype, device=weight.device)
        )
        self.reset_parameters()
        weight.requires_grad_(False)

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        *,
        r: int,
        lora_alpha: float,
        use_rslora: bool = False,
        adapter_dtype: torch.dtype = torch.float32,
        embed_scale: float | None = None,
        backend: str = "auto",
    ) -> "LoRAEmbedding":
        """Wrap ``embedding``: its Parameter is shared, not copied, and is frozen.

        Args:
            embedding: the base layer; weight [V, D]. Its ``padding_idx`` is kept.
            r: rank, at least 1.
            lora_alpha: the update is scaled by lora_alpha / r.
            use_rslora: scale by lora_alpha / sqrt(r) instead.
            adapter_dtype: dtype of ``lora_A`` and ``lora_B``.
            embed_scale: a factor on the whole output (Gemma's sqrt(D)).
            backend: "auto", "triton", "cpu" or "torch".

        Raises:
            TypeError, ValueError: before anything is changed.
        """
        check_plain("embedding", embedding, nn.Embedding)
        for option, default in (
            ("max_norm", None),
            ("scale_grad_by_freq", False),
            ("sparse", False),
        ):
            value = getattr(embedding, option)
            if value != default:
                raise ValueError(f"embedding: got {option}={value}, takes {option}={default}")
        return cls(
            embedding.weight,
            r=r,
            lora_alpha=lora_alpha,
            use_rslora=use_rslora,
            adapter_dtype=adapter_dtype,
            padding_idx=embedding.padding_idx,
            embed_scale=embed_scale,
            backend=backend,
        )

    def reset_parameters(self) -> None:
        """``lora_A`` zero, ``lora_B`` standard normal, as in PEFT: no update at first."""
        nn.init.zeros_(self.lora_A)
        nn.init.normal_(self.lora_B)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Integer [...] to [..., D]."""
        return lora_embedding(
            input_ids,
            self.weight,
            self.lora_A,
            self.lora_B,
            self.scaling,
            padding_idx=self.padding_idx,
            embed_scale=self.embed_scale,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, r={self.r}, scaling={self.scaling:g}, "
            f"padding_idx={self.padding_idx}, embed_scale={self.embed_scale}, "
            f"adapter_dtype={self.lora_A.dtype}, backend={self.backend!r}"
        )
