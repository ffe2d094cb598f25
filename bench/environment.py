"""What a figure was measured on: versions, processor, threads, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("fastlora", "torch", "peft", "transformers", "numpy", "triton", "pytest-benchmark")


def describe() -> dict[str, Any]:
    """Versions and hardware, without names or paths of the machine."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = getattr(sys.modules.get(name), "__version__", None)
    return {
        "versions": versions,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "fastlora_simd": _simd(),
        "load_at_start": load(),
    }


def load() -> float | None:
    """Processes running or waiting over the last minute: more than a few spoil a measurement."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def processor() -> str:
    """The processor's model, as the system names it."""
    described = Path("/proc/cpuinfo")
    if described.exists():
        for line in described.read_text(errors="replace").splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _simd() -> str | None:
    try:
        from fastlora import _C

        return str(_C.simd_level())
    except (ImportError, AttributeError):
        return None
