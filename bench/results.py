"""The file of results: written, read back, its figures worked out.

It is pytest-benchmark's JSON (`benchmarks`, with every sample, `machine_info`, `commit_info`) and
under "fastlora" the rows: each peer's status, check and the name of its entry in `benchmarks`.
Figures are worked out of the samples whenever they are needed, and stand nowhere else.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measure import Spread, ratios, spread, verdict

SCHEMA = 1
STATUSES = ("ok", "unavailable", "wrong", "not run")


@dataclass(frozen=True)
class Row:
    """One row: an operation at one shape, dtype and dropout, with its peers."""

    id: str
    op: str
    dims: tuple[int, ...]
    m: int
    dtype: str
    dropout: float
    peers: dict[str, dict[str, Any]]
    samples: dict[str, list[float]]

    def time(self, peer: str) -> Spread | None:
        """A peer's seconds a step; None where it was not timed."""
        return spread(self.samples[peer]) if peer in self.samples else None

    def speedup(self, over: str = "peft", peer: str = "fastlora") -> float | None:
        """Median of `over` over median of `peer`."""
        slow, fast = self.time(over), self.time(peer)
        return slow.median / fast.median if slow and fast else None

    def speedup_spread(self, over: str = "peft", peer: str = "fastlora") -> Spread | None:
        """The same, round by round."""
        if over not in self.samples or peer not in self.samples:
            return None
        return spread(ratios(self.samples[over], self.samples[peer]))

    @property
    def verdict(self) -> str:
        """ "faster", "even" or "slower" than PEFT beyond the run's own spread; "" if not timed."""
        if "peft" not in self.samples or "fastlora" not in self.samples or self.op == "import":
            return ""
        return verdict(self.samples["peft"], self.samples["fastlora"])

    def saved_bytes(self, peer: str) -> int | None:
        return self.peers.get(peer, {}).get("saved_bytes")

    def reason(self, peer: str) -> str:
        """Why a peer has no time here, "" if it has one."""
        entry = self.peers.get(peer)
        if entry is None:
            return "not a peer of this row"
        return "" if entry["status"] == "ok" else f"{entry['status']}: {entry['reason']}"


@dataclass(frozen=True)
class Results:
    """A file of results, read."""

    rows: list[Row]
    settings: dict[str, Any]
    environment: dict[str, Any]
    commit: dict[str, Any]
    date: str
    seconds: float

    def find(self, row_id: str) -> Row | None:
        return next((row for row in self.rows if row.id == row_id), None)


def write(path: Path, written: dict[str, Any]) -> None:
    """Writes the JSON under a temporary name first, so that a killed run leaves no half of it."""
    for entry in written["benchmarks"]:
        entry.pop("options", None)  # of the fixture's own loop, which was not used
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(written, indent=1, default=str) + "\n")
    os.replace(temporary, path)


def load(path: Path) -> Results:
    """Reads a file of results. Raises ValueError, naming the file, on anything else."""
    try:
        return parse(json.loads(path.read_text()))
    except (json.JSONDecodeError, ValueError, KeyError, TypeError) as broken:
        raise ValueError(f"{path}: not a file of this suite's results: {broken!r}") from broken


def parse(written: dict[str, Any]) -> Results:
    """Results out of the file's JSON. Raises ValueError or KeyError where it is not one."""
    ours = written["fastlora"]
    if ours["schema"] != SCHEMA:
        raise ValueError(f"schema: got {ours['schema']}, takes {SCHEMA}")
    samples = {entry["name"]: entry["stats"]["data"] for entry in written["benchmarks"]}
    rows = []
    for row in ours["rows"]:
        for peer, entry in row["peers"].items():
            if entry["status"] not in STATUSES:
                raise ValueError(f"status of {peer} in {row['id']}: got {entry['status']!r}")
            if entry["timing"] is not None and entry["status"] != "ok":
                raise ValueError(f"{peer} in {row['id']}: {entry['status']}, and has a time")
        timed = {
            peer: samples[entry["timing"]]
            for peer, entry in row["peers"].items()
            if entry["timing"] is not None
        }
        rows.append(Row(**(row | {"dims": tuple(row["dims"])}), samples=timed))
    return Results(
        rows,
        ours["settings"],
        ours["environment"],
        written.get("commit_info") or {},
        written["datetime"],
        ours["seconds"],
    )
