"""Which checkpoint is resumed from: half-written ones, damaged ones, and those of another number of processes."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from fastlora.finetune import checkpoints, parse, run
from fastlora.finetune.resuming import find_checkpoint, total_steps
from tests.finetune import tiny

FILES = (
    *("adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "scheduler.pt"),
    *("rng_state.pth", "trainer_state.json"),
)


@pytest.fixture(scope="module")
def saved(base, tmp_path_factory):
    """(options, checkpoint) of a run of two steps that saved behind each."""
    options = tiny.options(base, tmp_path_factory.mktemp("saved"))
    options |= {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    run(parse(options))
    return options, Path(options["output_dir"]) / "checkpoint-2"


@pytest.fixture
def out(saved, tmp_path):
    """A copy of that run's directory."""
    shutil.copytree(saved[1].parent, tmp_path / "copy")
    return tmp_path / "copy"


def settings(saved, out, **changes):
    return parse(saved[0] | {"output_dir": str(out), "max_steps": 4} | changes)


def unsealed(directory):
    """Without checksums, as a checkpoint of Trainer's own, or one that was being written."""
    (directory / checkpoints.MANIFEST).unlink()
    return directory


def test_a_whole_checkpoint_has_no_fault(saved, out):
    assert checkpoints.fault(saved[1]) is None
    assert checkpoints.fault(unsealed(out / "checkpoint-2")) is None
    assert checkpoints.manifest(saved[1])["processes"] == 1
    assert set(FILES) <= set(checkpoints.manifest(saved[1])["files"])


@pytest.mark.parametrize("name", FILES)
def test_every_file_cut_off_or_missing(out, name):
    sealed, bare = out / "checkpoint-2", unsealed(out / "checkpoint-1")
    content = (sealed / name).read_bytes()
    for length in (0, 5, len(content) // 2, len(content) - 1):
        (sealed / name).write_bytes(content[:length])
        assert checkpoints.fault(sealed) == f"{name} is cut off", length
        if length < len(content) - 1 or not name.endswith(".json"):
            (bare / name).write_bytes(content[:length])
            assert checkpoints.fault(bare).startswith(f"{name} "), length
    for directory in (sealed, bare):
        (directory / name).unlink()
        assert checkpoints.fault(directory) == f"{name} is missing"


@pytest.mark.parametrize("name", FILES)
def test_every_file_damaged_at_its_length(out, name):
    path = out / "checkpoint-2" / name
    content = path.read_bytes()
    middle = len(content) // 2
    for spoilt in (bytes(len(content)), content[:middle] + bytes(8) + content[middle + 8 :]):
        path.write_bytes(spoilt)
        assert checkpoints.fault(path.parent) == f"{name} is damaged"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(
            (name, text)
            for name in FILES
            if name.endswith(".json")
            for text in (b"{}", b"[]", b"1")
        ),
        ("adapter_model.safetensors", (2).to_bytes(8, "little") + b"[]"),
        ("adapter_model.safetensors", (8).to_bytes(8, "little") + b'{"a":{}}'),
        ("adapter_model.safetensors", (2).to_bytes(8, "little") + b"{}"),
        ("fastlora.json", b"[]"),
        ("fastlora.json", b'{"files": 3}'),
        *((name, {"other": 1}) for name in FILES if name[-3:] in (".pt", "pth")),
        *((name, [1]) for name in FILES if name[-3:] in (".pt", "pth")),
    ],
)
def test_other_content_is_a_fault_without_checksums_too(out, name, content):
    path = unsealed(out / "checkpoint-2") / name
    torch.save(content, path) if not isinstance(content, bytes) else path.write_bytes(content)
    assert checkpoints.fault(path.parent).startswith(f"{name} ")
    assert checkpoints.find(out).usable == out / "checkpoint-1"


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(saved, out, capsys):
    weights = out / "checkpoint-2" / "adapter_model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    (out / "metrics.json").unlink()
    metrics = run(settings(saved, out, max_steps=3)).metrics
    said = capsys.readouterr().out
    assert "not whole: checkpoint-2: adapter_model.safetensors is damaged" in said
    assert metrics["resumed_from"] == "checkpoint-1"
    assert checkpoints.find(out).usable == out / "checkpoint-3"
    assert checkpoints.fault(out / "checkpoint-2") is None  # written anew on the way


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_killed_at_its_first_checkpoint_starts_over(saved, out, capsys, begun):
    """One checkpoint, without checksums, and a file short: it can only have been being written."""
    shutil.rmtree(out / "checkpoint-1")
    facts = checkpoints.manifest(out / "checkpoint-2")
    (unsealed(out / "checkpoint-2") / "trainer_state.json").unlink()
    if begun:
        del facts["files"]
        (out / "checkpoint-2" / checkpoints.MANIFEST).write_text(json.dumps(facts))
    assert find_checkpoint(settings(saved, out), out) is None
    said = capsys.readouterr().out
    assert "checkpoint-2: trainer_state.json is missing" in said
    assert "starting over" in said
    with pytest.raises(ValueError, match=r"got false, but .* holds checkpoint-2 of an earlier run"):
        find_checkpoint(settings(saved, out, resume_from_checkpoint="false"), out)
    with pytest.raises(ValueError, match=r"got true, but .* holds no usable checkpoint"):
        find_checkpoint(settings(saved, out, resume_from_checkpoint="true"), out)


@pytest.mark.parametrize("both", [False, True])
def test_nothing_but_damaged_checkpoints_is_refused(saved, out, both):
    """What was whole once is a run's work: it is not written over."""
    for name in ("checkpoint-1", "checkpoint-2"):
        (out / name / "optimizer.pt").unlink()
    if both:
        unsealed(out / "checkpoint-1")
        unsealed(out / "checkpoint-2")
    else:
        shutil.rmtree(out / "checkpoint-1")
    with pytest.raises(
        ValueError, match=r"output_dir: .* no usable checkpoint \(checkpoint-2: opt.*remove"
    ):
        find_checkpoint(settings(saved, out), out)


def test_a_checkpoint_of_more_processes_is_refused(saved, out):
    bare = unsealed(out / "checkpoint-2")
    (bare / "rng_state.pth").rename(bare / "rng_state_0.pth")
    assert checkpoints.made_by(bare) is None
    assert checkpoints.fault(bare, 2) == "rng_state_1.pth is missing"
    shutil.copy(bare / "rng_state_0.pth", bare / "rng_state_1.pth")
    message = r"checkpoint-2 was made by 2 processes, this run has 1; start it with as many"
    for wish in (None, str(bare)):
        with pytest.raises(ValueError, match=message):
            find_checkpoint(settings(saved, out, resume_from_checkpoint=wish), out)


def test_a_checkpoint_of_fewer_processes_is_refused(saved, out, monkeypatch):
    chosen = settings(saved, out)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="was made by 1 process, this run has 2"):
        find_checkpoint(chosen, out)


def test_a_named_checkpoint_that_is_not_there(saved, out):
    with pytest.raises(ValueError, match="nope cannot be resumed from: there is no such directory"):
        find_checkpoint(settings(saved, out, resume_from_checkpoint="nope"), out)


def test_the_manifest_is_json_without_paths(saved):
    text = (saved[1] / checkpoints.MANIFEST).read_text()
    assert {"data", "processes", "base", "optim", "said", "files"} <= json.loads(text).keys()


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"max_steps": 5}, 5),
        ({"num_train_epochs": 3}, 18),
        ({"num_train_epochs": 1, "per_device_train_batch_size": 7}, 4),
        (
            {"num_train_epochs": 1, "per_device_train_batch_size": 7, "dataloader_drop_last": True},
            3,
        ),
        ({"num_train_epochs": 2, "gradient_accumulation_steps": 4}, 4),
        ({"num_train_epochs": 0.5}, 3),
        ({"num_train_epochs": 1, "per_device_train_batch_size": 25}, 1),
    ],
    ids=str,
)
def test_steps_are_those_that_trainer_takes(options, changes, steps):
    del options["max_steps"]
    chosen = parse(options | changes)
    assert total_steps(24, chosen.training) == steps
    assert run(chosen).metrics["steps"] == steps


def test_no_step_at_all_is_refused(options):
    options |= {"dataloader_drop_last": True, "per_device_train_batch_size": 25}
    with pytest.raises(ValueError, match="dataloader_drop_last: got true, and a step's 25 rows"):
        run(parse(options))
    assert not Path(options["output_dir"]).exists()
