"""Bad arguments are refused before anything is loaded, by name; good ones come from a file too."""

import re
from pathlib import Path

import pytest

from fastlora import finetune
from fastlora.finetune import main, parse, run
from tests.finetune import tiny

BAD = {
    "r": ({"r": 0}, "r: got 0"),
    "r-text": ({"r": "many"}, "--r.*: invalid int value: 'many'"),
    "dropout": ({"lora_dropout": 1.0}, "lora_dropout: got 1.0"),
    "dropout-nan": ({"lora_dropout": "nan"}, "lora_dropout: got nan"),
    "alpha": ({"lora_alpha": 0}, "lora_alpha: got 0"),
    "bias": ({"bias": "some"}, "--bias: invalid choice: 'some'"),
    "bool": ({"use_dora": "maybe"}, "--use_dora.* got maybe"),
    "layers": ({"layers": "bottom:3"}, "layers: got 'bottom:3', takes top:N"),
    "layers-0": ({"layers": "top:0"}, "layers: got 'top:0', takes top:N"),
    "layers-twice": ({"layers": "top:1", "layers_to_transform": [0]}, "takes one of the two"),
    "index": ({"layers_to_transform": [-1]}, "layers_to_transform: got -1"),
    "backend": ({"backend": "gpu"}, "backend: got 'gpu', takes auto"),
    "eval": ({"eval_strategy": "steps", "eval_steps": 2}, "eval_strategy: .* needs eval_data"),
    "fraction": ({"eval_fraction": 1.5}, "eval_fraction: got 1.5"),
    "both-evals": ({"eval_fraction": 0.1, "eval_data": ["x"]}, "takes one of the two"),
    "model": ({"model": ""}, "model: missing"),
    "gguf": ({"model": "absent.gguf"}, "model: no such file"),
    "directory": ({"model": "/absent/model"}, "model: no such directory /absent/model"),
    "batch": ({"per_device_train_batch_size": 0}, "per_device_train_batch_size: got 0"),
    "accumulation": ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: got 0"),
    "rate": ({"learning_rate": -1.0}, "learning_rate: got -1.0"),
    "rate-nan": ({"learning_rate": "nan"}, "learning_rate: got nan"),
    "decay": ({"weight_decay": -0.1}, "weight_decay: got -0.1"),
    "steps": ({"max_steps": 0}, "max_steps: got 0"),
    "epochs": ({"max_steps": -1, "num_train_epochs": 0}, "num_train_epochs: got 0"),
    "length": ({"max_length": 1}, "max_length: got 1"),
    "multiple": ({"pad_to_multiple_of": 0}, "pad_to_multiple_of: got 0"),
    "template": ({"prompt_template": "Q {inpt}"}, "prompt_template: got 'Q {inpt}'"),
    "pattern": ({"rank_pattern": "q_proj"}, "rank_pattern: got"),
    "pattern-bool": ({"alpha_pattern": '{"q_proj": true}'}, "alpha_pattern: got"),
    "epochs-inf": ({"max_steps": -1, "num_train_epochs": "inf"}, "num_train_epochs: got inf"),
    "epochs-nan": ({"max_steps": -1, "num_train_epochs": "nan"}, "num_train_epochs: got nan"),
    "seed": ({"seed": -1}, "seed: got -1, takes 0 up to"),
    "init": ({"init_lora_weights": "foo"}, "init_lora_weights: got 'foo', takes true, false"),
    "data": ({"data": [""]}, "data: got an empty name"),
    "metric": (
        {"eval_fraction": 0.2, "metric_for_best_model": "accuracy"},
        "metric_for_best_model: got 'accuracy', takes loss",
    ),
    "mapping": ({"gradient_checkpointing_kwargs": "5"}, "gradient_checkpointing_kwargs: got '5'"),
    "mapping-cut": ({"lr_scheduler_kwargs": '{"a": '}, "lr_scheduler_kwargs: got .* not JSON"),
    "fsdp": ({"fsdp": "full_shard"}, "fsdp: .* needs several processes"),
    "deepspeed": ({"deepspeed": '{"a": 1}'}, "deepspeed: .*"),
    "list": ({"r": [8, 9]}, r"r: got \[8, 9\], takes one value"),
    "dash": ({"target_modules": ["-q_proj"]}, "target_modules: got '-q_proj'"),
    "precision": ({"fp16": True, "bf16": True}, "fp16 and bf16"),
    "reporter": ({"report_to": "tensorbored"}, "report_to: tensorbored cannot serve here"),
    "scheduler": ({"lr_scheduler_type": "zigzag"}, "--lr_scheduler_type.*'zigzag'"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_by_the_parser(options, case):
    changes, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        parse(options | changes)


@pytest.mark.parametrize("case", ["r", "dropout", "layers", "backend", "eval", "directory"])
def test_the_command_refuses_likewise(options, capsys, case):
    changes, message = BAD[case]
    assert main(tiny.argv(options | changes)) == 2
    printed = capsys.readouterr()
    assert re.fullmatch(rf"fastlora finetune: error: .*{message}.*\n", printed.err)
    assert printed.out == ""
    assert not Path(options["output_dir"]).exists()


def test_a_reporter_that_is_not_installed_is_refused_early(options, monkeypatch):
    from transformers.integrations import integration_utils

    monkeypatch.setattr(integration_utils, "is_wandb_available", lambda: False)
    with pytest.raises(ValueError, match=r"report_to: wandb cannot serve here .*pip install wandb"):
        parse(options | {"report_to": "wandb"})


def test_unknown_names_come_with_the_nearest(options):
    for wrong, right in (("learning_rat", "learning_rate"), ("lora-alpa", "lora_alpha")):
        with pytest.raises(ValueError, match=f"unknown key '{wrong}'; did you mean {right}"):
            parse(options | {wrong: 1})
        with pytest.raises(
            ValueError, match=rf"unknown option --{wrong}; did you mean --{right}\?"
        ):
            parse([*tiny.argv(options), f"--{wrong}=1"])
    with pytest.raises(ValueError, match="unknown option --zzzz; see fastlora finetune --help"):
        parse([*tiny.argv(options), "--zzzz", "1"])
    with pytest.raises(ValueError, match="got 'stray' where an option was expected"):
        parse(["stray", *tiny.argv(options)])


def test_an_option_cut_short_is_not_guessed(options):
    with pytest.raises(ValueError, match="unknown option --lora_drop"):
        parse([*tiny.argv(options), "--lora_drop", "0.5"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ["absent.jsonl"]}, "data: cannot read"),
        ({"layers": "top:99"}, "the model has 2 layers"),
        ({"layers_to_transform": [7]}, "layers_to_transform: got 7"),
        ({"target_modules": ["qq_proj"]}, "target_modules: got 'qq_proj', but the model's layers"),
        ({"modules_to_save": ["lm_heads"]}, "modules_to_save: got 'lm_heads'"),
        ({"eval_fraction": 0.999}, "eval_fraction: got 0.999, which leaves 0 rows to train on"),
        (
            {"model": "absent"},
            r"model: cannot load a tokenizer from absent; there is no such directory here",
        ),
        ({"max_length": 3}, "max_length: got 3, and every row of data is longer"),
        ({"resume_from_checkpoint": "absent"}, "resume_from_checkpoint: absent"),
        ({"resume_from_checkpoint": "true"}, "holds no usable checkpoint"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_before_training(options, changes, message):
    with pytest.raises(ValueError, match=message):
        run(parse(options | changes))


def test_output_dir_is_tried_before_the_model_is_loaded(options, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(
        "fastlora.finetune.running.load_model", lambda *_: pytest.fail("the model was loaded")
    )
    with pytest.raises(ValueError, match="output_dir: cannot write"):
        run(parse(options | {"output_dir": str(tmp_path / "file" / "out")}))


def test_nothing_is_loaded_for_data_that_are_refused(options, tmp_path, monkeypatch):
    for name in ("load_model", "load_tokenizer"):
        monkeypatch.setattr(f"fastlora.finetune.running.{name}", lambda *_: pytest.fail("loaded"))
    data = tmp_path / "bad.jsonl"
    data.write_text('{"input": "a", "output": "b"}\n{"input": 1}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:2: missing output"):
        run(parse(options | {"data": [str(data)]}))
    assert not Path(options["output_dir"]).exists()


def test_config_file_and_command_line(options, tmp_path):
    """YAML holds the same names (2e-4 is a string to it); what the command line gives wins."""
    config = tmp_path / "run.yaml"
    lines = [f"{name}: {value}" for name, value in options.items() if name != "data"]
    config.write_text("\n".join([*lines, f"data: {options['data']}"]).replace("0.01", "2e-4"))
    settings = parse(["--config", str(config), "--r", "2"])
    assert settings.training.learning_rate == 2e-4
    assert settings.lora.r == 2
    assert settings.lora.lora_alpha == 8
    assert settings.lora.target_modules == ["all-linear"]
    assert settings.training.disable_tqdm is True
    assert settings.training.save_strategy == "no"  # though YAML reads no as false
    config.write_text("lora_dropuot: 0.1\n")
    with pytest.raises(
        ValueError, match=r"run\.yaml: unknown key 'lora_dropuot'; did you mean lora_dropout"
    ):
        parse(["--config", str(config)])
    assert main(["--config", str(config)]) == 2
    config.write_text("r: [1\n")
    with pytest.raises(ValueError, match=r"config: .*run\.yaml is not YAML"):
        parse(["--config", str(config)])
    config.write_text("- a list\n")
    with pytest.raises(ValueError, match="takes a mapping"):
        parse(["--config", str(config)])
    with pytest.raises(ValueError, match="config: cannot read"):
        parse(["--config", str(tmp_path / "absent.yaml")])


def test_the_command_exits_2_with_one_line(tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"input": "a", "output": "b"}\nnot json\n')
    arguments = ["--model", "m", "--data", str(bad), "--output_dir", str(tmp_path / "out")]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{bad}:2" in error
    assert not (tmp_path / "out").exists()
    assert main([*arguments, "--lora_alpa", "3"]) == 2
    assert "did you mean --lora_alpha" in capsys.readouterr().err


def test_public_names():
    """`run` and `parse` are functions however the package's submodules were imported."""
    import fastlora.finetune.command
    import fastlora.finetune.running  # noqa: F401

    assert callable(finetune.run)
    assert callable(finetune.parse)
    with pytest.raises(AttributeError):
        finetune.absent  # noqa: B018


def test_rows_longer_than_the_model(options, tmp_path):
    long = tiny.write(tmp_path / "long.jsonl", [{"input": "a" * 400, "output": "b"}])
    with pytest.raises(ValueError, match="the model takes 256"):
        run(parse(options | {"data": [str(long)]}))
