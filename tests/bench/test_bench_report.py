"""Bars, tables, chart and README, out of a file of results that is written by hand."""

import json
from collections import namedtuple
from pathlib import Path

import pytest

from bench import compare, environment, report, results, tables
from bench.bars import bars

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "bench" / "results" / "cpu.json"
ROUNDS = 9


def planted(rows):
    """A file's JSON. rows: (id parts, {peer: seconds | reason}, {peer: bytes})."""
    benchmarks, written = [], []
    for (op, dims, m, dtype, dropout), peers, saved in rows:
        size = "x".join(map(str, dims))
        rows_of_x = "" if op == "model" else f"-M{m}"
        row_id = op if op == "import" else f"{op}-{size}{rows_of_x}-{dtype}-p{dropout:g}"
        entries = {}
        for peer, seconds in peers.items():
            entry = {
                "status": "ok",
                "reason": "",
                "note": "",
                "timing": None,
                "saved_bytes": saved.get(peer),
                "check": {"worst": "dx", "rms": 1e-7, "limit": 1e-5},
            }
            if isinstance(seconds, str):
                entry |= {"status": "wrong", "reason": seconds, "check": None}
            elif seconds is not None:
                entry["timing"] = f"{row_id}[{peer}]"
                data = seconds if isinstance(seconds, list) else [seconds] * ROUNDS
                benchmarks.append({"name": entry["timing"], "stats": {"data": data}})
            entries[peer] = entry
        written.append(
            {
                "id": row_id,
                "op": op,
                "dims": list(dims),
                "m": m,
                "dtype": dtype,
                "dropout": dropout,
                "peers": entries,
            }
        )
    return {
        "benchmarks": benchmarks,
        "datetime": "2026-01-02T03:04:05+00:00",
        "commit_info": {"id": "0123456789abcdef", "dirty": False},
        "fastlora": {
            "schema": results.SCHEMA,
            "settings": {"mode": "default"},
            "environment": {
                "versions": {"python": "3.11", "torch": "2.13.0", "triton": None},
                "system": "Linux x86_64",
                "processor": "A processor",
                "cores": 2,
                "threads": 2,
                "torch_cpu_capability": "AVX2",
                "fastlora_simd": None,
                "load_at_start": 0.1,
                "load_at_end": 1.0,
            },
            "seconds": 600.0,
            "rows": written,
        },
    }


def model(dtype, dropout, peft, ours, saved=None):
    times = {"frozen": 2.0, "peft": peft, "fastlora": ours}
    return (("model", (4, 128), 512, dtype, dropout), times, saved or {})


def layer(m, peft, ours, op="linear"):
    return ((op, (576, 576), m, "float32", 0.1), {"peft": peft, "fastlora": ours}, {})


MIB = 2**20
GOOD = [
    (("import", (), 0, "float32", 0.0), {"frozen": 2.0, "fastlora": 0.05}, {}),
    model("float32", 0.0, 3.0, 2.5),
    model(
        "float32", 0.1, 4.0, 2.5, {"peft": 1000 * MIB, "fastlora": 520 * MIB, "frozen": 500 * MIB}
    ),
    model("bfloat16", 0.0, 3.0, 2.5),
    model("bfloat16", 0.1, 4.0, 2.5),
    layer(1, 1.0e-4, 0.9e-4),
    layer(128, 2.0e-3, [2.0e-3, 2.1e-3, 1.9e-3] * 3),
]


def found(rows):
    return results.parse(planted(rows))


def statuses(rows):
    return [bar.status for bar in bars(found(rows))]


def test_bars_reached():
    reached = bars(found(GOOD))
    assert [bar.status for bar in reached] == ["reached"] * 7
    assert reached[0].measured == "1.60x (4.00 s to 2.50 s; frozen base 2.00 s)"
    assert reached[4].measured == "0.52x (1000 MiB to 520 MiB; frozen base 500 MiB)"
    assert reached[5].measured == "2 rows: 1 faster, 1 even, 0 slower"
    assert reached[6].measured == "0.050 s (p10 0.050, p90 0.050)"


@pytest.mark.parametrize(
    ("index", "row", "bar"),
    [
        (2, model("float32", 0.1, 4.0, 2.87, {"peft": 1000 * MIB, "fastlora": 1}), 0),
        (4, model("bfloat16", 0.1, 4.0, 2.87), 1),
        (1, model("float32", 0.0, 3.0, 2.73), 2),
        (3, model("bfloat16", 0.0, 3.0, 2.73), 3),
        (2, model("float32", 0.1, 4.0, 2.5, {"peft": 1000 * MIB, "fastlora": 521 * MIB}), 4),
        (5, layer(1, 1.00e-4, 1.01e-4), 5),
        (5, layer(1, 1.00e-4, "y0: relative error 1"), 5),
        (0, (("import", (), 0, "float32", 0.0), {"frozen": 2.0, "fastlora": 0.31}, {}), 6),
        (0, (("import", (), 0, "float32", 0.0), {"fastlora": "imports peft"}, {}), 6),
    ],
)
def test_a_bar_missed_by_little_is_missed(index, row, bar):
    rows = list(GOOD)
    rows[index] = row
    assert [i for i, status in enumerate(statuses(rows)) if status == "missed"] == [bar]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], ["not measured"] * 7),
        # A wrong model has no time: that is not "missed by so much", and never "reached".
        ([model("float32", 0.1, 4.0, "y0: wrong")], ["not measured"] * 7),
        ([layer(1, 1e-4, 1e-5), layer(4, 1e-4, None)], ["not measured"] * 7),
    ],
)
def test_what_was_not_measured_is_not_reached(rows, expected):
    assert statuses(rows) == expected


def test_another_batch_is_not_the_bar_s():
    row = (("model", (1, 32), 32, "float32", 0.1), {"peft": 4.0, "fastlora": 1.0}, {})
    assert statuses([row]) == ["not measured"] * 7


def test_losses_are_published(tmp_path):
    rows = [*GOOD, layer(16, 1.0e-4, 1.25e-4), layer(64, 1e-4, "dx: relative error 0.3")]
    file = tmp_path / "run.json"
    file.write_text(json.dumps(planted(rows)))
    report.write_all(file, None)
    text = (tmp_path / "run.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("| linear-576x576-M16-")]
    assert "0.80x (0.80 to 0.80)" in line and line.endswith("**slower** |")
    (line,) = [line for line in text.splitlines() if line.startswith("| linear-576x576-M64-")]
    assert "wrong: dx: relative error 0.3" in line and line.endswith("not timed |")
    assert "1 slower (worst 0.80x, linear-576x576-M16-float32-p0.1); 1 wrong and untimed" in text
    assert "missed" in report.summary(found(rows))


@pytest.mark.parametrize(("share", "busy"), [(0.0, False), (0.05, False), (0.3, True)])
def test_other_work_outweighs_the_load(share, busy, tmp_path):
    """The load average counts what ended before the run; the share does not."""
    written = planted(GOOD)
    written["fastlora"]["environment"] |= {"load_at_start": 9.0, "other_work": share}
    file = tmp_path / "run.json"
    results.write(file, written)
    assert ("no measurement" in tables.busy(results.load(file))) == busy


def test_other_work_is_that_of_others(monkeypatch):
    """Of 10 s on 2 processors: 9 s of work, 6 s of it this run's own and its children's."""
    every = namedtuple("every", "user system idle iowait guest")
    own = namedtuple("own", "user system children_user children_system")
    clock, times = [100.0], [every(50.0, 10.0, 30.0, 5.0, 2.0), own(1.0, 1.0, 0.0, 0.0)]
    monkeypatch.setattr(environment.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(environment.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(environment.psutil, "cpu_times", lambda: times[0])
    monkeypatch.setattr(environment.psutil.Process, "cpu_times", lambda _: times[1])
    watch = environment.OtherWork()
    clock[0] += 10.0
    times[:] = [every(57.0, 12.0, 41.0, 6.0, 3.0), own(4.0, 2.0, 1.5, 0.5)]
    assert watch.share() == 0.15


@pytest.mark.parametrize(
    ("start", "end", "busy"),
    [(0.1, 2.1, False), (1.5, 2.1, True), (0.1, 5.0, True), (None, None, False)],
)
def test_a_busy_machine_is_told(start, end, busy, tmp_path):
    written = planted(GOOD)
    written["fastlora"]["environment"] |= {"load_at_start": start, "load_at_end": end}
    file = tmp_path / "run.json"
    results.write(file, written)
    report.write_all(file, None)
    for text in (
        (tmp_path / "run.md").read_text(),
        report.summary(results.load(file)),
        report.block(file, tmp_path / "README.md"),
    ):
        assert ("no measurement" in text) == busy


def test_writing_the_report_again_changes_nothing(tmp_path):
    file, readme = tmp_path / "results" / "run.json", tmp_path / "README.md"
    results.write(file, planted(GOOD))
    readme.write_text(f"# Title\n\n{report.START}\nold\n{report.END}\n\nThe end.\n")
    report.write_all(file, readme)
    first = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.name for path in first} == {"run.json", "run.md", "run.png", "README.md"}
    assert report.main([str(file), "--readme", str(readme)]) == 0
    assert {path: path.read_bytes() for path in first} == first
    text = readme.read_text()
    assert text.startswith("# Title\n\n<!-- bench:start -->\n| what |")
    assert text.endswith("<!-- bench:end -->\n\nThe end.\n") and "old" not in text
    assert "](results/run.png)" in text and "0123456789ab" in text


@pytest.mark.parametrize("text", ["no marks", f"{report.END}{report.START}", report.START * 2])
def test_a_readme_without_its_marks_is_left_alone(tmp_path, text, capsys):
    file, readme = tmp_path / "run.json", tmp_path / "README.md"
    results.write(file, planted(GOOD))
    readme.write_text(text)
    assert report.main([str(file), "--readme", str(readme)]) == 2
    assert readme.read_text() == text
    assert "takes one line <!-- bench:start -->" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"benchmarks": []}', '{"fastlora": {"schema": 0}}']
)
def test_a_file_of_something_else_is_refused(tmp_path, text, capsys):
    file = tmp_path / "run.json"
    file.write_text(text)
    assert report.main([str(file), "--no-readme"]) == 2
    assert "not a file of this suite's results" in capsys.readouterr().err
    assert not (tmp_path / "run.md").exists()


def test_a_wrong_peer_with_a_time_is_refused():
    written = planted(GOOD)
    written["fastlora"]["rows"][1]["peers"]["fastlora"]["status"] = "wrong"
    with pytest.raises(ValueError, match="wrong, and has a time"):
        results.parse(written)


def test_a_killed_write_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "run.json"
    results.write(file, planted(GOOD))
    before = file.read_bytes()
    monkeypatch.setattr(results.os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        results.write(file, planted([]))
    assert file.read_bytes() == before


def test_comparison_is_by_speed_up_and_beyond_both_spreads():
    now = found([layer(1, 1.0, 0.5), layer(4, 1.0, 1.0), layer(16, [1.0, 1.2, 0.8] * 3, 1.0)])
    # Everything three times slower: the machine, not the code.
    before = found(
        [layer(1, 3.0, 3.0), layer(4, 3.0, 1.5), layer(16, 3.0, 3.0), layer(64, 1.0, 1.0)]
    )
    assert [(c[0], c[3]) for c in compare.changes(now, before)] == [
        ("linear-576x576-M1-float32-p0.1", "better"),
        ("linear-576x576-M4-float32-p0.1", "worse"),
        ("linear-576x576-M16-float32-p0.1", "same"),
    ]
    text = compare.comparison(now, before)
    assert "3 rows in both, 2 changed" in text
    assert "| linear-576x576-M4-float32-p0.1 | 2.00x | 1.00x | worse |" in text


@pytest.mark.skipif(
    not COMMITTED.exists(), reason="bench/results/cpu.json is not there: `make bench` makes it"
)
def test_the_readme_shows_the_committed_results():
    text = (ROOT / "README.md").read_text()
    shown = text.split(report.START)[1].split(report.END)[0].strip("\n")
    assert shown == report.block(COMMITTED, ROOT / "README.md"), (
        "run: python -m bench.report bench/results/cpu.json"
    )
    assert COMMITTED.with_suffix(".png").exists()
