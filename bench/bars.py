"""The numbers to reach, each worked out of a file of results: reached, missed, or not measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bench.results import Results, Row

REACHED, MISSED, NOT_MEASURED = "reached", "missed", "not measured"
STEP = "SmolLM2-135M training step, batch 4x128, r=16 on all seven projections"
STEP_BARS = (
    ("float32", 0.1, 1.40),
    ("bfloat16", 0.1, 1.40),
    ("float32", 0.0, 1.10),
    ("bfloat16", 0.0, 1.10),
)
BYTES_BAR = 0.52
IMPORT_BAR_S = 0.3
LAYER_OPS = ("linear", "qkv", "mlp", "embedding")


@dataclass(frozen=True)
class Bar:
    """what: what is measured. bar: what it takes. measured: what it came to, or why it did not."""

    what: str
    bar: str
    measured: str
    status: str


def bars(found: Results) -> list[Bar]:
    """Every bar, in the order in which the README shows them."""
    return [
        *(_step(found, *bar) for bar in STEP_BARS),
        _bytes(found),
        _layers(row for row in found.rows if row.op in LAYER_OPS),
        _import(found),
    ]


def _step(found: Results, dtype: str, dropout: float, least: float) -> Bar:
    what = f"{STEP}, dropout {dropout:g}, {dtype}"
    bar = f"≥ {least:.2f}x as fast as PEFT"
    row = found.find(f"model-4x128-{dtype}-p{dropout:g}")
    speedup = row.speedup() if row else None
    if row is None or speedup is None:
        return Bar(what, bar, _why_not(row), NOT_MEASURED)
    ours, theirs, limit = row.time("fastlora"), row.time("peft"), row.time("frozen")
    assert ours is not None and theirs is not None
    measured = f"{speedup:.2f}x ({theirs.median:.2f} s to {ours.median:.2f} s"
    measured += f"; frozen base {limit.median:.2f} s)" if limit else ")"
    return Bar(what, bar, measured, REACHED if speedup >= least else MISSED)


def _bytes(found: Results) -> Bar:
    what = "bytes saved for its backward, dropout 0.1, float32"
    bar = f"≤ {BYTES_BAR}x PEFT's"
    row = found.find("model-4x128-float32-p0.1")
    ours = row.saved_bytes("fastlora") if row else None
    theirs = row.saved_bytes("peft") if row else None
    if row is None or not ours or not theirs:
        return Bar(what, bar, _why_not(row, "not counted"), NOT_MEASURED)
    base = row.saved_bytes("frozen")
    measured = f"{ours / theirs:.2f}x ({theirs / 2**20:.0f} MiB to {ours / 2**20:.0f} MiB"
    measured += f"; frozen base {base / 2**20:.0f} MiB)" if base else ")"
    return Bar(what, bar, measured, REACHED if ours <= BYTES_BAR * theirs else MISSED)


def _layers(rows: Iterable[Row]) -> Bar:
    what = "one layer, any M, any shape of the suite"
    bar = "never slower than PEFT beyond the run's spread"
    rows = list(rows)
    timed = [row for row in rows if row.verdict]
    wrong = [row for row in rows if row.peers.get("fastlora", {}).get("status") == "wrong"]
    if not timed and not wrong:
        return Bar(what, bar, _why_not(rows[0] if rows else None), NOT_MEASURED)
    slower = [row for row in timed if row.verdict == "slower"]
    faster = sum(row.verdict == "faster" for row in timed)
    measured = (
        f"{len(timed)} rows: {faster} faster, {len(timed) - faster - len(slower)} even, "
        f"{len(slower)} slower"
    )
    if slower:
        worst = min(slower, key=lambda row: row.speedup() or 0.0)
        measured += f" (worst {worst.speedup():.2f}x, {worst.id})"
    if wrong:
        measured += f"; {len(wrong)} wrong and untimed"
    if missing := len(rows) - len(timed) - len(wrong):
        measured += f"; {missing} not timed"
    # A row that was not timed is no proof of anything.
    status = MISSED if slower or wrong else (NOT_MEASURED if missing else REACHED)
    return Bar(what, bar, measured, status)


def _import(found: Results) -> Bar:
    what = "`import fastlora` beyond `import torch`"
    bar = f"≤ {IMPORT_BAR_S} s, no device touched"
    row = found.find("import")
    ours = row.time("fastlora") if row else None
    if row is None or ours is None:
        entry = row.peers.get("fastlora", {}) if row else {}
        status = MISSED if entry.get("status") == "wrong" else NOT_MEASURED
        return Bar(what, bar, _why_not(row), status)
    measured = f"{ours.median:.3f} s (p10 {ours.p10:.3f}, p90 {ours.p90:.3f})"
    return Bar(what, bar, measured, REACHED if ours.median <= IMPORT_BAR_S else MISSED)


def _why_not(row: Row | None, otherwise: str = "not timed") -> str:
    if row is None:
        return "no such row in this run"
    reasons = [f"{p} {row.reason(p)}" for p in ("fastlora", "peft") if row.reason(p)]
    return "; ".join(reasons) or otherwise
