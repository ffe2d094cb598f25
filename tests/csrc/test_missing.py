"""Says so when the tests of this folder could not be collected."""

import importlib.util

import pytest


def test_the_extension_is_built():
    if importlib.util.find_spec("fastlora._C") is None:
        pytest.skip(
            "fastlora._C is not built; to run tests/csrc: install g++ and pybind11, then"
            " `pip install --no-build-isolation -e .`"
        )
    from fastlora import _C

    assert _C.simd_level() in ("avx512", "avx2", "generic")
    assert (_C.F32, _C.BF16, _C.F16) == (0, 1, 2)
