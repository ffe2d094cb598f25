"""Checkpoints that can be trusted: what they were made of, and which one to resume from.

Trainer writes a checkpoint's files one after another into its final directory, `trainer_state.json` last; then `seal`
adds the size and checksum of each to `fastlora.json`. A run that is killed meanwhile leaves a directory that looks like
a checkpoint; `fault` tells it from a real one, and a real one from one that was damaged since.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import write_json

STATE = "trainer_state.json"
MANIFEST = "fastlora.json"
WEIGHTS = "adapter_model.safetensors"
_NAME = re.compile(r"checkpoint-(\d+)")
_SUMMED = (".json", ".safetensors", ".pt", ".pth", ".bin")
# A key that the file's content must have, where no checksum vouches for it
_KEYS = {
    "adapter_config.json": "r",
    STATE: "global_step",
    "optimizer.pt": "param_groups",
    "scheduler.pt": "last_epoch",
}


@dataclass
class Found:
    """The checkpoints of a directory: the newest to resume from, and what is wrong with those that are newer."""

    usable: Path | None = None
    skipped: list[str] = field(default_factory=list)
    half_written: int = 0  # how many of the skipped were being written when their run was killed

    @property
    def any(self) -> bool:
        """Whether there is any, of use or not."""
        return self.usable is not None or bool(self.skipped)


def manifest(directory: Path) -> dict[str, Any]:
    """What a checkpoint's `fastlora.json` holds; empty when there is none, as in one that Trainer made alone.

    Raises:
        ValueError: it is damaged.
    """
    try:
        found = json.loads((directory / MANIFEST).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("files", {}), dict):
        raise ValueError(f"{MANIFEST} is damaged")
    return found


def begin(directory: Path, facts: Mapping[str, Any]) -> None:
    """Empty a checkpoint's directory, and note what it will be of, before its first file is written."""
    # What an earlier run left there must not pass for a part of this one; its checksums go first, so that a kill
    # meanwhile leaves nothing that looks like a whole one gone bad.
    (directory / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / MANIFEST, facts)


def seal(directory: Path, facts: Mapping[str, Any]) -> None:
    """Bring a checkpoint's files to the disk, and note the size and checksum of each."""
    files = {}
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.suffix in _SUMMED and path.name != MANIFEST:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            files[path.name] = {"size": path.stat().st_size, "crc32": _checksum(path)}
    write_json(directory / MANIFEST, {**facts, "files": files})


def fault(directory: Path, processes: int = 1) -> str | None:
    """Why a checkpoint cannot be resumed from by as many processes as made it, or None when it can."""
    if not directory.is_dir():
        return "there is no such directory"
    random_states = (
        ["rng_state.pth"]
        if processes <= 1
        else [f"rng_state_{rank}.pth" for rank in range(processes)]
    )
    needed = ["adapter_config.json", STATE, WEIGHTS, "optimizer.pt", "scheduler.pt", *random_states]
    try:
        sums = manifest(directory).get("files")
    except ValueError as error:
        return str(error)
    for name in dict.fromkeys([*needed, *(sums or ())]):
        path = directory / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            if sums is not None and name in sums:
                reason = _differs(path, sums[name])
            else:
                reason = _unreadable(path)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if reason:
            return f"{name} {reason}"
    return None


def made_by(directory: Path) -> int | None:
    """How many processes made a checkpoint; None where that cannot be told."""
    try:
        processes = manifest(directory).get("processes")
    except ValueError:
        processes = None
    if isinstance(processes, int):
        return processes
    if (directory / "rng_state.pth").is_file():
        return 1
    # One alone says nothing: another may have been about to be written.
    count = len(list(directory.glob("rng_state_*.pth")))
    return count if count > 1 else None


def step(directory: Path) -> int:
    """The step that a checkpoint was made behind."""
    return int(json.loads((directory / STATE).read_bytes())["global_step"])


def find(output_dir: Path, processes: int = 1) -> Found:
    """Look for the newest checkpoint in `output_dir` that can be resumed from, newest first."""
    names = []
    if output_dir.is_dir():
        for path in output_dir.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir():
                names.append((int(match[1]), path))
    found = Found()
    for _, path in sorted(names, reverse=True):
        reason = fault(path, made_by(path) or processes)
        if reason is None:
            found.usable = path
            break
        found.skipped.append(f"{path.name}: {reason}")
        found.half_written += not _sealed(path)
    return found


def _sealed(directory: Path) -> bool:
    try:
        return "files" in manifest(directory)
    except ValueError:
        return True


def _differs(path: Path, noted: Any) -> str | None:
    size = path.stat().st_size
    if not isinstance(noted, dict) or size != noted.get("size"):
        return (
            "is cut off"
            if isinstance(noted, dict) and size < noted.get("size", 0)
            else "is damaged"
        )
    return None if _checksum(path) == noted.get("crc32") else "is damaged"


def _checksum(path: Path) -> int:
    # Against damage, not malice; CRC-32 runs at memory's speed, and a checkpoint may hold gigabytes.
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _unreadable(path: Path) -> str | None:
    """What is wrong with a file of no known checksum, as far as reading it tells."""
    try:
        if path.suffix == ".json":
            content = json.loads(path.read_bytes())
        elif path.suffix == ".safetensors":
            return None if _whole_safetensors(path) else "is cut off or damaged"
        else:
            import torch
            from transformers.trainer_pt_utils import safe_globals

            with safe_globals():
                content = torch.load(path, weights_only=True, map_location="cpu")
    except Exception:  # what a damaged archive makes torch raise is of many kinds
        return "is cut off or damaged"
    key = _KEYS.get(path.name, "cpu")
    if not isinstance(content, dict) or key not in content:
        return f"has no {key}"
    return None


def _whole_safetensors(path: Path) -> bool:
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + length:
            return False
        header = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return bool(ends) and size == 8 + length + max(ends)
