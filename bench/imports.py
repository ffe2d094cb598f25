"""What `import fastlora` costs beyond `import torch`, each time in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measure import Timings

ROOT = Path(__file__).resolve().parent.parent
# Imported only when used, so never by `import fastlora` itself. torch.cuda is asked, not started.
HEAVY = ("transformers", "peft", "triton", "accelerate", "datasets", "matplotlib")
PROGRAM = """
import json, sys, time
start = time.perf_counter()
import torch
middle = time.perf_counter()
before = set(sys.modules)
import fastlora
end = time.perf_counter()
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps({"torch": middle - start, "fastlora": end - middle, "new": sorted(new),
                  "cuda": torch.cuda.is_initialized()}))
"""


@dataclass
class Imports:
    """Seconds of "frozen" (import torch) and of "fastlora" (what comes on top of it).

    wrong: what it did that an import must not do. failed: why it could not be imported.
    """

    timings: Timings
    wrong: str = ""
    failed: str = ""


def measure(repeats: int, program: str = PROGRAM) -> Imports:
    """Imports torch, then fastlora, in `repeats` processes, after one that fills the disk's cache."""
    seconds: dict[str, list[float]] = {"frozen": [], "fastlora": []}
    wrong = ""
    for round_number in range(repeats + 1):
        try:
            found = _once(program)
        except RuntimeError as failed:
            return Imports(Timings({}, 1), failed=str(failed))
        heavy = sorted(set(found["new"]) & set(HEAVY))
        if heavy or found["cuda"]:
            wrong = f"imports {', '.join(heavy)}" if heavy else "starts a CUDA context"
        if round_number:
            seconds["frozen"].append(found["torch"])
            seconds["fastlora"].append(found["fastlora"])
    return Imports(Timings(seconds, 1), wrong=wrong)


def _once(program: str) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=120,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(lines[-1])
    return json.loads(done.stdout.splitlines()[-1])
