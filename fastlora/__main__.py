"""``python -m fastlora`` and ``torchrun -m fastlora finetune``: the ``fastlora`` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
