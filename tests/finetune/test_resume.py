"""A run that was cut, by whatever, goes on to the losses and the adapter of a run that never was."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from fastlora.finetune import checkpoints, parse, run
from tests.finetune import tiny

SAVING = {"save_strategy": "steps", "save_steps": 4}


class Cut(Exception):
    """What the cut raises."""


class CutAt(TrainerCallback):
    """Raises once a step is done and, where it is due, saved."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Cut


def cut_and_resume(options, step):
    """Metrics of a run that was cut after `step` steps and started again by the same command."""
    with pytest.raises(Cut):
        run(parse(options), callbacks=[CutAt(step)])
    assert not (Path(options["output_dir"]) / "adapter_model.safetensors").exists()
    return run(parse(options)).metrics


def assert_same_adapter(one, other):
    one, other = tiny.adapter(one), tiny.adapter(other)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train_sampling_strategy": "random"},
        {"logging_steps": 3},
        {"gradient_accumulation_steps": 4, "max_steps": 6},  # an epoch is 6 batches: 2 steps
        {"lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1},
        {"eval_fraction": 0.2, "eval_strategy": "steps", "eval_steps": 2},
        {"gradient_checkpointing": True},
        {"max_steps": -1, "num_train_epochs": 2},
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_resumed_losses_are_those_of_a_run_never_cut(options, tmp_path, changes):
    """Dropout on, cut at 5 behind the checkpoint of step 4: bit for bit, losses and adapter."""
    options |= SAVING | changes
    options = {name: value for name, value in options.items() if value != -1}
    whole = run(parse(options | {"output_dir": str(tmp_path / "whole")})).metrics
    resumed = cut_and_resume(options, 5)
    assert resumed["resumed_from"] == "checkpoint-4"
    assert tiny.losses(resumed) == tiny.losses(whole)
    assert min(tiny.losses(whole)) < 5 < max(tiny.losses(whole)) <= whole["steps"]
    assert resumed["eval_loss"] == whole["eval_loss"]
    assert_same_adapter(tmp_path / "whole", options["output_dir"])


def test_saving_leaves_no_trace_in_the_losses(options, tmp_path):
    """The run never cut may also be one that never saved."""
    whole = run(parse(options | {"output_dir": str(tmp_path / "whole")})).metrics
    resumed = cut_and_resume(options | SAVING, 7)
    assert tiny.losses(resumed) == tiny.losses(whole)
    assert_same_adapter(tmp_path / "whole", options["output_dir"])


def contents(directory):
    """Bytes of every file below a directory, by path."""
    return {
        path: path.read_bytes() for path in sorted(Path(directory).rglob("*")) if path.is_file()
    }


@pytest.mark.parametrize("changes", [{"max_steps": 8}, {"num_train_epochs": 1}, {"max_steps": 4}])
def test_a_finished_run_started_again_is_refused(options, tmp_path, changes):
    """Nothing is left to train, with other data neither: every file stays as it was."""
    del options["max_steps"]
    options |= SAVING | changes
    run(parse(options | ({"max_steps": 8} if "max_steps" in changes else {})))
    before = contents(options["output_dir"])
    other = tiny.write(tmp_path / "other.jsonl", tiny.rows(24, seed=7))
    name, value = next(iter(changes.items()))
    for more in ({}, {"data": [str(other)]}):
        with pytest.raises(
            ValueError, match=rf"{name}: got {value}.* has done . steps: nothing is left"
        ):
            run(parse(options | more))
        assert contents(options["output_dir"]) == before


def test_a_run_cut_behind_its_last_step_is_finished(options):
    """Without the report there is something left to do: the adapter is written."""
    first = run(parse(options | SAVING)).metrics
    out = Path(options["output_dir"])
    before = tiny.adapter(out)
    for name in ("metrics.json", "adapter_model.safetensors"):
        (out / name).unlink()
    again = run(parse(options | SAVING)).metrics
    assert again["resumed_from"] == "checkpoint-8"
    assert (again["steps"], again["loss"]) == (8, first["loss"])
    after = tiny.adapter(out)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_half_written_checkpoint_is_skipped(options, capsys):
    options |= {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    run(parse(options))
    weights = Path(options["output_dir"]) / "checkpoint-4" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    capsys.readouterr()
    metrics = run(parse(options | {"max_steps": 6})).metrics
    said = capsys.readouterr().out
    assert "checkpoint-4: adapter_model.safetensors is cut off" in said
    assert metrics["resumed_from"] == "checkpoint-2"
    assert checkpoints.fault(weights.parent) is None  # written anew on the way


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 2}, r"r: got 2, but .*checkpoint-2 has 4"),
        ({"lora_alpha": 4}, r"lora_alpha: got 4, but .* has 8"),
        (
            {"target_modules": ["q_proj"]},
            r"target_modules, layers, modules_to_save: .* is trained by .*checkpoint-2 alone",
        ),
        (
            {"layers_to_transform": [0]},
            r"target_modules, layers, modules_to_save: .*layers\.1\..* is trained by ",
        ),
        ({"optim": "sgd"}, r"optim: got 'sgd', but .*checkpoint-2 has 'adamw"),
        ({"lr_scheduler_type": "cosine"}, r"lr_scheduler_type: got 'cosine', but .* has 'linear'"),
        ({"init_lora_weights": "olora"}, r"init_lora_weights: got 'olora', but .* has 'true'"),
        (
            {"modules_to_save": ["lm_head"]},
            r"modules_to_save.*lm_head.* is trained by this run alone",
        ),
        ({"resume_from_checkpoint": "false"}, r"resume_from_checkpoint: got false, but .* holds"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_run_does_not_resume(stopped, changes, message):
    with pytest.raises(ValueError, match=message):
        run(parse(stopped | {"max_steps": 4} | changes))


def test_the_same_layers_by_other_names_resume(stopped):
    assert (
        run(parse(stopped | {"max_steps": 3, "target_modules": ["all-linear"]})).metrics["steps"]
        == 3
    )


@pytest.fixture
def stopped(options):
    """Options of a run that has stopped after two steps."""
    options |= {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    options |= {"target_modules": list(tiny.LINEAR)}
    run(parse(options))
    return options


def test_changed_data_are_said(stopped, tmp_path, capsys):
    data = tiny.write(tmp_path / "more.jsonl", tiny.rows(25, seed=5))
    run(parse(stopped | {"data": [str(data)], "max_steps": 3}))
    assert "the training data changed since checkpoint-2" in capsys.readouterr().out


def test_changed_settings_are_said(stopped, capsys):
    run(parse(stopped | {"max_steps": 3, "lora_dropout": 0.2, "init_lora_weights": "gaussian"}))
    said = capsys.readouterr().out
    assert "lora_dropout (was 0.1, now 0.2), init_lora_weights (was true, now gaussian)" in said
    assert "have changed since checkpoint-2: the losses will not be those" in said


def test_another_base_does_not_resume(stopped, tmp_path):
    """Of the same shape, but with one weight changed."""
    model = tiny.model(259)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    tiny.tokenizer(chat=True).save_pretrained(tmp_path / "other")
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(
        ValueError, match=r"model: got .*other, but .*checkpoint-2 was trained on other"
    ):
        run(parse(stopped | {"max_steps": 4, "model": str(tmp_path / "other")}))


def test_no_template_of_another_tokenizer_stays(options):
    out = Path(options["output_dir"])
    for directory in (out, out / "checkpoint-1"):
        directory.mkdir(parents=True)
        (directory / "chat_template.jinja").write_text("of another")
    changes = {
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 1,
        "prompt_template": "plain",
    }
    run(parse(options | changes), tokenizer=tiny.tokenizer())
    assert not list(out.rglob("chat_template.jinja"))


def test_a_checkpoint_can_be_named(stopped, tmp_path):
    elsewhere = str(tmp_path / "elsewhere")
    named = str(Path(stopped["output_dir"]) / "checkpoint-2")
    changes = {"output_dir": elsewhere, "resume_from_checkpoint": named, "max_steps": 3}
    metrics = run(parse(stopped | changes)).metrics
    assert (metrics["resumed_from"], metrics["steps"]) == ("checkpoint-2", 3)


def test_a_killed_run_leaves_a_usable_checkpoint(options):
    """SIGKILL at any moment; the same command, in this process, goes on."""
    options |= {"save_strategy": "steps", "save_steps": 2, "max_steps": 100_000}
    out = Path(options["output_dir"])
    process = subprocess.Popen(
        [sys.executable, "-m", "fastlora.finetune", *tiny.argv(options)],
        env=tiny.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 200
    try:
        while len(list(out.glob("checkpoint-*/trainer_state.json"))) < 2:
            assert process.poll() is None, "the run ended by itself"
            assert time.monotonic() < deadline, "no checkpoint within 200 s"
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert not (out / "adapter_model.safetensors").exists()
    done = max(int(path.name.split("-")[1]) for path in out.glob("checkpoint-*"))
    metrics = run(parse(options | {"max_steps": done + 3})).metrics
    assert int(metrics["resumed_from"].split("-")[1]) >= done - 2
    assert metrics["steps"] == done + 3
    assert sorted(tiny.losses(metrics)) == list(range(1, done + 4))
    assert tiny.adapter(out)
    assert not [name for name in os.listdir(out) if name.startswith(".adapter-")]
