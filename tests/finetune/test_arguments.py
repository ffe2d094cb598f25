"""Bad arguments are refused before anything is loaded, by name; good ones come from a file too."""

import pytest

from fastlora import finetune
from fastlora.finetune import main, parse, run
from tests.finetune import tiny

BAD = {
    "r": ({"r": 0}, "r: got 0"),
    "dropout": ({"lora_dropout": 1.0}, "lora_dropout: got 1.0"),
    "alpha": ({"lora_alpha": 0}, "lora_alpha: got 0"),
    "layers": ({"layers": "bottom:3"}, "layers: got 'bottom:3', takes top:N"),
    "backend": ({"backend": "gpu"}, "backend: got 'gpu'"),
    "eval": ({"eval_strategy": "steps", "eval_steps": 2}, "eval_strategy: .* needs eval_data"),
    "fraction": ({"eval_fraction": 1.5}, "eval_fraction: got 1.5"),
    "both-evals": ({"eval_fraction": 0.1, "eval_data": ["x"]}, "takes one of the two"),
    "model": ({"model": ""}, "model: missing"),
    "gguf": ({"model": "absent.gguf"}, "model: no such file"),
    "batch": ({"per_device_train_batch_size": 0}, "per_device_train_batch_size"),
    "pattern": ({"rank_pattern": "q_proj"}, "rank_pattern: got"),
    "unknown-key": ({"learning_rat": 1e-3}, "'learning_rat'; did you mean learning_rate"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_by_the_parser(options, case):
    changes, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        parse(options | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ["absent.jsonl"]}, "data: cannot read"),
        ({"layers": "top:99"}, "the model has 2 layers"),
        ({"layers_to_transform": [7]}, "layers_to_transform: got 7"),
        ({"target_modules": ["qq_proj"]}, "target_modules: got 'qq_proj', but the model's layers"),
        ({"max_length": 3}, "max_length|no row left"),
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


def test_config_file_and_command_line(options, tmp_path):
    """YAML holds the same names (2e-4 is a string to it); what the command line gives wins."""
    config = tmp_path / "run.yaml"
    lines = [f"{name}: {value}" for name, value in options.items() if name != "data"]
    config.write_text("\n".join([*lines, f"data: {options['data']}"]).replace("0.01", "2e-4"))
    settings = parse(["--config", str(config), "--r", "2"])
    assert settings.training.learning_rate == 2e-4
    assert settings.lora.r == 2
    assert settings.lora.lora_alpha == 8
    config.write_text("lora_dropuot: 0.1\n")
    with pytest.raises(
        ValueError, match=r"run\.yaml: unknown key 'lora_dropuot'; did you mean lora_dropout"
    ):
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


def test_layers_top_adapts_the_attention_of_the_top(options):
    changes = {"layers": "top:1", "target_modules": None, "max_steps": 1}
    result = run(parse({k: v for k, v in (options | changes).items() if v is not None}))
    adapted = {
        name.split(".lora_")[0] for name, _ in result.model.named_parameters() if "lora_" in name
    }
    assert {name.split("layers.")[1] for name in adapted} == {
        f"1.self_attn.{part}_proj" for part in "qkvo"
    }


def test_rows_longer_than_the_model(options, tmp_path):
    long = tiny.write(tmp_path / "long.jsonl", [{"input": "a" * 400, "output": "b"}])
    with pytest.raises(ValueError, match="the model takes 256"):
        run(parse(options | {"data": [str(long)]}))
