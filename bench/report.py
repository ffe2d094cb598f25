"""`python -m bench.report FILE`: tables, chart and the README's block out of a file of results.

Nothing is measured here and no figure stands in this code: the same file gives the same text.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from bench import plot, tables
from bench.bars import bars
from bench.compare import comparison
from bench.results import Results, load

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- bench:start -->", "<!-- bench:end -->"

__all__ = ["block", "comparison", "rewrite_readme", "summary", "write_all"]


def block(results: Path, readme: Path) -> str:
    """The README's text between its marks, as `results` gives it."""
    chart = os.path.relpath(results.with_suffix(".png").resolve(), readme.resolve().parent)
    return tables.readme_block(load(results), Path(chart).as_posix())


def rewrite_readme(results: Path, readme: Path) -> bool:
    """Puts the block between the README's marks; True if that changed it.

    Raises ValueError where the marks are missing, doubled or in the wrong order.
    """
    text = readme.read_text()
    if text.count(START) != 1 or text.count(END) != 1 or text.index(END) < text.index(START):
        raise ValueError(f"{readme}: takes one line {START} and one line {END} after it")
    head, rest = text.split(START)
    tail = rest.split(END)[1]
    new = f"{head}{START}\n{block(results, readme)}\n{END}{tail}"
    if new == text:
        return False
    _write(readme, new)
    return True


def write_all(results: Path, readme: Path | None) -> Results:
    """Writes the report and the chart beside the JSON file, and the README's block if it is given."""
    found = load(results)
    picture = results.with_suffix(".png")
    plot.draw(found, picture)
    _write(results.with_suffix(".md"), tables.document(found, picture.name))
    if readme is not None and readme.exists():
        rewrite_readme(results, readme)
    return found


def summary(found: Results) -> str:
    """The bars, a line each, for the terminal."""
    lines = [f"{b.status:>12}  {b.what}: {b.measured} (bar: {b.bar})" for b in bars(found)]
    return "\n".join([*lines, tables.busy(found)]).strip()


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("file", type=Path, help="JSON file that `python -m bench` wrote")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--no-readme", action="store_true", help="leave the README as it is")
    options = parser.parse_args(argv)
    try:
        found = write_all(options.file, None if options.no_readme else options.readme)
    except (OSError, ValueError) as refused:
        print(f"bench.report: {refused}", file=sys.stderr)
        return 2
    print(summary(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
