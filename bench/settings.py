"""What a run of the suite was asked for."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

OPERATIONS = ("import", "model", "memory", "linear", "qkv", "mlp", "embedding")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Settings:
    """One run's settings.

    mode: "quick" (a rehearsal: small model batch, two M), "default" or "full".
    only: operations to run, () for all. dtypes: names from DTYPES, () for all.
    rows: keep the rows whose id holds this text.
    repeats: least rounds a row is timed for (`model_repeats` for a model step, `slow_repeats` for one
        in a half type, which takes some CPUs 20 s).
    sample_s: a timed sample repeats a short step until it lasts this long.
    row_s: a row of short samples goes on for more rounds, up to this many seconds.
    budget_s: seconds after which the rows left are reported as not run.
    threads: torch's threads, 0 to leave torch's own choice.
    """

    mode: str = "default"
    only: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    rows: str = ""
    repeats: int = 9
    model_repeats: int = 7
    slow_repeats: int = 3
    sample_s: float = 0.010
    row_s: float = 1.0
    budget_s: float = 840.0
    threads: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode: got {self.mode!r}, takes one of {', '.join(MODES)}")
        for name, got, known in (
            ("only", self.only, OPERATIONS),
            ("dtypes", self.dtypes, DTYPES),
        ):
            for value in got:
                if value not in known:
                    raise ValueError(f"{name}: got {value!r}, takes some of {', '.join(known)}")
        for name in ("repeats", "model_repeats", "slow_repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes an integer from 1 up")
        if self.budget_s <= 0:
            raise ValueError(f"budget_s: got {self.budget_s}, takes a number of seconds above 0")
        if self.threads < 0:
            raise ValueError(f"threads: got {self.threads}, takes an integer from 0 up")

    @property
    def complete(self) -> bool:
        """Whether this run measures every row of its mode, so that it may stand for the machine."""
        return self.mode != "quick" and not (self.only or self.dtypes or self.rows)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


MODES: dict[str, dict[str, Any]] = {
    "quick": {"repeats": 7, "sample_s": 0.003, "row_s": 0.3, "budget_s": 240.0},
    "default": {},
    "full": {
        "repeats": 15,
        "model_repeats": 9,
        "slow_repeats": 7,
        "sample_s": 0.03,
        "row_s": 4.0,
        "budget_s": 7200.0,
    },
}


def add_arguments(add: Any) -> None:
    """Adds the suite's options through `add`, argparse's or pytest's way of adding one."""
    add(
        "--mode",
        default="default",
        choices=tuple(MODES),
        help="how much to run (default: %(default)s)",
    )
    add("--only", default="", help=f"comma-separated operations: {', '.join(OPERATIONS)}")
    add("--dtypes", default="", help=f"comma-separated dtypes: {', '.join(DTYPES)}")
    add("--rows", default="", help="only rows whose id holds this text, such as M128 or 576x1536")
    add("--repeats", type=int, default=None, help="rounds a row is timed for, for every row")
    add("--budget", type=float, default=None, help="seconds after which no new row is begun")
    add("--threads", type=int, default=0, help="torch's threads (default: torch's own choice)")


def from_options(options: argparse.Namespace) -> Settings:
    """Settings out of parsed options. Raises ValueError, naming the option, on one it cannot take."""
    chosen: dict[str, Any] = dict(MODES[options.mode])
    if options.repeats is not None:
        chosen |= dict.fromkeys(("repeats", "model_repeats", "slow_repeats"), options.repeats)
    if options.budget is not None:
        chosen["budget_s"] = options.budget
    return Settings(
        mode=options.mode,
        only=_names(options.only),
        dtypes=_names(options.dtypes),
        rows=options.rows,
        threads=options.threads,
        **chosen,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
