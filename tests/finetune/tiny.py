"""A tokenizer and a Llama small enough to be trained in a test, made on the spot."""

import json
import os
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WORDS = ("red", "green", "blue", "one", "two", "three", "cat", "dog", "sun", "moon")


def tokenizer(chat: bool = False) -> PreTrainedTokenizerFast:
    """One token a byte, plus <|end|> (EOS), <|pad|> and <|start|>: any text, and ids that can be read off."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|start|>"],
    )
    if chat:
        made.chat_template = CHAT_TEMPLATE
    return made


def model(vocabulary: int, layers: int = 2) -> LlamaForCausalLM:
    """A Llama of 16 channels, with random weights that depend on nothing but its shape."""
    torch.manual_seed(1234)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config)


def save(directory: Path, chat: bool = False, layers: int = 2) -> Path:
    """Model and tokenizer as `--model` takes them."""
    made = tokenizer(chat)
    made.save_pretrained(directory)
    model(len(made), layers).save_pretrained(directory)
    return directory


def rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Distinct input/output pairs of differing length."""
    draw = random.Random(seed)
    found: dict[str, str] = {}
    while len(found) < count:
        words = draw.choices(WORDS, k=draw.randint(1, 6))
        found[" ".join(words)] = " ".join(reversed(words))
    return [{"input": key, "output": value} for key, value in found.items()]


def write(path: Path, records: list[Any]) -> Path:
    """Records as JSONL."""
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), "utf-8")
    return path


def losses(metrics: dict[str, Any]) -> dict[int, float]:
    """Training loss by step."""
    return {entry["step"]: entry["loss"] for entry in metrics["loss"]}


def adapter(directory: Path | str) -> dict[str, torch.Tensor]:
    """Weights of a saved adapter."""
    return load_file(Path(directory) / "adapter_model.safetensors")


def argv(options: dict[str, Any]) -> list[str]:
    """A mapping of options as a command line."""
    words: list[str] = []
    for name, value in options.items():
        if isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        else:
            words.append(f"--{name}={value}")
    return words


def environment() -> dict[str, str]:
    """Of a process that runs the command: this checkout, kernels not interpreted, one thread."""
    changes = {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    return os.environ | changes


def options(base: Path, directory: Path) -> dict[str, Any]:
    """Arguments of a run of 8 steps on 24 rows that takes a second; tests change what they are about."""
    data = write(directory / "train.jsonl", rows(24))
    return {
        "model": str(base),
        "data": [str(data)],
        "output_dir": str(directory / "out"),
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "target_modules": ["all-linear"],
        "per_device_train_batch_size": 4,
        "max_steps": 8,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
    }
