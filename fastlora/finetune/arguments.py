"""The command's arguments: four dataclasses and one parser.

A `--config` file (YAML or JSON) holds the same names; what is given on the command line wins over it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from transformers import HfArgumentParser, TrainingArguments

from .checks import check_arguments, check_training, make_training
from .configs import config_path, names, nearest, read_config, to_argv

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
        argv = to_argv(arguments, parser, "arguments")
    else:
        argv = list(arguments)
        path = config_path(argv)
        if path is not None:
            argv = [*to_argv(read_config(path), parser, path), *argv]
    namespace, unknown = parser.parse_known_args(argv)
    for word in unknown:
        name = word.partition("=")[0]
        if not name.startswith("-"):
            raise ValueError(
                f"got {word!r} where an option was expected; every option starts with --"
            )
        raise ValueError(f"unknown option {name}{nearest(name.lstrip('-'), names(parser), '--')}")
    values = vars(namespace)

    def pick(kind: type) -> dict[str, Any]:
        return {f.name: values[f.name] for f in fields(kind) if f.init}

    model = ModelArguments(**pick(ModelArguments))
    data = DataArguments(**pick(DataArguments))
    lora = LoraArguments(**pick(LoraArguments))
    check_arguments(model, data, lora, values["output_dir"])
    chosen = pick(TrainingArguments)
    given = {name for name, value in chosen.items() if value != parser.get_default(name)}
    training = make_training(chosen, given)
    settings = Settings(model, data, lora, training)
    check_training(settings)
    return settings
