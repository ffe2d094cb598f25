"""Every kernel and configuration, as its launcher asks for it, ready to be compiled for a GPU that is not there.

An entry is a launcher call on meta tensors of a representative shape; the launches it makes are recorded, so that
signatures, tiles, warps and stages are the launcher's own and cannot drift from it. `compilations` turns them into
what `triton.compiler.ASTSource` takes. Only a process without TRITON_INTERPRET can compile them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from . import glu, projections
from .dispatch import forcing
from .dropout import philox_mask
from .embedding import embedding_forward
from .launch import Launch, recording

SM_80, SM_90 = (8, 0), (9, 0)
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64", torch.int32: "i32",
    torch.uint8: "u8",
}  # fmt: skip
# Kernels that must reach the tensor cores when their operands are half types, or TF32.
MATRIX = {
    "_gemm_kernel",
    "_shrink_kernel",
    "_grad_dy_kernel",
    "_x_pass_kernel",
    "_embedding_kernel",
    "_expand_kernel",
}


@dataclass(frozen=True)
class Entry:
    """A named launcher call; `tensor_cores` says whether its matrix kernels should use them.

    candidate: the one of dispatch.OPERATIONS that is to make the launches, whatever the part would choose.
    """

    name: str
    call: Callable[[], object]
    tensor_cores: bool = False
    candidate: str = "fused"

    def launches(self, capability: tuple[int, int]) -> list[Launch]:
        """What the call launches on a GPU of this capability."""
        with recording(capability) as found, forcing(self.candidate):
            self.call()
        return found


@dataclass(frozen=True)
class Compilation:
    """One kernel in one configuration: what ASTSource and triton.compile need, and what to expect of the result."""

    name: str
    fn: Any
    signature: dict[str, Any]
    constexprs: dict[tuple[int, ...], Any]
    attrs: dict[tuple[int, ...], list[list[Any]]]
    num_warps: int
    num_stages: int
    tensor_cores: bool


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _projections(
    M: int,
    K: int,
    Ns: tuple[int, ...],
    ranks: tuple[int, ...],
    dtype: torch.dtype,
    p: float,
    adapter: torch.dtype = torch.float32,
    *,
    backward: bool = True,
    conv1d: bool = False,
    need_dx: bool = True,
    need_dA: bool = True,
    need_dB: bool = True,
) -> None:
    count = len(Ns)
    x = _meta(M, K, dtype=dtype)
    weights = [_meta(K, n, dtype=dtype).t() if conv1d else _meta(n, K, dtype=dtype) for n in Ns]
    lora_As = [_meta(r, K, dtype=adapter) for r in ranks]
    lora_Bs = [_meta(n, r, dtype=adapter) for n, r in zip(Ns, ranks, strict=True)]
    biases = [_meta(n, dtype=dtype) if conv1d else None for n in Ns]
    seeds = _meta(count, dtype=torch.int64) if p else None
    scalings = [2.0] * count
    _, s = projections.projections_forward(x, weights, lora_As, lora_Bs, scalings, biases, p, seeds)
    if backward:
        projections.projections_backward(
            [_meta(M, n, dtype=dtype) for n in Ns], x, s, weights, lora_As, lora_Bs, scalings, p, seeds,
            need_dx=need_dx, need_dA=[need_dA] * count, need_dB=[need_dB] * count,
        )  # fmt: skip


def _tf32(*args: Any, **kwargs: Any) -> None:
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        _projections(*args, **kwargs)
    finally:
        matmul.fp32_precision = before


def _glu(dtype: torch.dtype, activation: str) -> None:
    gate = _meta(4096, 14336, dtype=dtype)
    glu.glu_forward(gate, gate, activation)
    glu.glu_backward(gate, gate, gate, activation)


def _embedding(dtype: torch.dtype, rank: int) -> None:
    embedding_forward(
        _meta(8192, dtype=torch.int64),
        _meta(32000, 4096, dtype=dtype),
        _meta(rank, 32000),
        _meta(4096, rank),
        2.0,
    )


def entries(thorough: bool = False) -> list[Entry]:
    """Every kernel in every tile of the tables: a Llama-sized layer, few tokens, odd shapes, both weight layouts.

    `thorough` adds the other combinations of dtype, rank and dropout.
    """
    out: list[Entry] = []

    def add(
        name: str,
        call: Callable[..., object],
        *args: Any,
        cores: bool = False,
        candidate: str = "fused",
        **kwargs: Any,
    ) -> None:
        out.append(Entry(name, partial(call, *args, **kwargs), cores, candidate))

    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    layer = (8192, 4096, (4096,))
    qkv = (8192, 4096, (4096, 1024, 1024))
    odd = (4097, 4095, (4097,))  # no vector loads, every mask
    alone: dict[str, Any] = dict(
        need_dx=False, need_dA=False, need_dB=False
    )  # of a backward's sums, all but one frozen
    add("qkv bf16 r=16", _projections, *qkv, (16,) * 3, bf16, 0.0, cores=True)
    add("qkv bf16 r=16 p=0.1", _projections, *qkv, (16,) * 3, bf16, 0.1, cores=True)
    add("linear bf16 r=64 p=0.1", _projections, *layer, (64,), bf16, 0.1, cores=True)
    add("linear fp32 r=64 p=0.1", _projections, *layer, (64,), fp32, 0.1)
    add("linear tf32 r=16", _tf32, *layer, (16,), fp32, 0.0, cores=True, backward=False)
    add("odd bf16 r=13 p=0.1", _projections, *odd, (13,), bf16, 0.1, cores=True)
    add("odd fp32 r=13", _projections, *odd, (13,), fp32, 0.0)
    add(
        "conv1d bf16 r=8",
        _projections,
        8192,
        1024,
        (3072,),
        (8,),
        bf16,
        0.0,
        cores=True,
        conv1d=True,
        backward=False,
    )
    for M, dtype in {1: bf16, 48: fp16, 600: bf16}.items():
        name = f"M={M} {TYPES[dtype]} r=16"
        add(name, _projections, M, 4096, (4096,), (16,), dtype, 0.0, cores=True, backward=False)
    add("M=1 fp32 r=16", _projections, 1, 4096, (4096,), (16,), fp32, 0.0, backward=False)
    add("M=1 tf32 r=16", _tf32, 1, 4096, (4096,), (16,), fp32, 0.0, cores=True, backward=False)
    add(
        "dA alone bf16 p=0.1",
        _projections,
        *layer,
        (16,),
        bf16,
        0.1,
        cores=True,
        **(alone | {"need_dA": True}),
    )
    beside: dict[str, Any] = dict(candidate="library")
    add("beside a library bf16 r=64", _projections, *layer, (64,), bf16, 0.0, cores=True, **beside)
    add(
        "beside a library qkv p=0.1", _projections, *qkv, (16,) * 3, bf16, 0.1, cores=True, **beside
    )
    add("beside a library fp32 r=64 p=0.1", _projections, *layer, (64,), fp32, 0.1, **beside)
    add("embedding bf16 r=64", _embedding, bf16, 64, cores=True)
    add("embedding fp32 r=64", _embedding, fp32, 64)
    for activation, dtype in {"silu": bf16, "gelu": fp16, "gelu_tanh": fp32}.items():
        add(f"glu {activation} {TYPES[dtype]}", _glu, dtype, activation)
    add("philox mask", philox_mask, 4096, 4096, 0.1, _meta(1, dtype=torch.int64))
    if thorough:
        add(
            "dX alone bf16 p=0.1",
            _projections,
            *layer,
            (16,),
            bf16,
            0.1,
            cores=True,
            **(alone | {"need_dx": True}),
        )
        add("linear fp16 r=16 p=0.1", _projections, *layer, (16,), fp16, 0.1, cores=True)
        add("linear bf16 r=64", _projections, *layer, (64,), bf16, 0.0, cores=True)
        add("linear bf16 r=256", _projections, *layer, (256,), bf16, 0.0, cores=True)
        add("linear fp32 r=64", _projections, *layer, (64,), fp32, 0.0)
        add("linear tf32 r=16 backward", _tf32, *layer, (16,), fp32, 0.0, cores=True)
        add("linear tf32 r=16 p=0.1", _tf32, *layer, (16,), fp32, 0.1, cores=True)
        add(
            "conv1d bf16 r=8 backward",
            _projections,
            8192,
            1024,
            (3072,),
            (8,),
            bf16,
            0.0,
            cores=True,
            conv1d=True,
        )
        add("linear bf16 half adapters", _projections, *layer, (16,), bf16, 0.0, bf16, cores=True)
        add(
            "linear bf16 half adapters p=0.1",
            _projections,
            *layer,
            (16,),
            bf16,
            0.1,
            bf16,
            cores=True,
        )
        add("qkv fp16 unequal ranks p=0.1", _projections, *qkv, (16, 8, 8), fp16, 0.1, cores=True)
        add("odd bf16 r=13", _projections, *odd, (13,), bf16, 0.0, cores=True)
        add("odd fp32 r=13 p=0.1", _projections, *odd, (13,), fp32, 0.1)
        add("conv1d fp32 r=8", _projections, 8192, 1024, (3072,), (8,), fp32, 0.0, conv1d=True)
        add(
            "dB alone bf16",
            _projections,
            *layer,
            (16,),
            bf16,
            0.0,
            cores=True,
            **(alone | {"need_dB": True}),
        )
        for M in (1, 48, 600):
            add(
                f"M={M} bf16 r=16 p=0.1",
                _projections,
                M,
                4096,
                (4096,),
                (16,),
                bf16,
                0.1,
                cores=True,
            )
    return out


def _describe(
    launch: Launch,
) -> tuple[dict[str, Any], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """Signature, constants and divisibility of one launch, by the rules of Triton's own specialisation."""
    signature: dict[str, Any] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    attrs: dict[tuple[int, ...], Any] = {}

    def kind(value: Any, path: tuple[int, ...], specialize: bool) -> Any:
        if isinstance(value, tuple):
            return tuple(kind(v, (*path, i), specialize) for i, v in enumerate(value))
        if value is None or (specialize and isinstance(value, int) and value == 1):
            constexprs[path] = value
            return "constexpr"
        if isinstance(value, torch.Tensor):
            if value.storage_offset() * value.element_size() % 16 == 0:
                attrs[path] = [["tt.divisibility", 16]]
            return f"*{TYPES[value.dtype]}"
        if isinstance(value, int):
            if specialize and value % 16 == 0:
                attrs[path] = [["tt.divisibility", 16]]
            return "i32" if -(2**31) <= value < 2**31 else "i64"
        return "fp32"

    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constexprs[(i,)] = value
        else:
            signature[parameter.name] = kind(value, (i,), not parameter.do_not_specialize)
    return signature, constexprs, attrs


def compilations(capability: tuple[int, int], thorough: bool = False) -> Iterator[Compilation]:
    """Every distinct kernel that the entries launch on a GPU of this capability."""
    seen: set[str] = set()
    names: dict[str, int] = {}
    for entry in entries(thorough):
        for launch in entry.launches(capability):
            signature, constexprs, attrs = _describe(launch)
            kernel = launch.kernel.__name__
            key = (
                f"{kernel} {signature} {constexprs} {attrs} {launch.num_warps} {launch.num_stages}"
            )
            if key in seen:
                continue
            seen.add(key)
            name = f"{entry.name}: {kernel}"
            names[name] = names.get(name, 0) + 1
            if names[name] > 1:
                name += f" {names[name]}"
            yield Compilation(
                name, launch.kernel, signature, constexprs, attrs, launch.num_warps,
                launch.num_stages, entry.tensor_cores and kernel in MATRIX,
            )  # fmt: skip
