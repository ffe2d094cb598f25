"""Builds `fastlora._C`, the C++ kernels of the CPU path, and maps `kernels/` to `fastlora.kernels`.

Everything else about the package is in pyproject.toml. The extension is optional: without a compiler (or with
FASTLORA_NO_EXT=1 in the environment) the install goes on without it, and `fastlora doctor` says so.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CFLAGS = [
    "-std=c++17",
    "-O3",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-g0",
]
# Each instruction set has a translation unit of its own; only that one may use its instructions.
X86_FLAGS = {
    "kernels_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "kernels_avx512.cpp": [
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"),
        "-mprefer-vector-width=512",
        "-Wno-maybe-uninitialized",  # about gcc's own headers
    ],
}
OPENMP_PROBE = "#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n"


def extensions() -> list[Extension]:
    """The extension, or none when it is not wanted or cannot be built for a reason known beforehand."""
    if os.environ.get("FASTLORA_NO_EXT", "0") not in ("", "0"):
        return left_out("FASTLORA_NO_EXT is set")
    if sys.platform == "win32":
        return left_out("it needs gcc or clang")
    try:
        import pybind11
    except ImportError:
        return left_out("pybind11 is not installed")
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.cpp"))
    headers = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.h"))
    include_dirs = [pybind11.get_include(), "csrc"]
    return [
        Extension(
            "fastlora._C", sources, include_dirs=include_dirs, depends=headers, language="c++"
        )
    ]


def left_out(reason: str) -> list[Extension]:
    print(f"fastlora: the C++ extension fastlora._C is left out: {reason}.", file=sys.stderr)
    return []


class BuildExtension(build_ext):
    """`build_ext` with flags for each source, OpenMP where the compiler has it, and failure that is not fatal."""

    def build_extension(self, ext: Extension) -> None:
        try:
            self.add_flags(ext)
            super().build_extension(ext)
        except (
            Exception
        ) as error:  # whatever a missing or broken compiler raises: the package works without
            if os.environ.get("FASTLORA_NO_EXT") == "0":  # an explicit 0 asks for the extension
                raise
            left_out(
                f"it did not compile ({str(error).splitlines()[0] if str(error) else error!r})"
            )
            # Nor one that an earlier build in this checkout has left.
            Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
            self.failed = True

    def add_flags(self, ext: Extension) -> None:
        ext.extra_compile_args = list(CFLAGS)
        if self.has_openmp():
            ext.extra_compile_args.append("-fopenmp")
            ext.extra_link_args = ["-fopenmp"]
        compiler, plain = self.compiler, self.compiler._compile
        x86 = platform.machine().lower() in ("x86_64", "amd64")

        def compile_one(obj, src, extension, cc_args, extra_postargs, pp_opts):  # type: ignore[no-untyped-def]
            extra = X86_FLAGS.get(Path(src).name, []) if x86 else []
            plain(obj, src, extension, cc_args, [*extra_postargs, *extra], pp_opts)

        def compile_all(  # type: ignore[no-untyped-def]
            sources, output_dir=None, macros=None, include_dirs=None, debug=0,
            extra_preargs=None, extra_postargs=None, depends=None,
        ):  # fmt: skip
            """distutils' `CCompiler.compile`, several sources at a time."""
            macros, objects, extra_postargs, pp_opts, build = compiler._setup_compile(
                output_dir, macros, include_dirs, sources, depends, extra_postargs
            )
            cc_args = compiler._get_cc_args(pp_opts, debug, extra_preargs)
            with ThreadPoolExecutor(max(1, min(len(objects), os.cpu_count() or 1))) as pool:
                jobs = [
                    pool.submit(compile_one, obj, *build[obj], cc_args, extra_postargs, pp_opts)
                    for obj in objects
                    if obj in build
                ]
                for job in jobs:
                    job.result()
            return objects

        compiler.compile = compile_all

    def has_openmp(self) -> bool:
        """Whether the compiler compiles and links a program with -fopenmp (Apple's clang does not)."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.cpp")
            source.write_text(OPENMP_PROBE)
            try:
                objects = self.compiler.compile(
                    [str(source)], output_dir=folder, extra_postargs=["-fopenmp"]
                )
                self.compiler.link_executable(
                    objects,
                    "probe",
                    output_dir=folder,
                    extra_postargs=["-fopenmp"],
                    target_lang="c++",
                )
            except Exception:  # no compiler at all is reported by the build itself
                return False
        return True

    def get_outputs(self) -> list[str]:
        return [] if getattr(self, "failed", False) else super().get_outputs()

    def copy_extensions_to_source(self) -> None:
        if not getattr(self, "failed", False):
            super().copy_extensions_to_source()


kernels = [f"fastlora.kernels.{name}" for name in find_packages("kernels")]
setup(
    packages=[*find_packages(include=["fastlora", "fastlora.*"]), "fastlora.kernels", *kernels],
    package_dir={"fastlora.kernels": "kernels"},
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildExtension},
)
