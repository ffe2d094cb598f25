"""The command line: refusals become one line on stderr and exit code 2; everything else is left to Python."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """See `fastlora.finetune.main`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    from .arguments import parse
    from .running import prepare, train

    try:
        prepared = prepare(parse(arguments))
    except (ValueError, TypeError, OSError) as error:
        message = " ".join(str(error).split())
        print(f"fastlora finetune: error: {message}", file=sys.stderr)
        return 2
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    # From here on a failure is not the arguments': its traceback is what helps.
    train(prepared)
    return 0
