"""One test a case: every peer built, checked, and timed if right. Run by `python -m bench`."""

from __future__ import annotations

from typing import Any

import pytest

from bench.conftest import Suite, record
from bench.registry import Case


def test_case(case: Case, suite: Suite, benchmark: Any) -> None:
    outcome = suite.run(case)
    record(benchmark, outcome)
    if outcome.wrong:
        pytest.fail("no time for a wrong result: " + "; ".join(outcome.wrong), pytrace=False)
