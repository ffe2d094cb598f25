"""Loading what `--model` names: a directory, a hub id, or a GGUF file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from .arguments import ModelArguments
from .checks import refusing
from .trainer import say


def load_tokenizer(arguments: ModelArguments) -> Any:
    """The tokenizer of `--model`; ValueError when there is none."""
    path, kwargs = _where(arguments)
    _say_where(arguments.model)
    with refusing("model", _cannot("tokenizer", arguments.model)):
        return AutoTokenizer.from_pretrained(path, **kwargs)


def load_model(arguments: ModelArguments) -> Any:
    """The base model of `--model`, on the CPU, without adapter. A GGUF file's weights are dequantised to float32.

    Raises:
        ValueError: there is none.
    """
    path, kwargs = _where(arguments)
    say(f"loading {arguments.model}")
    if arguments.attn_implementation:
        kwargs["attn_implementation"] = arguments.attn_implementation
    with refusing("model", _cannot("model", arguments.model)):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=arguments.dtype, **kwargs)
    if "gguf_file" in kwargs:
        # The weights are plain now; what says otherwise would only forbid saving a merged model.
        model.is_quantized = False
        for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
            if hasattr(owner, name):
                delattr(owner, name)
    return model


def _where(arguments: ModelArguments) -> tuple[str, dict[str, Any]]:
    """`from_pretrained`'s first argument and its keywords."""
    kwargs: dict[str, Any] = {"trust_remote_code": arguments.trust_remote_code}
    if arguments.revision:
        kwargs["revision"] = arguments.revision
    if arguments.model.endswith(".gguf"):
        file = Path(arguments.model).resolve()
        return str(file.parent), kwargs | {"gguf_file": file.name}
    return arguments.model, kwargs


def _cannot(what: str, model: str) -> str:
    """What is refused, and where it was looked for."""
    here = "" if os.path.exists(model) else "; there is no such directory here, and on the hub"
    return f"cannot load a {what} from {model}{here}"


def _say_where(model: str) -> None:
    # The hub is asked many times where it cannot be reached: a misspelt directory would look like a hang
    if not os.path.exists(model) and not _is_cached(model):
        say(f"no directory {model} here: asking the hub for it")


def _is_cached(name: str) -> bool:
    """Whether a hub id was loaded here before."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False
