"""One case from build to figures: peers built, checked against the truth, timed, recorded.

A peer that cannot run keeps its place in the row, with the reason; one whose result is wrong keeps
it too, and gets no time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from bench import check, imports
from bench.layers import LayerWork
from bench.measure import Timings, interleave
from bench.model import ModelWork
from bench.peers import Unavailable
from bench.registry import Case
from bench.settings import Settings

OK, UNAVAILABLE, WRONG, NOT_RUN = "ok", "unavailable", "wrong", "not run"


@dataclass
class Entry:
    """One peer in one row. status: "ok", "unavailable", "wrong" or "not run"; reason: why not ok."""

    peer: str
    dropout: float
    status: str = OK
    reason: str = ""
    note: str = ""
    check: check.Verdict | None = None
    saved_bytes: int | None = None
    timing: str | None = None  # the name of its figures among the file's benchmarks
    work: Any = field(default=None, repr=False)

    def refuse(self, status: str, reason: str) -> None:
        self.status, self.reason, self.work = status, reason, None

    def as_dict(self) -> dict[str, Any]:
        row = {
            name: getattr(self, name)
            for name in ("status", "reason", "note", "timing", "saved_bytes")
        }
        verdict = None
        if self.check is not None:
            verdict = {k: v for k, v in asdict(self.check).items() if k != "wrong" and v == v}
        return row | {"check": verdict}


@dataclass
class Outcome:
    """What one case came to: its entries, and the times of those that were timed, by entry index."""

    case: Case
    entries: list[Entry]
    timings: Timings

    @property
    def wrong(self) -> list[str]:
        return [
            f"{self.case.row_id(e.dropout)} {e.peer}: {e.reason}"
            for e in self.entries
            if e.status == WRONG
        ]

    def name(self, entry: Entry) -> str:
        """An entry's name among the file's benchmarks; the base has no dropout and is timed once."""
        if entry.peer == "frozen":
            return f"{self.case.id}[frozen]"
        return f"{self.case.row_id(entry.dropout)}[{entry.peer}]"

    def rows(self) -> list[dict[str, Any]]:
        """The case's rows as they stand in the file."""
        case = self.case
        base = [e for e in self.entries if e.peer == "frozen"]
        found = []
        for dropout in case.dropouts:
            mine = base + [e for e in self.entries if e.peer != "frozen" and e.dropout == dropout]
            peers = {e.peer: e.as_dict() for e in mine}
            for peer, reason in case.left_out.items():
                if reason:
                    peers[peer] = Entry(peer, dropout, NOT_RUN, reason).as_dict()
            found.append(
                {
                    "id": case.row_id(dropout),
                    "op": case.op,
                    "dims": list(case.dims),
                    "m": case.m,
                    "dtype": case.dtype,
                    "dropout": dropout,
                    "peers": peers,
                }
            )
        return found


def not_run(case: Case, reason: str) -> Outcome:
    """The outcome of a case that was never begun."""
    entries = _entries(case)
    for entry in entries:
        entry.refuse(NOT_RUN, reason)
    return Outcome(case, entries, Timings({}, 1))


def run(case: Case, settings: Settings) -> Outcome:
    """Builds, checks and times every peer of a case."""
    if case.op == "import":
        return _run_imports(case)
    entries = _entries(case)
    make: Any = ModelWork if case.op == "model" else LayerWork
    for entry in entries:
        _try(entry, functools.partial(_build, entry, make, case))
    (_check_model if case.op == "model" else _check_layers)(case, entries)
    steps = {str(i): e.work.step for i, e in enumerate(entries) if e.status == OK}
    timings = Timings({}, 1)
    if case.repeats:
        # The check has run each peer of a model once: as good a warm-up as any, and 20 s in bf16.
        warm_up = 0 if case.op == "model" else 2
        timings = interleave(
            steps, case.repeats, settings.sample_s, settings.row_s, warm_up=warm_up
        )
    outcome = Outcome(case, entries, timings)
    for index, entry in enumerate(entries):
        entry.work = None
        if str(index) in timings.seconds:
            entry.timing = outcome.name(entry)
    return outcome


def _entries(case: Case) -> list[Entry]:
    """The base once, then each other peer at each dropout."""
    base = [Entry("frozen", case.dropouts[0])] if "frozen" in case.peers else []
    others = [
        Entry(peer, dropout) for dropout in case.dropouts for peer in case.peers if peer != "frozen"
    ]
    return base + others


def _build(entry: Entry, make: Any, case: Case) -> None:
    entry.work = make(case, entry.peer, entry.dropout)
    entry.note = entry.work.note


def _try(entry: Entry, action: Callable[[], Any]) -> Any:
    """Runs one peer's part; an exception is this peer's result, and the row goes on without it.

    A compiler that cannot compile makes its peer unavailable; a layer that raises is wrong.
    """
    if entry.status != OK:
        return None
    try:
        return action()
    except Unavailable as reason:
        entry.refuse(UNAVAILABLE, str(reason))
    except check.Wrong as wrong:
        entry.refuse(WRONG, _line(wrong))
    except Exception as failed:  # any peer may fail in any way: that is a result to report
        status = UNAVAILABLE if entry.peer == "compile" else WRONG
        entry.refuse(status, f"{type(failed).__name__}: {_line(failed)}")
    return None


def _line(failed: BaseException) -> str:
    text = " ".join(str(failed).split())
    return text if len(text) <= 300 else text[:297] + "..."


def _accept(entry: Entry, verdict: check.Verdict) -> None:
    entry.check = verdict
    if verdict.wrong:
        entry.refuse(WRONG, verdict.wrong)


def _check_layers(case: Case, entries: list[Entry]) -> None:
    """Every peer against fp64, under the very masks that it dropped by."""
    measured: dict[float, Mapping[str, check.Error]] = {}

    def measure(entry: Entry) -> Mapping[str, check.Error]:
        work = entry.work
        results = work.results()
        return check.errors(results, work.reference(work.dropped()))

    # PEFT first: in a half type its error is the others' yardstick.
    for entry in sorted(entries, key=lambda e: e.peer != "peft"):
        found = _try(entry, functools.partial(measure, entry))
        if found is None:
            continue
        if entry.peer == "peft":
            measured[entry.dropout] = found
        # Torch's own paths have a bar of their own; ours without a PEFT to compare with, theirs.
        unfused = None if entry.peer in ("peft", "frozen") else measured.get(entry.dropout)
        _accept(entry, check.judge(found, entry.work.dtype, unfused))


def _check_model(case: Case, entries: list[Entry]) -> None:
    """Loss and every gradient against fp64 with dropout off; dropout itself by its slope (fp32).

    The frozen base is torch's own path and has no gradient to compare.
    """
    reference: dict[str, Tensor] | None = None
    measured: tuple[dict[str, check.Error], dict[str, check.Error]] | None = None
    for entry in sorted(entries, key=lambda e: (e.peer != "peft", e.dropout)):
        if entry.status != OK:
            continue
        if entry.peer == "frozen":
            entry.note = "not checked: torch's own path, nothing trained"
            _try(entry, entry.work.step)
            continue
        if reference is None:
            if entry.peer != "peft":
                entry.refuse(
                    UNAVAILABLE, "no reference: it is made from PEFT's layers, which failed"
                )
                continue
            reference = _try(entry, entry.work.reference)
            if reference is None:
                continue
        found = _try(entry, functools.partial(_against, entry, reference))
        if found is None:
            continue
        if entry.peer == "peft" and measured is None:
            measured = found
        unfused = None if entry.peer == "peft" else measured
        _accept(entry, check.judge_model(*found, entry.work.dtype, unfused))
        if entry.status == OK and entry.dropout and case.dtype == "float32":
            wrong = _try(entry, entry.work.dropout_wrong)
            if wrong:
                entry.refuse(WRONG, wrong)
        if entry.peer == "compile" and entry.status == OK:
            _try(entry, entry.work.step)  # compiles for training, outside every timing
        if entry.status == OK and case.dtype == "float32":
            entry.saved_bytes = _bytes(entry)
    for entry in entries:
        if entry.peer == "frozen" and entry.status == OK and case.dtype == "float32":
            entry.saved_bytes = _bytes(entry)


def _against(
    entry: Entry, reference: Mapping[str, Tensor]
) -> tuple[dict[str, check.Error], dict[str, check.Error]]:
    """Errors of a model's results, one by one and over all layers."""
    results = entry.work.results()
    return check.errors(results, reference), check.pooled(results, reference)


def _bytes(entry: Entry) -> int | None:
    try:
        return entry.work.saved_bytes()
    except Unavailable as reason:
        entry.note = f"{entry.note}; bytes not counted: {reason}".lstrip("; ")
        return None


def _run_imports(case: Case) -> Outcome:
    found = imports.measure(case.repeats)
    ours = Entry("fastlora", 0.0, note="on top of it")
    entries = [Entry("frozen", 0.0, note="import torch"), ours]
    if found.failed:
        for entry in entries:
            entry.refuse(UNAVAILABLE, found.failed)
    elif found.wrong:
        ours.refuse(WRONG, found.wrong)
    seconds = {
        str(i): found.timings.seconds[e.peer] for i, e in enumerate(entries) if e.status == OK
    }
    outcome = Outcome(case, entries, Timings(seconds, 1))
    for entry in entries:
        if entry.status == OK:
            entry.timing = outcome.name(entry)
    return outcome
