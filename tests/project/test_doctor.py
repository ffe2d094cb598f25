"""``fastlora doctor``: the schema of its JSON, its tables, and a machine with torch alone."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from fastlora import backend, doctor

MINIMAL = """
import importlib.metadata, sys
absent = {absent}
sys.modules.update(dict.fromkeys(absent))
real = importlib.metadata.version
def version(name):
    if name in absent:
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.version = version
from fastlora import cli
sys.exit(cli.main(["doctor", *{options}]))
"""
ABSENT = ["rich", "pynvml", "transformers", "peft", "accelerate", "matplotlib"]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return json.loads(doctor.to_json())


def minimal(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process where nothing but torch is installed."""
    code = MINIMAL.format(absent=ABSENT, options=list(options))
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
    )


def test_json_schema(report: dict[str, Any]) -> None:
    assert list(report) == [
        *("schema", "versions", "devices", "environment", "backends", "operations", "advice")
    ]
    assert report["schema"] == doctor.SCHEMA
    versions = report["versions"]
    assert {"fastlora", "python", "torch", "triton", "transformers", "peft", "compiler"} <= set(
        versions
    )
    assert all(value is None or isinstance(value, str) for value in versions.values())
    cpu = report["devices"]["cpu"]
    assert isinstance(cpu["model"], str) and cpu["model"]
    assert cpu["threads"] >= 1
    assert cpu["simd"] in ("avx512", "avx2", "generic", None)
    for gpu in report["devices"]["gpus"]:
        assert {"index", "name"} <= set(gpu)
    assert report["devices"]["gpus"] or report["devices"]["gpu_note"]
    assert set(report["environment"]) == set(doctor.ENVIRONMENT)


def test_every_backend_has_its_state(report: dict[str, Any]) -> None:
    assert list(report["backends"]) == list(backend.NAMES)
    for name, state in report["backends"].items():
        assert state == backend.status(name)._asdict()
        assert state["reason"]
        assert state["ok"] or state["fix"]
    assert report["backends"]["torch"]["ok"] is True


def test_every_operation_says_who_serves_it_and_why_not_the_others(report: dict[str, Any]) -> None:
    assert list(report["operations"]) == list(backend.OPERATIONS)
    for name, devices in report["operations"].items():
        assert "cpu" in devices
        for served in devices.values():
            assert served["backend"] in backend.OPERATIONS[name]
            assert set(served["others"]) == set(backend.OPERATIONS[name]) - {served["backend"]}
            assert all(served["others"].values())


def test_serving_is_what_the_dispatcher_chooses(report: dict[str, Any]) -> None:
    import torch

    chosen = backend.choose("auto", torch.device("cpu"), torch.float32)
    assert {served["cpu"]["backend"] for served in report["operations"].values()} == {chosen}


def test_tables_hold_the_same(report: dict[str, Any]) -> None:
    text = doctor.to_text()
    for word in (*backend.NAMES, *backend.OPERATIONS, report["versions"]["torch"]):
        assert word in text


def test_torch_alone_is_enough_and_the_extras_are_named() -> None:
    done = minimal("--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["versions"]["peft"] is None
    advised = [entry["run"] for entry in found["advice"]]
    assert any("fastlora[peft]" in run for run in advised)
    assert any("fastlora[finetune]" in run for run in advised)


def test_plain_tables_without_rich() -> None:
    done = minimal()
    assert done.returncode == 0, done.stderr
    assert "┃" not in done.stdout
    for title in ("Versions", "Devices", "Backends", "Operations", "To get more"):
        assert f"\n{title}\n" in f"\n{done.stdout}"


def test_a_named_backend_that_cannot_serve_is_reported() -> None:
    """Without a GPU and without the interpreter, triton cannot serve: the doctor must still run."""
    done = minimal(
        "--json", FASTLORA_BACKEND="triton", TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES=""
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["environment"]["FASTLORA_BACKEND"] == "triton"
    served = found["operations"]["lora_linear"]["cpu"]
    assert served["backend"] is None
    assert "'triton', which cannot serve" in served["refusal"]


def test_unknown_backend_name_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLORA_BACKEND", "cuda")
    served = doctor.collect()["operations"]["lora_linear"]["cpu"]
    assert served["backend"] is None
    assert "got 'cuda'" in served["refusal"]


def test_gpus_are_counted_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpus, note = doctor._gpus()
    assert [gpu["index"] for gpu in gpus] == [0, 1]
    assert note is not None
    assert "nvidia-ml-py is not installed" in note


def test_gpus_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that answers, with two GPUs: what it says is what is printed."""
    from types import SimpleNamespace

    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=2**30),
        nvmlDeviceGetCudaComputeCapability=lambda handle: (9, 0),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    gpus, note = doctor._gpus()
    assert note is None
    assert gpus[1] == {
        "index": 1,
        "name": "GPU-1",
        "memory_mib": 1024,
        "capability": [9, 0],
        "driver": "580.1",
    }
    assert "GPU-1, 1024 MiB, sm_90, driver 580.1" in doctor.to_text()
