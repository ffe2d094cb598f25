"""The command's arguments: four dataclasses, one parser, and every check that needs neither the data nor the model.

A `--config` file (YAML or JSON) holds the same names; what is given on the command line wins over it.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from transformers import HfArgumentParser, TrainingArguments

# Trainer's defaults that suit training from scratch more than an adapter; everything else is as in TrainingArguments.
TRAINING_DEFAULTS = {
    "learning_rate": 2e-4,  # LoRA wants about ten times the rate of full fine-tuning
    "logging_steps": 10,
    "train_sampling_strategy": "group_by_length",
    "group_by_length": True,  # the same under its older name
}


def _option(help: str, default: Any = None, **kwargs: Any) -> Any:
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help, **kwargs})
    return field(default=default, metadata={"help": help, **kwargs})


@dataclass
class ModelArguments:
    """What is fine-tuned, and how it runs."""

    _argument_group_name = "model"
    model: str = _option("A directory, a hub id, or a .gguf file.", default="")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _option(
        "Of the frozen base weights; auto is what the model was saved in. The adapter is float32.",
        default="auto",
    )
    fuse: bool = _option("Swap PEFT's LoRA layers for the fused ones.", default=True)
    backend: str = _option("Of the fused layers: auto, triton, cpu or torch.", default="auto")
    attn_implementation: str | None = _option("As in from_pretrained: sdpa, eager, …")
    revision: str | None = _option("Branch, tag or commit of a hub id.")
    trust_remote_code: bool = _option("Run the code that a hub model brings.", default=False)


@dataclass
class DataArguments:
    """What it is fine-tuned on."""

    _argument_group_name = "data"
    data: list[str] = _option(
        "JSONL files: input/output or chat messages, a row a line.", default=[]
    )
    eval_data: list[str] | None = _option("JSONL files to evaluate on.")
    eval_fraction: float = _option(
        "Share of the rows to hold out instead, chosen by a hash of the input.", default=0.0
    )
    max_length: int = _option("Longer rows, in tokens, are left out and counted.", default=2048)
    prompt_template: str = _option(
        "auto (the tokenizer's chat template where it has one), chat, plain, or a form with {input} in it.",
        default="auto",
    )
    pad_to_multiple_of: int = _option("Round batch lengths up to a multiple.", default=1)


@dataclass
class LoraArguments:
    """The adapter, under PEFT's names."""

    _argument_group_name = "adapter"
    # torchrun reads a bare --r as one of its own options, cut short
    r: int = _option("Rank; under torchrun, --lora_r.", default=8, aliases=["--lora_r"])
    lora_alpha: int = _option("Scaling is lora_alpha / r.", default=16)
    lora_dropout: float = _option("On the adapter's input, in [0, 1).", default=0.0)
    target_modules: list[str] | None = _option("Names of layers, or all-linear.")
    exclude_modules: list[str] | None = _option("Names of layers to leave out.")
    bias: Literal["none", "all", "lora_only"] = _option("Which biases train.", default="none")
    layers: str | None = _option(
        "top:N adapts the attention of the top N layers only; target_modules widens it to other modules."
    )
    layers_to_transform: list[int] | None = _option("Indices of the layers to adapt.")
    layers_pattern: list[str] | None = _option(
        "Name of the list of layers, where PEFT cannot tell."
    )
    modules_to_save: list[str] | None = _option(
        "Modules trained whole and saved beside the adapter."
    )
    use_rslora: bool = _option("Scaling is lora_alpha / √r.", default=False)
    use_dora: bool = _option("Weight-decomposed LoRA.", default=False)
    lora_bias: bool = _option("A bias on lora_B.", default=False)
    init_lora_weights: str = _option("true, false, gaussian, pissa, olora, …", default="true")
    rank_pattern: str | None = _option('Ranks of single layers, JSON: {"q_proj": 16}.')
    alpha_pattern: str | None = _option("lora_alpha of single layers, JSON.")


@dataclass(frozen=True)
class Settings:
    """All arguments of one run, checked."""

    model: ModelArguments
    data: DataArguments
    lora: LoraArguments
    training: TrainingArguments


def bucketed(training: TrainingArguments) -> bool:
    """Whether batches are made of rows of like length."""
    strategy = getattr(training, "train_sampling_strategy", None)
    return strategy == "group_by_length" or bool(getattr(training, "group_by_length", False))


class _Parser(HfArgumentParser):
    """Raises instead of printing usage and exiting."""

    def error(self, message: str) -> Any:
        raise ValueError(message)


def build_parser() -> argparse.ArgumentParser:
    """The parser over the four dataclasses, plus `--config`."""
    parser = _Parser(
        [ModelArguments, DataArguments, LoraArguments, TrainingArguments],
        prog="fastlora finetune",
        description="Fine-tune a causal language model with fused LoRA layers, by Hugging Face's Trainer.",
        allow_abbrev=False,  # a typo must not be taken for another option
    )
    parser.add_argument("--config", metavar="FILE", help="YAML or JSON of the same names.")
    known = {f.name for f in fields(TrainingArguments)}
    parser.set_defaults(**{k: v for k, v in TRAINING_DEFAULTS.items() if k in known})
    return parser


def parse(arguments: Sequence[str] | Mapping[str, Any]) -> Settings:
    """Parse and check.

    Args:
        arguments: a command line (`["--model", …]`) or a mapping of the same names.

    Returns:
        The settings. Nothing has been read but the config file.

    Raises:
        ValueError: an unknown name (with the nearest known one), or a value that is not taken.
    """
    parser = build_parser()
    if isinstance(arguments, Mapping):
        argv = _to_argv(arguments, parser, "arguments")
    else:
        argv = list(arguments)
        path = _config_path(argv)
        if path is not None:
            argv = [*_to_argv(_read_config(path), parser, path), *argv]
    namespace, unknown = parser.parse_known_args(argv)
    for word in unknown:
        name = word.partition("=")[0]
        if not name.startswith("-"):
            raise ValueError(
                f"got {word!r} where an option was expected; every option starts with --"
            )
        raise ValueError(f"unknown option {name}{_nearest(name.lstrip('-'), _names(parser), '--')}")
    values = vars(namespace)

    def pick(kind: type) -> dict[str, Any]:
        return {f.name: values[f.name] for f in fields(kind) if f.init}

    model = ModelArguments(**pick(ModelArguments))
    data = DataArguments(**pick(DataArguments))
    lora = LoraArguments(**pick(LoraArguments))
    _check(model, data, lora, values["output_dir"])
    training = TrainingArguments(**pick(TrainingArguments))
    settings = Settings(model, data, lora, training)
    _check_training(settings)
    return settings


def layers_from_top(spec: str, count: int | None = None) -> int:
    """N of `top:N`; ValueError when malformed, or when the model has fewer than N of its `count` layers."""
    match = re.fullmatch(r"top:([1-9][0-9]*)", spec)
    if not match:
        raise ValueError(f"layers: got {spec!r}, takes top:N with N at least 1, such as top:8")
    number = int(match[1])
    if count is not None and number > count:
        raise ValueError(f"layers: got {spec!r}, but the model has {count} layers")
    return number


def _check(
    model: ModelArguments, data: DataArguments, lora: LoraArguments, output_dir: str | None
) -> None:
    for name, value in (("model", model.model), ("data", data.data), ("output_dir", output_dir)):
        if not value:
            raise ValueError(f"{name}: missing; --model, --data and --output_dir are needed")
    if model.model.endswith(".gguf") and not os.path.isfile(model.model):
        raise ValueError(f"model: no such file {model.model}")
    if _is_path(model.model) and not os.path.exists(model.model):
        raise ValueError(f"model: no such directory {model.model}")
    if lora.r < 1:
        raise ValueError(f"r: got {lora.r}, takes 1 or more")
    if lora.lora_alpha < 1:
        raise ValueError(f"lora_alpha: got {lora.lora_alpha}, takes 1 or more")
    if not 0 <= lora.lora_dropout < 1:
        raise ValueError(
            f"lora_dropout: got {lora.lora_dropout}, takes 0 up to but not including 1"
        )
    if lora.layers is not None:
        layers_from_top(lora.layers)
        if lora.layers_to_transform is not None:
            raise ValueError("layers: layers_to_transform is given too; takes one of the two")
    for index in lora.layers_to_transform or ():
        if index < 0:
            raise ValueError(f"layers_to_transform: got {index}, takes 0 or more")
    for name in ("rank_pattern", "alpha_pattern"):
        parse_pattern(name, getattr(lora, name))
    if not 0 <= data.eval_fraction < 1:
        raise ValueError(
            f"eval_fraction: got {data.eval_fraction}, takes 0 up to but not including 1"
        )
    if data.eval_fraction and data.eval_data:
        raise ValueError("eval_fraction: eval_data is given too; takes one of the two")
    if data.max_length < 2:
        raise ValueError(f"max_length: got {data.max_length}, takes 2 or more")
    if data.pad_to_multiple_of < 1:
        raise ValueError(f"pad_to_multiple_of: got {data.pad_to_multiple_of}, takes 1 or more")
    if (
        data.prompt_template not in ("auto", "chat", "plain")
        and "{input}" not in data.prompt_template
    ):
        raise ValueError(
            f"prompt_template: got {data.prompt_template!r}, takes auto, chat, plain, or a form with {{input}} in it"
        )
    _check_backend(model)


def _is_path(model: str) -> bool:
    """Whether `--model` can only be a path: a hub id has at most one slash, and none in front."""
    return os.path.isabs(model) or model.startswith(".") or model.count("/") > 1


def _check_backend(model: ModelArguments) -> None:
    from fastlora import backend

    if model.backend == "auto":
        return
    if model.backend not in backend.NAMES:
        raise ValueError(f"backend: got {model.backend!r}, takes auto, {', '.join(backend.NAMES)}")
    status = backend.status(model.backend)
    if not status.ok:
        raise ValueError(f"backend: {model.backend} cannot serve here: {status.reason}")


def _check_training(settings: Settings) -> None:
    training, data = settings.training, settings.data
    has_eval = bool(data.eval_data or data.eval_fraction)
    wants_eval = training.eval_strategy != "no" or training.eval_on_start
    if wants_eval and not has_eval:
        raise ValueError(
            f"eval_strategy: got {training.eval_strategy.value}, which needs eval_data or eval_fraction"
        )
    for name in (
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
    ):
        if getattr(training, name) < 1:
            raise ValueError(f"{name}: got {getattr(training, name)}, takes 1 or more")
    for name in ("learning_rate", "weight_decay"):
        if not 0 <= getattr(training, name) < float("inf"):
            raise ValueError(f"{name}: got {getattr(training, name)}, takes a number from 0 up")
    if training.max_steps == 0:  # Trainer would take one step
        raise ValueError("max_steps: got 0, takes 1 or more, or -1 for num_train_epochs")
    if training.max_steps < 0 and training.num_train_epochs <= 0:
        raise ValueError(f"num_train_epochs: got {training.num_train_epochs}, takes more than 0")
    _check_reporters(training)


def _check_reporters(training: TrainingArguments) -> None:
    """Make Trainer's loggers once: one whose package is missing would stop the run only behind the model's loading."""
    from transformers.integrations import get_reporting_integration_callbacks

    for name in training.report_to:
        try:
            for kind in get_reporting_integration_callbacks([name]):
                kind()
        except (RuntimeError, ImportError, ValueError) as error:
            raise ValueError(f"report_to: {name} cannot serve here ({error})") from None


def parse_pattern(name: str, text: str | None) -> dict[str, int]:
    """`rank_pattern` and `alpha_pattern`: a JSON object of layer name to positive integer."""
    if text is None:
        return {}
    try:
        pattern = json.loads(text)
    except json.JSONDecodeError:
        pattern = None
    if not isinstance(pattern, dict) or not all(
        type(v) is int and v >= 1 for v in pattern.values()
    ):
        raise ValueError(f'{name}: got {text!r}, takes JSON such as {{"q_proj": 16}}')
    return pattern


def _config_path(argv: Sequence[str]) -> str | None:
    finder = _Parser(allow_abbrev=False, add_help=False)
    finder.add_argument("--config")
    return finder.parse_known_args(list(argv))[0].config


def _read_config(path: str) -> Mapping[str, Any]:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            config = yaml.safe_load(file)  # JSON is YAML
    except OSError as error:
        raise ValueError(f"config: cannot read {path} ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"config: {path} is not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(config, Mapping):
        raise ValueError(
            f"config: {path} holds a {type(config).__name__}, takes a mapping of names to values"
        )
    return config


def _to_argv(config: Mapping[str, Any], parser: argparse.ArgumentParser, source: str) -> list[str]:
    """A mapping as a command line, so that types are checked in one place (YAML reads 2e-4 as a string)."""
    names = _names(parser)
    choices = {action.dest: action.choices or () for action in parser._actions}
    argv: list[str] = []
    for key, value in config.items():
        name = str(key).replace("-", "_")
        if name not in names:
            raise ValueError(f"{source}: unknown key {key!r}{_nearest(name, names, '')}")
        if value is None:
            continue
        if value is False and "no" in choices[name]:
            value = "no"  # YAML reads an unquoted `no` as false
        if isinstance(value, Mapping):
            argv.append(f"--{name}={json.dumps(value)}")
        elif isinstance(value, (list, tuple)):
            argv += [f"--{name}", *map(str, value)] if value else []
        else:
            argv.append(f"--{name}={value}")
    return argv


def _names(parser: argparse.ArgumentParser) -> list[str]:
    return sorted({action.dest for action in parser._actions} - {"help", "config"})


def _nearest(name: str, known: Sequence[str], prefix: str) -> str:
    close = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else "; see fastlora finetune --help"
