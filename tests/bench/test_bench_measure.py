"""Interleaving, spread and verdicts: on a clock that the test turns itself."""

import gc
from itertools import pairwise

import pytest

from bench.measure import MOST, WARM_UP, interleave, order, ratios, spread, verdict


class Clock:
    """Time passes only inside the steps."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def step(self, name, seconds):
        def run():
            self.calls.append(name)
            self.now += seconds

        return run

    def __call__(self):
        return self.now


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_round_has_every_peer_once_and_turns_round(count):
    names = list("abcde"[:count])
    rounds = [order(names, i) for i in range(2 * count)]
    assert all(sorted(found) == names for found in rounds)
    for i in range(0, 2 * count, 2):
        assert rounds[i] == rounds[i + 1][::-1]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_every_peer_has_every_place_equally_often(count):
    names = list("abcde"[:count])
    rounds = [order(names, i) for i in range(2 * count)]
    for name in names:
        assert sorted(found.index(name) for found in rounds) == sorted(2 * list(range(count)))


def test_no_peer_always_follows_the_same_one():
    names = list("abc")
    sequence = [name for i in range(6) for name in order(names, i)]
    for name in names:
        before = {a for a, b in pairwise(sequence) if b == name and a != name}
        assert before == set(names) - {name}


def test_samples_are_taken_in_turn_and_hold_one_step_each():
    clock = Clock()
    steps = {"slow": clock.step("slow", 3 / 64), "fast": clock.step("fast", 1 / 64)}
    found = interleave(steps, 7, sample_s=0.01, clock=clock)
    assert found.iterations == 1
    assert found.seconds == {"slow": [3 / 64] * 7, "fast": [1 / 64] * 7}
    timed = clock.calls[2 * WARM_UP :]
    assert timed == [name for i in range(7) for name in order(["slow", "fast"], i)]


def test_short_steps_are_repeated_equally_often_for_all_peers():
    clock = Clock()
    steps = {"slow": clock.step("slow", 2**-10), "fast": clock.step("fast", 2**-12)}
    found = interleave(steps, 8, sample_s=2**-5, clock=clock)
    assert found.iterations == 32
    assert found.seconds == {"slow": [2**-10] * 8, "fast": [2**-12] * 8}
    # Each sample is led in by one untimed step.
    assert clock.calls.count("slow") == clock.calls.count("fast") == WARM_UP + 8 * 33


@pytest.mark.parametrize(("row_s", "rounds"), [(0.0, 7), (9 / 64, 9), (1e9, 7 * MOST)])
def test_a_short_row_goes_on_until_its_time_is_used(row_s, rounds):
    clock = Clock()
    found = interleave({"only": clock.step("only", 1 / 64)}, 7, 0.01, row_s, clock=clock)
    assert len(found.seconds["only"]) == rounds


def test_the_collector_is_off_while_the_clock_runs_and_as_it_was_afterwards():
    seen = []
    assert gc.isenabled()
    interleave({"only": lambda: seen.append(gc.isenabled())}, 7, 0.0, warm_up=0)
    assert seen and not any(seen)
    assert gc.isenabled()


def test_a_step_that_raises_leaves_the_collector_on():
    def broken():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        interleave({"only": broken}, 1, 0.0, warm_up=0)
    assert gc.isenabled()


def test_spread():
    found = spread([float(i) for i in range(11)])
    assert (found.median, found.p10, found.p90, found.count) == (5.0, 1.0, 9.0, 11)
    assert spread([2.0]).p90 == 2.0
    with pytest.raises(ValueError, match="values: got an empty list"):
        spread([])
    with pytest.raises(ValueError, match="fast: got 1 rounds, takes as many as slow, 2"):
        ratios([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ([1.01] * 9, "slower"),  # by little, but every time
        ([0.5] * 9, "faster"),
        ([1.0] * 9, "even"),
        ([1.1, 0.9, 1.1, 0.9, 1.2, 0.8, 1.1, 0.9, 1.0], "even"),  # within the spread
        ([1.5] * 7 + [0.9] * 2, "even"),  # two rounds of nine went the other way
    ],
)
def test_a_verdict_is_beyond_the_spread_or_even(ours, expected):
    assert verdict([1.0] * 9, ours) == expected


def test_a_drifting_machine_does_not_hide_a_loss():
    peft = [1.0 + i for i in range(9)]
    assert verdict(peft, [1.05 * seconds for seconds in peft]) == "slower"
