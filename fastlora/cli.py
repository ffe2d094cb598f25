"""The ``fastlora`` command: ``doctor``, ``finetune``.

Exit codes: 0 done; 1 the work could not be done, the reason is printed in one line; 2 the command
line is wrong; 130 interrupted.
"""

import argparse
import difflib
import importlib.util
import io
import sys
from collections.abc import Sequence
from typing import NoReturn

COMMANDS = {
    "doctor": "versions, devices, which backend serves which operation and why not the others",
    "finetune": "fine-tune a model on a JSONL file with LoRA (needs fastlora[finetune])",
}
FINETUNE_NEEDS = ("transformers", "peft", "accelerate", "safetensors", "matplotlib", "yaml")


class _Parser(argparse.ArgumentParser):
    """Names the nearest command when the one given does not exist."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nRun `{self.prog} --help` for what it takes.\n")


def _parser() -> argparse.ArgumentParser:
    commands = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
    parser = _Parser(
        prog="fastlora",
        usage="fastlora [--version] COMMAND ...",
        description="Fused LoRA layers for PEFT and PyTorch models.",
        epilog=f"commands:\n{commands}\n\n`fastlora COMMAND --help` tells what a command takes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=True,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    return parser


def _unknown(parser: argparse.ArgumentParser, command: str) -> NoReturn:
    near = difflib.get_close_matches(command, COMMANDS, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    parser.error(f"command: got {command!r}, takes {', '.join(COMMANDS)}.{hint}")


def _doctor(arguments: Sequence[str]) -> int:
    parser = _Parser(prog="fastlora doctor", description=COMMANDS["doctor"], allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="machine-readable, on one object")
    options = parser.parse_args(arguments)
    from . import doctor

    print(doctor.to_json() if options.json else doctor.to_text())
    return 0


def _finetune(arguments: Sequence[str]) -> int:
    missing = [name for name in FINETUNE_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"fastlora finetune: not installed: {', '.join(missing)}; "
            'run: pip install "fastlora[finetune]"',
            file=sys.stderr,
        )
        return 1
    from . import finetune

    return finetune.main(list(arguments))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own) and return its exit code.

    Whatever follows ``finetune`` is passed on untouched, ``--help`` included.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Of a terminal that is not UTF-8, a table's frame or an arrow would stop the command
            stream.reconfigure(errors="replace")
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not arguments:
        parser.print_help()
        return 2
    command, rest = arguments[0], arguments[1:]
    if command == "doctor":
        return _doctor(rest)
    if command == "finetune":
        return _finetune(rest)
    if not command.startswith("-"):
        _unknown(parser, command)
    options = parser.parse_args(arguments)
    if options.version:
        from . import __version__

        print(f"fastlora {__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
