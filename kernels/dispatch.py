"""Which candidate serves an operation at a shape: measured once and kept in a file, or worked out by a model.

Every operation has candidates of one result:
    fused     the low-rank update in the accumulator of our own GEMM
    library   the library's GEMM, and the update added in place
    unfused   library operations alone, as PEFT runs them
and our own GEMM has its tiles. On a GPU the first call of a problem times its candidates, and the winner is kept in
a file (tuning.py). FASTLORA_AUTOTUNE=0, a CUDA graph's capture and a GPU that is only assumed take the model of
cost.py instead. Under the interpreter nothing is chosen by time: the first candidate serves.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from . import cost, tuning
from .cost import Problem
from .launch import INTERPRETED, assumed, capability

OPERATIONS = ("fused", "library", "unfused")


class Choice(NamedTuple):
    """name: the candidate. how: "measured", "kept" (in the file) or "modelled". seconds: what it rests on."""

    name: str
    how: str
    seconds: dict[str, float]


_choices: dict[tuple[Problem, torch.device], Choice] = {}
_lock = threading.RLock()
_forced: list[str] = []


def bucket(rows: int) -> int:
    """Rows that share a choice with `rows`: up to the next power of two."""
    return 1 << max(0, rows - 1).bit_length()


def fastest(seconds: Mapping[str, float], names: Sequence[str]) -> str:
    """The candidate of least time; of equals the one that `names` has first. Raises ValueError if none was timed."""
    timed = [name for name in names if name in seconds]
    if not timed:
        raise ValueError(
            f"seconds: got times of {sorted(seconds)}, takes some of {', '.join(names)}"
        )
    return min(timed, key=seconds.__getitem__)


@contextlib.contextmanager
def forcing(name: str) -> Iterator[None]:
    """Take candidate `name` wherever it is one, whatever it costs: for tests, and to time one against the other."""
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()


def choose(
    problem: Problem,
    device: torch.device,
    names: Sequence[str],
    run: Callable[[str], object],
) -> str:
    """The candidate of `names` that serves `problem`; run(name) carries one out, to be timed."""
    if _forced and _forced[-1] in names:
        return _forced[-1]
    part = capability(device)
    if part == INTERPRETED or len(names) == 1:
        return names[0]
    if assumed():
        return fastest(cost.seconds(problem, names, part), names)
    found = _choices.get((problem, device))
    if found is None or found.name not in names:
        found = _decide(problem, device, names, run)
    return found.name


def _decide(
    problem: Problem, device: torch.device, names: Sequence[str], run: Callable[[str], object]
) -> Choice:
    with _lock:
        found = _choices.get((problem, device))  # another thread's backward may have been first
        if found is not None and found.name in names:
            return found
        measurable = autotune()
        capturing = torch.cuda.is_current_stream_capturing()
        cache = tuning.cache(device) if measurable else None
        kept = cache.get(str(problem), names) if cache else None
        if kept is not None:
            found = Choice(*kept)
        elif cache and not capturing and (seconds := tuning.measure(names, run)):
            found = Choice(fastest(seconds, names), "measured", seconds)
            cache.put(str(problem), found.name, seconds)
        else:
            seconds = cost.seconds(problem, names, capability(device))
            found = Choice(fastest(seconds, names), "modelled", seconds)
            if capturing and measurable:
                return found  # the next call outside the capture may still measure
        _choices[problem, device] = found
        return found


def autotune() -> bool:
    """Whether candidates may be timed (FASTLORA_AUTOTUNE, on unless 0)."""
    return os.environ.get("FASTLORA_AUTOTUNE", "1") != "0"


def choices() -> dict[tuple[Problem, torch.device], Choice]:
    """What was chosen in this process so far."""
    return dict(_choices)


def forget() -> None:
    """Drop this process's choices; the file keeps its own."""
    _choices.clear()
