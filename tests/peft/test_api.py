"""``fuse``, ``unfuse`` and ``explain``: what they refuse, change, and put back."""

import copy
import io
import logging

import peft
import pytest
import torch
from peft.tuners.lora import layer as peft_layer
from torch import nn

import fastlora

from . import models
from .models import assert_parity, kinds, pair, peft_model


def _snapshot(model):
    """Everything that ``fuse`` could have changed: classes, attributes, parameters, keys."""
    return {
        name: (
            type(module),
            sorted(module.__dict__),
            {key: id(value) for key, value in module._parameters.items()},
            {key: id(value) for key, value in module._modules.items()},
        )
        for name, module in model.named_modules()
    }


def test_fuse_returns_the_model_and_keeps_its_parameters_and_keys():
    model = peft_model()
    parameters = [(name, id(p)) for name, p in model.named_parameters()]
    modules = [(name, id(m)) for name, m in model.named_modules()]
    keys = list(model.state_dict())
    assert fastlora.fuse(model) is model
    assert [(name, id(p)) for name, p in model.named_parameters()] == parameters
    assert [(name, id(m)) for name, m in model.named_modules()] == modules
    assert list(model.state_dict()) == keys


def test_fuse_twice_is_fuse_once():
    model = fastlora.fuse(peft_model())
    once = _snapshot(model)
    rows = fastlora.explain(model).rows
    assert fastlora.fuse(model) is model
    assert _snapshot(model) == once
    assert fastlora.explain(model).rows == rows


def test_the_last_call_holds():
    model = fastlora.fuse(peft_model())
    fastlora.fuse(model, backend="torch", groups=())
    assert kinds(model) == {"linear": 14}
    assert {row.backend for row in fastlora.explain(model).rows} == {"torch"}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3"])
def test_unfuse_gives_back_exactly_what_peft_made(kind):
    model = peft_model(kind)
    before = _snapshot(model)
    assert fastlora.unfuse(fastlora.fuse(model)) is model
    assert _snapshot(model) == before
    assert fastlora.unfuse(model) is model
    assert kinds(model) == {"peft": len(fastlora.explain(model).rows)}


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"backend": "gpu"}, ValueError, "backend: got 'gpu', takes 'auto'"),
        ({"groups": ("attention",)}, ValueError, "groups: got 'attention'.*projections"),
        ({"groups": "mlp"}, TypeError, "groups: got 'mlp', takes a collection"),
        ({"groups": 3}, TypeError, "groups: got 3"),
    ],
)
def test_bad_arguments_are_refused_before_anything_changes(arguments, error, match):
    model = peft_model()
    before = _snapshot(model)
    with pytest.raises(error, match=match):
        fastlora.fuse(model, **arguments)
    assert _snapshot(model) == before


def test_a_backend_that_cannot_serve_is_refused_before_anything_changes(monkeypatch):
    from fastlora import backend

    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    backend.status.cache_clear(), backend._choose.cache_clear()
    model = peft_model()
    before = _snapshot(model)
    with pytest.raises(ValueError, match="backend: got 'triton', which cannot serve"):
        fastlora.fuse(model, backend="triton")
    assert _snapshot(model) == before
    backend.status.cache_clear(), backend._choose.cache_clear()


@pytest.mark.parametrize("function", [fastlora.fuse, fastlora.unfuse, fastlora.explain])
def test_not_a_module(function):
    with pytest.raises(TypeError, match=r"model: got dict, takes a torch\.nn\.Module"):
        function({})


@pytest.mark.parametrize("function", [fastlora.fuse, fastlora.explain])
def test_a_model_without_lora_is_refused(function):
    with pytest.raises(ValueError, match="model: got one without a LoRA layer"):
        function(nn.Linear(3, 3))


def test_explain_prints_a_table():
    model = fastlora.fuse(peft_model(target_modules=["q_proj", "v_proj"]))
    text = str(fastlora.explain(model))
    assert text.splitlines()[0].split() == ["layer", "count", "kind", "fused", "backend", "reason"]
    assert "base_model.model.model.layers.*.self_attn.q_proj  2" in text
    assert "one pass over x with v_proj" in text
    assert text.endswith("4 of 4 LoRA layers are fused")
    row = fastlora.explain(model).rows[0]
    assert model.get_submodule(row.name) is not None
    assert (row.kind, row.fused) == ("projections", True)


def test_explain_before_fuse():
    rows = fastlora.explain(peft_model()).rows
    assert not any(row.fused for row in rows)
    assert {row.reason for row in rows} == {"fuse has not been called since PEFT made this layer"}


def test_what_is_left_is_logged_once(caplog):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.linear = nn.Conv1d(4, 4, 1), nn.Linear(4, 4)

    model = peft.inject_adapter_in_model(models.lora(target_modules=["conv", "linear"]), Net())
    with caplog.at_level(logging.WARNING, logger="fastlora"):
        fastlora.fuse(model)
    (record,) = caplog.records
    assert "1 of 2 LoRA layers keep PEFT's own forward: 1 × PEFT's" in record.message
    assert models.row(model, "conv").kind == "Conv1d"
    assert "has no fused form" in models.row(model, "conv").reason


def test_a_model_without_a_peft_wrapper():
    torch.manual_seed(0)
    reference = peft.inject_adapter_in_model(models.lora(), models.MODELS["llama"][0]())
    fused = fastlora.fuse(copy.deepcopy(reference))
    assert kinds(fused) == {"projections": 6, "linear": 2, "mlp": 6}
    assert_parity(fused, reference)


def test_hooks_stay_and_fire():
    reference, fused = pair()
    calls = {}
    for label, model in (("reference", reference), ("fused", fused)):
        calls[label] = []
        for name, module in model.named_modules():
            if name.endswith(("q_proj", "v_proj", "up_proj", "mlp")):
                note = calls[label].append
                module.register_forward_pre_hook(lambda m, a, n=name, f=note: f(("pre", n)))
                module.register_forward_hook(lambda m, a, o, n=name, f=note: f(("post", n)))
                module.register_full_backward_hook(lambda m, i, o, n=name, f=note: f(("back", n)))
    assert_parity(fused, reference)
    assert sorted(calls["fused"]) == sorted(calls["reference"])
    assert calls["fused"]


def test_deepcopy_and_torch_save_keep_the_groups():
    reference, fused = pair()
    file = io.BytesIO()
    torch.save(fused, file)
    file.seek(0)
    for twin in (copy.deepcopy(fused), torch.load(file, weights_only=False)):
        assert kinds(twin) == kinds(fused)
        assert_parity(twin, reference)
        shared = {id(p) for p in fused.parameters()} & {id(p) for p in twin.parameters()}
        assert not shared
        assert fastlora.unfuse(twin) is twin
        assert type(twin.base_model.model.model.layers[0].mlp).__name__ == "LlamaMLP"
        assert not any("_fastlora" in module.__dict__ for module in twin.modules())


def test_a_copied_layer_is_on_its_own():
    _, fused = pair()
    layer = fused.base_model.model.model.layers[0].self_attn.q_proj
    twin = copy.deepcopy(layer)
    x = torch.randn(3, 32)
    torch.testing.assert_close(twin(x), layer(x))
    assert kinds(twin) == {"linear": 1}


def test_adapter_that_is_never_called_is_refused():
    """A module that multiplies with ``layer.weight`` and never calls the layer (L14)."""

    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.o = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            weight = torch.cat([self.q.weight, self.k.weight])
            if self.o.weight.dtype == x.dtype:
                return self.o(x @ weight.t()[:, :4])
            return x

    net = peft.inject_adapter_in_model(models.lora(target_modules=["o"]), Fused())
    assert kinds(fastlora.fuse(net)) == {"linear": 1}
    net = peft.inject_adapter_in_model(models.lora(target_modules=["q", "o"]), Fused())
    with pytest.raises(
        ValueError, match=r"adapter on 'q', which Fused.forward knows by its weight"
    ):
        fastlora.fuse(net)
    assert type(net.o) is peft_layer.Linear
