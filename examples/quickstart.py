"""The two ways into your own code: a PEFT model in three lines, and a layer without PEFT.

python -m examples.quickstart
"""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fastlora


def with_peft() -> None:
    """Any model that PEFT adapts; here a small Llama with random weights."""
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )
    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules="all-linear")
    model = get_peft_model(base, config)
    fastlora.fuse(model)
    print(fastlora.explain(model))

    ids = torch.randint(0, 256, (2, 16))
    model(input_ids=ids, labels=ids).loss.backward()


def without_peft() -> None:
    """One layer: W stays frozen and shared, A and B train."""
    layer = fastlora.nn.LoRALinear.from_linear(nn.Linear(64, 32), r=8, lora_alpha=16)
    optimizer = torch.optim.AdamW([p for p in layer.parameters() if p.requires_grad], lr=1e-3)
    layer(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    print(layer)


if __name__ == "__main__":
    with_peft()
    without_peft()
