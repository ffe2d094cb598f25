"""What ``fastlora doctor`` prints: versions, devices, backends, and what to install to get more.

Reads versions from package metadata and GPUs from NVML, so that it imports no optional package but
``rich`` (for colour, when it is there) and starts no CUDA context.
"""

import contextlib
import importlib.metadata
import io
import json
import logging
import os
import platform
import re
import shutil
import subprocess
from typing import Any

import torch

from . import __version__, backend

SCHEMA = 1
PACKAGES = ("torch", "triton", "transformers", "peft", "accelerate")
COMPILERS = ("c++", "g++", "clang++")
ENVIRONMENT = ("FASTLORA_BACKEND", "FASTLORA_SIMD", "FASTLORA_NO_EXT", "TRITON_INTERPRET")
# Extras, by the packages that tell whether they are there.
EXTRAS = {
    "peft": ("fuse, unfuse and explain", ("peft", "transformers")),
    "finetune": (
        "fastlora finetune",
        ("peft", "transformers", "accelerate", "safetensors", "pyyaml", "matplotlib", "rich"),
    ),
}


def collect() -> dict[str, Any]:
    """Everything that ``fastlora doctor --json`` prints, as plain dicts, lists and scalars.

    Keys: ``schema``, ``versions``, ``devices`` (``cpu``, ``gpus``, ``gpu_note``), ``environment``,
    ``backends`` (name -> ``ok``, ``reason``, ``fix``), ``operations`` (operation -> device ->
    ``backend``, ``others``), ``advice`` (list of ``get``, ``run``).
    """
    gpus, gpu_note = _gpus()
    versions = _versions()
    backends = {name: backend.status(name)._asdict() for name in backend.NAMES}
    return {
        "schema": SCHEMA,
        "versions": versions,
        "devices": {"cpu": _cpu(), "gpus": gpus, "gpu_note": gpu_note},
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
        "backends": backends,
        "operations": {name: _serving(name) for name in backend.OPERATIONS},
        "advice": _advice(backends, gpus, versions["compiler"]),
    }


def to_json() -> str:
    """``collect()`` as indented JSON."""
    return json.dumps(collect(), indent=2)


def to_text() -> str:
    """``collect()`` as tables: with ``rich`` when it is installed, else in plain columns."""
    report = collect()
    try:
        import rich.console
        import rich.markup
        import rich.table
    except ImportError:
        return "\n\n".join(_plain(title, rows) for title, rows in _tables(report))
    console = rich.console.Console(file=io.StringIO(), width=max(80, _width()))
    for title, (header, *rows) in _tables(report):
        table = rich.table.Table(title=title, title_justify="left", title_style="bold")
        for name in header:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*map(rich.markup.escape, row))
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()


# -- what is there ---------------------------------------------------------------------------------


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    """What a command prints, or "" when it is not there, fails or hangs."""
    path = shutil.which(command[0])
    if path is None:
        return ""
    try:
        done = subprocess.run([path, *command[1:]], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _compiler() -> str | None:
    for name in (*os.environ.get("CXX", "").split()[:1], *COMPILERS):
        if lines := _output(name, "--version").splitlines():
            return lines[0].strip()
    return None


def _versions() -> dict[str, str | None]:
    nvcc = re.search(r"release ([\d.]+)", _output("nvcc", "--version"))
    return {
        "fastlora": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "compiler": _compiler(),
        "nvcc": nvcc and nvcc.group(1),
    }


def _cpu() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = (line.partition(":")[2] for line in lines if line.startswith("model name"))
        model = next(names, model)
    try:
        from . import _C  # type: ignore[attr-defined]

        simd = _C.simd_level()
    except ImportError:
        simd = None
    return {
        "model": model.strip(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "simd": simd,
    }


def _gpus() -> tuple[list[dict[str, Any]], str | None]:
    """GPUs that the driver sees, and a note when there are none or they were counted otherwise."""
    try:
        return _gpus_by_nvml(), None
    except ImportError:
        missing = "nvidia-ml-py is not installed"
    except Exception as error:  # NVML's own errors: no driver, no device, no permission
        return [], f"no NVIDIA driver answers ({error})"
    # Counting through torch starts no CUDA context; names and sizes would.
    count = torch.cuda.device_count()
    gpus = [{"index": index, "name": None} for index in range(count)]
    return gpus, f"{missing}: names and memory are not known" if gpus else "none is visible"


def _gpus_by_nvml() -> list[dict[str, Any]]:
    import pynvml

    pynvml.nvmlInit()
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            found.append(
                {
                    "index": index,
                    "name": pynvml.nvmlDeviceGetName(handle),
                    "memory_mib": pynvml.nvmlDeviceGetMemoryInfo(handle).total // 2**20,
                    "capability": list(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
                    "driver": driver,
                }
            )
        return found
    finally:
        pynvml.nvmlShutdown()


# -- what serves -----------------------------------------------------------------------------------


def _serving(operation: str) -> dict[str, dict[str, Any]]:
    """For each device type here: the backend that "auto" takes, and why not the others."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return {device: _serving_on(device, backend.OPERATIONS[operation]) for device in devices}


def _serving_on(device: str, names: tuple[str, ...]) -> dict[str, Any]:
    log = logging.getLogger("fastlora")
    disabled, log.disabled = log.disabled, True  # the table says what the fallback's log line says
    try:
        chosen: str | None = backend.choose("auto", torch.device(device), torch.float32)
        refusal = ""
    except ValueError as error:  # FASTLORA_BACKEND names one that cannot serve
        chosen, refusal = None, str(error)
    finally:
        log.disabled = disabled
    others = {}
    for name in names:
        if name == chosen:
            continue
        state = backend.supports(name, device, torch.float32)
        if not state.ok:
            others[name] = state.reason
        elif refusal or os.environ.get("FASTLORA_BACKEND", "auto") != "auto":
            others[name] = "FASTLORA_BACKEND names another"
        else:
            others[name] = "serves when named"
    return {"backend": chosen, "refusal": refusal or None, "others": others}


def _advice(
    backends: dict[str, dict[str, Any]], gpus: list[Any], compiler: str | None
) -> list[dict[str, str]]:
    advice = []
    for name, state in backends.items():
        fix = state["fix"]
        if name == "cpu" and compiler:
            fix = f"reinstall fastlora with the compiler that is here ({compiler})"
        if not state["ok"] and fix:
            advice.append({"get": f"backend {name}", "run": fix})
    if gpus and torch.version.cuda is None:
        advice.append(
            {"get": "the GPU", "run": "install a CUDA build of torch (this is a CPU one)"}
        )
    for extra, (what, packages) in EXTRAS.items():
        missing = [name for name in packages if _version(name) is None]
        if missing:
            run = f'pip install "fastlora[{extra}]"  (missing: {", ".join(missing)})'
            advice.append({"get": what, "run": run})
    return advice


# -- how it is printed -----------------------------------------------------------------------------


def _tables(report: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """(title, [header, row, ...]) of every table, all cells as text."""
    cpu, gpus = report["devices"]["cpu"], report["devices"]["gpus"]
    devices = [
        ["device", "what"],
        [
            "cpu",
            f"{cpu['model']}, {cpu['cores']} cores, {cpu['threads']} threads, "
            f"SIMD {cpu['simd'] or 'not used: fastlora._C is not built'}",
        ],
    ]
    for gpu in gpus:
        known = gpu["name"] is not None
        text = f"{gpu['name']}, {gpu['memory_mib']} MiB, sm_{gpu['capability'][0]}"
        text = f"{text}{gpu['capability'][1]}, driver {gpu['driver']}" if known else "name unknown"
        devices.append([f"gpu {gpu['index']}", text])
    if report["devices"]["gpu_note"]:
        devices.append(["gpu", report["devices"]["gpu_note"]])
    set_variables = [[name, value] for name, value in report["environment"].items() if value]
    operations = [["operation", "device", "served by", "not by"]]
    for name, devices_of in report["operations"].items():
        for device, served in devices_of.items():
            others = "; ".join(
                # A backend that is not there at all has its reason in the table above.
                f"{other}: {reason}" if report["backends"][other]["ok"] else f"{other}: not here"
                for other, reason in served["others"].items()
            )
            chosen = served["backend"] or f"nothing ({served['refusal']})"
            operations.append([name, device, chosen, others])
    tables = [
        (
            "Versions",
            [["package", "version"]]
            + [[name, value or "not installed"] for name, value in report["versions"].items()],
        ),
        ("Devices", devices),
        (
            "Backends",
            [["backend", "here", "why"]]
            + [
                [name, "yes" if state["ok"] else "no", state["reason"]]
                for name, state in report["backends"].items()
            ],
        ),
        ("Operations", operations),
    ]
    if set_variables:
        tables.insert(2, ("Environment", [["variable", "value"], *set_variables]))
    if report["advice"]:
        rows = [[entry["get"], entry["run"]] for entry in report["advice"]]
        tables.append(("To get more", [["to get", "do"], *rows]))
    return tables


def _plain(title: str, rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _width() -> int:
    return shutil.get_terminal_size((100, 24)).columns
