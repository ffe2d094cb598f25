"""The command line: what is refused becomes one line on stderr; what breaks in training keeps its traceback."""

from __future__ import annotations

import errno
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import checkpoints
from .arguments import parse
from .checks import words
from .running import prepare, train
from .trainer import rank, world_size


def main(argv: Sequence[str] | None = None) -> int:
    """See `fastlora.finetune.main`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        prepared = prepare(parse(arguments))
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except KeyboardInterrupt:
        _print("interrupted before training: nothing was trained")
        return 130
    except ModuleNotFoundError:
        raise  # of the extra's own: the caller says how to get it
    except Exception as error:
        text = str(error) if isinstance(error, (ValueError, TypeError, OSError)) else words(error)
        _print(f"error: {' '.join(text.split())}")
        return 2
    output_dir = Path(prepared.settings.training.output_dir)
    try:
        train(prepared)
    except KeyboardInterrupt:
        _print(f"interrupted: {_advice(output_dir)}")
        return 130
    except Exception as error:
        if _is_disk_full(error, output_dir):
            _print(f"error: no space left for {output_dir}: {_advice(output_dir)}")
        else:  # not the arguments' fault: where it broke is what helps
            traceback.print_exc()
            _print(f"error while training: {words(error)}: {_advice(output_dir)}")
        return 1
    return 0


def _print(text: str) -> None:
    print(f"fastlora finetune: {text}", file=sys.stderr)


def _advice(output_dir: Path) -> str:
    """What the same command would do now."""
    if rank():
        return "see the first process"
    usable = checkpoints.find(output_dir, world_size()).usable
    if usable is None:
        return "the same command starts over: no checkpoint was saved"
    return f"the same command resumes from {usable.name}"


def _is_disk_full(error: BaseException, output_dir: Path) -> bool:
    for link in _chain(error):
        text = str(link)
        if isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left on device" in text or "os error 28" in text:  # from Rust
            return True
        # torch.save says only that fewer bytes arrived
        if isinstance(link, RuntimeError) and (
            "PytorchStreamWriter" in text or "inline_container" in text
        ):
            return shutil.disk_usage(output_dir).free < 1 << 20
    return False


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
