"""Whole runs on a tiny model: what they leave behind, resuming bit for bit, killed processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from fastlora.finetune import parse, run
from tests.finetune import tiny

ROOT = Path(__file__).resolve().parents[2]


def losses(metrics):
    return {entry["step"]: entry["loss"] for entry in metrics["loss"]}


def adapter(directory):
    return load_file(Path(directory) / "adapter_model.safetensors")


def test_a_run_and_what_it_leaves(options, base):
    settings = parse(
        options
        | {"eval_fraction": 0.2, "eval_strategy": "steps", "eval_steps": 4, "eval_on_start": True}
    )
    result = run(settings)
    out = Path(options["output_dir"])
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["steps"] == 8
    assert metrics["eval_loss_after"] < metrics["eval_loss_before"]
    assert metrics["train_loss_last"] < metrics["train_loss_first"]
    assert metrics["tokens_per_second"] > 0
    assert metrics["fusion"]["layers"] == metrics["fusion"]["fused"] == 14
    assert 0 <= metrics["data"]["padding_share"] < 1
    assert metrics["data"]["train_rows"] + metrics["data"]["eval_rows"] == 24
    assert (out / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"

    ids = torch.randint(0, 200, (2, 9))
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(out)).eval()
    with torch.no_grad():
        expected = plain(input_ids=ids).logits
        got = result.model.eval()(input_ids=ids).logits
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


class _Stop(TrainerCallback):
    """Ends the run after a step, as a cut would, but in the same process."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.parametrize("sampling", ["group_by_length", "random"])
def test_resumed_losses_are_those_of_a_run_never_cut(options, tmp_path, sampling):
    """Dropout on, through an epoch's end: bit for bit, losses and adapter."""
    options |= {"train_sampling_strategy": sampling, "save_strategy": "steps", "save_steps": 4}
    options |= {"max_steps": 9}
    if sampling == "random":
        options |= {"group_by_length": "false"}
        options = {k: v for k, v in options.items() if k != "group_by_length"}
    whole = run(parse(options | {"output_dir": str(tmp_path / "whole")})).metrics
    cut_dir = str(tmp_path / "cut")
    run(parse(options | {"output_dir": cut_dir}), callbacks=[_Stop(5)])
    assert (tmp_path / "cut" / "checkpoint-4").is_dir()
    for later in ("checkpoint-5",):
        shutil.rmtree(tmp_path / "cut" / later, ignore_errors=True)
    resumed = run(parse(options | {"output_dir": cut_dir})).metrics
    assert resumed["resumed_from"] == "checkpoint-4"
    expected, got = losses(whole), losses(resumed)
    assert {s: got[s] for s in range(5, 10)} == {s: expected[s] for s in range(5, 10)}
    for name, value in adapter(tmp_path / "whole").items():
        assert torch.equal(adapter(cut_dir)[name], value), name


def test_a_half_written_checkpoint_is_skipped(options, tmp_path, capsys):
    options |= {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    run(parse(options))
    newest = Path(options["output_dir"]) / "checkpoint-4"
    weights = newest / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    capsys.readouterr()
    metrics = run(parse(options | {"max_steps": 6})).metrics
    said = capsys.readouterr().out
    assert "checkpoint-4: adapter_model.safetensors is cut off" in said
    assert metrics["resumed_from"] == "checkpoint-2"


def test_another_adapter_is_not_resumed(options):
    options |= {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    run(parse(options))
    with pytest.raises(ValueError, match=r"r: got 2, but .* has 4"):
        run(parse(options | {"r": 2, "max_steps": 4}))


def _argv(options):
    words = []
    for name, value in options.items():
        words += [f"--{name}", *value] if isinstance(value, list) else [f"--{name}={value}"]
    return words


def _environment():
    return os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}


def test_a_killed_run_leaves_a_usable_checkpoint(options):
    options |= {"save_strategy": "steps", "save_steps": 2, "max_steps": 100000}
    process = subprocess.Popen(
        [sys.executable, "-m", "fastlora.finetune", *_argv(options)],
        env=_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    out = Path(options["output_dir"])
    deadline = time.monotonic() + 200
    try:
        while len(list(out.glob("checkpoint-*/trainer_state.json"))) < 2:
            assert process.poll() is None, "the run ended by itself"
            assert time.monotonic() < deadline, "no checkpoint within 200 s"
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = max(int(path.name.split("-")[1]) for path in out.glob("checkpoint-*"))
    metrics = run(parse(options | {"max_steps": done + 3})).metrics
    assert int(metrics["resumed_from"].split("-")[1]) >= done - 2
    assert metrics["steps"] == done + 3


def test_two_processes(options):
    """torchrun, gloo: one adapter, and finite losses that both ranks agreed on."""
    options |= {"max_steps": 3, "ddp_backend": "gloo", "lora_r": options.pop("r")}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", "2", "-m", "fastlora.finetune"),
            *_argv(options),
        ],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = json.loads((Path(options["output_dir"]) / "metrics.json").read_text())
    assert metrics["training"]["processes"] == 2
    assert metrics["steps"] == 3
    assert all(loss is not None for loss in losses(metrics).values())
    assert adapter(options["output_dir"])


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": True},
        {"bf16": True},
        {"gradient_accumulation_steps": 2},
        {"bias": "all"},
        {"use_dora": True},
        {"fuse": False},
        {"lr_scheduler_type": "cosine", "warmup_steps": 1, "weight_decay": 0.01},
        {"report_to": "tensorboard"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_trainer_options(options, changes):
    metrics = run(parse(options | {"max_steps": 2} | changes)).metrics
    assert metrics["steps"] == 2
    assert all(loss is not None for loss in losses(metrics).values())


def test_checkpointing_changes_no_loss(options, tmp_path):
    """Recomputed dropout masks are the same ones: the losses are equal bit for bit."""
    plain = run(parse(options | {"output_dir": str(tmp_path / "a"), "max_steps": 3})).metrics
    checkpointed = run(
        parse(
            options
            | {"output_dir": str(tmp_path / "b"), "max_steps": 3, "gradient_checkpointing": True}
        )
    ).metrics
    assert losses(plain) == losses(checkpointed)


def test_best_model_is_kept(options):
    metrics = run(
        parse(
            options
            | {"eval_fraction": 0.25, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 6}
            | {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
        )
    ).metrics
    assert metrics["eval_loss_after"] == pytest.approx(metrics["best_eval_loss"], rel=1e-6)


def test_fused_and_unfused_runs_agree(options, tmp_path):
    """Without dropout the fused layers train to the same losses as PEFT's own."""
    options |= {"lora_dropout": 0.0}
    fused = run(parse(options | {"output_dir": str(tmp_path / "a")})).metrics
    plain = run(parse(options | {"output_dir": str(tmp_path / "b"), "fuse": False})).metrics
    for step, loss in losses(plain).items():
        assert losses(fused)[step] == pytest.approx(loss, rel=1e-4)


def test_messages_train(options, tmp_path):
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    chat = tiny.write(tmp_path / "chat.jsonl", [{"messages": messages}, *tiny.rows(7)])
    assert run(parse(options | {"data": [str(chat)], "max_steps": 2})).metrics["steps"] == 2
