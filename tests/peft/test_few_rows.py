"""The path for few rows gives what the fused operations give (L17)."""

import copy

import pytest
import torch
from torch import nn

import fastlora
from fastlora import functional
from fastlora.peft import few_rows

from ..helpers import relative_error, require_backend
from . import models
from .models import assert_parity, pair


@pytest.fixture
def no_functions(monkeypatch):
    """Fail where an operation of ``fastlora.functional`` is called after all."""

    def refuse(*args, **kwargs):
        raise AssertionError("the path for few rows was not taken")

    for name in ("lora_linear", "lora_projections", "lora_mlp"):
        monkeypatch.setattr(functional, name, refuse)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_few_rows_without_dropout(kind, no_functions):
    reference, fused = pair(kind, lora_bias=kind == "gpt2")
    assert_parity(fused, reference)


def test_few_rows_with_dropout_draw_the_same_masks(no_functions, monkeypatch):
    require_backend("cpu")
    reference, fused = pair(lora_dropout=0.25)
    fused.train(), reference.train()
    with models.recorded_seeds(monkeypatch) as seeds:
        got = models.step(fused)
    assert len(seeds) == 14
    models.replay(reference, seeds)
    models.assert_same(got, models.step(reference))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_few_rows_in_half_types(dtype, no_functions):
    reference = models.peft_model("qwen2", lora_bias=True)
    for name, parameter in reference.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.to(dtype)
    exact = models.step(copy.deepcopy(reference).double())
    fused = fastlora.fuse(copy.deepcopy(reference))
    got, unfused = models.step(fused), models.step(reference)
    models.assert_as_accurate(got, unfused, exact)


def test_few_rows_and_many_rows_agree(monkeypatch):
    """One layer on both sides of the limit, with one seed: the same mask, the same result."""
    require_backend("cpu")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 24))
    import peft

    net = peft.inject_adapter_in_model(models.lora(target_modules=["0"], lora_dropout=0.3), net)
    fastlora.fuse(net)
    x = torch.randn(4, 3, 32)
    results = []
    for limit in (16, 0):
        monkeypatch.setattr(few_rows, "LIMIT_WITH_DROPOUT", limit)
        torch.manual_seed(4)
        results.append(net(x))
    assert relative_error(*results) <= 1e-6
    assert not few_rows.few(torch.ones(17, 1, 32), torch.ones(1), 0.3, "auto")
    assert not few_rows.few(torch.ones(1, 32), torch.ones(1), 0.0, "torch")
