"""Hugging Face's Trainer, with what a LoRA run adds: exact resuming, length buckets, a token count."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ProgressCallback

from .arguments import bucketed
from .batches import LengthBuckets
from .checkpoints import begin, seal
from .checks import refusing


class LoRATrainer(Trainer):
    """Trainer whose run, cut at any checkpoint and resumed, has the losses of the run that was not cut, bit for bit.

    Args:
        facts: about the run; stored in every checkpoint, so that a resume can tell that they changed.
        The rest is Trainer's.
    """

    def __init__(self, *args: Any, facts: dict[str, Any] | None = None, **kwargs: Any):
        self._buckets: LengthBuckets | None = None
        self._tokens = torch.zeros(2, dtype=torch.int64)  # real, with padding
        self._facts = facts or {}
        super().__init__(*args, **kwargs)
        self.clock = _Clock()
        self.add_callback(_Replay(self))
        self.add_callback(self.clock)
        if not self.args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.add_callback(_LossBar(self))

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler | None:
        if not bucketed(self.args):
            return super()._get_train_sampler(train_dataset)
        dataset = self.train_dataset if train_dataset is None else train_dataset
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        rows_at_once = self._train_batch_size * self.args.world_size
        self._buckets = LengthBuckets(dataset.lengths, rows_at_once, seed)
        return self._buckets

    def start_epoch(self, epoch: int) -> None:
        """Choose the sampler's order; accelerate does not reach it through a loader that skips batches for a resume."""
        if self._buckets is not None:
            self._buckets.set_epoch(epoch)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Trainer's, but no step beyond the last: Trainer asks for the end behind a step only, so that a run resumed
        from its very last checkpoint would take one more."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def training_step(
        self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Trainer's step, with the batch's tokens counted."""
        mask = inputs["attention_mask"]
        self._tokens = self._tokens.to(mask.device)
        self._tokens += torch.stack([mask.sum(), torch.tensor(mask.numel(), device=mask.device)])
        return super().training_step(model, inputs, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Trainer's evaluation, without a trace in the random state: making a data loader draws a number from it.

        Otherwise a run resumed behind an evaluation would have other dropout masks than the run that went through it.
        """
        state = torch.get_rng_state()
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            torch.set_rng_state(state)

    def tokens(self) -> tuple[int, int]:
        """Tokens trained on so far by all processes: without and with padding."""
        counts = self.accelerator.reduce(self._tokens.to(self.args.device), reduction="sum")
        return int(counts[0]), int(counts[1])

    def local_tokens(self) -> int:
        """This process's share of the tokens without padding."""
        return int(self._tokens[0])

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        directory = Path(self._get_output_dir(trial=None)) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            begin(directory, self._facts)
        self._wait()
        super()._save_checkpoint(*args, **kwargs)
        self._wait()  # the other processes' random states are in it too
        if self.args.should_save and directory.is_dir():
            seal(directory, self._facts)

    def _wait(self) -> None:
        if self.args.world_size > 1:
            torch.distributed.barrier()

    def check_optimizer(self, steps: int) -> None:
        """Make optimiser and scheduler for a weight of nobody's: what they refuse is refused before training.

        Raises:
            ValueError: `optim` or `lr_scheduler_type`, with their arguments, cannot be made.
        """
        weight = torch.nn.Parameter(torch.zeros(1, device=self.args.device))
        optimizer: torch.optim.Optimizer = torch.optim.SGD([weight], lr=self.args.learning_rate)
        kind = getattr(self.args.optim, "value", self.args.optim)
        with refusing("optim, optim_args", f"{kind} cannot be used here"):
            make, kwargs = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            # Some take the model, and hang themselves into it
            plain = isinstance(make, type) and issubclass(make, torch.optim.Optimizer)
            if plain and not {"params", "model", "optimizer_dict"} & kwargs.keys():
                optimizer = make([weight], **kwargs)
        kind = getattr(self.args.lr_scheduler_type, "value", self.args.lr_scheduler_type)
        with refusing("lr_scheduler_type, lr_scheduler_kwargs", f"{kind} cannot be used here"):
            self.create_scheduler(steps, optimizer)
        self.lr_scheduler = None
        self._created_lr_scheduler = False


class _Replay(TrainerCallback):
    """What a resumed run needs to repeat: the sampler's epoch, and a loss window that begins at the checkpoint."""

    def __init__(self, trainer: LoRATrainer):
        self.trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.start_epoch(int(state.epoch or 0))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log |= control.should_save

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log |= control.should_save


class _Clock(TrainerCallback):
    """Seconds spent in optimiser steps, from the first forward to the update; no evaluation, no saving."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds += time.perf_counter() - self._begun


class _LossBar(ProgressCallback):
    """Trainer's progress bar with the loss on it, and a readable line a log instead of a dictionary."""

    def __init__(self, trainer: LoRATrainer):
        super().__init__()
        self.trainer = trainer
        self._shown: dict[str, str] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        line = f"step {state.global_step}/{state.max_steps}"
        if "eval_loss" in logs:
            line += f"  eval loss {logs['eval_loss']:.4f}"
            self._shown["eval"] = f"{logs['eval_loss']:.3f}"
        elif "loss" in logs:
            rate = (
                self.trainer.local_tokens()
                * args.world_size
                / max(self.trainer.clock.seconds, 1e-9)
            )
            line += f"  loss {logs['loss']:.4f}  learning rate {logs['learning_rate']:.2e}  {rate:,.0f} tokens/s"
            self._shown["loss"] = f"{logs['loss']:.3f}"
        else:
            return
        if self.training_bar is None:
            print(line, flush=True)
        else:
            self.training_bar.write(line)
            self.training_bar.set_postfix(self._shown)


def rank() -> int:
    """This process's number under torchrun, 0 otherwise."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many processes torchrun started, 1 otherwise."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def say(text: str) -> None:
    """Print a line, from the first process only."""
    if rank() == 0:
        print(text, flush=True)
