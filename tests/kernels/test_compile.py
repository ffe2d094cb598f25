"""Every kernel and tile, compiled ahead of time for sm_80 and sm_90: no GPU needed, only Triton's own ptxas."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastlora.kernels import config, registry

ROOT = Path(__file__).resolve().parents[2]
SHARED_LIMIT = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
}  # bytes a block may have, CUDA C++ guide, table 27


def compile_all(*flags: str) -> list[dict]:
    """Results of tests.kernels.compile_all in a process of its own: this one has the interpreter's kernels."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_all", *flags],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def complaints(result: dict) -> list[str]:
    """What is wrong with one compiled kernel."""
    if result["error"]:
        return [result["error"]]
    limit = SHARED_LIMIT[result["part"]]
    found = []
    if result["stack"] or result["spills"]:
        found.append(
            f"spills: {result['stack']} bytes of stack, {result['spills']} local loads and stores"
        )
    if result["shared"] > limit:
        found.append(f"{result['shared']} bytes of shared memory of {limit}")
    if result["tensor_cores"] and not result["matrix"]:
        found.append("no matrix instruction")
    return found


def check(results: list[dict]) -> None:
    bad = [
        f"{r['part']} {r['kernel']}: {'; '.join(found)}"
        for r in results
        if (found := complaints(r))
    ]
    assert not bad, "\n".join(bad)
    assert {r["part"] for r in results} == set(SHARED_LIMIT)


@pytest.mark.timeout(900)
def test_every_kernel_compiles_without_spills():
    check(compile_all())


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_combination_compiles_without_spills():
    check(compile_all("--thorough"))


def test_every_tile_is_registered():
    """No row of the tables escapes the compile test."""
    used = set()
    for part in ((8, 0), (9, 0)):
        for entry in registry.entries():
            for launch in entry.launches(part):
                sizes = {n: v for n, v in launch.arguments.items() if n.startswith("BLOCK")}
                used.add(
                    (
                        launch.kernel.__name__,
                        sizes.get("BLOCK_M"),
                        launch.num_warps,
                        launch.num_stages,
                        sizes.get("BLOCK_N", sizes.get("BLOCK_D", sizes.get("BLOCK_K"))),
                        sizes.get("BLOCK_K"),
                    )
                )
    tables = {
        "_gemm_kernel": (config.GEMM, lambda t: (t.n, t.k)),
        "_shrink_kernel": (config.SHRINK, lambda t: (t.k, t.k)),
        "_grad_dy_kernel": (config.GRAD_DY, lambda t: (t.n, None)),
        "_expand_kernel": (config.EXPAND, lambda t: (t.n, None)),
        "_x_pass_kernel": (config.X_PASS, lambda t: (t.k, t.k)),
        "_embedding_kernel": (config.EMBEDDING, lambda t: (t.n, None)),
    }
    for kernel, (table, sizes) in tables.items():
        for name, tile in table.items():
            if name != "interpreted":
                row = (kernel, tile.m, tile.warps, tile.stages, *sizes(tile))
                assert row in used, f"{kernel}: {name} is compiled by no entry of the registry"
