"""The command's last words: one line, an exit code, and what the same command would do next."""

import errno
import io
import shutil
import sys
from pathlib import Path

import pytest
import torch

from fastlora.finetune import command, main, parse, run
from fastlora.finetune.checks import check_processes
from tests.finetune import tiny

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


def refused(options, capsys):
    """The one line with which the command refuses these options."""
    assert main(tiny.argv(options)) == 2
    error = capsys.readouterr().err.splitlines()
    assert error[-1].startswith("fastlora finetune: error: ")
    assert not any("Traceback" in line for line in error)
    return error[-1]


def breaking(error, monkeypatch):
    """Have training raise, once it has begun."""

    def train(prepared):
        raise error

    monkeypatch.setattr(command, "train", train)


@pytest.fixture
def checkpointed(options):
    """Options of a run with a checkpoint behind step 4, and more to do."""
    run(parse(options | SAVING))
    return options | SAVING | {"max_steps": 8}


def test_an_interrupt_says_what_comes_next(checkpointed, tmp_path, monkeypatch, capsys):
    breaking(KeyboardInterrupt(), monkeypatch)
    assert main(tiny.argv(checkpointed)) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "fastlora finetune: interrupted: the same command resumes from checkpoint-4"
    assert main(tiny.argv(checkpointed | {"output_dir": str(tmp_path / "new")})) == 130
    assert "starts over: no checkpoint was saved" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["python", "rust"],
)
def test_a_full_disk_is_one_line(checkpointed, monkeypatch, capsys, error):
    breaking(error, monkeypatch)
    assert main(tiny.argv(checkpointed)) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "error: no space left for" in said
    assert said.rstrip().endswith("the same command resumes from checkpoint-4")


def test_what_breaks_in_training_keeps_its_traceback(checkpointed, monkeypatch, capsys):
    breaking(RuntimeError("shapes differ"), monkeypatch)
    assert main(tiny.argv(checkpointed)) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "error while training: RuntimeError: shapes differ" in said.splitlines()[-1]
    assert said.rstrip().endswith("the same command resumes from checkpoint-4")


def test_a_missing_package_of_an_option_is_not_laid_to_the_extra(options, monkeypatch, capsys):
    for package, run_this in (("zzz", "pip install zzz"), ("yaml", "fastlora[finetune]")):
        monkeypatch.setattr(command, "parse", _raiser(ModuleNotFoundError("no", name=package)))
        assert main(tiny.argv(options)) == 1
        said = capsys.readouterr().err
        assert f"{package!r} is not installed; run: " in said
        assert run_this in said
        assert ("fastlora[finetune]" in said) == (package == "yaml")


def _raiser(error):
    def fail(*args):
        raise error

    return fail


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_is_not_utf8(options, monkeypatch, encoding):
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    monkeypatch.setattr(sys, "stdout", out)
    assert main(tiny.argv(options | {"max_steps": 1})) == 0
    assert "loss 5." in out.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": "lomo"}, "optim, optim_args: lomo cannot be used here (You need to install"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "lr_scheduler_kwargs: cosine_with_min_lr"),
        ({"lr_scheduler_kwargs": '{"zz": 1}'}, "lr_scheduler_kwargs: linear cannot be used here"),
        ({"use_liger_kernel": True}, "use_liger_kernel: got true, which needs pip install"),
        ({"rank_pattern": '{"zz": 3}'}, "rank_pattern: got 'zz', but the model's layers are"),
        ({"alpha_pattern": '{"q_proj(": 3}'}, "alpha_pattern: got 'q_proj(', which is no regular"),
        ({"model": "nope"}, "model: cannot load a tokenizer from nope; there is no such directory"),
        ({"max_length": 300}, "longer ("),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_in_one_line_that_names_the_option(options, tmp_path, capsys, changes, message):
    """And the directory that was made for it is not left behind."""
    if "max_length" in changes:
        long = tiny.write(tmp_path / "long.jsonl", [{"input": "a" * 400, "output": "b"}])
        options |= {"eval_data": [str(long)]}
        message = "max_length: got 300, and every row of eval_data is " + message
    assert message in refused(options | changes, capsys)
    assert not Path(options["output_dir"]).exists()


def test_a_directory_that_was_there_stays(options, capsys):
    Path(options["output_dir"]).mkdir()
    refused(options | {"modules_to_save": ["zz"]}, capsys)
    assert Path(options["output_dir"]).is_dir()


def test_damaged_models_are_refused(options, base, tmp_path, capsys):
    damaged = tmp_path / "damaged"
    shutil.copytree(base, damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:3000])
    said = refused(options | {"model": str(damaged)}, capsys)
    assert f"model: cannot load a model from {damaged} (SafetensorError: " in said
    gguf = tmp_path / "bad.gguf"
    gguf.write_bytes(b"GGUF" + bytes(range(200)))
    assert "model: cannot load a tokenizer from" in refused(options | {"model": str(gguf)}, capsys)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="only where there is a CPU alone")
def test_half_precision_on_a_cpu(options, capsys):
    del options["use_cpu"]
    said = refused(options | {"fp16": True}, capsys)
    assert "fp16: got true, but this run is on the CPU" in said
    assert "--bf16" in said
    training = parse(options | {"bf16": True}).training
    assert (training.bf16, training.use_cpu) == (True, True)


def test_processes_that_do_not_find_each_other_are_refused(monkeypatch):
    check_processes(1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_processes(2)
    with pytest.raises(ValueError, match=r"WORLD_SIZE: torchrun started 2 processes, but .* of 1"):
        check_processes(1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("r: 4\nr: 5\n", r"run\.yaml:2: r is given twice"),
        ('{"r": 4,\n"r": 5}', r"run\.yaml:2: r is given twice"),
        ("r: [8, 9]\n", r"run\.yaml: r: got \[8, 9\], takes one value"),
        ("target_modules: ['-q_proj']\n", r"run\.yaml: target_modules: got '-q_proj'"),
        ("r: many\n", r"run\.yaml: argument --r.*many"),
        ("{a: " * 3000 + "}" * 3000, r"run\.yaml is nested too deep"),
    ],
    ids=["twice", "twice-json", "list", "dash", "type", "deep"],
)
def test_a_config_file_is_refused_by_key_and_name(tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        parse(["--config", str(tmp_path / "run.yaml")])
