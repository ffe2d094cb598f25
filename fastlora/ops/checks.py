"""What a call's arguments must be: each check names the argument, what it got and what it takes."""

import numbers
from collections.abc import Sequence

import torch
from torch import Tensor

from ._common import intercepted, transformed

_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
_IDS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


def check_floats(name: str, tensor: Tensor) -> None:
    """A dense tensor of a floating dtype."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}, takes a tensor")
    if tensor.dtype not in _FLOATS:
        raise TypeError(f"{name}: got {tensor.dtype}, takes float32, bfloat16, float16 or float64")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name}: got layout {tensor.layout}, takes torch.strided: call to_dense()")


def check_sequence(name: str, values: Sequence[object]) -> None:
    if not isinstance(values, list | tuple | torch.nn.ParameterList):
        raise TypeError(f"{name}: got {type(values).__name__}, takes a list or a tuple")


def check_x(x: Tensor) -> None:
    check_floats("x", x)
    if x.dim() == 0:
        raise ValueError("x: got a 0-d tensor, takes [..., in_features]")


def check_projection(
    x: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float,
    bias: Tensor | None,
    where: str,
    in_features: int | None = None,
) -> None:
    check_weight(weight, where)
    out_features, columns = weight.shape
    if in_features is None:
        in_features = x.shape[-1]
    if columns != in_features:
        raise ValueError(
            f"weight{where}: got shape {tuple(weight.shape)}, takes [out_features, {in_features}] "
            f"for an input of {in_features} features (in and out swapped?)"
        )
    check_matrix("lora_A", lora_A, where, columns=in_features, what="in_features")
    check_rank(lora_A, where)
    check_matrix(
        "lora_B", lora_B, where, rows=out_features, columns=lora_A.shape[0], what="lora_A's rank"
    )
    check_scaling(scaling, where)
    device = x.device
    if weight.device != device or lora_A.device != device or lora_B.device != device:
        check_devices(x, ((f"weight{where}", weight), ("lora_A", lora_A), ("lora_B", lora_B)))
    if bias is not None:
        check_floats(f"bias{where}", bias)
        if bias.shape != (out_features,):
            raise ValueError(f"bias{where}: got shape {tuple(bias.shape)}, takes [{out_features}]")
        check_devices(x, ((f"bias{where}", bias),))


def check_weight(weight: Tensor, where: str) -> None:
    check_floats(f"weight{where}", weight)
    if weight.dim() != 2:
        raise ValueError(f"weight{where}: got shape {tuple(weight.shape)}, takes 2 dimensions")
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"weight{where}: got one that requires grad, takes a frozen base weight, whose gradient "
            "is never computed: call weight.requires_grad_(False)"
        )


def check_matrix(
    name: str,
    tensor: Tensor,
    where: str,
    *,
    rows: int | None = None,
    columns: int,
    what: str,
) -> None:
    check_floats(f"{name}{where}", tensor)
    shape = tensor.shape
    if len(shape) != 2 or shape[1] != columns or (rows is not None and shape[0] != rows):
        raise ValueError(
            f"{name}{where}: got shape {tuple(shape)}, "
            f"takes [{'r' if rows is None else rows}, {columns}] ({what} is {columns})"
        )


def check_ids_dtype(input_ids: Tensor) -> None:
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in _IDS:
        got = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise TypeError(f"input_ids: got {got}, takes an integer tensor")


def check_ids(input_ids: Tensor, vocabulary: int) -> None:
    """Refuse ids outside the vocabulary: at once on the CPU, by a device-side assertion elsewhere."""
    if torch.compiler.is_compiling() or input_ids.numel() == 0 or input_ids.is_meta:
        return
    if intercepted() or transformed():
        return  # no values to look at
    if input_ids.device.type == "cpu":
        low, high = (int(bound) for bound in input_ids.aminmax())
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"input_ids: got ids from {low} to {high}, takes 0 to {vocabulary - 1} "
                f"for a vocabulary of {vocabulary}"
            )
    else:  # without a wait for the device, as torch's own embedding does it
        torch._assert_async(
            ((input_ids >= 0) & (input_ids < vocabulary)).all(),
            f"input_ids: ids outside 0 to {vocabulary - 1}",
        )


def check_rank(lora_A: Tensor, where: str) -> None:
    if lora_A.shape[0] < 1:
        raise ValueError(f"lora_A{where}: got rank 0, takes r >= 1")


def check_padding_idx(padding_idx: int | None, vocabulary: int) -> None:
    if padding_idx is None:
        return
    if not isinstance(padding_idx, int) or isinstance(padding_idx, bool):
        raise TypeError(f"padding_idx: got {type(padding_idx).__name__}, takes an integer or None")
    if not -vocabulary <= padding_idx < vocabulary:
        raise ValueError(f"padding_idx: got {padding_idx}, takes {-vocabulary} to {vocabulary - 1}")


def check_embed_scale(embed_scale: float | Tensor | None, weight: Tensor) -> None:
    if isinstance(embed_scale, Tensor):
        if embed_scale.numel() != 1:
            raise ValueError(
                f"embed_scale: got shape {tuple(embed_scale.shape)}, takes a number or one element"
            )
        check_devices(weight, (("embed_scale", embed_scale),))
    elif embed_scale is not None and not isinstance(embed_scale, numbers.Real):
        raise TypeError(f"embed_scale: got {type(embed_scale).__name__}, takes a number or None")


def check_scaling(scaling: float, where: str) -> None:
    if type(scaling) is not float and not isinstance(scaling, numbers.Real):
        raise TypeError(f"scaling{where}: got {type(scaling).__name__}, takes a number")
    if scaling != scaling or (type(scaling) is not float and not _fits_a_float(scaling)):
        raise ValueError(f"scaling{where}: got {scaling}, takes a number that a float can hold")


def _fits_a_float(number: float) -> bool:
    try:
        float(number)
    except OverflowError:
        return False
    return True


def check_devices(reference: Tensor, tensors: Sequence[tuple[str, Tensor]]) -> None:
    for name, tensor in tensors:
        if tensor.device != reference.device:
            raise ValueError(
                f"{name}: got a tensor on {tensor.device}, takes {reference.device}, "
                "where the other tensors are"
            )


def check_probability(name: str, p: float) -> None:
    if not isinstance(p, numbers.Real):
        raise TypeError(f"{name}: got {type(p).__name__}, takes a number in [0, 1)")
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{name}: got {p}, takes a number in [0, 1)")


def check_dropout(
    dropout_p: float, training: bool, generator: torch.Generator | None = None
) -> float:
    """The probability in force: 0 when not training."""
    if not isinstance(training, bool):
        raise TypeError(f"training: got {type(training).__name__}, takes a bool")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator: got {type(generator).__name__}, takes a torch.Generator or None"
        )
    check_probability("dropout_p", dropout_p)
    return float(dropout_p) if training else 0.0
