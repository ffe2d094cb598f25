"""`python -m bench` from end to end, on one small row; and what an import costs, on planted ones."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import __main__, environment, imports, results

ROOT = Path(__file__).resolve().parents[2]


def test_one_row_from_command_to_files(tmp_path):
    out = tmp_path / "run.json"
    row = "linear-576x576-M1-float32"
    command = [sys.executable, "-m", "bench", "--quick", "--rows", row, "--out", str(out)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--threads", "1"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "run.md", "run.png"}

    written = json.loads(out.read_text())
    # pytest-benchmark's own format, so that its tools read it too.
    assert {"machine_info", "commit_info", "benchmarks", "datetime", "version"} <= set(written)
    assert "node" not in written["machine_info"]
    names = {f"{row}[frozen]"} | {
        f"{row}-p{p}[{q}]" for p in ("0", "0.1") for q in ("peft", "fastlora")
    }
    assert {entry["name"] for entry in written["benchmarks"]} == names
    for entry in written["benchmarks"]:
        assert entry["group"] == row
        assert len(entry["stats"]["data"]) == entry["stats"]["rounds"] >= 7
        assert min(entry["stats"]["data"]) > 0
    rounds = {entry["stats"]["rounds"] for entry in written["benchmarks"]}
    assert len(rounds) == 1  # interleaved: every peer in every round

    found = results.load(out)
    assert [r.id for r in found.rows] == [f"{row}-p0", f"{row}-p0.1"]
    for measured in found.rows:
        assert measured.verdict in ("faster", "even", "slower")
        assert measured.speedup() > 0 and measured.time("frozen").count >= 7
        for peer in ("peft", "fastlora"):
            entry = measured.peers[peer]
            assert entry["check"]["rms"] <= entry["check"]["limit"]
        assert "layers fused" in measured.peers["fastlora"]["note"]
        assert measured.reason("compile").startswith("not run: one compilation")
    assert found.environment["threads"] == 1
    assert f"| {row}-p0.1 |" in out.with_suffix(".md").read_text()
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "linaer"], "only: got 'linaer'"),
        (["--repeats", "-1"], "repeats: got -1"),
        (["--compare", "nowhere.json"], "--compare: no such file: nowhere.json"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        __main__.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def program(body):
    """A stand-in for the program that imports torch and fastlora."""
    facts = {"torch": 2.0, "fastlora": 0.25, "new": ["fastlora"], "cuda": False}
    return f"import json\nfacts = {facts!r}\n{body}\nprint(json.dumps(facts))"


def test_import_times():
    found = imports.measure(3, program(""))
    assert (found.wrong, found.failed) == ("", "")
    assert found.timings.seconds == {"frozen": [2.0] * 3, "fastlora": [0.25] * 3}


@pytest.mark.parametrize(
    ("body", "wrong", "failed"),
    [
        ("facts['new'] += ['peft', 'transformers']", "imports peft, transformers", ""),
        ("facts['cuda'] = True", "starts a CUDA context", ""),
        ("raise ImportError('no fastlora')", "", "ImportError: no fastlora"),
    ],
)
def test_an_import_that_does_too_much_or_fails(body, wrong, failed):
    found = imports.measure(1, program(body))
    assert (found.wrong, found.failed) == (wrong, failed)


def test_the_environment_names_no_path():
    told = json.dumps(environment.describe())
    assert not re.search(r"/(home|root|work|tmp)/", told)
    assert environment.describe()["versions"]["torch"]
