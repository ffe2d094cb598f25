"""The chart: a training step's time a peer, and single layers' speed-up over PEFT by rows of x."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bench.bars import LAYER_OPS
from bench.peers import PEERS
from bench.results import Results, Row

COLOURS = {"frozen": "#9aa0a6", "peft": "#d98c4a", "compile": "#7a6bb0", "fastlora": "#2a7f9e"}
OP_COLOURS = dict(zip(LAYER_OPS, ("#2a7f9e", "#5fb3a1", "#7a6bb0", "#d98c4a"), strict=True))


def draw(found: Results, path: Path) -> None:
    """Writes the chart as a PNG. The same results give the same picture, byte for byte."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    _steps(left, [row for row in found.rows if row.op == "model" and row.samples])
    _layers(right, [row for row in found.rows if row.op in LAYER_OPS and row.verdict])
    figure.suptitle(
        f"{found.environment['processor']}, {found.environment['threads']} threads, "
        f"torch {found.environment['versions']['torch']}",
        fontsize=10,
    )
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, dpi=110, format="png", metadata={"Software": None})
    plt.close(figure)
    temporary.replace(path)


def _steps(axes: Any, rows: list[Row]) -> None:
    axes.set_title("SmolLM2-135M, one training step, over PEFT's (lower is faster)")
    if not rows:
        _empty(axes)
        return
    peers = [peer for peer in PEERS if any(peer in row.samples for row in rows)]
    width = 0.8 / len(peers)
    tallest = 1.0
    for i, peer in enumerate(peers):
        places, heights, below, above, texts = [], [], [], [], []
        for j, row in enumerate(rows):
            found, base = row.time(peer), row.time("peft")
            if found is None or base is None:
                continue
            places.append(j + (i - (len(peers) - 1) / 2) * width)
            heights.append(found.median / base.median)
            below.append((found.median - found.p10) / base.median)
            above.append((found.p90 - found.median) / base.median)
            texts.append(
                f"{found.median:.2f} s" if found.median >= 0.1 else f"{found.median * 1e3:.0f} ms"
            )
        axes.bar(
            places,
            heights,
            width,
            yerr=[below, above],
            color=COLOURS[peer],
            label=PEERS[peer].title,
            error_kw={"elinewidth": 1, "ecolor": "#444444"},
        )
        tallest = max([tallest, *heights])
        for place, height, text in zip(places, heights, texts, strict=True):
            axes.text(place, height / 2, text, ha="center", va="center", rotation=90, fontsize=8)
    labels = [f"{row.dtype}\ndropout {row.dropout:g}" for row in rows]
    axes.set_xticks(range(len(rows)), labels)
    axes.set_ylabel("time / PEFT's time")
    axes.axhline(1.0, color="#d98c4a", linewidth=0.8)
    axes.set_ylim(0, 1.3 * tallest)
    axes.legend(fontsize=8, loc="upper center", ncols=len(peers))


def _layers(axes: Any, rows: list[Row]) -> None:
    axes.set_title("Single layers, forward and backward: speed-up over PEFT")
    if not rows:
        _empty(axes)
        return
    tokens = sorted({row.m for row in rows})
    ops = [op for op in LAYER_OPS if any(row.op == op for row in rows)]
    width = 0.8 / len(ops)
    for i, op in enumerate(ops):
        places, heights, below, above = [], [], [], []
        for j, m in enumerate(tokens):
            ratios = [row.speedup() or 1.0 for row in rows if row.op == op and row.m == m]
            if not ratios:
                continue
            middle = statistics.geometric_mean(ratios)
            places.append(j + (i - (len(ops) - 1) / 2) * width)
            heights.append(middle)
            below.append(max(0.0, middle - min(ratios)))
            above.append(max(0.0, max(ratios) - middle))
        axes.bar(
            places,
            [height - 1.0 for height in heights],
            width,
            bottom=1.0,  # on a logarithmic axis: twice as fast and half as fast are as long
            yerr=[below, above],
            color=OP_COLOURS[op],
            label=op,
            error_kw={"elinewidth": 1, "ecolor": "#444444"},
        )
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.axhline(1.0, color="#444444", linewidth=1)
    axes.set_xticks(range(len(tokens)), [str(m) for m in tokens])
    axes.set_xlabel(
        "rows of x (M); bars: geometric mean over shapes and dtypes, lines: least and most"
    )
    axes.set_ylabel("PEFT's time / fastlora's (below 1: slower)")
    axes.legend(fontsize=8, loc="best")


def _empty(axes: Any) -> None:
    axes.text(0.5, 0.5, "no row of this kind in this run", ha="center", transform=axes.transAxes)
    axes.set_xticks([])
    axes.set_yticks([])
