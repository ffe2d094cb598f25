"""The path for few rows gives what the fused operations give (L17)."""

import copy

import pytest
import torch

import fastlora
from fastlora import functional
from fastlora.ops import few_rows

from ..helpers import require_backend
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
def test_few_rows_in_half_types(dtype, no_functions, monkeypatch):
    monkeypatch.setattr(few_rows, "has_fast_gemm", lambda _: True)
    reference = models.peft_model("qwen2", lora_bias=True)
    for name, parameter in reference.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.to(dtype)
    exact = models.step(copy.deepcopy(reference).double())
    fused = fastlora.fuse(copy.deepcopy(reference))
    got, unfused = models.step(fused), models.step(reference)
    models.assert_as_accurate(got, unfused, exact)
