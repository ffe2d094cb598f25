"""The choice of a candidate: a pure function of times, and of a file that other processes write too."""

import json
import multiprocessing
from pathlib import Path

import pytest
import torch

from fastlora.kernels import cost, dispatch, tuning
from fastlora.kernels.dispatch import OPERATIONS, Problem, bucket, fastest

PROBLEM = Problem("forward", torch.bfloat16, 8192, 4096, (4096,), (16,), False)
GPU = torch.device("meta")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A GPU that is not there, with a file of its own: candidates are "timed" by a table."""
    monkeypatch.setattr(dispatch, "capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tuning, "cache", lambda device: tuning.Cache(tmp_path / "choices.json"))
    dispatch.forget()
    yield tuning.Cache(tmp_path / "choices.json")
    dispatch.forget()


class Timer:
    """tuning.measure by table; counts how often it was asked."""

    def __init__(self, monkeypatch, **seconds):
        self.seconds, self.calls = seconds, 0
        monkeypatch.setattr(tuning, "measure", self)

    def __call__(self, names, run):
        self.calls += 1
        return {name: self.seconds[name] for name in names if name in self.seconds}


def choose(problem=PROBLEM, names=OPERATIONS):
    return dispatch.choose(problem, GPU, names, lambda name: None)


@pytest.mark.parametrize(
    ("rows", "expected"), [(0, 1), (1, 1), (2, 2), (3, 4), (8192, 8192), (8193, 16384)]
)
def test_bucket(rows, expected):
    assert bucket(rows) == expected


def test_least_time_wins_and_of_equals_the_first():
    names = ("a", "b", "c")
    assert fastest({"a": 2.0, "b": 1.0, "c": 3.0}, names) == "b"
    assert fastest({"c": 1.0, "b": 1.0}, names) == "b"
    with pytest.raises(ValueError, match=r"takes some of a, b, c"):
        fastest({"other": 1.0}, names)


def test_first_use_measures_once_and_keeps_the_winner(cache, monkeypatch):
    timer = Timer(monkeypatch, fused=3.0, library=2.0, unfused=4.0)
    assert [choose(), choose()] == ["library", "library"]
    assert timer.calls == 1
    assert dispatch.choices()[PROBLEM, GPU].how == "measured"
    dispatch.forget()  # another process
    assert choose() == "library"
    assert timer.calls == 1
    found = dispatch.choices()[PROBLEM, GPU]
    assert found.how == "kept" and found.seconds == {"fused": 3.0, "library": 2.0, "unfused": 4.0}


def test_never_slower_than_the_unfused_path(cache, monkeypatch):
    Timer(monkeypatch, fused=3.0, library=2.0, unfused=1.0)
    assert choose() == "unfused"


def test_candidate_that_does_not_run_is_passed_over(cache, monkeypatch):
    Timer(monkeypatch, unfused=5.0)
    assert choose() == "unfused"


def test_without_autotune_the_model_chooses_and_no_file_is_touched(cache, monkeypatch):
    timer = Timer(monkeypatch, fused=3.0, library=2.0, unfused=1.0)
    monkeypatch.setenv("FASTLORA_AUTOTUNE", "0")
    expected = fastest(cost.seconds(PROBLEM, OPERATIONS, (9, 0)), OPERATIONS)
    assert choose() == expected
    assert dispatch.choices()[PROBLEM, GPU].how == "modelled"
    assert timer.calls == 0 and not cache.path.exists()


def test_capture_of_a_graph_takes_the_model_and_leaves_the_question_open(cache, monkeypatch):
    timer = Timer(monkeypatch, fused=3.0, library=2.0, unfused=1.0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    choose()
    assert timer.calls == 0 and not dispatch.choices()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert choose() == "unfused" and timer.calls == 1


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 1}',
        '{"format": 1, "choices": []}',
        '{"format": 99, "choices": {}}',
        "\x00\xff",
    ],
)
def test_broken_file_is_ignored_and_replaced(cache, monkeypatch, content, caplog):
    Timer(monkeypatch, fused=1.0, library=2.0)
    cache.path.write_text(content)
    assert choose() == "fused"
    assert "is ignored" in caplog.text
    assert cache.get(str(PROBLEM), OPERATIONS) == ("fused", "kept", {"fused": 1.0, "library": 2.0})


@pytest.mark.parametrize(
    "entry", [None, 3, {}, {"name": "gone", "seconds": {}}, {"name": "fused", "seconds": "x"}]
)
def test_unusable_entry_is_measured_again(cache, monkeypatch, entry):
    timer = Timer(monkeypatch, library=2.0)
    cache.path.write_text(json.dumps({"format": 1, "choices": {str(PROBLEM): entry, "other": 1}}))
    assert choose() == "library" and timer.calls == 1
    assert json.loads(cache.path.read_text())["choices"]["other"] == 1


def test_folder_that_cannot_be_written_costs_only_the_file(cache, monkeypatch, caplog, tmp_path):
    Timer(monkeypatch, fused=1.0)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tuning, "cache", lambda device: tuning.Cache(tmp_path / "file" / "c.json"))
    assert choose() == "fused"
    assert "FASTLORA_CACHE_DIR" in caplog.text


def _write(path: str, worker: int, count: int) -> None:
    for i in range(count):
        tuning.Cache(Path(path)).put(f"problem {worker}.{i}", "fused", {"fused": 1.0})


def test_two_processes_writing_at_once_lose_nothing(tmp_path):
    path = tmp_path / "choices.json"
    count = 40
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.starmap(_write, [(str(path), worker, count) for worker in (0, 1)])
    assert len(tuning.Cache(path).read()) == 2 * count
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".lock"]  # no rest of a write


def test_file_is_named_after_gpu_versions_and_source(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTLORA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200 / x")
    path = tuning.cache(GPU).path
    assert path.parent == tmp_path
    assert path.name.startswith("NVIDIA-H200-x-torch") and tuning.source_hash() in path.name


def test_forced_candidate_wins_over_everything(cache, monkeypatch):
    Timer(monkeypatch, fused=1.0, library=2.0)
    with dispatch.forcing("library"):
        assert choose() == "library"
        assert choose(names=("fused", "unfused")) == "fused"  # which has no such candidate
    assert choose() == "fused"


@pytest.mark.parametrize("part", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0), (7, 5)])
@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_model_ranks_the_candidates_of_a_large_layer(part, op, dropout, dtype):
    seconds = cost.seconds(PROBLEM._replace(op=op, dropout=dropout, dtype=dtype), OPERATIONS, part)
    assert all(0 < s < 1 for s in seconds.values())
    # Beside the library's GEMM the passes are fewer, or as many: forward without a mask S and Y are all there is.
    plain = op == "forward" and not dropout
    assert seconds["library"] <= seconds["unfused"] * (1.0 if plain else 0.999)
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32":
        assert seconds["library"] < seconds["fused"]  # no tensor cores in our own fp32 GEMM
