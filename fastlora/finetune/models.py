"""Loading what `--model` names: a directory, a hub id, or a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from .arguments import ModelArguments
from .trainer import say


def load_tokenizer(arguments: ModelArguments) -> Any:
    """The tokenizer of `--model`; ValueError when there is none."""
    path, kwargs = _where(arguments)
    with _refusing(arguments.model, "tokenizer"):
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
    with _refusing(arguments.model, "model"):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=arguments.dtype, **kwargs)
    if "gguf_file" in kwargs:
        # The weights are plain now; what says otherwise would only forbid saving a merged model.
        model.is_quantized = False
        for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
            if hasattr(owner, name):
                delattr(owner, name)
    return model


@contextmanager
def _refusing(name: str, what: str) -> Iterator[None]:
    """Put the argument's name in front of what `from_pretrained` says."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(f"model: cannot load a {what} from {name} ({error})") from error


def _where(arguments: ModelArguments) -> tuple[str, dict[str, Any]]:
    """`from_pretrained`'s first argument and its keywords."""
    kwargs: dict[str, Any] = {"trust_remote_code": arguments.trust_remote_code}
    if arguments.revision:
        kwargs["revision"] = arguments.revision
    if arguments.model.endswith(".gguf"):
        file = Path(arguments.model).resolve()
        return str(file.parent), kwargs | {"gguf_file": file.name}
    return arguments.model, kwargs
