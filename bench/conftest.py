"""The suite as pytest sees it: its options, its rows, and the file that it leaves."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import environment, results, settings
from bench.registry import Case, cases
from bench.runner import Outcome, not_run, run


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastlora's microbenchmarks")
    settings.add_arguments(group.addoption)
    group.addoption("--out", default=None, help="the JSON file to write")


class Suite:
    """One run: its settings, its rows, what became of them."""

    def __init__(self, config: pytest.Config) -> None:
        # Under Triton's interpreter kernels run as Python: right, and no measure of anything.
        os.environ.pop("TRITON_INTERPRET", None)
        self.settings = settings.from_options(config.option)
        self.out = config.getoption("out")
        if self.settings.threads:
            torch.set_num_threads(self.settings.threads)
        self.cases = cases(self.settings)
        self.environment = environment.describe()
        self.outcomes: list[Outcome] = []
        self.others = environment.OtherWork()
        self.started = time.monotonic()

    def run(self, case: Case) -> Outcome:
        """Runs a case, unless the time is spent; a case that breaks is recorded with the reason."""
        if time.monotonic() - self.started > self.settings.budget_s:
            reason = f"the run's budget of {self.settings.budget_s:g} s was spent"
            outcome = not_run(case, reason)
        else:
            try:
                outcome = run(case, self.settings)
            except Exception as failed:
                self.outcomes.append(not_run(case, f"{type(failed).__name__}: {failed}"))
                raise
        self.outcomes.append(outcome)
        return outcome

    def section(self) -> dict[str, Any]:
        """What stands in the file under "fastlora", beside pytest-benchmark's own figures."""
        return {
            "schema": results.SCHEMA,
            "settings": self.settings.as_dict(),
            "environment": self.environment
            | {"load_at_end": environment.load(), "other_work": self.others.share()},
            "seconds": round(time.monotonic() - self.started, 1),
            "rows": [row for outcome in self.outcomes for row in outcome.rows()],
        }


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.stash[SUITE] = Suite(config)


SUITE = pytest.StashKey[Suite]()


@pytest.fixture
def suite(request: pytest.FixtureRequest) -> Suite:
    return request.config.stash[SUITE]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        found = metafunc.config.stash[SUITE].cases
        metafunc.parametrize("case", found, ids=[case.id for case in found])


def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:
    machine_info.pop("node", None)  # whose machine it was says nothing about the figures
    machine_info.get("cpu", {}).pop("flags", None)  # a hundred lines; the SIMD level is in ours


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Any:
    """Writes the file, pytest-benchmark's format with a section of ours: whole or not at all."""
    result = yield
    config = session.config
    found = config.stash[SUITE]
    if found.out and found.outcomes:
        timed = config._benchmarksession
        machine = timed.get_machine_info()
        commit = config.hook.pytest_benchmark_generate_commit_info(config=config)
        written = config.hook.pytest_benchmark_generate_json(
            config=config,
            benchmarks=timed.benchmarks,
            include_data=True,
            machine_info=machine,
            commit_info=commit,
        )
        written["commit_info"].pop("project", None)
        written["fastlora"] = found.section()
        results.write(Path(found.out), written)
    return result


def record(benchmark: Any, outcome: Outcome) -> None:
    """Enters a case's interleaved times as pytest-benchmark's, one entry a peer.

    The fixture times one function to its end before the next begins, which is what this suite must
    not do; so its statistics are given samples that were taken in turn.
    """
    benchmark._mode = "interleaved"
    for index, entry in enumerate(outcome.entries):
        samples = outcome.timings.seconds.get(str(index))
        if not samples or entry.timing is None:
            continue
        benchmark.name = benchmark.fullname = entry.timing
        benchmark.group = outcome.case.id
        benchmark.param, benchmark.params = None, dataclasses.asdict(outcome.case)
        benchmark.extra_info = {"peer": entry.peer, "dropout": entry.dropout}
        entered = benchmark._make_stats(outcome.timings.iterations)
        for seconds in samples:
            entered.update(seconds * outcome.timings.iterations)
