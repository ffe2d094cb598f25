"""The operations as functions, arguments in PyTorch's order and names.

Shapes: M rows (any leading dimensions), K in_features, N out_features, r rank. Every function
checks its arguments before it computes anything, and takes ``backend="auto"``: the fastest backend
that serves the device and dtype (see :mod:`fastlora.backend`), or one by name.

Dtypes: float32, bfloat16, float16 and float64. The computation runs in x's dtype (autocast's, where
autocast is on) and accumulates in fp32; the output has that dtype; gradients come back in the
dtype of their parameter. Base weights are frozen: one that requires grad is refused.
"""

import numbers
from collections.abc import Sequence

import torch
from torch import Tensor

from .backend import choose
from .ops import _common, dropout, few_rows
from .ops import lora_embedding as _embedding
from .ops import lora_linear as _linear
from .ops import lora_mlp as _mlp
from .ops import lora_projections as _projections

__all__ = ["lora_embedding", "lora_linear", "lora_mlp", "lora_projections"]

Projection = tuple[Tensor, Tensor, Tensor, float, Tensor | None]

_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
_IDS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
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
    _check_x(x)
    _check_projection(x, weight, lora_A, lora_B, scaling, bias, "")
    dropout_p = _check_dropout(dropout_p, training)
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
    _check_x(x)
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
        if len(values) != count:
            raise ValueError(f"{name}: got {len(values)}, takes {count}, one for each weight")
    for i in range(count):
        _check_projection(
            x, weights[i], lora_As[i], lora_Bs[i], scalings[i], biases[i], f" (projection {i})"
        )
    dropout_p = _check_dropout(dropout_p, training)
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
    _check_x(x)
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"activation: got {activation!r}, takes {', '.join(map(repr, _ACTIVATIONS))}"
        )
    for name, projection in (("gate", gate), ("up", up), ("down", down)):
        if len(projection) != 5:
            raise ValueError(
                f"{name}: got {len(projection)} items, "
                "takes (weight, lora_A, lora_B, scaling, bias or None)"
            )
    _check_projection(x, *gate, " (gate)")
    _check_projection(x, *up, " (up)")
    hidden = gate[0].shape[0]
    if up[0].shape[0] != hidden:
        raise ValueError(
            f"weight (up): got out_features {up[0].shape[0]}, takes gate's, which is {hidden}"
        )
    _check_projection(x, *down, " (down)", in_features=hidden)
    dropout_p = _check_dropout(dropout_p, training)
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
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in _IDS:
        got = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise TypeError(f"input_ids: got {got}, takes an integer tensor")
    if input_ids.dtype not in (torch.int64, torch.int32):
        input_ids = input_ids.long()
    _check_weight(weight, "")
    vocabulary, dim = weight.shape
    _check_matrix("lora_A", lora_A, "", columns=vocabulary, what="the vocabulary size")
    _check_matrix("lora_B", lora_B, "", rows=dim, columns=lora_A.shape[0], what="lora_A's rank")
    _check_rank(lora_A, "")
    _check_scaling(scaling, "")
    _check_devices(weight, (("input_ids", input_ids), ("lora_A", lora_A), ("lora_B", lora_B)))
    if padding_idx is not None:
        if not -vocabulary <= padding_idx < vocabulary:
            raise ValueError(
                f"padding_idx: got {padding_idx}, takes {-vocabulary} to {vocabulary - 1}"
            )
        padding_idx %= vocabulary
    served_by = choose(backend, weight.device, weight.dtype)
    with _common.without_autocast(weight.device.type):
        y = _embedding.lora_embedding(
            served_by, input_ids, weight, lora_A, lora_B, float(scaling), padding_idx
        )
        if embed_scale is not None:
            y = y * (embed_scale.to(y.dtype) if isinstance(embed_scale, Tensor) else embed_scale)
    return y


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype where autocast is on for x's device (fp64 is left alone), else x's."""
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device_type)
    return x.dtype


def _check_x(x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x: got {type(x).__name__}, takes a tensor")
    if x.dtype not in _FLOATS:
        raise TypeError(f"x: got {x.dtype}, takes float32, bfloat16, float16 or float64")
    if x.dim() == 0:
        raise ValueError("x: got a 0-d tensor, takes [..., in_features]")


def _check_projection(
    x: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float,
    bias: Tensor | None,
    where: str,
    in_features: int | None = None,
) -> None:
    _check_weight(weight, where)
    out_features, columns = weight.shape
    if in_features is None:
        in_features = x.shape[-1]
    if columns != in_features:
        raise ValueError(
            f"weight{where}: got shape {tuple(weight.shape)}, takes [out_features, {in_features}] "
            f"for an input of {in_features} features (in and out swapped?)"
        )
    _check_matrix("lora_A", lora_A, where, columns=in_features, what="in_features")
    _check_rank(lora_A, where)
    _check_matrix(
        "lora_B", lora_B, where, rows=out_features, columns=lora_A.shape[0], what="lora_A's rank"
    )
    _check_scaling(scaling, where)
    device = x.device
    if weight.device != device or lora_A.device != device or lora_B.device != device:
        _check_devices(x, ((f"weight{where}", weight), ("lora_A", lora_A), ("lora_B", lora_B)))
    if bias is not None:
        if bias.shape != (out_features,):
            raise ValueError(f"bias{where}: got shape {tuple(bias.shape)}, takes [{out_features}]")
        _check_devices(x, ((f"bias{where}", bias),))


def _check_weight(weight: Tensor, where: str) -> None:
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight{where}: got {type(weight).__name__}, takes a tensor")
    if weight.dtype not in _FLOATS:
        raise TypeError(
            f"weight{where}: got {weight.dtype}, takes float32, bfloat16, float16 or float64"
        )
    if weight.dim() != 2:
        raise ValueError(f"weight{where}: got shape {tuple(weight.shape)}, takes 2 dimensions")
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"weight{where}: got one that requires grad, takes a frozen base weight, whose gradient "
            "is never computed: call weight.requires_grad_(False)"
        )


def _check_matrix(
    name: str,
    tensor: Tensor,
    where: str,
    *,
    rows: int | None = None,
    columns: int,
    what: str,
) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}{where}: got {type(tensor).__name__}, takes a tensor")
    if tensor.dtype not in _FLOATS:
        raise TypeError(
            f"{name}{where}: got {tensor.dtype}, takes float32, bfloat16, float16 or float64"
        )
    shape = tensor.shape
    if len(shape) != 2 or shape[1] != columns or (rows is not None and shape[0] != rows):
        raise ValueError(
            f"{name}{where}: got shape {tuple(shape)}, "
            f"takes [{'r' if rows is None else rows}, {columns}] ({what} is {columns})"
        )


def _check_rank(lora_A: Tensor, where: str) -> None:
    if lora_A.shape[0] < 1:
        raise ValueError(f"lora_A{where}: got rank 0, takes r >= 1")


def _check_scaling(scaling: float, where: str) -> None:
    if not isinstance(scaling, numbers.Real):
        raise TypeError(f"scaling{where}: got {type(scaling).__name__}, takes a number")


def _check_devices(reference: Tensor, tensors: Sequence[tuple[str, Tensor]]) -> None:
    for name, tensor in tensors:
        if tensor.device != reference.device:
            raise ValueError(
                f"{name}: got a tensor on {tensor.device}, takes {reference.device}, "
                "where the other tensors are"
            )


def _check_dropout(dropout_p: float, training: bool) -> float:
    """The probability in force: 0 when not training."""
    if not isinstance(dropout_p, numbers.Real):
        raise TypeError(f"dropout_p: got {type(dropout_p).__name__}, takes a number in [0, 1)")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p: got {dropout_p}, takes a number in [0, 1)")
    return float(dropout_p) if training else 0.0
