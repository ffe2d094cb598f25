"""Times of candidates, taken on the device and kept in a file.

The file is JSON, one for each GPU model, set of versions and state of the kernels' source, under FASTLORA_CACHE_DIR
(else the user's cache folder). Processes that write it at once each add what they found: the file is read again
under a lock, and replaced whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

_log = logging.getLogger("fastlora")
FORMAT = 1


def folder() -> Path:
    """Where the files lie: FASTLORA_CACHE_DIR, else fastlora/ in the user's cache folder."""
    named = os.environ.get("FASTLORA_CACHE_DIR")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fastlora"


@functools.cache
def source_hash() -> str:
    """Of every file of this package: a changed kernel is a new candidate."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def cache(device: torch.device) -> Cache:
    """The file of this device."""
    return _cache(torch.cuda.get_device_name(device), folder())


@functools.cache
def _cache(gpu: str, where: Path) -> Cache:
    stack = f"torch{torch.__version__}-triton{triton.__version__}-{source_hash()}"
    return Cache(where / (re.sub(r"[^\w.+-]+", "-", f"{gpu}-{stack}") + ".json"))


class Cache:
    """Choices by problem in one JSON file. A file that cannot be read counts as empty, and is replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        """Every choice in the file, {} if there is none or it is broken (logged)."""
        try:
            written = json.loads(self.path.read_text())
            choices = written["choices"]
            if written["format"] != FORMAT or not isinstance(choices, dict):
                raise ValueError(f"format {written['format']!r}")
            return choices
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError) as broken:
            _log.warning("fastlora: %s is no file of choices and is ignored: %r", self.path, broken)
            return {}

    def get(self, key: str, names: Sequence[str]) -> tuple[str, str, dict[str, float]] | None:
        """(name, "kept", seconds) of a problem; None if unknown, or not one of today's candidates."""
        entry: Any = self.read().get(key)
        try:
            name, seconds = entry["name"], {k: float(v) for k, v in entry["seconds"].items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        return (name, "kept", seconds) if name in names else None

    def put(self, key: str, name: str, seconds: dict[str, float]) -> None:
        """Add one choice; where the folder cannot be written (logged once), it lasts as long as the process."""
        try:
            with self._locked():
                choices = self.read() | {key: {"name": name, "seconds": seconds}}
                temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
                temporary.write_text(
                    json.dumps({"format": FORMAT, "choices": choices}, indent=1, sort_keys=True)
                )
                os.replace(temporary, self.path)
        except OSError as failed:
            _warn_unwritable(self.path.parent, str(failed))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(
                lock, fcntl.LOCK_EX
            )  # released when the file closes, also if the process dies
            yield


@functools.cache
def _warn_unwritable(where: Path, why: str) -> None:
    _log.warning(
        "fastlora: choices cannot be kept in %s (%s); set FASTLORA_CACHE_DIR to a folder that can be written",
        where,
        why,
    )


def measure(names: Sequence[str], run: Callable[[str], object]) -> dict[str, float]:
    """Median seconds of every candidate that runs, {} if none does; the cache of the device is flushed between runs."""
    from triton.testing import do_bench

    seconds = {}
    for name in names:
        try:
            run(name)  # compiles, and chooses what it rests on in turn
            taken = (
                do_bench(functools.partial(run, name), warmup=5, rep=25, return_mode="median") / 1e3
            )
        except (
            RuntimeError,
            triton.errors.TritonError,
        ) as failed:  # out of memory, or of a block's resources
            _log.warning(
                "fastlora: candidate %s does not run here and is passed over: %s", name, failed
            )
            continue
        if math.isfinite(taken) and taken > 0:
            seconds[name] = taken
    return seconds
