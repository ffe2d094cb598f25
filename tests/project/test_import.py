"""``import fastlora`` is cheap and quiet: no heavy package, no device, no output."""

import json
import subprocess
import sys

import pytest

HEAVY = ("transformers", "peft", "triton", "accelerate", "matplotlib", "rich", "yaml", "pynvml")
PROBE = """
import json, sys, torch
before = set(sys.modules)
import {module}
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(json.dumps({{
    "new": sorted(new),
    "cuda": torch.cuda.is_initialized(),
    "threads": torch.get_num_threads(),
    "rng": torch.initial_seed(),
}}))
"""


@pytest.mark.parametrize(
    "module",
    ["fastlora", "fastlora.cli", "fastlora.finetune"],
)
def test_import_is_light_and_quiet(module: str) -> None:
    command = [sys.executable, "-W", "error", "-c", PROBE.format(module=module)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1, "it printed something"
    found = json.loads(done.stdout)
    assert not set(found["new"]) & set(HEAVY)
    assert found["cuda"] is False


def test_fuse_is_reached_through_the_package_and_unknown_names_are_not() -> None:
    import fastlora

    assert {"fuse", "unfuse", "explain", "functional", "nn"} <= set(dir(fastlora))
    assert callable(fastlora.fuse)
    with pytest.raises(AttributeError, match="no attribute 'fusee'"):
        _ = fastlora.fusee


def test_is_typed() -> None:
    from importlib.resources import files

    assert files("fastlora").joinpath("py.typed").is_file()
