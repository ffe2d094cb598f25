"""A wheel: what is in it, and that it is importable with none of the repository in reach."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("fastlora", "kernels", "csrc", "bench", "tests", "examples", "docs")
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel without the C++ extension, built from a copy of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    skip = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", "results", "build")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / "copy" / name, ignore=skip)
    for name in FILES:
        shutil.copy(ROOT / name, folder / "copy" / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(folder / "copy")],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "FASTLORA_NO_EXT": "1"},
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_nothing_is_importable_but_fastlora(names: list[str]) -> None:
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fastlora"}
    assert len(tops) == 2


def test_every_module_is_in(names: list[str]) -> None:
    expected = set()
    for folder, place in (("fastlora", "fastlora"), ("kernels", "fastlora/kernels")):
        for file in (ROOT / folder).rglob("*.py"):
            expected.add(f"{place}/{file.relative_to(ROOT / folder).as_posix()}")
    assert expected
    assert expected <= set(names)
    assert any(name.startswith("fastlora/kernels/") for name in names)


def test_types_license_and_command_are_in(names: list[str], wheel: Path) -> None:
    assert "fastlora/py.typed" in names
    assert any(name.endswith("/LICENSE") and ".dist-info/" in name for name in names)
    (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
    with zipfile.ZipFile(wheel) as archive:
        assert "fastlora = fastlora.cli:main" in archive.read(entry_points).decode()


def test_works_where_only_the_wheel_is(wheel: Path, tmp_path: Path) -> None:
    """Unpacked, no extension: torch serves, the backend says why, no `kernels` at the top."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = f"""
import sys
sys.path[:] = [p for p in sys.path if p not in ("", {str(ROOT)!r})]
sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")
                    and "__editable__" not in getattr(f, "__name__", "")]
sys.path.insert(0, {str(tmp_path)!r})
import importlib.util
import fastlora, torch
assert fastlora.__file__.startswith({str(tmp_path)!r}), fastlora.__file__
assert importlib.util.find_spec("fastlora.kernels") is not None
for absent in ("kernels", "bench", "csrc"):
    assert importlib.util.find_spec(absent) is None, absent
from fastlora import backend
state = backend.status("cpu")
assert not state.ok and state.fix, state
y = fastlora.functional.lora_linear(
    torch.ones(2, 4), torch.ones(3, 4), torch.ones(1, 4), torch.ones(3, 1), 0.5)
assert y.tolist() == [[6.0] * 3] * 2, y
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": "", "TRITON_INTERPRET": "0"},
    )
    assert done.returncode == 0, done.stderr
