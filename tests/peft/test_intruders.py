"""What other code does to modules and classes around a fused model: never a silently different result."""

import copy
import threading

import pytest
import torch
from peft import get_peft_model
from peft.utils.hotswap import prepare_model_for_compiled_hotswap
from torch import nn
from torch.nn.modules import module as torch_module
from transformers.models.llama.modeling_llama import LlamaMLP

import fastlora

from . import models
from .models import assert_parity, kinds, lora, pair


def _relu_mlp(self, x):
    return self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_class_whose_forward_is_replaced(monkeypatch, when):
    """As Liger Kernel and others do, before ``fuse`` (but after an earlier one) or after it."""
    reference, fused = pair()
    if when == "before":
        monkeypatch.setattr(LlamaMLP, "forward", _relu_mlp)
        reference, fused = pair()
    else:
        monkeypatch.setattr(LlamaMLP, "forward", _relu_mlp)
        assert "another forward" in models.row(fused, "0.mlp.gate_proj").reason
    assert_parity(fused, reference)
    fastlora.fuse(fused)
    assert "another forward" not in models.row(fused, "0.mlp.gate_proj").reason
    assert_parity(fused, reference)
    monkeypatch.undo()
    assert_parity(fused, reference)


@pytest.mark.parametrize("kind", ["forward", "pre", "backward"])
def test_global_module_hooks_see_every_module(kind):
    reference, fused = pair()
    seen: dict[str, list[str]] = {}

    def hook(module, *_):
        # one class of either model: the fused classes' own names differ
        seen[name].append(type(module).__mro__[1].__name__ if hasattr(module, "lora_A") else "")

    register = {
        "forward": torch_module.register_module_forward_hook,
        "pre": torch_module.register_module_forward_pre_hook,
        "backward": torch_module.register_module_full_backward_hook,
    }[kind]
    handle = register(hook)
    try:
        for name, model in (("reference", reference), ("fused", fused)):
            seen[name] = []
            models.step(model)
        assert len(seen["fused"]) == len(seen["reference"]) > 0
        assert "global module hook" in models.row(fused, "0.mlp.gate_proj").reason
    finally:
        handle.remove()
    assert_parity(fused, reference)


def test_a_global_hook_that_changes_outputs():
    reference, fused = pair()
    handle = torch_module.register_module_forward_hook(
        lambda module, args, output: output * 1.1 if hasattr(module, "lora_A") else None
    )
    try:
        assert_parity(fused, reference)
    finally:
        handle.remove()


_KNOWN = []


class _Register(nn.Module):
    def __init_subclass__(cls, *, kind):
        _KNOWN.append(kind)


class _Pair(_Register, kind="pair"):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.q(x) * self.k(x)


def test_a_parent_that_keeps_a_register_of_its_subclasses():
    net = nn.Sequential(_Pair(), _Pair())
    fused = fastlora.fuse(get_peft_model(net, lora(target_modules=["q", "k"])))
    assert _KNOWN == ["pair"]
    assert kinds(fused) == {"linear": 4}


def test_inference_mode():
    reference, fused = pair()
    ids = models.ids(2, 6)
    with torch.inference_mode():
        torch.testing.assert_close(fused(ids).logits, reference(ids).logits)


def test_threads_share_a_model():
    """Each thread computes what it would alone, and grouping is still on afterwards."""
    _, fused = pair()
    inputs = [models.ids(2, 6).roll(i) for i in range(4)]
    with torch.no_grad():
        want = [fused(ids).logits for ids in inputs]
    wrong: list[int] = []

    def work(i):
        with torch.no_grad():
            for _ in range(10):
                if not torch.allclose(fused(inputs[i]).logits, want[i], atol=1e-5):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert "one pass over x" in models.row(fused, "0.self_attn.q_proj").reason


def test_scalings_made_into_tensors_for_hot_swapping():
    reference, fused = pair()
    for model in (reference, fused):
        prepare_model_for_compiled_hotswap(
            model, target_rank=8, config=copy.deepcopy(model.peft_config["default"])
        )
    assert "its scaling is a tensor" in models.row(fused, "0.self_attn.q_proj").reason
    assert_parity(fused, reference)
