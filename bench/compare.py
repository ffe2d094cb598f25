"""Two runs side by side, by their speed-up over PEFT: absolute times drift from run to run."""

from __future__ import annotations

from bench.results import Results
from bench.tables import table


def changes(now: Results, earlier: Results) -> list[tuple[str, float, float, str]]:
    """(row, speed-up earlier, speed-up now, "better" | "worse" | "same"), for rows timed in both.

    Better or worse is what lies beyond both runs' spreads: the intervals from the 10th to the 90th
    percentile do not meet.
    """
    found = []
    for row in now.rows:
        other = earlier.find(row.id)
        if other is None or row.op == "import":
            continue
        new, old = row.speedup_spread(), other.speedup_spread()
        if new is None or old is None:
            continue
        change = "better" if new.p10 > old.p90 else "worse" if new.p90 < old.p10 else "same"
        found.append((row.id, old.median, new.median, change))
    return found


def comparison(now: Results, earlier: Results) -> str:
    """A table of the rows that changed, and how many did not."""
    found = changes(now, earlier)
    moved = [change for change in found if change[3] != "same"]
    text = f"compared with the run of {earlier.date[:19]}: {len(found)} rows in both, {len(moved)} changed"
    if not moved:
        return text
    moved.sort(key=lambda change: change[2] / change[1])
    head = ("row", "over PEFT before", "over PEFT now", "change")
    return text + "\n" + table(head, [(i, f"{a:.2f}x", f"{b:.2f}x", c) for i, a, b, c in moved])
