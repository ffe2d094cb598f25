"""Compile every registered kernel for GPUs that are not there, and print what came out, as JSON lines or a table.

    python -m tests.kernels.compile_all [--thorough] [--table] [--processes 2]

Run without TRITON_INTERPRET. Triton's cache makes a second run quick.
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
import warnings
from pathlib import Path

PARTS = ((8, 0), (9, 0))


def measure(job: tuple[tuple[int, int], str, bool]) -> dict[str, object]:
    """Compile one kernel and read its cubin: registers, stack, spills, shared memory, matrix instructions."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    part, name, thorough = job
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    c = _find(part, name, thorough)
    result: dict[str, object] = {"part": f"sm_{part[0]}{part[1]}", "kernel": name, "error": ""}
    try:
        source = ASTSource(c.fn, c.signature, c.constexprs, c.attrs)
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", 10 * part[0] + part[1], 32),
            options={"num_warps": c.num_warps, "num_stages": c.num_stages},
        )
    except Exception as error:  # reported with its kernel, beside the others
        return result | {"error": f"{type(error).__name__}: {error}"}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tools / "cuobjdump", "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        # Disassembly is a third of the time: the stack shows spills too, and the PTX the matrix instructions.
        text, pattern = compiled.asm["ptx"], r"\b(?:wgmma\.mma_async|mma)\.sync[.\w]*"
        if thorough:
            text, pattern = (
                subprocess.run(
                    [tools / "nvdisasm", "-c", file.name],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout,
                r"\bHG?MMA\.[0-9x.A-Z]*",
            )
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    names = c.fn.arg_names
    return result | {
        "tile": {
            names[p[0]]: v for p, v in c.constexprs.items() if names[p[0]].startswith("BLOCK")
        },
        "warps": c.num_warps,
        "stages": c.num_stages,
        "registers": registers,
        "stack": stack,
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", text)),
        "shared": compiled.metadata.shared,
        "matrix": sorted(set(re.findall(pattern, text))),
        "tensor_cores": c.tensor_cores,
    }


_known: dict[tuple[tuple[int, int], bool], dict[str, object]] = {}


def _find(part, name, thorough):
    from fastlora.kernels import registry

    if (part, thorough) not in _known:
        _known[part, thorough] = {c.name: c for c in registry.compilations(part, thorough)}
    return _known[part, thorough][name]


def _row(r: dict) -> str:
    tile = " ".join(f"{k.removeprefix('BLOCK_')}{v}" for k, v in r["tile"].items())
    kind = (
        " ".join(sorted({m.split(".")[0] for m in r["matrix"]})) or "-"
    )  # HMMA, HGMMA, or PTX's mma, wgmma
    return (
        f"| {r['part']} | {r['kernel']} | {tile} | {r['warps']} | {r['stages']} | {r['registers']} | {r['stack']} "
        f"| {r['shared'] / 1024:.0f} | {kind} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--thorough", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        parser.error("unset TRITON_INTERPRET: interpreted kernels cannot be compiled")
    warnings.simplefilter("ignore")

    from fastlora.kernels import registry

    # Worked out before the workers fork, so that none of them does it again.
    jobs = []
    for part in PARTS:
        _known[part, options.thorough] = {
            c.name: c for c in registry.compilations(part, options.thorough)
        }
        jobs += [(part, name, options.thorough) for name in _known[part, options.thorough]]
    if options.table:
        print("| part | kernel | tile | warps | stages | registers | stack | shared KiB | matrix |")
        print("|---|---|---|---|---|---|---|---|---|")
    with multiprocessing.get_context("fork").Pool(options.processes) as pool:
        for result in pool.imap(measure, jobs):
            print(
                _row(result) if options.table and not result["error"] else json.dumps(result),
                flush=True,
            )


if __name__ == "__main__":
    main()
