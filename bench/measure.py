"""Timing peers against each other: interleaved rounds, medians, spread.

Absolute times drift on a shared or warming machine by more than peers differ, so peers are never
timed one after the other: each round takes one sample of every peer, and peers are compared round
by round. The order rotates and turns round, so that no peer always follows the same one (and finds
the caches as that one left them).
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Clock = Callable[[], float]
WARM_UP = 2  # untimed calls of each peer; the first one also compiles and fills caches
LONG_SAMPLE_S = 0.1
MOST = 4


@dataclass(frozen=True)
class Timings:
    """Seconds of one step, a list a peer, one figure a round; `iterations` steps made one sample."""

    seconds: dict[str, list[float]]
    iterations: int


def order(names: Sequence[str], round_number: int) -> list[str]:
    """The peers' order in a round: turned round every other time, rotated by one every second."""
    shift = (round_number // 2) % len(names)
    turned = [*names[shift:], *names[:shift]]
    return turned[::-1] if round_number % 2 else turned


def interleave(
    steps: Mapping[str, Callable[[], object]],
    repeats: int,
    sample_s: float,
    row_s: float = 0.0,
    *,
    warm_up: int = WARM_UP,
    clock: Clock = time.perf_counter,
) -> Timings:
    """Times the steps against each other.

    steps: a call that does one whole step, a peer. repeats: least rounds. sample_s: each sample
    repeats its step until the slowest peer's lasts this long; all peers repeat equally often.
    row_s: short rows go on to more rounds, up to four times `repeats`, until this long has passed.
    """
    if not steps:
        return Timings({}, 1)
    slowest = 0.0
    for step in steps.values():
        taken = math.inf
        for _ in range(warm_up):
            start = clock()
            step()
            taken = min(taken, clock() - start)
        slowest = max(slowest, 0.0 if math.isinf(taken) else taken)
    iterations = max(1, math.ceil(sample_s / slowest)) if slowest > 0 else 1

    seconds: dict[str, list[float]] = {name: [] for name in steps}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        begun = clock()
        for round_number in range(MOST * repeats):
            if round_number >= repeats and clock() - begun >= row_s:
                break
            for name in order(list(steps), round_number):
                seconds[name].append(_sample(steps[name], iterations, clock))
            if iterations == 1 and max(taken[-1] for taken in seconds.values()) > LONG_SAMPLE_S:
                gc.collect()  # a model's outputs hold cycles; outside every sample
    finally:
        if collecting:
            gc.enable()
    return Timings(seconds, iterations)


def _sample(step: Callable[[], object], iterations: int, clock: Clock) -> float:
    if iterations > 1:
        step()  # the caches are this peer's own when the clock starts
    start = clock()
    for _ in range(iterations):
        step()
    return (clock() - start) / iterations


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile of a list of figures."""

    median: float
    p10: float
    p90: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Median and percentiles (linear between the figures). Raises ValueError on an empty list."""
    if not values:
        raise ValueError("values: got an empty list, takes at least one figure")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return Spread(statistics.median(values), deciles[0], deciles[-1], len(values))


def ratios(slow: Sequence[float], fast: Sequence[float]) -> list[float]:
    """slow / fast, round by round: both samples of a pair met the same state of the machine."""
    if len(slow) != len(fast):
        raise ValueError(f"fast: got {len(fast)} rounds, takes as many as slow, {len(slow)}")
    return [a / b for a, b in zip(slow, fast, strict=True)]


def verdict(peft: Sequence[float], fastlora: Sequence[float]) -> str:
    """ "faster", "slower" or "even": fastlora against PEFT beyond the run's own spread.

    The spread is that of PEFT / fastlora over the rounds: "slower" when even its 90th percentile is
    below 1, that is, when fastlora lost nine rounds in ten, by however little.
    """
    found = spread(ratios(peft, fastlora))
    if found.p90 < 1.0:
        return "slower"
    return "faster" if found.p10 > 1.0 else "even"
