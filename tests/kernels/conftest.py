"""The kernels under Triton's interpreter: cases, the fp64 truth and the bars."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is decorated
