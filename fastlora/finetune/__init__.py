"""`fastlora finetune`: one command that fine-tunes a causal language model with fused LoRA layers.

The training loop is Hugging Face's `Trainer`, the adapter is PEFT's; this package adds the data (`rows`, `encoding`,
`batches`), the checks (`arguments`), resuming (`checkpoints`) and the report (`report`).

From Python::

    from fastlora.finetune import parse, run
    result = run(parse({"model": "path/to/model", "data": ["train.jsonl"], "output_dir": "out", "r": 16}))
    result.metrics, result.model

transformers, peft and accelerate are imported when a name of this package is first used, not before.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arguments import Settings, parse
    from .models import load_model, load_tokenizer
    from .running import Result, run

__all__ = ["Result", "Settings", "load_model", "load_tokenizer", "main", "parse", "run"]

# What the extra `finetune` brings, by the names that they are imported under
_PACKAGES = ("accelerate", "matplotlib", "peft", "yaml", "rich", "safetensors", "transformers")
_HOMES = {
    "Settings": "arguments",
    "parse": "arguments",
    "Result": "running",
    "load_model": "models",
    "load_tokenizer": "models",
    "run": "running",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command's entry point.

    Args:
        argv: the arguments after `fastlora finetune`; None reads `sys.argv[1:]`.

    Returns:
        0 when the run finished; 2 (after one line on stderr) when an argument, a file or the data was refused; 1 when a
        package that it needs is not installed, or training failed; 130 when it was interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # of a terminal that is not UTF-8, → would stop it
    try:
        from .command import main as command

        return command(argv)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "fastlora":
            raise  # a broken install of this package, not a missing extra
        print(
            f"fastlora finetune: the package {package!r} is not installed; run: {_install(package)}",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("fastlora finetune: interrupted: nothing was trained", file=sys.stderr)
        return 130


def _install(package: str) -> str:
    """How to get a package: by the extra where that holds it."""
    return 'pip install "fastlora[finetune]"' if package in _PACKAGES else f"pip install {package}"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f".{_HOMES[name]}", __name__)
    return getattr(module, name)
