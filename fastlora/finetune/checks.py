"""What is refused before data and model are looked at, and how a library's exception becomes a refusal."""

from __future__ import annotations

import json
import math
import os
import re
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from .arguments import DataArguments, LoraArguments, ModelArguments, Settings

# PEFT's, but for those that need a config or data of their own
INITIAL = ("true", "false", "gaussian", "mica", "olora", "orthogonal", "pissa", "pissa_niter_N")
SEEDS = 2**32  # NumPy takes no more


@contextmanager
def refusing(argument: str, what: str) -> Iterator[None]:
    """Turn whatever a library raises within into a ValueError that names the argument."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{argument}: {what} ({words(error)})") from error


def words(error: BaseException) -> str:
    """An exception in one line: what it says; its kind and place too, where those tell more than its text."""
    text = " ".join(str(error).split())
    if isinstance(error, (ValueError, OSError, ImportError)) and text:
        return text
    frames = traceback.extract_tb(error.__traceback__)
    place = ""
    if frames:
        file = "/".join(frames[-1].filename.split("/")[-2:])
        place = f" at {file}:{frames[-1].lineno}"
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


def blamed(error: BaseException, given: Collection[str]) -> str:
    """Which of the options that were given an exception is about, as far as its text or origin tells."""
    home = type(error).__module__.partition(".")[0]
    # httpx2 is what it is built on as of 1.0
    if "push_to_hub" in given and home.startswith(("huggingface_hub", "httpx", "requests")):
        return "push_to_hub"
    text = f"{error} {getattr(error, 'name', '') or ''}".lower()
    found = sorted(name for name in given if re.search(rf"\b{re.escape(name)}\b", text))
    if not found:
        # liger-kernel for use_liger_kernel, FSDP for fsdp_config
        found = sorted(
            name
            for name in given
            if any(len(part) > 3 and part in text for part in name.split("_")[:2])
        )
    return ", ".join(found) or "a training option"


def check_arguments(
    model: ModelArguments, data: DataArguments, lora: LoraArguments, output_dir: str | None
) -> None:
    """All checks of the options that are this package's own."""
    for name, value in (("model", model.model), ("data", data.data), ("output_dir", output_dir)):
        if not value:
            raise ValueError(f"{name}: missing; --model, --data and --output_dir are needed")
    for name, files in (("data", data.data), ("eval_data", data.eval_data)):
        if "" in (files or ()):
            raise ValueError(f"{name}: got an empty name, takes JSONL files")
    if model.model.endswith(".gguf") and not os.path.isfile(model.model):
        raise ValueError(f"model: no such file {model.model}")
    if _is_path(model.model) and not os.path.exists(model.model):
        raise ValueError(f"model: no such directory {model.model}")
    _check_adapter(lora)
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


def _check_adapter(lora: LoraArguments) -> None:
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
    initial = lora.init_lora_weights.lower()
    if initial not in INITIAL[:-1] and not re.fullmatch(r"pissa_niter_[1-9]\d*", initial):
        raise ValueError(
            f"init_lora_weights: got {lora.init_lora_weights!r}, takes {', '.join(INITIAL)}"
        )


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


def make_training(values: dict[str, Any], given: Collection[str]) -> TrainingArguments:
    """TrainingArguments of these values, on the CPU where there is nothing else.

    Args:
        values: every field.
        given: names of those that differ from their defaults.
    """
    from transformers import TrainingArguments

    _check_numbers(values)
    for name in TrainingArguments._VALID_DICT_FIELDS:
        value = values.get(name)
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                json.loads(value)
            except (ValueError, RecursionError):
                raise ValueError(f"{name}: got {value!r}, which is not JSON") from None
    if not torch.accelerator.is_available() and "ACCELERATE_TORCH_DEVICE" not in os.environ:
        # Not told, accelerate starts no process group on a CPU, and transformers refuses bf16 there
        values = values | {"use_cpu": True}
    try:
        training = TrainingArguments(**values)
    except (ValueError, TypeError):
        raise
    except ImportError as error:
        raise ValueError(
            f"{blamed(error, given)}: needs a package that is not installed ({words(error)})"
        ) from error
    except Exception as error:
        raise ValueError(f"{blamed(error, given)}: {words(error)}") from error
    check_processes(training.world_size)
    return training


def check_processes(found: int) -> None:
    """ValueError when torchrun started other than `found` processes: each would train by itself, into one directory."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != found:
        raise ValueError(
            f"WORLD_SIZE: torchrun started {started} processes, but Trainer makes them a group of {found}; "
            "takes a device each, or --use_cpu, or --ddp_backend gloo"
        )


def _check_numbers(values: Mapping[str, Any]) -> None:
    for name in ("seed", "data_seed"):
        if values.get(name) is not None and not 0 <= values[name] < SEEDS:
            raise ValueError(f"{name}: got {values[name]}, takes 0 up to {SEEDS - 1}")
    epochs = values["num_train_epochs"]
    if not math.isfinite(epochs) or (values["max_steps"] < 0 and epochs <= 0):
        raise ValueError(f"num_train_epochs: got {epochs}, takes a finite number of more than 0")
    for name in (
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
    ):
        if values[name] < 1:
            raise ValueError(f"{name}: got {values[name]}, takes 1 or more")
    for name in ("learning_rate", "weight_decay"):
        if not 0 <= values[name] < float("inf"):
            raise ValueError(f"{name}: got {values[name]}, takes a number from 0 up")
    if values["max_steps"] == 0:  # Trainer would take one step
        raise ValueError("max_steps: got 0, takes 1 or more, or -1 for num_train_epochs")


def check_training(settings: Settings) -> None:
    """What Trainer would find wrong with its own options only while it trains, or not at all."""
    training, data = settings.training, settings.data
    has_eval = bool(data.eval_data or data.eval_fraction)
    wants_eval = training.eval_strategy != "no" or training.eval_on_start
    if wants_eval and not has_eval:
        raise ValueError(
            f"eval_strategy: got {training.eval_strategy.value}, which needs eval_data or eval_fraction"
        )
    metric = training.metric_for_best_model
    if metric is not None and metric not in ("loss", "eval_loss"):
        raise ValueError(f"metric_for_best_model: got {metric!r}, takes loss (that of eval_data)")
    for name in (
        "gradient_checkpointing_kwargs",
        "activation_checkpointing_kwargs",
        "lr_scheduler_kwargs",
    ):
        value = getattr(training, name, None)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{name}: got {value!r}, takes a mapping, in JSON: {{…}}")
    if training.fp16 and training.device.type == "cpu":
        raise ValueError(
            "fp16: got true, but this run is on the CPU, where Trainer has no fp16; takes --bf16 instead, or neither"
        )
    if training.use_liger_kernel:
        from transformers.utils import is_liger_kernel_available

        if not is_liger_kernel_available():
            raise ValueError("use_liger_kernel: got true, which needs pip install liger-kernel")
    if training.fsdp and not torch.distributed.is_initialized():
        raise ValueError(f"fsdp: got {training.fsdp}, which needs several processes, by torchrun")
    _check_reporters(training)


def _check_reporters(training: TrainingArguments) -> None:
    """Make Trainer's loggers once: one whose package is missing would stop the run only behind the model's loading."""
    from transformers.integrations import get_reporting_integration_callbacks

    for name in training.report_to:
        with refusing("report_to", f"{name} cannot serve here"):
            for kind in get_reporting_integration_callbacks([name]):
                kind()


def layers_from_top(spec: str, count: int | None = None) -> int:
    """N of `top:N`; ValueError when malformed, or when the model has fewer than N of its `count` layers."""
    match = re.fullmatch(r"top:([1-9][0-9]*)", spec)
    if not match:
        raise ValueError(f"layers: got {spec!r}, takes top:N with N at least 1, such as top:8")
    number = int(match[1])
    if count is not None and number > count:
        raise ValueError(f"layers: got {spec!r}, but the model has {count} layers")
    return number


def parse_pattern(name: str, text: str | None) -> dict[str, int]:
    """`rank_pattern` and `alpha_pattern`: a JSON object of layer name to positive integer."""
    if text is None:
        return {}
    try:
        pattern = json.loads(text)
    except (ValueError, RecursionError):
        pattern = None
    if not isinstance(pattern, dict) or not all(
        type(v) is int and v >= 1 for v in pattern.values()
    ):
        raise ValueError(f'{name}: got {text!r}, takes JSON such as {{"q_proj": 16}}')
    return pattern
