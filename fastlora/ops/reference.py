"""The ``torch`` backend: every operation in plain PyTorch, on any device, up to fp64.

This is what the other backends are tested against and what serves where they cannot.

    S_i  = X̂_i A_iᵀ                       Y_i  = X W_iᵀ + bias_i + s_i S_i B_iᵀ
    dS_i = s_i dY_i B_i                    dB_i = s_i dY_iᵀ S_i
    dA_i = dS_iᵀ X̂_i                      dX   = Σ_i dY_i W_i + mask_i ⊙ (dS_i A_i) / (1 - p)
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .dropout import dropout, keep_mask


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that the low-rank branch is computed in: at least fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def ranks(lora_As: Sequence[Tensor]) -> list[int]:
    """Rank of each projection: the column counts of the stacked S."""
    return [lora_A.shape[0] for lora_A in lora_As]


def projections_forward(
    x: Tensor,  # [M, K]
    weights: Sequence[Tensor],  # [N_i, K] in x's dtype
    lora_As: Sequence[Tensor],  # [r_i, K]
    lora_Bs: Sequence[Tensor],  # [N_i, r_i]
    scalings: Sequence[float],
    biases: Sequence[Tensor | None],  # [N_i]
    dropout_p: float,
    seeds: Tensor | None,  # int64 [P]
) -> tuple[list[Tensor], Tensor]:
    """Outputs [M, N_i] in x's dtype, and the stacked S [M, Σ r_i] in fp32 (fp64 for fp64)."""
    wide = _wide(x.dtype)
    x_wide = x.to(wide)
    s_parts, ys = [], []
    for i, (weight, lora_A, lora_B) in enumerate(zip(weights, lora_As, lora_Bs, strict=True)):
        x_hat = x_wide if seeds is None else dropout(x_wide, seeds[i], dropout_p)
        s = x_hat @ lora_A.to(wide).T
        y = F.linear(x, weight, biases[i]).to(wide) + scalings[i] * (s @ lora_B.to(wide).T)
        s_parts.append(s)
        ys.append(y.to(x.dtype))
    return ys, torch.cat(s_parts, dim=1)


def projections_backward(
    dys: Sequence[Tensor | None],  # [M, N_i]
    x: Tensor | None,  # [M, K]; None when no dA is wanted
    s: Tensor | None,  # [M, Σ r_i]; None when no dB is wanted
    weights: Sequence[Tensor],
    lora_As: Sequence[Tensor],
    lora_Bs: Sequence[Tensor],
    scalings: Sequence[float],
    dropout_p: float,
    seeds: Tensor | None,
    *,
    need_dx: bool,
    need_dA: Sequence[bool],
    need_dB: Sequence[bool],
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """dX, then each projection's dA and dB in the parameter's dtype; None for what is not wanted."""
    dx: Tensor | None = None
    dAs: list[Tensor | None] = [None] * len(weights)
    dBs: list[Tensor | None] = [None] * len(weights)
    s_parts = [None] * len(weights) if s is None else s.split(ranks(lora_As), dim=1)
    for i, dy in enumerate(dys):
        if dy is None:
            continue
        wide = _wide(dy.dtype)
        lora_A, lora_B, dy_wide = lora_As[i], lora_Bs[i], dy.to(wide)
        ds = scalings[i] * (dy_wide @ lora_B.to(wide))
        s_i = s_parts[i]
        if need_dB[i] and s_i is not None:
            dBs[i] = (scalings[i] * (dy_wide.T @ s_i)).to(lora_B.dtype)
        if need_dA[i] and x is not None:
            x_wide = x.to(wide)
            x_hat = x_wide if seeds is None else dropout(x_wide, seeds[i], dropout_p)
            dAs[i] = (ds.T @ x_hat).to(lora_A.dtype)
        if need_dx:
            low_rank = ds @ lora_A.to(wide)
            if seeds is not None:
                rows, columns = low_rank.shape
                mask = keep_mask(seeds[i], rows, columns, dropout_p)
                low_rank = torch.where(mask, low_rank / (1.0 - dropout_p), 0.0)
            term = (dy @ weights[i]).to(wide) + low_rank
            dx = term if dx is None else dx + term
    if dx is not None:
        dx = dx.to(weights[0].dtype)
    return dx, dAs, dBs


_GELU = {"gelu": "none", "gelu_tanh": "tanh"}


def _activate(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(gate)
    return F.gelu(gate, approximate=_GELU[activation])


def glu_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up."""
    wide = _wide(gate.dtype)
    return (_activate(gate.to(wide), activation) * up.to(wide)).to(gate.dtype)


def glu_backward(
    dh: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """d gate = dh * up * act'(gate), d up = dh * act(gate), and h = act(gate) * up once more."""
    wide = _wide(gate.dtype)
    g, u, grad = gate.to(wide), up.to(wide), dh.to(wide)
    act = _activate(g, activation)
    if activation == "silu":
        dgate = torch.ops.aten.silu_backward(grad * u, g)
    else:
        dgate = torch.ops.aten.gelu_backward(grad * u, g, approximate=_GELU[activation])
    return dgate.to(gate.dtype), (grad * act).to(gate.dtype), (act * u).to(gate.dtype)


def embedding_forward(
    input_ids: Tensor,  # [M]
    weight: Tensor,  # [V, D]
    lora_A: Tensor,  # [r, V]
    lora_B: Tensor,  # [D, r]
    scale: float,
    padding_idx: int | None = None,
) -> Tensor:
    """W[ids] + scale * (Aᵀ)[ids] Bᵀ, [M, D] in W's dtype; by autograd, none for A's padding row."""
    wide = _wide(weight.dtype)
    s = F.embedding(input_ids, lora_A.T, padding_idx).to(wide)
    y = F.embedding(input_ids, weight).to(wide) + scale * (s @ lora_B.to(wide).T)
    return y.to(weight.dtype)


def embedding_backward(
    dy: Tensor,  # [M, D]
    input_ids: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scale: float,
    padding_idx: int | None,
) -> tuple[Tensor, Tensor]:
    """dA (zero in the padding row) and dB, in the parameters' dtypes."""
    ds, dB = embedding_gradients(dy, input_ids, lora_A, lora_B, scale, padding_idx)
    # Sort-based on CUDA, so that equal ids add up in a fixed order.
    dA = torch.ops.aten.embedding_dense_backward(ds, input_ids, lora_A.shape[1], -1, False).T
    return dA.to(lora_A.dtype).contiguous(), dB


def embedding_gradients(
    dy: Tensor,
    input_ids: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scale: float,
    padding_idx: int | None,
) -> tuple[Tensor, Tensor]:
    """dS [M, r], which dA sums by id (zero for the padding row), and dB in B's dtype."""
    wide = _wide(dy.dtype)
    dy_wide = dy.to(wide)
    ds = scale * (dy_wide @ lora_B.to(wide))
    if padding_idx is not None:
        # F.embedding gives the padding row no gradient; B's own gradient does see that row's S.
        ds = ds.masked_fill((input_ids == padding_idx)[:, None], 0.0)
    dB = scale * (dy_wide.T @ lora_A.T[input_ids].to(wide))
    return ds, dB.to(lora_B.dtype)
