"""What only the sources can show: counters beyond 32 bits, and machines that are not this one."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"

COUNTERS = r"""
#define FASTLORA_ISA here
#include "simd/philox.h"
#include <cstdio>
using namespace fastlora::here;
int main() {
  const uint64_t edge = uint64_t(1) << 32;
  const uint64_t starts[] = {0, edge - 200, edge - 7, edge - 1, edge, edge + 5, 7 * edge - 3, 12345 * edge - 40};
  int wrong = 0;
  const uint64_t seeds[] = {0, 0x123456789ABCDEF};
  for (const uint64_t seed : seeds) {
    Philox philox(seed, 0x80000000u);
    for (const uint64_t start : starts) {
      philox.row(start, 601, [&](int64_t j, vi mask) {
        for (int i = 0; i < W; ++i) {
          uint32_t words[4];
          philox_block(start + uint64_t(j + i) / 4, seed, words);
          wrong += mask[i] != (words[(j + i) % 4] >= 0x80000000u ? -1 : 0);
        }
      });
    }
  }
  printf("%d wrong\n", wrong);
  return wrong != 0;
}
"""


# The last is the width of AVX-512 in plain vector extensions, which any machine runs.
FLAGS = {"generic": [], "avx2": ["-mavx2", "-mfma", "-mf16c"], "wide": ["-DFASTLORA_WIDTH=16"]}


def compiler(name="g++"):
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name}; to run it: apt-get install {name.replace('-g++', '') and name}")
    return path


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_counters_beyond_32_bits(flags, tmp_path):
    """Matrices of over 2^34 elements: the counter's high word changes in the middle of a row."""
    if "-mavx2" in flags and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("AVX2 is x86-64's; to run it: use such a machine")
    if "-mavx2" in flags and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2; to run it: use one that has")
    source, program = tmp_path / "counters.cpp", tmp_path / "counters"
    source.write_text(COUNTERS)
    command = [
        compiler(),
        "-std=c++17",
        "-O1",
        f"-I{CSRC}",
        str(source),
        "-o",
        str(program),
        *flags,
    ]
    subprocess.run(command, check=True, capture_output=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.stdout == "0 wrong\n"


def test_generic_kernels_compile_for_aarch64():
    gxx = compiler("aarch64-linux-gnu-g++")
    command = [gxx, "-std=c++17", "-fsyntax-only", "-Wall", "-Werror", "-fopenmp"]
    files = ["kernels_generic.cpp", "kernels_avx2.cpp", "kernels_avx512.cpp", "scratch.cpp"]
    for file in files:
        done = subprocess.run([*command, str(CSRC / file)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_kernels_take_no_template_of_the_standard_library():
    """One instruction set's copy of such a template could be linked into another's code (see kernels.h)."""
    allowed = {"cstddef", "cstdint", "cstring", "immintrin.h", "omp.h"}
    for path in [CSRC / "kernels.h", *(CSRC / "simd").glob("*.h"), *CSRC.glob("kernels_*.cpp")]:
        for line in path.read_text().splitlines():
            if line.startswith("#include <"):
                assert line[10:-1] in allowed, f"{path.name}: {line}"
