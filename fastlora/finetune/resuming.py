"""Which checkpoint a run goes on from, whether it is this run's, and what is left to train."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import torch

from . import checkpoints
from .arguments import Settings
from .trainer import say, world_size

# Weights that are made of the base's, and change it: another one gives the adapter another base
_OF_THE_BASE = ("pissa", "olora", "mica")
_SAMPLE = 64  # values of each weight that are compared


def find_checkpoint(settings: Settings, output_dir: Path) -> Path | None:
    """What to resume from: the one that was named, else the newest usable one in `output_dir`, else nothing.

    Raises:
        ValueError: the one that was named is not whole; there are some in `output_dir`, and a fresh start was asked
            for or none is whole; or it was made by another number of processes.
    """
    wish = settings.training.resume_from_checkpoint
    word = "" if wish is None else str(wish).lower()
    if wish is not None and word not in ("false", "no", "true", "yes"):
        path = Path(wish)
        reason = checkpoints.fault(path, checkpoints.made_by(path) or world_size())
        if reason:
            raise ValueError(f"resume_from_checkpoint: {wish} cannot be resumed from: {reason}")
        _check_processes(path)
        say(f"resuming from {path}")
        return path
    found = checkpoints.find(output_dir, world_size())
    if word in ("false", "no"):
        if found.any:
            name = found.usable.name if found.usable else found.skipped[0].partition(":")[0]
            raise ValueError(
                f"resume_from_checkpoint: got {wish}, but {output_dir} holds {name} of an earlier run; "
                "take another output_dir or remove it"
            )
        return None
    if found.usable is not None:
        _check_processes(found.usable)
    elif word or (found.any and (len(found.skipped) > 1 or not found.half_written)):
        reasons = f" ({'; '.join(found.skipped)})" if found.skipped else ""
        raise ValueError(
            (f"resume_from_checkpoint: got {wish}, but " if word else "output_dir: ")
            + f"{output_dir} holds no usable checkpoint{reasons}; "
            "remove what is there, or take another output_dir"
        )
    for reason in found.skipped:
        say(f"skipping a checkpoint that is not whole: {reason}")
    if found.usable is not None:
        say(f"resuming from {found.usable}")
    elif found.skipped:
        say("the earlier run was killed at its first checkpoint: starting over")
    return found.usable


def _check_processes(checkpoint: Path) -> None:
    made = checkpoints.made_by(checkpoint)
    if made is not None and made != world_size():
        raise ValueError(
            f"output_dir: {checkpoint} was made by {_processes(made)}, this run has {world_size()}; "
            "start it with as many, or take another output_dir"
        )


def _processes(count: int) -> str:
    return f"{count} process" + ("es" if count > 1 else "")


def facts(settings: Settings, data: str, base: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint notes of its run, to be compared by the run that resumes from it."""
    args = settings.training
    return {
        "data": data,
        "processes": world_size(),
        "base": base | {"name": settings.model.model},
        "optim": str(getattr(args.optim, "value", args.optim)),
        "lr_scheduler_type": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        "init_lora_weights": settings.lora.init_lora_weights.lower(),
        "said": {
            "lora_dropout": settings.lora.lora_dropout,
            "learning_rate": args.learning_rate,
            "weight_decay": args.weight_decay,
            "per_device_train_batch_size": args.per_device_train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "seed": args.seed,
        },
    }


def describe_base(model: torch.nn.Module) -> dict[str, Any]:
    """A base model's size and dtype, and a checksum of its names, shapes and a sample of its weights.

    The config would not do: two trainings of one model share it, and another Transformers writes it differently.
    """
    checksum, count = 0, 0
    for name, parameter in sorted(model.named_parameters()):
        values = parameter.detach().reshape(-1)
        count += values.numel()
        sample = values[:: max(1, values.numel() // _SAMPLE)][:_SAMPLE].to("cpu", torch.float32)
        checksum = zlib.crc32(f"{name} {tuple(parameter.shape)}".encode(), checksum)
        checksum = zlib.crc32(sample.numpy().tobytes(), checksum)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return {"parameters": count, "dtype": dtype, "weights": f"{checksum:08x}"}


def check_same_run(ours: dict[str, Any], checkpoint: Path) -> None:
    """Refuse what would make the resumed run wrong, and say what only makes it another one.

    Raises:
        ValueError: another base model, optimiser or scheduler.
    """
    theirs = checkpoints.manifest(checkpoint)
    for name in ("optim", "lr_scheduler_type"):
        if theirs.get(name, ours[name]) != ours[name]:
            raise ValueError(_other(name, ours[name], checkpoint, theirs[name]))
    base, other = ours["base"], theirs.get("base") or {}
    same_dtype = other.get("dtype", base["dtype"]) == base["dtype"]
    for name in ("parameters", "weights") if same_dtype else ("parameters",):
        if other.get(name, base[name]) != base[name]:
            raise ValueError(
                f"model: got {base['name']}, but {checkpoint} was trained on other weights "
                f"({other.get('name')}, {other.get('parameters', 0):,} parameters); "
                "resume with that, or take another output_dir"
            )
    initial, was = ours["init_lora_weights"], theirs.get("init_lora_weights")
    if was not in (None, initial) and (
        initial.startswith(_OF_THE_BASE) or was.startswith(_OF_THE_BASE)
    ):
        raise ValueError(_other("init_lora_weights", initial, checkpoint, was))
    said = {**ours["said"], "init_lora_weights": initial, "dtype": base["dtype"]}
    before = {**(theirs.get("said") or {}), "init_lora_weights": was, "dtype": other.get("dtype")}
    changed = [
        f"{name} (was {before[name]}, now {value})"
        for name, value in said.items()
        if before.get(name) is not None and before[name] != value
    ]
    if theirs.get("data", ours["data"]) != ours["data"]:
        changed.insert(0, "the training data")
    if changed:
        verb = "changed" if len(changed) == 1 else "have changed"
        say(
            f"{', '.join(changed)} {verb} since {checkpoint.name}: "
            "the losses will not be those of a run never cut"
        )


def _other(name: str, ours: Any, checkpoint: Path, theirs: Any) -> str:
    return (
        f"{name}: got {ours!r}, but {checkpoint} has {theirs!r}; "
        "resume with that, or take another output_dir"
    )


def total_steps(rows: int, training: Any) -> int:
    """Optimiser steps that Trainer takes on this many rows; 0 where no batch is full and short ones are dropped."""
    drop = training.dataloader_drop_last
    batches = _parts(rows, training.train_batch_size, drop)
    if not training.accelerator_config.split_batches:
        batches = _parts(batches, training.world_size, drop)
    if not batches:
        return 0
    if training.max_steps > 0:
        return training.max_steps
    updates = _parts(batches, training.gradient_accumulation_steps, False)
    return math.ceil(training.num_train_epochs * updates)


def _parts(count: int, size: int, drop: bool) -> int:
    return count // size if drop else -(-count // size)


def check_steps(rows: int, settings: Settings, resume_from: Path | None) -> int:
    """Steps of the whole run.

    Raises:
        ValueError: there are none, or all of them are done and reported in `output_dir`.
    """
    args = settings.training
    total = total_steps(rows, args)
    if not total:
        raise ValueError(
            f"dataloader_drop_last: got true, and a step's {args.train_batch_size * args.world_size} rows "
            f"are more than the {rows} there are: nothing would be trained"
        )
    if resume_from is None:
        return total
    done = checkpoints.step(resume_from)
    # Without a report the run was cut behind its last step: what is left is to write it.
    if done >= total and _reported(Path(args.output_dir)) >= total:
        name, asked = (
            ("max_steps", args.max_steps)
            if args.max_steps > 0
            else ("num_train_epochs", f"{args.num_train_epochs:g}, which is {total} steps")
        )
        raise ValueError(
            f"{name}: got {asked}, and the run in output_dir {args.output_dir} has done {done} steps: "
            f"nothing is left to train; takes more, or another output_dir"
        )
    return total


def _reported(output_dir: Path) -> int:
    """Steps that `metrics.json` tells of, 0 without one."""
    try:
        return int(json.loads((output_dir / "metrics.json").read_bytes())["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
