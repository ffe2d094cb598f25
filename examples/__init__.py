"""Runnable examples; `python -m examples.demo` is what `make demo` runs."""

import sys
from pathlib import Path

# Run from a checkout, the folder `kernels` would hide a package of that name: installed ones first.
_ROOT = str(Path(__file__).resolve().parent.parent)
sys.path[:] = [entry for entry in sys.path if entry not in ("", _ROOT)] + [_ROOT]
