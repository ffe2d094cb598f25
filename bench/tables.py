"""Markdown out of results: bars, the model, the layers, the losses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.bars import LAYER_OPS, bars
from bench.measure import Spread
from bench.peers import PEERS
from bench.results import Results, Row


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a bar inside a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def seconds(value: float) -> str:
    """3.2 s, 4.56 ms, 78.9 us: three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"


def timed(found: Spread | None) -> str:
    """Median and the spread below and above it, such as "4.6 ms (4.5 to 4.9)"."""
    if found is None:
        return "–"
    value, unit = seconds(found.median).split()
    scale = found.median / float(value)
    return f"{value} {unit} ({found.p10 / scale:.3g} to {found.p90 / scale:.3g})"


def machine(found: Results) -> str:
    """One paragraph: on what, with which versions, when."""
    e, s = found.environment, found.settings
    versions = ", ".join(
        f"{name} {version or 'not installed'}" for name, version in e["versions"].items()
    )
    commit = (found.commit.get("id") or "no commit")[:12]
    dirty = " with uncommitted changes" if found.commit.get("dirty") else ""
    return (
        f"{e['processor']}, {e['cores']} cores, {e['threads']} threads, {e['system']}, torch's CPU "
        f"capability {e['torch_cpu_capability']}, fastlora's {e['fastlora_simd'] or 'no C++ part'}. "
        f"{versions}. Commit {commit}{dirty}, {found.date[:10]}, mode {s['mode']}, "
        f"{found.seconds:.0f} s, load {e['load_at_start']} at the start and {e['load_at_end']} at the end."
    )


MOST_OTHER_WORK = 0.05


def busy(found: Results) -> str:
    """A warning where other work ran on the machine, "" otherwise: such figures show little."""
    e = found.environment
    if (share := e.get("other_work")) is not None:  # since it is measured
        if share <= MOST_OTHER_WORK:
            return ""
        return (
            f"**The machine was busy with other work (other processes took {share:.0%} of the "
            "processors meanwhile): these figures are no measurement.**"
        )
    start, end, own = e["load_at_start"], e["load_at_end"], e["threads"]
    if (start is None or start <= 0.5 * e["cores"]) and (end is None or end <= own + 1):
        return ""
    return (
        f"**The machine was busy with other work (load {start} at the start, {end} at the end of a "
        f"run of {own} threads): these figures are no measurement.**"
    )


def bars_table(found: Results) -> str:
    return table(
        ("what", "bar", "measured", "verdict"),
        ((b.what, b.bar, b.measured, f"**{b.status}**") for b in bars(found)),
    )


def _speedup(row: Row) -> str:
    ratio, around = row.speedup(), row.speedup_spread()
    if ratio is None or around is None:
        return row.reason("fastlora") or row.reason("peft") or "not timed"
    return f"{ratio:.2f}x ({around.p10:.2f} to {around.p90:.2f})"


def model_table(found: Results) -> str:
    """The model's rows: a step's time and the bytes saved for its backward, a peer a column."""
    rows = []
    for row in (row for row in found.rows if row.op == "model"):
        size = f"{row.dims[0]}x{row.dims[1]}, {row.dtype}, dropout {row.dropout:g}"
        times = [timed(row.time(p)) for p in ("frozen", "peft", "fastlora")]
        rows.append((size, *times, _speedup(row), _saved(row)))
    head = (
        "batch x length",
        "frozen base",
        "PEFT",
        "fastlora",
        "over PEFT",
        "MiB saved: base / PEFT / ours",
    )
    return table(head, rows) if rows else "No model row in this run."


def _saved(row: Row) -> str:
    counted = [row.saved_bytes(peer) for peer in ("frozen", "peft", "fastlora")]
    if not any(counted):
        return "–"
    return " / ".join("–" if count is None else f"{count / 2**20:.0f}" for count in counted)


def layers_table(found: Results) -> str:
    """Every layer's row, with its verdict; the slower ones are marked."""
    rows = []
    for row in (row for row in found.rows if row.op in LAYER_OPS):
        mark = row.verdict or "not timed"
        rows.append(
            (
                row.id,
                *(timed(row.time(peer)) for peer in PEERS),
                _speedup(row),
                f"**{mark}**" if mark == "slower" else mark,
            )
        )
    head = (
        "row",
        "frozen base",
        "PEFT",
        "torch.compile of PEFT",
        "fastlora",
        "over PEFT",
        "verdict",
    )
    return table(head, rows) if rows else "No layer row in this run."


def overview_table(found: Results) -> str:
    """Layers by operation and dtype: how many rows are faster, even, slower; the ends of the range."""
    groups: dict[tuple[str, str, float], list[Row]] = {}
    for row in found.rows:
        if row.op in LAYER_OPS:
            groups.setdefault((row.op, row.dtype, row.dropout), []).append(row)
    rows = []
    for (op, dtype, dropout), members in groups.items():
        done = [row for row in members if row.verdict]
        ratios = sorted((row.speedup() or 0.0, row.id) for row in done)
        counts = [str(sum(row.verdict == v for row in done)) for v in ("faster", "even", "slower")]
        rows.append(
            (
                f"{op}, {dtype}, dropout {dropout:g}",
                *counts,
                str(len(members) - len(done)),
                f"{ratios[0][0]:.2f}x ({ratios[0][1]})" if ratios else "–",
                f"{ratios[-1][0]:.2f}x ({ratios[-1][1]})" if ratios else "–",
            )
        )
    head = ("layer", "faster", "even", "slower", "not timed", "least over PEFT", "most over PEFT")
    return table(head, rows) if rows else "No layer row in this run."


def refused_table(found: Results) -> str:
    """Peers without a time, by reason, so that none goes missing quietly."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in found.rows:
        for peer in row.peers:
            if row.reason(peer):
                reasons.setdefault((PEERS[peer].title, row.reason(peer)), []).append(row.id)
    rows = [
        (peer, reason, f"{len(ids)}: {ids[0]}" + (" and others" if len(ids) > 1 else ""))
        for (peer, reason), ids in sorted(reasons.items())
    ]
    return (
        table(("peer", "reason", "rows"), rows) if rows else "Every peer of every row has a time."
    )


HOW = """\
Medians of interleaved rounds (in brackets the 10th and 90th percentile); one step is forward,
backward and dropping the gradients. *slower* and *faster* mean: in nine rounds out of ten.
No result is timed before it was held against fp64, forward and every gradient."""


def document(found: Results, chart: str) -> str:
    """The whole Markdown report. chart: the PNG's name, as the report should refer to it."""
    parts = [
        "# Microbenchmarks",
        machine(found),
        *([busy(found)] if busy(found) else []),
        HOW,
        f"![step time and speed-up over PEFT]({chart})",
        "## Numbers to reach",
        bars_table(found),
        "## One training step of SmolLM2-135M",
        model_table(found),
        "## Single layers",
        overview_table(found),
        layers_table(found),
        "## Without a time",
        refused_table(found),
    ]
    return "\n\n".join(parts) + "\n"


def readme_block(found: Results, chart: str) -> str:
    """What stands in the README between its two marks."""
    parts = [
        *([busy(found)] if busy(found) else []),
        bars_table(found),
        f"![step time and speed-up over PEFT]({chart})",
        overview_table(found),
        f"Measured on: {machine(found)}",
        HOW + " Every row, the losses too: `bench/results/`. Run it here: `make bench`.",
    ]
    return "\n\n".join(parts)
