"""From the command's arguments to PEFT's `LoraConfig`, and whether a checkpoint's adapter is that one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from torch import nn

from .arguments import LoraArguments
from .checks import layers_from_top, parse_pattern

# What a checkpoint's adapter must share with the run's, or its weights and optimiser state do not fit.
_COMPARED = (
    "r",
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "bias",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
)


def lora_config(arguments: LoraArguments, model: nn.Module) -> Any:
    """PEFT's config for this model.

    Raises:
        ValueError: `layers`, `layers_to_transform`, `target_modules` or `modules_to_save` names what the model does
            not have.
    """
    from peft import LoraConfig

    count = _layer_count(model)
    indices = arguments.layers_to_transform
    targets: list[str] | str | None = arguments.target_modules
    if arguments.layers is not None:
        if count is None:
            raise ValueError(
                f"layers: got {arguments.layers!r}, but this model's config does not say how many layers it has; "
                "takes layers_to_transform"
            )
        indices = list(range(count - layers_from_top(arguments.layers, count), count))
        targets = targets or attention_projections(model)
    for index in indices or ():
        if count is not None and index >= count:
            raise ValueError(f"layers_to_transform: got {index}, but the model has {count} layers")
    if targets == ["all-linear"]:
        # PEFT takes indices beside names only, and would adapt a name outside the layers (lm_head) all the same
        targets = "all-linear" if indices is None else _linear_names(model, inside_layers=True)
    elif isinstance(targets, list):
        names = [name for name, _ in model.named_modules()]
        for target in targets:
            if not any(name == target or name.endswith(f".{target}") for name in names):
                raise ValueError(
                    f"target_modules: got {target!r}, but the model's layers are "
                    + ", ".join(_linear_names(model))
                )
    for name in arguments.modules_to_save or ():
        # PEFT, which compares endings, says nothing of a name that no module has
        if not any(known.endswith(name) for known, _ in model.named_modules()):
            raise ValueError(f"modules_to_save: got {name!r}, but the model has no such module")
    patterns = {
        name: parse_pattern(name, getattr(arguments, name))
        for name in ("rank_pattern", "alpha_pattern")
    }
    for name, pattern in patterns.items():
        _check_pattern(name, pattern, model)
    initial = {"true": True, "false": False}.get(
        arguments.init_lora_weights.lower(), arguments.init_lora_weights.lower()
    )
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=arguments.r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=targets,
        exclude_modules=arguments.exclude_modules,
        bias=arguments.bias,
        layers_to_transform=indices,
        layers_pattern=arguments.layers_pattern,
        modules_to_save=arguments.modules_to_save,
        use_rslora=arguments.use_rslora,
        use_dora=arguments.use_dora,
        lora_bias=arguments.lora_bias,
        init_lora_weights=initial,
        **patterns,
    )


def _check_pattern(name: str, pattern: dict[str, int], model: nn.Module) -> None:
    """ValueError for a key that PEFT, which takes keys as regular expressions, would find no layer for."""
    layers = [layer for layer, _ in model.named_modules()]
    for key in pattern:
        try:
            matches = re.compile(rf"(.*\.)?({key})$").match
        except re.error as error:
            raise ValueError(
                f"{name}: got {key!r}, which is no regular expression ({error})"
            ) from None
        if not any(map(matches, layers)):
            raise ValueError(
                f"{name}: got {key!r}, but the model's layers are {', '.join(_linear_names(model))}"
            )


def attention_projections(model: nn.Module) -> list[str]:
    """Names of the linear layers inside attention blocks, as `target_modules` takes them.

    A last name that also occurs elsewhere (GPT-2's c_proj is in the MLP too) gets its parent's in front.
    """
    inside: set[tuple[str, str]] = set()
    outside: set[str] = set()
    for name, module in model.named_modules():
        if not _is_linear(module):
            continue
        path, _, leaf = name.rpartition(".")
        parent = path.rpartition(".")[2]
        if "att" in parent.lower():
            inside.add((parent, leaf))
        else:
            outside.add(leaf)
    if not inside:
        raise ValueError(
            "layers: no attention block was recognised in this model; takes target_modules too"
        )
    return sorted({f"{parent}.{leaf}" if leaf in outside else leaf for parent, leaf in inside})


def check_same_adapter(model: Any, checkpoint: Path) -> None:
    """ValueError when the checkpoint holds another adapter than the one that this run asked for."""
    config = model.peft_config["default"]
    stored = json.loads((checkpoint / "adapter_config.json").read_bytes())
    for name in _COMPARED:
        if name in stored and stored[name] != getattr(config, name):
            raise ValueError(
                f"{name}: got {getattr(config, name)!r}, but {checkpoint} has {stored[name]!r}; "
                "resume with that, or take another output_dir"
            )
    # target_modules and layers by what they came to: one set of layers can be named in several ways
    ours, theirs = _tensor_names(model), _stored_tensor_names(checkpoint)
    for names, of in ((ours - theirs, "this run"), (theirs - ours, str(checkpoint))):
        if names:
            raise ValueError(
                f"target_modules, layers, modules_to_save: {min(names)} is trained by "
                f"{of} alone ({len(names)} such tensors); resume with the checkpoint's settings "
                f"({_settings(stored)}), or take another output_dir"
            )


def _tensor_names(model: Any) -> set[str]:
    from peft import get_peft_model_state_dict

    return set(get_peft_model_state_dict(model))


def _stored_tensor_names(checkpoint: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(checkpoint / "adapter_model.safetensors", "pt") as file:
        return set(file.keys())


def _settings(stored: dict[str, Any]) -> str:
    names = ("target_modules", "layers_to_transform", "modules_to_save")
    return ", ".join(f"{name} {stored[name]}" for name in names if stored.get(name))


def _layer_count(model: Any) -> int | None:
    config = model.config
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    return getattr(config, "num_hidden_layers", None)


def _linear_names(model: nn.Module, *, inside_layers: bool = False) -> list[str]:
    """Last names of the linear modules, each once; of all, or of those inside numbered layers."""
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if _is_linear(module) and (not inside_layers or re.search(r"\.\d+\.", name))
        }
    )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
