"""What a run leaves behind besides the adapter: `metrics.json` and `loss.png`."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import write_json, write_whole

if TYPE_CHECKING:
    from .running import Prepared
    from .trainer import LoRATrainer


def losses(
    log_history: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Trainer's log as two curves by step and epoch: training (with learning_rate, grad_norm) and evaluation."""
    training, evaluation = [], []
    for entry in log_history:
        if "loss" in entry:
            names = ("step", "epoch", "loss", "learning_rate", "grad_norm")
            training.append({name: entry[name] for name in names if name in entry})
        elif "eval_loss" in entry:
            evaluation.append(
                {"step": entry["step"], "epoch": entry["epoch"], "loss": entry["eval_loss"]}
            )
    return training, evaluation


def run_metrics(prepared: Prepared, trainer: LoRATrainer, seconds: float) -> dict[str, Any]:
    """What metrics.json holds of a finished run; `seconds` is all of its training, evaluation and saving."""
    import peft
    import torch
    import transformers

    import fastlora

    curve, evaluations = losses(trainer.state.log_history)
    real, padded = trainer.tokens()
    args = trainer.args
    return {
        "model": prepared.settings.model.model,
        "steps": trainer.state.global_step,
        "epochs": trainer.state.epoch,
        "resumed_from": prepared.resume_from.name if prepared.resume_from else None,
        "train_loss_first": curve[0]["loss"] if curve else None,
        "train_loss_last": curve[-1]["loss"] if curve else None,
        "eval_loss_before": evaluations[0]["loss"]
        if evaluations and evaluations[0]["step"] == 0
        else None,
        "eval_loss_after": evaluations[-1]["loss"] if evaluations else None,
        "best_eval_loss": min((e["loss"] for e in evaluations), default=None),
        "seconds": seconds,
        "step_seconds": trainer.clock.seconds,
        "tokens": real,
        "tokens_with_padding": padded,
        "tokens_per_second": real / trainer.clock.seconds if trainer.clock.seconds else None,
        **prepared.facts,
        "training": {
            "per_device_train_batch_size": args.per_device_train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "processes": args.world_size,
            "learning_rate": args.learning_rate,
            "lr_scheduler_type": str(
                getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
            ),
            "weight_decay": args.weight_decay,
            "seed": args.seed,
            "fp16": args.fp16,
            "bf16": args.bf16,
            "gradient_checkpointing": bool(args.gradient_checkpointing),
        },
        "loss": curve,
        "eval_loss": evaluations,
        "versions": {
            "fastlora": getattr(fastlora, "__version__", None),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
            "python": platform.python_version(),
        },
        "device": str(args.device),
        "threads": torch.get_num_threads(),
    }


def write_report(output_dir: Path, metrics: Mapping[str, Any]) -> None:
    """Write `metrics.json` and `loss.png`, each whole or not at all."""
    write_metrics(output_dir / "metrics.json", metrics)
    draw_losses(output_dir / "loss.png", metrics["loss"], metrics["eval_loss"])


def last_line(metrics: Mapping[str, Any]) -> str:
    """A run in one line: steps, speed, losses."""
    parts = [f"{metrics['steps']} steps"]
    if metrics["tokens_per_second"]:
        parts.append(f"{metrics['tokens_per_second']:,.0f} tokens/s")
    first, last = metrics["train_loss_first"], metrics["train_loss_last"]
    if last is not None:
        parts.append(f"loss {first:.4f} → {last:.4f}")
    before, after = metrics["eval_loss_before"], metrics["eval_loss_after"]
    if after is not None:
        parts.append(
            f"eval loss {after:.4f}" if before is None else f"eval loss {before:.4f} → {after:.4f}"
        )
    return "; ".join(parts)


def write_metrics(path: Path, metrics: Mapping[str, Any]) -> None:
    """Write metrics as JSON, whole or not at all; NaN and infinities, which JSON lacks, become null."""
    write_json(path, _finite(metrics))


def draw_losses(
    path: Path, training: Sequence[Mapping[str, float]], evaluation: Sequence[Mapping[str, float]]
) -> None:
    """Draw both curves over the step, as a PNG, whole or not at all."""
    from matplotlib.figure import Figure  # no pyplot: it would choose a display

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    if training:
        axes.plot([e["step"] for e in training], [e["loss"] for e in training], label="training")
    if evaluation:
        axes.plot(
            [e["step"] for e in evaluation],
            [e["loss"] for e in evaluation],
            "o-",
            label="evaluation",
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.grid(alpha=0.3)
    if training or evaluation:
        axes.legend()
    write_whole(path, lambda temporary: figure.savefig(temporary, dpi=120, format="png"))


def describe_fusion(model: Any) -> tuple[str, dict[str, Any]]:
    """`fastlora.explain` in a few lines, and the same as counts.

    Returns:
        Text such as `210 of 210 LoRA layers fused (cpu 210)`, with a line a reason for the rest; and
        `{"layers", "fused", "backends": {name: count}, "unfused": {reason: count}}`.
    """
    import fastlora

    rows = list(fastlora.explain(model).rows)
    backends: dict[str, int] = {}
    reasons: dict[str, int] = {}
    for row in rows:
        counts, key = (
            (backends, str(row.backend)) if row.fused else (reasons, row.reason or "not fused")
        )
        counts[key] = counts.get(key, 0) + 1
    fused = sum(backends.values())
    by = ", ".join(f"{name} {count}" for name, count in sorted(backends.items()))
    lines = [f"{fused} of {len(rows)} LoRA layers fused" + (f" ({by})" if by else "")]
    lines += [f"  {count} as PEFT has them: {reason}" for reason, count in sorted(reasons.items())]
    summary = {"layers": len(rows), "fused": fused, "backends": backends, "unfused": reasons}
    return "\n".join(lines), summary


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
