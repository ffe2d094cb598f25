"""Checkpoints that can be trusted: which one to resume from, and files written whole or not at all.

Trainer writes a checkpoint's files one after another into its final directory, `trainer_state.json` last. A run that is
killed meanwhile leaves a directory that looks like a checkpoint; `fault` tells it from a real one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def fault(directory: Path, world_size: int = 1) -> str | None:
    """Why a checkpoint cannot be resumed from, or None when it can.

    Every file is looked into as far as its format tells that it is complete: JSON parses, a `.pt` is a closed zip
    archive, a `.safetensors` is as long as its header says.
    """
    random_states = (
        ["rng_state.pth"]
        if world_size <= 1
        else [f"rng_state_{rank}.pth" for rank in range(world_size)]
    )
    for name in ("adapter_config.json", STATE):
        try:
            json.loads((directory / name).read_bytes())
        except FileNotFoundError:
            return f"{name} is missing"
        except ValueError:
            return f"{name} is cut off"
    weights = directory / "adapter_model.safetensors"
    if not weights.is_file():
        return f"{weights.name} is missing"
    if not _whole_safetensors(weights):
        return f"{weights.name} is cut off"
    for name in ("optimizer.pt", "scheduler.pt", *random_states):
        if not (directory / name).is_file():
            return f"{name} is missing"
        if not zipfile.is_zipfile(directory / name):
            return f"{name} is cut off"
    return None


def last_usable(output_dir: Path, world_size: int = 1) -> tuple[Path | None, list[str]]:
    """The newest checkpoint in `output_dir` that can be resumed from, and what was wrong with newer ones."""
    found = []
    if output_dir.is_dir():
        for path in output_dir.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir():
                found.append((int(match[1]), path))
    skipped: list[str] = []
    for _, path in sorted(found, reverse=True):
        reason = fault(path, world_size)
        if reason is None:
            return path, skipped
        skipped.append(f"{path.name}: {reason}")
    return None, skipped


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` fill a temporary file beside `path`, then rename it: readers see the old file or the new one."""
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())  # mkstemp makes it private
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole or not at all; ValueError on NaN and infinities, which JSON does not have."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def save_directory(save: Callable[[str], Any], directory: Path) -> None:
    """Have `save` write into a fresh directory, then move its files into `directory` one rename each."""
    temporary = Path(tempfile.mkdtemp(prefix=".adapter-", dir=directory))
    try:
        save(str(temporary))
        # The weights last: a reader that finds them finds the config that they were saved with.
        for path in sorted(temporary.iterdir(), key=lambda path: path.suffix == ".safetensors"):
            if path.is_file():
                path.chmod(0o666 & ~_umask())  # safetensors makes its files private
                os.replace(path, directory / path.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def make_writable(output_dir: Path) -> None:
    """Create the directory and write a file in it, to learn before training whether that works.

    Raises:
        ValueError: it does not.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".probe-", dir=output_dir) as file:
            file.write(b"x")
    except OSError as error:
        raise ValueError(f"output_dir: cannot write in {output_dir} ({error.strerror})") from None


def _whole_safetensors(path: Path) -> bool:
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + length:
            return False
        try:
            header = json.loads(file.read(length))
        except ValueError:
            return False
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return size == 8 + length + max(ends, default=0)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
