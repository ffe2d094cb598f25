"""Which backends exist on this machine, which one serves a call, and why the others do not.

A backend is one implementation of all operations: ``triton`` (GPU, or any device under
``TRITON_INTERPRET=1``), ``cpu`` (ATen GEMMs and the C++ streaming kernels of ``fastlora._C``) and
``torch`` (plain PyTorch: always there, on every device and floating dtype).
"""

import functools
import importlib
import importlib.util
import logging
import os
from typing import NamedTuple

import torch

NAMES = ("triton", "cpu", "torch")
OPERATIONS: dict[str, tuple[str, ...]] = {
    "lora_linear": NAMES,
    "lora_projections": NAMES,
    "lora_mlp": NAMES,
    "lora_embedding": NAMES,
}
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_log = logging.getLogger("fastlora")


class Status(NamedTuple):
    """Whether a backend can serve on this machine, why (not), and what to do to get it."""

    ok: bool
    reason: str
    fix: str


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def status(name: str) -> Status:
    """State of one backend on this machine. Starts no CUDA context.

    Raises:
        ValueError: for a name that is not one of ``NAMES``.
    """
    if name == "torch":
        return Status(True, "plain PyTorch, on every device", "")
    if name == "cpu":
        try:
            importlib.import_module("fastlora._C")
        except ImportError as error:
            return Status(
                False,
                f"the C++ extension fastlora._C does not load ({error})",
                "install a C++17 compiler (gcc or clang), then reinstall fastlora",
            )
        return Status(True, "the C++ extension fastlora._C is built", "")
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            return Status(False, "the package triton is not installed", "pip install triton")
        if interpreting():
            return Status(True, "Triton's interpreter (TRITON_INTERPRET=1), for tests", "")
        if not torch.cuda.is_available():
            return Status(False, "no CUDA device is visible", "run on a machine with an NVIDIA GPU")
        return Status(True, "Triton on CUDA", "")
    raise ValueError(f"backend: got {name!r}, takes one of {', '.join(NAMES)}")


def supports(name: str, device_type: str, dtype: torch.dtype) -> Status:
    """Whether backend ``name`` serves tensors of this device type and dtype, with the reason."""
    state = status(name)
    if not state.ok or name == "torch":
        return state
    if dtype not in KERNEL_DTYPES:
        return Status(
            False, f"{name} takes float32, bfloat16 and float16, not {dtype}", "use backend='torch'"
        )
    if name == "cpu" and device_type != "cpu":
        return Status(False, f"cpu serves CPU tensors, not {device_type}", "")
    if name == "triton" and device_type != ("cpu" if interpreting() else "cuda"):
        return Status(
            False,
            f"triton serves {'CPU' if interpreting() else 'CUDA'} tensors here, not {device_type}",
            "move the model to a CUDA device",
        )
    return state


def check_name(backend: str) -> None:
    """Raise unless ``backend`` is "auto" or one of ``NAMES``."""
    if not isinstance(backend, str):
        raise TypeError(f"backend: got {type(backend).__name__}, takes a string")
    if backend != "auto" and backend not in NAMES:
        raise ValueError(f"backend: got {backend!r}, takes 'auto', {', '.join(map(repr, NAMES))}")


def named_by_environment() -> bool:
    """Whether ``FASTLORA_BACKEND`` names a backend for the whole process."""
    return os.environ.get("FASTLORA_BACKEND", "auto") != "auto"


def choose(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Name of the backend that serves a call on ``device`` in ``dtype``.

    ``backend="auto"`` takes the environment variable ``FASTLORA_BACKEND`` when it is set, else the
    fastest one that can serve; falling past the device's own backend is logged once.

    Raises:
        ValueError: an unknown name, or a backend named outright that cannot serve.
    """
    if not isinstance(backend, str):
        check_name(backend)
    if backend == "auto":
        backend = os.environ.get("FASTLORA_BACKEND", "auto")
    return _choose(backend, device.type, dtype)


# What torch.compiler.assume_constant_result sets: a traced graph takes the answer as it is, instead
# of tracing the look at the machine. Set by hand, since that call imports all of torch._dynamo.
choose._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _choose(backend: str, device_type: str, dtype: torch.dtype) -> str:
    check_name(backend)
    if backend != "auto":
        state = supports(backend, device_type, dtype)
        if not state.ok:
            fix = f"; {state.fix}" if state.fix else ""
            raise ValueError(f"backend: got {backend!r}, which cannot serve: {state.reason}{fix}")
        return backend
    # Under the interpreter Triton could serve CPU tensors, thousands of times slower: only by name.
    preferred = "cpu" if device_type == "cpu" else "triton"
    state = supports(preferred, device_type, dtype)
    if state.ok:
        return preferred
    if dtype in KERNEL_DTYPES:
        _log.warning(
            "fastlora: %s tensors in %s run on plain PyTorch: %s%s",
            device_type,
            dtype,
            state.reason,
            f" ({state.fix})" if state.fix else "",
        )
    return "torch"
