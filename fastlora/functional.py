"""The operations as functions, arguments in PyTorch's order and names.

Shapes: M rows (any leading dimensions), K in_features, N out_features, r rank. Every function
checks its arguments before it computes anything, and takes ``backend="auto"``: the fastest backend
that serves the device and dtype (see :mod:`fastlora.backend`), or one by name.

Dtypes: float32, bfloat16, float16 and float64. The computation runs in x's dtype (autocast's, where
autocast is on) and accumulates in fp32; the output has that dtype; gradients come back in the
dtype of their parameter. Base weights are frozen: one that requires grad is refused.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .backend import choose
from .ops import _common, dropout, few_rows
from .ops import lora_embedding as _embedding
from .ops import lora_linear as _linear
from .ops import lora_mlp as _mlp
from .ops import lora_projections as _projections
from .ops.checks import (
    check_devices,
    check_dropout,
    check_embed_scale,
    check_ids,
    check_ids_dtype,
    check_matrix,
    check_padding_idx,
    check_projection,
    check_rank,
    check_scaling,
    check_sequence,
    check_weight,
    check_x,
)

__all__ = ["lora_embedding", "lora_linear", "lora_mlp", "lora_projections"]

Projection = tuple[Tensor, Tensor, Tensor, float, Tensor | None]

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def lora_linear(
    x: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float,
    bias: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    training: bool = True,
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> Tensor:
    """``x Wᵀ + bias + scaling · dropout(x) Aᵀ Bᵀ`` with W frozen.

    Args:
        x: [..., K], floating point.
        weight: [N, K], frozen; may be a transposed view.
        lora_A: [r, K].
        lora_B: [N, r].
        scaling: alpha / r, or alpha / sqrt(r) for rsLoRA.
        bias: [N].
        dropout_p: probability of dropping an element of the LoRA branch's input, in [0, 1).
        training: dropout acts only when true.
        generator: source of the dropout seed; torch's default one for the device when None.
        backend: "auto", "triton", "cpu" or "torch".

    Returns:
        [..., N] in x's dtype (autocast's under autocast).

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.

    Source: Hu et al., "LoRA", arXiv 2106.09685, section 4.1; rsLoRA: Kalajdzievski, arXiv 2312.03732.
    """
    check_x(x)
    check_projection(x, weight, lora_A, lora_B, scaling, bias, "")
    dropout_p = check_dropout(dropout_p, training, generator)
    if few_rows.few(x, weight, dropout_p, backend):
        return few_rows.lora_linear(
            x, weight, lora_A, lora_B, float(scaling), bias, dropout_p, generator
        )
    dtype = _compute_dtype(x)
    served_by = choose(backend, x.device, dtype)
    seeds = dropout.draw_seeds(1, x.device, generator) if dropout_p > 0.0 else None
    with _common.without_autocast(x.device.type):
        return _linear.lora_linear(
            served_by, x.to(dtype), weight, lora_A, lora_B, float(scaling), bias, dropout_p, seeds
        )


def lora_projections(
    x: Tensor,
    weights: Sequence[Tensor],
    lora_As: Sequence[Tensor],
    lora_Bs: Sequence[Tensor],
    scalings: Sequence[float],
    biases: Sequence[Tensor | None] | None = None,
    *,
    dropout_p: float = 0.0,
    training: bool = True,
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """Several LoRA projections of one x, which is read once; see :func:`lora_linear`.

    Args:
        x: [..., K].
        weights: [N_i, K] each; out_features may differ.
        lora_As: [r_i, K] each; ranks may differ.
        lora_Bs: [N_i, r_i] each.
        scalings: one number each.
        biases: [N_i] or None each; None for no bias at all.
        dropout_p: as in :func:`lora_linear`; each projection draws its own mask.
        training, generator, backend: as in :func:`lora_linear`.

    Returns:
        a tuple of [..., N_i], in the order given.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.
    """
    check_x(x)
    check_sequence("weights", weights)
    count = len(weights)
    if count == 0:
        raise ValueError("weights: got none, takes at least one")
    if biases is None:
        biases = (None,) * count
    for name, values in (
        ("lora_As", lora_As),
        ("lora_Bs", lora_Bs),
        ("scalings", scalings),
        ("biases", biases),
    ):
        check_sequence(name, values)
        if len(values) != count:
            raise ValueError(f"{name}: got {len(values)}, takes {count}, one for each weight")
    for i in range(count):
        check_projection(
            x, weights[i], lora_As[i], lora_Bs[i], scalings[i], biases[i], f" (projection {i})"
        )
    dropout_p = check_dropout(dropout_p, training, generator)
    dtype = _compute_dtype(x)
    served_by = choose(backend, x.device, dtype)
    seeds = dropout.draw_seeds(count, x.device, generator) if dropout_p > 0.0 else None
    with _common.without_autocast(x.device.type):
        return _projections.lora_projections(
            served_by,
            x.to(dtype),
            weights,
            lora_As,
            lora_Bs,
            [float(scaling) for scaling in scalings],
            biases,
            dropout_p,
            seeds,
        )


def lora_mlp(
    x: Tensor,
    gate: Projection,
    up: Projection,
    down: Projection,
    *,
    activation: str = "silu",
    dropout_p: float = 0.0,
    training: bool = True,
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> Tensor:
    """``down(act(gate(x)) * up(x))`` where each of the three is a :func:`lora_linear`.

    Args:
        x: [..., K].
        gate, up: (weight [I, K], lora_A [r, K], lora_B [I, r], scaling, bias [I] or None).
        down: (weight [N, I], lora_A [r, I], lora_B [N, r], scaling, bias [N] or None).
        activation: "silu", "gelu" (erf) or "gelu_tanh".
        dropout_p: as in :func:`lora_linear`; each of the three draws its own mask.
        training, generator, backend: as in :func:`lora_linear`.

    Returns:
        [..., N] in x's dtype (autocast's under autocast).

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202, section 2.
    """
    check_x(x)
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"activation: got {activation!r}, takes {', '.join(map(repr, _ACTIVATIONS))}"
        )
    for name, projection in (("gate", gate), ("up", up), ("down", down)):
        check_sequence(name, projection)
        if len(projection) != 5:
            raise ValueError(
                f"{name}: got {len(projection)} items, "
                "takes (weight, lora_A, lora_B, scaling, bias or None)"
            )
    check_projection(x, *gate, " (gate)")
    check_projection(x, *up, " (up)")
    hidden = gate[0].shape[0]
    if up[0].shape[0] != hidden:
        raise ValueError(
            f"weight (up): got out_features {up[0].shape[0]}, takes gate's, which is {hidden}"
        )
    check_projection(x, *down, " (down)", in_features=hidden)
    dropout_p = check_dropout(dropout_p, training, generator)
    dtype = _compute_dtype(x)
    served_by = choose(backend, x.device, dtype)
    seeds = dropout.draw_seeds(3, x.device, generator) if dropout_p > 0.0 else None
    parts = (gate, up, down)
    with _common.without_autocast(x.device.type):
        return _mlp.lora_mlp(
            served_by,
            x.to(dtype),
            [part[0] for part in parts],
            [part[1] for part in parts],
            [part[2] for part in parts],
            [float(part[3]) for part in parts],
            [part[4] for part in parts],
            activation,
            dropout_p,
            seeds,
        )


def lora_embedding(
    input_ids: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float,
    *,
    padding_idx: int | None = None,
    embed_scale: float | Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """``(W[ids] + scaling · (Aᵀ)[ids] Bᵀ) · embed_scale`` with W frozen; never any dropout.

    Args:
        input_ids: integer, [...], each in [0, V).
        weight: [V, D], frozen.
        lora_A: [r, V], as PEFT lays it out.
        lora_B: [D, r].
        scaling: alpha / r, or alpha / sqrt(r).
        padding_idx: this row's column of A gets no gradient.
        embed_scale: a factor on the whole output (Gemma's); a number or a 0-d tensor.
        backend: "auto", "triton", "cpu" or "torch".

    Returns:
        [..., D] in the weight's dtype.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.
    """
    check_ids_dtype(input_ids)
    if input_ids.dtype not in (torch.int64, torch.int32):
        input_ids = input_ids.long()
    check_weight(weight, "")
    vocabulary, dim = weight.shape
    check_matrix("lora_A", lora_A, "", columns=vocabulary, what="the vocabulary size")
    check_matrix("lora_B", lora_B, "", rows=dim, columns=lora_A.shape[0], what="lora_A's rank")
    check_rank(lora_A, "")
    check_scaling(scaling, "")
    check_devices(weight, (("input_ids", input_ids), ("lora_A", lora_A), ("lora_B", lora_B)))
    check_padding_idx(padding_idx, vocabulary)
    if padding_idx is not None:
        padding_idx %= vocabulary
    check_embed_scale(embed_scale, weight)
    check_ids(input_ids, vocabulary)
    served_by = choose(backend, weight.device, weight.dtype)
    with _common.without_autocast(weight.device.type):
        y = _embedding.lora_embedding(
            served_by, input_ids, weight, lora_A, lora_B, float(scaling), padding_idx
        )
        if embed_scale is not None:
            if isinstance(embed_scale, Tensor):
                embed_scale = embed_scale.reshape(()).to(y.dtype)
            y = y * embed_scale
    return y


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype where autocast is on for x's device (fp64 is left alone), else x's."""
    device_type = x.device.type
    if _common.autocast_enabled(device_type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device_type)
    return x.dtype
