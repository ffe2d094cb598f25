"""What the binding refuses, and how the instruction set is chosen."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fastlora import _C
from tests.csrc import native
from tests.csrc.test_products import Case

X, A, S = torch.zeros(4, 8), torch.zeros(2, 8), torch.zeros(4, 2)
x, a, s = X.data_ptr(), A.data_ptr(), S.data_ptr()

REFUSED = {
    "x_dtype": lambda: _C.shrink(x, 3, 8, 4, 8, [(a, 0, 2, 1)], 0.0, s, 2, 1),
    "a_dtype": lambda: _C.shrink(x, 0, 8, 4, 8, [(a, -1, 2, 1)], 0.0, s, 2, 1),
    "r": lambda: _C.shrink(x, 0, 8, 4, 8, [(a, 0, 0, 1)], 0.0, s, 2, 1),
    "p": lambda: _C.shrink(x, 0, 8, 4, 8, [(a, 0, 2, 1)], 1.0, s, 2, 1),
    "p ": lambda: _C.philox_mask(x, 1, 4, -0.1, 0, 1),
    "p  ": lambda: _C.philox_mask(x, 1, 4, float("nan"), 0, 1),
    "threads": lambda: _C.shrink(x, 0, 8, 4, 8, [(a, 0, 2, 1)], 0.0, s, 2, 0),
    "ldx": lambda: _C.shrink(x, 0, 7, 4, 8, [(a, 0, 2, 1)], 0.0, s, 2, 1),
    "ldo": lambda: _C.shrink(x, 0, 8, 4, 8, [(a, 0, 2, 1)], 0.0, s, 1, 1),
    "M": lambda: _C.shrink(x, 0, 8, -4, 8, [(a, 0, 2, 1)], 0.0, s, 2, 1),
    "x": lambda: _C.shrink(0, 0, 8, 4, 8, [(a, 0, 2, 1)], 0.0, s, 2, 1),
    "proj": lambda: _C.shrink(x, 0, 8, 4, 8, [(a, 0, 2)], 0.0, s, 2, 1),
    "proj ": lambda: _C.grad_x(x, 0, 8, 4, 8, s, 2, [(a, 0, 2, 1)], 0.0, 0, 0, 0, 1),
    "b_dtype": lambda: _C.expand(x, 0, 8, 4, 8, s, 2, 2, a, 7, 1.0, 1),
    "lds": lambda: _C.expand(x, 0, 8, 4, 8, s, 1, 2, a, 0, 1.0, 1),
    "dy_dtype": lambda: _C.grad_dy(x, 9, 8, 4, 8, s, 2, 2, a, 0, 1.0, s, 2, 0, 1),
    "ldds": lambda: _C.grad_dy(x, 0, 8, 4, 8, s, 2, 2, a, 0, 1.0, s, 1, 0, 1),
    "dx_dtype": lambda: _C.grad_x(x, 0, 8, 4, 8, s, 2, [(a, 0, 2, 1, 0)], 0.0, x, 5, 8, 1),
    "activation": lambda: _C.glu_forward(x, x, x, 0, 8, 3, 1),
    "dtype": lambda: _C.glu_forward(x, x, x, 4, 8, 0, 1),
    "n": lambda: _C.glu_backward(x, x, x, x, x, 0, 0, -1, 0, 1),
    "dh": lambda: _C.glu_backward(0, x, x, x, x, 0, 0, 8, 0, 1),
}


@pytest.mark.parametrize("argument", REFUSED)
def test_bad_arguments_are_named(argument):
    with pytest.raises(ValueError, match=rf"^{argument.strip()} "):
        REFUSED[argument]()
    assert not X.any()
    assert not S.any()


def everything() -> dict[str, object]:
    """The results of one call of each kernel."""
    case = Case(130, 259, [16, 5, 8], torch.bfloat16, torch.float16, extra=3)
    s, dx, y = case.s[:, :16], case.y.clone(), case.y.float().clone()
    gate = torch.linspace(-9, 9, 1003)
    return {
        "mask": native.philox_mask(130, 259, 0.3, 12345),
        "s": [native.shrink(case.x, case.a, case.seeds, 0.1)],
        "da": native.grad_x(case.x, case.s, case.a, dx, case.seeds, 0.1),
        "dx": [dx],
        "y": [native.expand(y, s, case.b, 0.5)],
        "ds, db": list(native.grad_dy(case.x, s, case.b, 0.5)),
        "glu": [t for act in range(3) for t in native.glu_backward(gate + 1, gate, gate - 1, act)],
    }


SCRIPT = """
import sys, torch
from tests.csrc import native, test_binding
torch.save({"level": native._C.simd_level(), **test_binding.everything()}, sys.argv[1])
"""


def in_a_process(level, code, *arguments):
    environment = {**os.environ, "FASTLORA_SIMD": level}
    command = [sys.executable, "-c", code, *arguments]
    root = Path(__file__).parents[2]
    return subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, timeout=200
    )


@pytest.mark.parametrize("level", ["generic", "avx2"])
def test_every_instruction_set_gives_the_same_numbers(level, tmp_path):
    """The same masks to the bit, the same results but for the order of the sums."""
    order = ["generic", "avx2", "avx512"]
    if order.index(_C.simd_level()) <= order.index(level):
        pytest.skip(f"{_C.simd_level()} is in use; to run it: a processor with more than {level}")
    done = in_a_process(level, SCRIPT, str(tmp_path / "results.pt"))
    assert done.returncode == 0, done.stderr
    got, want = torch.load(tmp_path / "results.pt"), everything()
    assert got.pop("level") == level
    assert torch.equal(got.pop("mask"), want.pop("mask"))
    for name in want:
        for one, other in zip(got[name], want[name]):
            # bfloat16 may round the other way where the sums differ in the last bit
            assert native.error(one, other) < (2e-2 if one.dtype == torch.bfloat16 else 5e-6), name


def test_unknown_instruction_set_is_refused():
    code = f"""
import importlib.machinery as machinery, importlib.util as util
loader = machinery.ExtensionFileLoader("fastlora._C", {_C.__file__!r})
loader.exec_module(util.module_from_spec(util.spec_from_loader("fastlora._C", loader)))
"""
    done = in_a_process("sse9", code)
    assert done.returncode != 0
    assert "FASTLORA_SIMD is 'sse9': it takes avx512, avx2 or generic" in done.stderr


def test_calls_run_side_by_side():
    """The interpreter's lock is released and no state is shared: threads get what one thread gets."""
    xs = [torch.randn(64 + i, 200) for i in range(8)]
    factor = torch.randn(16, 200)
    want = [native.shrink(x, [factor], [i], 0.2, threads=1) for i, x in enumerate(xs)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            jobs = [pool.submit(native.shrink, x, [factor], [i], 0.2, 1) for i, x in enumerate(xs)]
            assert all(torch.equal(job.result(), one) for job, one in zip(jobs, want))
