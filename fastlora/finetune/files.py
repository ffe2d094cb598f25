"""Files that are written whole or not at all, and a directory that is tried before it is needed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


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


def make_writable(output_dir: Path) -> list[Path]:
    """Create the directory and write a file in it, to learn before training whether that works.

    Returns:
        The directories that were made for it, the innermost first.

    Raises:
        ValueError: it does not work.
    """
    made = [path for path in (output_dir, *output_dir.parents) if not path.exists()]
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".probe-", dir=output_dir) as file:
            file.write(b"x")
    except OSError as error:
        remove_empty(made)
        raise ValueError(f"output_dir: cannot write in {output_dir} ({error.strerror})") from None
    return made


def remove_empty(directories: list[Path]) -> None:
    """Remove those of the directories that hold nothing, in this order."""
    for path in directories:
        with suppress(OSError):
            path.rmdir()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
