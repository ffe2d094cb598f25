"""Whole runs on a tiny model: what they leave behind, Trainer's options, two processes."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, TrainerCallback

import fastlora
from fastlora import backend
from fastlora.finetune import checkpoints, parse, run
from tests.finetune import tiny

METRICS = {
    *("model", "steps", "epochs", "resumed_from", "train_loss_first", "train_loss_last"),
    *("eval_loss_before", "eval_loss_after", "best_eval_loss", "seconds", "step_seconds"),
    *("tokens", "tokens_with_padding", "tokens_per_second", "data", "adapter", "fusion"),
    *("training", "loss", "eval_loss", "versions", "device", "threads"),
}
EVALUATING = {"eval_fraction": 0.25, "eval_strategy": "steps", "eval_steps": 2}


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory):
    """(result, output directory) of one run with evaluation."""
    directory = tmp_path_factory.mktemp("finished")
    options = tiny.options(base, directory)
    options |= {"eval_fraction": 0.2, "eval_strategy": "steps", "eval_steps": 4}
    options |= {"eval_on_start": True}
    return run(parse(options)), Path(options["output_dir"])


def test_metrics_of_a_run(finished):
    result, out = finished
    metrics = json.loads((out / "metrics.json").read_text("utf-8"))
    assert metrics == result.metrics
    assert set(metrics) == METRICS
    assert metrics["steps"] == 8
    assert metrics["resumed_from"] is None
    assert sorted(tiny.losses(metrics)) == list(range(1, 9))
    assert [entry["step"] for entry in metrics["eval_loss"]] == [0, 4, 8]
    assert metrics["train_loss_last"] < metrics["train_loss_first"]
    assert metrics["eval_loss_after"] < metrics["eval_loss_before"]
    assert metrics["tokens_per_second"] == metrics["tokens"] / metrics["step_seconds"]
    assert 0 < metrics["step_seconds"] < metrics["seconds"]
    data = metrics["data"]
    assert data["train_rows"] + data["eval_rows"] == 24
    assert data["lines"]["data"]["kept"] == data["lines"]["data"]["read"] == 24
    assert 0 < data["trained_tokens_an_epoch"] < data["tokens_an_epoch"]
    assert 0 < data["padding_share"] < data["padding_share_random"] < 1
    adapter = metrics["adapter"]
    assert (adapter["r"], adapter["lora_alpha"], adapter["lora_dropout"]) == (4, 8, 0.1)
    assert adapter["target_modules"] == sorted(tiny.LINEAR)


def test_tokens_are_counted(options):
    """One epoch's tokens, counted in its steps, are those of the data."""
    options = {**options, "num_train_epochs": 1}
    del options["max_steps"]
    metrics = run(parse(options)).metrics
    data = metrics["data"]
    assert metrics["tokens"] == data["tokens_an_epoch"]
    assert 1 - metrics["tokens"] / metrics["tokens_with_padding"] == pytest.approx(
        data["padding_share"]
    )


def test_every_layer_is_fused(finished):
    result, _ = finished
    fusion = result.metrics["fusion"]
    assert (fusion["layers"], fusion["fused"], fusion["unfused"]) == (14, 14, {})
    assert sum(fusion["backends"].values()) == 14
    assert set(fusion["backends"]) <= set(backend.NAMES)
    rows = fastlora.explain(result.model).rows
    assert len(rows) == 14
    assert all(row.fused for row in rows)


def test_files_of_a_run(finished):
    _, out = finished
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    names = {path.name for path in out.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not {name for name in names if name.startswith(".")}  # nothing half written
    modes = {path.name: path.stat().st_mode & 0o777 for path in out.iterdir() if path.is_file()}
    assert modes["adapter_model.safetensors"] == modes["metrics.json"] == modes["loss.png"]


def test_the_adapter_loads_into_the_plain_base(finished, base):
    result, out = finished
    ids = torch.randint(0, 200, (2, 9))
    bare = AutoModelForCausalLM.from_pretrained(base).eval()
    with torch.no_grad():
        untrained = bare(input_ids=ids).logits
        plain = PeftModel.from_pretrained(bare, str(out)).eval()
        expected = plain(input_ids=ids).logits
        got = result.model.eval()(input_ids=ids).logits
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert (expected - untrained).abs().max() > 1e-2
    saved = plain.state_dict()
    for name, value in result.model.state_dict().items():
        assert torch.equal(saved[name], value), name


def test_two_processes_take_the_steps_of_one(options, tmp_path):
    """torchrun: twice 2 rows a step train as 4 rows do, and leave one adapter; a checkpoint is of both."""
    options |= {"max_steps": 3, "lora_dropout": 0.0}
    one = run(parse(options | {"output_dir": str(tmp_path / "one")})).metrics
    options |= {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 3}
    del options[
        "use_cpu"
    ]  # where there is nothing else, the processes find each other all the same
    options["lora_r"] = options.pop("r")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", "2", "-m", "fastlora.finetune"),
            *tiny.argv(options),
        ],
        env=tiny.environment(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("adapter, metrics.json and loss.png are in") == 1
    metrics = json.loads((Path(options["output_dir"]) / "metrics.json").read_text())
    assert metrics["training"]["processes"] == 2
    assert metrics["tokens"] == one["tokens"]
    assert sorted(tiny.losses(metrics)) == [1, 2, 3]
    for step, loss in tiny.losses(one).items():
        assert tiny.losses(metrics)[step] == pytest.approx(loss, rel=1e-5)
    expected = tiny.adapter(tmp_path / "one")
    got = tiny.adapter(options["output_dir"])
    assert got.keys() == expected.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)
    checkpoint = Path(options["output_dir"]) / "checkpoint-3"
    assert checkpoints.fault(checkpoint, 2) is None
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= checkpoints.manifest(checkpoint)[
        "files"
    ].keys()
    with pytest.raises(ValueError, match="was made by 2 processes, this run has 1"):
        run(parse(tiny.argv(options | {"max_steps": 4})))


@pytest.mark.parametrize(
    "changes",
    [
        {"bf16": True},
        {"dtype": "bfloat16"},
        {"gradient_accumulation_steps": 2},
        {"bias": "all"},
        {"lora_bias": True},
        {"use_dora": True},
        {"use_rslora": True},
        {"fuse": False},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": '{"q_proj": 2}'},
        {"lr_scheduler_type": "cosine", "warmup_steps": 1, "weight_decay": 0.01},
        {"train_sampling_strategy": "random"},
        {"pad_to_multiple_of": 8},
        {"report_to": "tensorboard"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_trainer_options(options, changes):
    result = run(parse(options | {"max_steps": 2} | changes))
    assert result.metrics["steps"] == 2
    found = tiny.losses(result.metrics)
    assert sorted(found) == [1, 2]
    assert all(math.isfinite(loss) and 4 < loss < 7 for loss in found.values())  # log 259 is 5.56
    trained = [
        p.detach().abs().max()
        for n, p in result.model.named_parameters()
        if "lora_B" in n and "bias" not in n
    ]
    assert len(trained) == 14
    assert all(0 < size < 1 for size in trained)  # B began as 0
    fused = 0 if {"fuse", "use_dora"} & changes.keys() else 14
    assert result.metrics["fusion"]["fused"] == fused


def test_bf16_computes_in_bf16(options, tmp_path):
    full = run(parse(options | {"output_dir": str(tmp_path / "a"), "max_steps": 2})).metrics
    half = run(
        parse(options | {"output_dir": str(tmp_path / "b"), "max_steps": 2, "bf16": True})
    ).metrics
    assert half["training"]["bf16"] is True
    assert tiny.losses(half) != tiny.losses(full)
    assert tiny.losses(half) == pytest.approx(tiny.losses(full), rel=5e-3)


@pytest.mark.parametrize("reentrant", ["false", "true"])
def test_checkpointing_changes_no_loss(options, tmp_path, reentrant):
    """Recomputed dropout masks are the same ones: the losses are equal bit for bit."""
    options |= {"max_steps": 3}
    plain = run(parse(options | {"output_dir": str(tmp_path / "a")}))
    options |= {"output_dir": str(tmp_path / "b"), "gradient_checkpointing": True}
    options |= {"gradient_checkpointing_kwargs": f'{{"use_reentrant": {reentrant}}}'}
    checkpointed = run(parse(options))
    assert any(getattr(m, "gradient_checkpointing", False) for m in checkpointed.model.modules())
    assert tiny.losses(plain.metrics) == tiny.losses(checkpointed.metrics)


class _Spoil(TrainerCallback):
    """Makes the adapter worse than any training would, once a step is done."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        parameter.mul_(-300)


def test_the_best_model_is_kept(options):
    """The evaluation of step 4 is the best: what is saved is what was there then."""
    options |= EVALUATING | {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    options |= {"load_best_model_at_end": True}
    result = run(parse(options), callbacks=[_Spoil(5)])
    metrics = result.metrics
    found = {entry["step"]: entry["loss"] for entry in metrics["eval_loss"][:3]}
    assert found[4] < found[2] < found[6]
    assert metrics["best_eval_loss"] == found[4]
    assert metrics["eval_loss_after"] == pytest.approx(found[4], rel=1e-6)
    out = Path(options["output_dir"])
    best, saved = tiny.adapter(out / "checkpoint-4"), tiny.adapter(out)
    assert all(torch.equal(saved[name], value) for name, value in best.items())


def test_fused_and_unfused_runs_agree(options, tmp_path):
    """Without dropout the fused layers train to the same losses as PEFT's own."""
    options |= {"lora_dropout": 0.0}
    fused = run(parse(options | {"output_dir": str(tmp_path / "a")})).metrics
    plain = run(parse(options | {"output_dir": str(tmp_path / "b"), "fuse": False})).metrics
    assert (fused["fusion"]["fused"], plain["fusion"]["fused"]) == (14, 0)
    assert tiny.losses(fused) == pytest.approx(tiny.losses(plain), rel=1e-4)


def test_messages_train(options, tmp_path):
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    chat = tiny.write(tmp_path / "chat.jsonl", [{"messages": messages}, *tiny.rows(7)])
    metrics = run(parse(options | {"data": [str(chat)], "max_steps": 2})).metrics
    assert (metrics["steps"], metrics["data"]["train_rows"]) == (2, 8)


def test_evaluation_data_of_their_own(options, tmp_path, capsys):
    """A file to evaluate on; prompts that are trained too are said."""
    held_out = tiny.write(tmp_path / "eval.jsonl", tiny.rows(5))
    changes = {"eval_data": [str(held_out)], "max_steps": 2}
    metrics = run(parse(options | changes)).metrics
    assert (metrics["data"]["eval_rows"], metrics["data"]["eval_inputs_also_trained"]) == (5, 5)
    assert [entry["step"] for entry in metrics["eval_loss"]] == [2]
    assert "evaluating on 5 rows; 5 of their inputs are also trained on" in capsys.readouterr().out


def test_layers_top_adapts_the_attention_of_the_top(options):
    options |= {"layers": "top:1", "max_steps": 1}
    del options["target_modules"]
    assert _adapted(run(parse(options)).model) == {f"1.self_attn.{part}_proj" for part in "qkvo"}


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "gate_proj"]])
def test_layers_top_with_target_modules_widens(options, targets):
    options |= {"layers": "top:1", "target_modules": targets, "max_steps": 1}
    names = tiny.LINEAR if targets == ["all-linear"] else targets
    adapted = _adapted(run(parse(options)).model)
    assert {name.rpartition(".")[2] for name in adapted} == set(names)
    assert {name[0] for name in adapted} == {"1"}


def _adapted(model):
    """Names, from the layer's number on, of the modules with an adapter."""
    names = {name.split(".lora_")[0] for name, _ in model.named_parameters() if "lora_" in name}
    return {name.split("layers.")[1] for name in names}
