"""`python -m bench`: runs the suite and writes JSON, a Markdown table and a PNG."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from bench import settings

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
README = HERE.parent / "README.md"


def main(argv: list[str] | None = None) -> int:
    """Returns 0; 1 if a peer's result was wrong (its time is withheld); 2 on an option it cannot take."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Times fastlora beside PEFT, torch.compile of PEFT and the frozen base.",
    )
    settings.add_arguments(parser.add_argument)
    parser.add_argument(
        "--quick", action="store_const", const="quick", dest="mode", help="--mode quick"
    )
    parser.add_argument(
        "--full", action="store_const", const="full", dest="mode", help="--mode full"
    )
    parser.add_argument("--out", type=Path, help="JSON file to write; .md and .png lie beside it")
    parser.add_argument(
        "--compare", type=Path, help="a JSON file of an earlier run to compare with"
    )
    options = parser.parse_args(argv)
    try:
        chosen = settings.from_options(options)
    except ValueError as refused:
        parser.error(str(refused))
    official = RESULTS / "cpu.json"
    out = options.out or (official if chosen.complete else RESULTS / f"local-{chosen.mode}.json")
    out = out.resolve()
    if options.compare and not options.compare.exists():
        parser.error(f"--compare: no such file: {options.compare}")

    # The kernels' interpreter, where a test run left it on, would be what is timed.
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is in a wheel; nothing is fetched
    sys.path.insert(0, str(HERE.parent))
    import pytest

    from bench import report, results

    earlier = results.load(options.compare) if options.compare else None
    before = out.stat().st_mtime_ns if out.exists() else None
    arguments = ["-c", str(HERE / "pytest.ini"), "--rootdir", str(HERE.parent), str(HERE)]
    arguments += ["-p", "no:xdist", "-p", "no:timeout", "--benchmark-quiet", "-v", "--tb=short"]
    for name in ("mode", "only", "dtypes", "rows", "repeats", "budget", "threads"):
        value = getattr(options, name)
        if value not in (None, ""):
            arguments += [f"--{name}={value}"]
    code = int(pytest.main([*arguments, f"--out={out}"]))
    if not out.exists() or out.stat().st_mtime_ns == before:
        print(
            f"nothing was measured (pytest's exit code {code}): {out} is as it was", file=sys.stderr
        )
        return code or 1
    report.write_all(out, README if out == official else None)
    found = results.load(out)
    print(report.summary(found))
    if earlier is not None:
        print(report.comparison(found, earlier))
    print(f"wrote {out}, {out.with_suffix('.md').name}, {out.with_suffix('.png').name}")
    return code


if __name__ == "__main__":
    sys.exit(main())
