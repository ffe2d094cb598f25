"""A tokenizer and a Llama small enough to be trained in a test, made on the spot."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
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
