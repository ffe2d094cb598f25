"""What a figure was measured on: versions, processor, threads, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import psutil
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


class OtherWork:
    """How much of the processors other processes took since this was made.

    The load average also counts this run, and what ended before it.
    """

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.started = time.monotonic()
        self.before = self._others()

    def _others(self) -> float:
        every, own = psutil.cpu_times(), self.process.cpu_times()
        idle = every.idle + getattr(every, "iowait", 0.0)
        # "guest" is in "user" already; a hypervisor's "steal" is somebody else's work as well
        busy = sum(every) - idle - getattr(every, "guest", 0.0) - getattr(every, "guest_nice", 0.0)
        return busy - own.user - own.system - own.children_user - own.children_system

    def share(self) -> float:
        """Of all processors' time, 0 to 1."""
        spent = (time.monotonic() - self.started) * (os.cpu_count() or 1)
        return round(max(0.0, self._others() - self.before) / max(spent, 1e-9), 3)


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
