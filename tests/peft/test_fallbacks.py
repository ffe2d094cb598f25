"""Modules whose own behaviour must not be bypassed: PEFT's forward runs, with the reason (L15, L16)."""

import copy

import peft
import pytest
import torch
from torch import nn

import fastlora

from . import models
from .models import assert_parity, kinds, lora, pair, peft_model


def q_proj(model, layer=0):
    return model.base_model.model.model.layers[layer].self_attn.q_proj


@pytest.mark.parametrize("part", ["base_layer", "lora_A", "lora_B", "lora_dropout"])
@pytest.mark.parametrize("kind", ["forward", "pre", "backward"])
def test_hooks_inside_a_layer_run(part, kind):
    reference, fused = pair(lora_dropout=0.5)
    fired = []
    for model in (reference, fused):
        model.eval()
        inner = getattr(q_proj(model, 1), part)  # layer 0's x needs no gradient
        inner = inner if part == "base_layer" else inner["default"]
        if kind == "forward":
            inner.register_forward_hook(lambda module, args, output: fired.append(1) or output * 2)
        elif kind == "pre":
            inner.register_forward_pre_hook(lambda module, args: fired.append(1) or args[0] * 2)
        else:
            inner.register_full_backward_hook(lambda module, i, o: fired.append(1) and None)
    assert "carries a hook" in models.row(fused, "1.self_attn.q_proj").reason
    assert_parity(fused, reference)
    assert len(fired) == 2


def test_a_parametrised_adapter_keeps_its_parametrisation():
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    reference, fused = pair()
    for model in (reference, fused):
        nn.utils.parametrize.register_parametrization(
            q_proj(model).lora_A["default"], "weight", Double()
        )
    assert "not a plain nn.Linear" in models.row(fused, "0.self_attn.q_proj").reason
    assert_parity(fused, reference)


def test_a_parametrised_base_keeps_its_parametrisation():
    reference = peft_model()
    nn.utils.parametrizations.weight_norm(q_proj(reference).base_layer)
    for parameter in q_proj(reference).base_layer.parameters():
        parameter.requires_grad_(False)
    fused = fastlora.fuse(copy.deepcopy(reference))
    assert "ParametrizedLinear" in models.row(fused, "0.self_attn.q_proj").reason
    assert_parity(fused, reference)


class QuantisedLinear(nn.Linear):
    """Stands for a quantised layer of another package: a subclass with its own forward."""

    def forward(self, x):
        return super().forward(x).round(decimals=2)


def test_a_quantised_base_runs_pefts_forward():
    torch.manual_seed(0)
    base = models.MODELS["llama"][0]()
    base.model.layers[0].self_attn.q_proj.__class__ = QuantisedLinear
    reference = peft.get_peft_model(base, lora())
    fused = fastlora.fuse(copy.deepcopy(reference))
    row = models.row(fused, "0.self_attn.q_proj")
    assert (row.fused, row.backend) == (False, "peft")
    assert "QuantisedLinear, not a plain nn.Linear" in row.reason
    assert_parity(fused, reference)


class Wrapped(torch.Tensor):
    """Stands for a quantised weight of another package: a tensor subclass."""


def test_a_weight_that_is_a_tensor_subclass_runs_pefts_forward():
    _, fused = pair()
    layer = q_proj(fused)
    x = torch.randn(2, 32)
    want = layer(x)
    weight = layer.base_layer.weight.detach().as_subclass(Wrapped)
    layer.base_layer.weight = nn.Parameter(weight, requires_grad=False)
    assert "not plain tensors (Wrapped" in models.row(fused, "0.self_attn.q_proj").reason
    torch.testing.assert_close(layer(x).as_subclass(torch.Tensor), want)


def test_meta_parameters_and_materialising_them():
    reference, fused = pair()
    state = fused.state_dict()
    fused.to("meta")
    assert "meta device" in models.row(fused, "q_proj").reason
    assert q_proj(fused)(torch.randn(3, 32, device="meta")).is_meta
    fused.load_state_dict(state, assign=True)
    for name, parameter in fused.named_parameters():
        parameter.requires_grad_("lora_" in name)
    fused.base_model.model.model.rotary_emb = copy.deepcopy(
        reference.base_model.model.model.rotary_emb
    )
    assert "peft" not in kinds(fused)
    assert_parity(fused, reference)


@pytest.mark.parametrize("order", ["offload, fuse", "fuse, offload"])
def test_offloaded_parameters_come_back_through_their_hooks(order):
    from accelerate import cpu_offload

    reference = peft_model().eval()
    fused = copy.deepcopy(reference)
    if order == "fuse, offload":
        fastlora.fuse(fused)
    cpu_offload(fused, torch.device("cpu"))
    if order == "offload, fuse":
        fastlora.fuse(fused)
    assert q_proj(fused).base_layer.weight.is_meta
    assert kinds(fused) == {"peft": 14}
    with torch.no_grad():
        torch.testing.assert_close(models.logits(fused), models.logits(reference))
    fastlora.unfuse(fused)
    with torch.no_grad():
        torch.testing.assert_close(models.logits(fused), models.logits(reference))


def test_embeddings_with_more_than_a_look_up():
    reference = peft_model(target_modules=["embed_tokens"])
    for options in ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}):
        model = copy.deepcopy(reference)
        base = model.base_model.model.model.embed_tokens.base_layer
        for name, value in options.items():
            setattr(base, name, value)
        fused = fastlora.fuse(copy.deepcopy(model))
        assert "max_norm, sparse or scale_grad_by_freq" in models.row(fused, "tokens").reason
        torch.testing.assert_close(models.logits(fused), models.logits(model))


def test_an_embedding_with_a_forward_of_its_own():
    class Shifted(nn.Embedding):
        def forward(self, input_ids):
            return super().forward(input_ids) + 1

    torch.manual_seed(0)
    base = models.MODELS["llama"][0]()
    base.model.embed_tokens.__class__ = Shifted
    reference = peft.get_peft_model(base, lora(target_modules=["embed_tokens"]))
    fused = fastlora.fuse(copy.deepcopy(reference))
    assert kinds(fused) == {"peft": 1}
    assert_parity(fused, reference)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_the_padding_row_gets_no_gradient(kind):
    reference, fused = pair(kind, target_modules=["embed_tokens"])
    input_ids = models.ids()
    input_ids[:, :2] = 0
    got, want = models.step(fused, input_ids), models.step(reference, input_ids)
    models.assert_same(got, want)
    (name,) = [name for name in got if "lora_embedding_A" in name]
    assert not got[name][:, 0].any()


def test_tensor_subclasses_as_input():
    _, fused = pair()
    x = torch.randn(2, 32)
    got = q_proj(fused)(x.as_subclass(Wrapped))
    assert isinstance(got, Wrapped)
    torch.testing.assert_close(got.as_subclass(torch.Tensor), q_proj(fused)(x))
