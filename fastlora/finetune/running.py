"""A run from settings to adapter: data, model, Trainer, report. Checks come first, in the order of what they cost."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, set_seed

import fastlora

from . import files, report, resuming
from .adapter import check_same_adapter, lora_config
from .arguments import Settings, bucketed
from .batches import Collator, LengthBuckets, padding_share
from .checks import blamed, words
from .encoding import Encoded, Prompting, encode_rows
from .models import load_model, load_tokenizer
from .rows import Cleaning, Row, read_rows, shared_prompts, split_rows
from .trainer import LoRATrainer, say


@dataclass(frozen=True)
class Prepared:
    """A run that only has to be trained: everything was read, checked, encoded, loaded and fused."""

    settings: Settings
    model: Any
    tokenizer: Any
    prompting: Prompting
    training: Encoded
    evaluation: Encoded | None
    facts: dict[str, Any]  # what metrics.json says of data, adapter and fusion
    resume_from: Path | None
    trainer: LoRATrainer


@dataclass(frozen=True)
class Result:
    """A finished run: what metrics.json holds, and the trained model."""

    metrics: dict[str, Any]
    model: Any
    tokenizer: Any
    prompting: Prompting
    trainer: LoRATrainer


def run(
    settings: Settings,
    *,
    model: Any = None,
    tokenizer: Any = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> Result:
    """Fine-tune.

    Args:
        settings: from `parse`.
        model: a base model that is loaded already, and gets the adapter in place; None loads `settings.model.model`.
        tokenizer: likewise.
        callbacks: for Trainer.

    Returns:
        The result; its files are in `output_dir`: the adapter in PEFT's layout, metrics.json, loss.png, checkpoints.

    Raises:
        ValueError, TypeError, OSError: an argument, a file or the data was refused; nothing was trained.
    """
    return train(prepare(settings, model=model, tokenizer=tokenizer, callbacks=callbacks))


def prepare(
    settings: Settings,
    *,
    model: Any = None,
    tokenizer: Any = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> Prepared:
    """All of a run up to training; takes and raises what `run` does."""
    rows, held_out, cleaning = _read(settings)
    say(f"data: {cleaning['data'].describe()}")
    if "eval_data" in cleaning:
        say(f"eval data: {cleaning['eval_data'].describe()}")
    made = files.make_writable(Path(settings.training.output_dir))
    try:
        return _prepare(settings, rows, held_out, cleaning, model, tokenizer, callbacks)
    except BaseException:
        files.remove_empty(made)
        raise


def _prepare(
    settings: Settings,
    rows: list[Row],
    held_out: list[Row],
    cleaning: dict[str, Cleaning],
    model: Any,
    tokenizer: Any,
    callbacks: Sequence[TrainerCallback],
) -> Prepared:
    resume_from = resuming.find_checkpoint(settings, Path(settings.training.output_dir))
    tokenizer = load_tokenizer(settings.model) if tokenizer is None else tokenizer
    prompting = Prompting.choose(tokenizer, settings.data.prompt_template)
    training, evaluation = _encode(rows, held_out, prompting, settings, cleaning)
    facts = _data_facts(rows, held_out, training, evaluation, settings, cleaning)
    steps = resuming.check_steps(len(training), settings, resume_from)

    model = load_model(settings.model) if model is None else model
    limit = getattr(model.config, "max_position_embeddings", None)
    longest = max(training.lengths + (evaluation.lengths if evaluation else []))
    if limit is not None and longest > limit:
        raise ValueError(
            f"max_length: a row has {longest} tokens, but the model takes {limit}; set max_length to that"
        )
    base = resuming.describe_base(model)
    noted = resuming.facts(settings, training.fingerprint(), base)
    model, adapter_facts = _adapt(model, settings)
    if resume_from is not None:
        check_same_adapter(model, resume_from)
        resuming.check_same_run(noted, resume_from)
    trainer = _make_trainer(settings, model, tokenizer, training, evaluation, noted, callbacks)
    trainer.check_optimizer(steps)
    facts |= adapter_facts
    return Prepared(
        settings, model, tokenizer, prompting, training, evaluation, facts, resume_from, trainer
    )


def _make_trainer(
    settings: Settings,
    model: Any,
    tokenizer: Any,
    training: Encoded,
    evaluation: Encoded | None,
    noted: dict[str, Any],
    callbacks: Sequence[TrainerCallback],
) -> LoRATrainer:
    args = settings.training
    if args.ddp_find_unused_parameters is None:
        # Every adapter is used in every forward: spare DDP its search.
        args.ddp_find_unused_parameters = False
    pad = (
        tokenizer.pad_token_id
        if tokenizer.pad_token_id is not None
        else (tokenizer.eos_token_id or 0)
    )
    try:
        return LoRATrainer(
            model=model,
            args=args,
            train_dataset=training,
            eval_dataset=evaluation,
            data_collator=Collator(pad, settings.data.pad_to_multiple_of),
            processing_class=tokenizer,
            callbacks=list(callbacks),
            facts=noted,
        )
    except Exception as error:  # a package or a service that one of Trainer's options needs
        given = {name for name, value in vars(args).items() if value}
        raise ValueError(f"{blamed(error, given)}: {words(error)}") from error


def train(prepared: Prepared) -> Result:
    """Train, evaluate, and write what the run leaves behind."""
    tokenizer, trainer = prepared.tokenizer, prepared.trainer
    output_dir = Path(trainer.args.output_dir)
    begun = time.perf_counter()
    with warnings.catch_warnings():
        # PEFT looks for the base's config.json on every save; a GGUF file has none beside it, and that is fine.
        warnings.filterwarnings("ignore", message="Could not find a config file")
        warnings.filterwarnings(
            "ignore", message="'pin_memory' argument is set"
        )  # Trainer's default, on a CPU
        resume_from = prepared.resume_from
        trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
        if prepared.evaluation is not None and _needs_last_evaluation(trainer):
            trainer.evaluate()
        metrics = report.run_metrics(prepared, trainer, time.perf_counter() - begun)
        if trainer.is_world_process_zero():
            files.save_directory(prepared.model.save_pretrained, output_dir)
            # Of another tokenizer, it would be taken for this one's
            (output_dir / "chat_template.jinja").unlink(missing_ok=True)
            tokenizer.save_pretrained(output_dir)
            report.write_report(output_dir, metrics)
            say(report.last_line(metrics))
            say(f"adapter, metrics.json and loss.png are in {output_dir}")
    return Result(metrics, prepared.model, tokenizer, prepared.prompting, trainer)


def _read(settings: Settings) -> tuple[list[Row], list[Row], dict[str, Cleaning]]:
    data = settings.data
    rows, cleaning = read_rows(data.data)
    if data.eval_data:
        held_out, eval_cleaning = read_rows(data.eval_data, "eval_data")
        return rows, held_out, {"data": cleaning, "eval_data": eval_cleaning}
    if not data.eval_fraction:
        return rows, [], {"data": cleaning}
    training, held_out = split_rows(rows, data.eval_fraction)
    if not training or not held_out:
        raise ValueError(
            f"eval_fraction: got {data.eval_fraction}, which leaves {len(training)} rows to train on and "
            f"{len(held_out)} to evaluate of {len(rows)}"
        )
    return training, held_out, {"data": cleaning}


def _encode(
    rows: list[Row],
    held_out: list[Row],
    prompting: Prompting,
    settings: Settings,
    cleaning: dict[str, Cleaning],
) -> tuple[Encoded, Encoded | None]:
    limit = settings.data.max_length
    all_data = cleaning["data"]
    training = encode_rows(rows, prompting, limit, all_data)
    if not held_out:
        evaluation = None
    elif "eval_data" in cleaning:
        evaluation = encode_rows(held_out, prompting, limit, cleaning["eval_data"], "eval_data")
    else:
        evaluation = encode_rows(held_out, prompting, limit, all_data, "eval_fraction")
        all_data.kept = len(training) + len(evaluation)
    for name, counts in cleaning.items():
        if counts.left_out["too_long"]:
            say(f"{name}, rows over max_length {limit}: {counts.describe()}")
    return training, evaluation


def _data_facts(
    rows: list[Row],
    held_out: list[Row],
    training: Encoded,
    evaluation: Encoded | None,
    settings: Settings,
    cleaning: dict[str, Cleaning],
) -> dict[str, Any]:
    args = settings.training
    batch = args.train_batch_size
    at_once = batch * args.world_size
    seed = args.seed if args.data_seed is None else args.data_seed
    shuffled = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed)).tolist()
    random_share = padding_share(shuffled, training.lengths, batch)
    order = list(LengthBuckets(training.lengths, at_once, seed)) if bucketed(args) else shuffled
    share = padding_share(order, training.lengths, batch)
    tokens = sum(training.lengths)
    say(
        f"training on {len(training)} rows, {tokens:,} tokens ({training.trained_tokens:,} with loss), "
        f"{min(training.lengths)} to {max(training.lengths)} a row; padding {share:.1%}"
        + (f" (random order: {random_share:.1%})" if bucketed(args) else "")
    )
    shared = shared_prompts(rows, held_out)
    if evaluation is not None:
        say(
            f"evaluating on {len(evaluation)} rows"
            + (f"; {shared} of their inputs are also trained on" if shared else "")
        )
    return {
        "data": {
            "files": list(settings.data.data),
            "lines": {name: counts.as_dict() for name, counts in cleaning.items()},
            "train_rows": len(training),
            "eval_rows": len(evaluation) if evaluation is not None else 0,
            "eval_inputs_also_trained": shared,
            "tokens_an_epoch": tokens,
            "trained_tokens_an_epoch": training.trained_tokens,
            "padding_share": share,
            "padding_share_random": random_share,
        }
    }


def _adapt(model: Any, settings: Settings) -> tuple[Any, dict[str, Any]]:
    """Add the adapter and fuse it."""
    from peft import get_peft_model

    args = settings.training
    config = lora_config(settings.lora, model)
    if args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get(
        "use_reentrant"
    ):
        model.enable_input_require_grads()  # reentrant checkpointing sees no gradient path from frozen embeddings
    set_seed(args.seed)
    with warnings.catch_warnings():
        # PEFT's own use of a name that transformers is about to drop.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        model = get_peft_model(model, config)
    if settings.model.fuse:
        fastlora.fuse(model, backend=settings.model.backend)
        text, fusion = report.describe_fusion(model)
        say(text)
    else:
        fusion = {"layers": 0, "fused": 0, "backends": {}, "unfused": {"fuse false": 0}}
        say("the layers stay as PEFT has them (fuse false)")
    trained, total = model.get_nb_trainable_parameters()
    say(f"{trained:,} of {total:,} parameters train ({trained / total:.2%})")
    lora = {name: value for name, value in vars(settings.lora).items() if value is not None}
    targets = model.peft_config["default"].target_modules
    lora["target_modules"] = sorted({name.rpartition(".")[2] for name in targets})
    return model, {
        "adapter": lora | {"trained_parameters": trained, "parameters": total},
        "fusion": fusion,
    }


def _needs_last_evaluation(trainer: LoRATrainer) -> bool:
    """Whether the weights that are saved have not been evaluated yet."""
    if trainer.args.load_best_model_at_end:
        return True
    done = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return not done or done[-1] != trainer.state.global_step
