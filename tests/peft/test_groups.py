"""Layers computed together: what the source says, and that nothing is computed wrongly or kept."""

import gc
import logging
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import peft
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import activations
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.t5.modeling_t5 import T5Attention, T5DenseGatedActDense

import fastlora
from fastlora import functional
from fastlora.peft import groups, source

from ..helpers import relative_error
from . import models
from .models import assert_parity, kinds, lora, pair


class Branches(nn.Module):
    """Forwards that look alike and are not."""

    def forward(self, x, flag=False):
        a, b = self.a(x), self.b(x) if flag else None
        if flag:
            c = self.c(x)
            x = self.d(x)
            e = self.e(x)
        else:
            c, e = self.f(x), self.g(x)
        with torch.no_grad():
            h = self.h(x)
        i = self.i(x)
        x += i
        return a, b, c, e, h, [self.j(x) for _ in range(2)], lambda: self.k(x), self.a(x)


def test_shared_inputs_are_read_off_the_source():
    qkv = (("q_proj", "k_proj", "v_proj"),)
    assert source.shared_inputs(LlamaAttention) == qkv
    assert source.shared_inputs(BertSelfAttention) == (("query", "key", "value"),)
    assert source.shared_inputs(T5Attention) == (("k", "v"),)
    assert source.shared_inputs(LlamaMLP) == (("gate_proj", "up_proj"),)
    assert source.shared_inputs(T5DenseGatedActDense) == (("wi_0", "wi_1"),)
    assert source.shared_inputs(Branches) == (("c", "d"), ("f", "g"))
    assert (
        source.shared_inputs(type("Made", (nn.Module,), {"forward": eval("lambda s, x: x")})) == ()
    )


class SwappedMLP(nn.Module):
    def forward(self, h):
        """The other order, with local variables."""
        gated = self.act(self.w1(h))
        product = self.w3(h) * gated
        return self.w2(product)


class NotQuite(nn.Module):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x) * 2)


class Extra(nn.Module):
    def forward(self, x):
        note = self.note(x)  # noqa: F841
        return self.down(self.act(self.gate(x)) * self.up(x))


def test_gated_mlps_are_read_off_the_source():
    assert source.gated_mlp(LlamaMLP) == ("gate_proj", "up_proj", "down_proj", "act_fn")
    assert source.gated_mlp(SwappedMLP) == ("w1", "w3", "w2", "act")
    for cls in (NotQuite, Extra, T5DenseGatedActDense, LlamaAttention):
        assert source.gated_mlp(cls) is None


@pytest.mark.parametrize(
    "activation",
    [
        nn.SiLU(),
        activations.SiLUActivation(),
        nn.GELU(),
        nn.GELU(approximate="tanh"),
        activations.GELUActivation(),
        activations.GELUTanh(),
        activations.NewGELUActivation(),
        activations.FastGELUActivation(),
        activations.AccurateGELUActivation(),
        F.silu,
        F.gelu,
    ],
    ids=lambda a: getattr(a, "__name__", repr(a)),
)
def test_activations_are_told_apart_rightly(activation):
    reference, fused = pair(target_modules=["gate_proj", "up_proj", "down_proj"])
    for model in (reference, fused):
        for layer in model.base_model.model.model.layers:
            del layer.mlp.act_fn
            layer.mlp.act_fn = activation
    fastlora.fuse(fused)
    assert kinds(fused) == {"mlp": 6}
    assert_parity(fused, reference)


@pytest.mark.parametrize("activation", [nn.ReLU(), activations.QuickGELUActivation()])
def test_other_activations_keep_the_mlp_apart(activation):
    reference, fused = pair(target_modules=["gate_proj", "up_proj", "down_proj"])
    for model in (reference, fused):
        for layer in model.base_model.model.model.layers:
            layer.mlp.act_fn = activation
    assert "is not SiLU or GELU" in models.row(fused, "down_proj").reason
    assert_parity(fused, reference)
    fastlora.fuse(fused)
    assert kinds(fused) == {"projections": 4, "linear": 2}
    assert_parity(fused, reference)


@pytest.fixture
def counted(monkeypatch):
    """How often each function of ``fastlora.functional`` was called."""
    counts = {}
    for name in ("lora_linear", "lora_projections", "lora_mlp"):
        real = getattr(functional, name)

        def counting(*args, _real=real, _name=name, **kwargs):
            counts[_name] = counts.get(_name, 0) + 1
            return _real(*args, **kwargs)

        monkeypatch.setattr(functional, name, counting)
    return counts


def test_one_call_a_group(counted):
    _, fused = pair()
    models.step(fused)
    assert counted == {"lora_projections": 2, "lora_linear": 2, "lora_mlp": 2}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["q_proj", "v_proj"], {"lora_projections": 2}),
        (["q_proj", "gate_proj", "up_proj"], {"lora_projections": 2, "lora_linear": 2}),
        (["k_proj", "down_proj"], {"lora_linear": 4}),
    ],
)
def test_only_adapted_layers_are_grouped(targets, expected, counted):
    reference, fused = pair(target_modules=targets)
    assert_parity(fused, reference)
    assert counted == expected


def test_different_dropouts_are_not_grouped(counted):
    reference, fused = pair(target_modules=["q_proj", "k_proj", "v_proj"])
    for model in (reference, fused):
        for layer in model.base_model.model.model.layers:
            layer.self_attn.k_proj.lora_dropout["default"] = nn.Dropout(0.5)
        model.train()
    models.logits(fused)
    assert counted == {"lora_projections": 2, "lora_linear": 2}
    assert "q_proj" not in models.row(fused, "k_proj").reason
    assert models.row(fused, "q_proj").reason == "one pass over x with v_proj"


def test_a_hook_on_a_member_takes_it_out(counted):
    reference, fused = pair()
    for model in (reference, fused):
        attention = model.base_model.model.model.layers[0].self_attn
        attention.k_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        model.base_model.model.model.layers[1].mlp.up_proj.register_forward_hook(
            lambda module, args, output: output + 1
        )
    assert_parity(fused, reference)
    assert counted == {"lora_projections": 3, "lora_linear": 4, "lora_mlp": 1}
    assert models.row(fused, "0.self_attn.q_proj").reason == "one pass over x with v_proj"
    assert "carries a hook" in models.row(fused, "1.mlp.down_proj").reason


class Attention(nn.Module):
    """A parent whose projections can be led astray."""

    def __init__(self, between):
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.between = between

    def forward(self, x):
        a = self.q(x)
        self.between(self, x)
        b = self.k(x)
        return a + b


def attention(between=lambda module, x: None):
    torch.manual_seed(0)
    net = Attention(between)
    return fastlora.fuse(peft.inject_adapter_in_model(lora(target_modules=["q", "k"]), net))


def _alone(net, x):
    return fastlora.functional.lora_linear(
        x,
        net.k.base_layer.weight,
        net.k.lora_A["default"].weight,
        net.k.lora_B["default"].weight,
        net.k.scaling["default"],
        net.k.base_layer.bias,
    )


@pytest.mark.parametrize(
    "between",
    [
        lambda module, x: x.mul_(3),
        lambda module, x: module.k.set_scale("default", 7.0),
        lambda module, x: setattr(module.k.lora_A["default"], "weight", nn.Parameter(_A)),
    ],
    ids=["x in place", "scaling", "another parameter"],
)
def test_a_change_between_two_members_is_seen(between, caplog):
    net = attention(between)
    x = torch.randn(3, 8)
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="fastlora"):
        before = net.q(x)
        got = net(x)
        torch.testing.assert_close(got, before + _alone(net, x))
        net(x)
    assert len(caplog.records) == 1
    assert "called with different inputs" in caplog.records[0].message
    assert "not grouped: its projections were called" in models.row(net, "k").reason


_A = torch.ones(4, 8)


def test_with_dropout_a_mismatch_is_survived_and_logged_once(caplog):
    """Forward and recomputation must draw the same masks, so the group stays."""
    net = attention(lambda module, x: module.k.set_scale("default", 7.0))
    for layer in (net.q, net.k):
        layer.lora_dropout["default"] = nn.Dropout(0.25)
    x = torch.randn(3, 8)
    with caplog.at_level(logging.WARNING, logger="fastlora"):
        for _ in range(2):
            net.k.set_scale("default", 2.0)
            assert net(x).isfinite().all()
    assert len(caplog.records) == 1
    assert "one pass over x" in models.row(net, "k").reason


def test_threads_that_share_a_model_do_not_mix_their_inputs():
    barrier = threading.Barrier(2)
    net = attention(lambda module, x: barrier.wait(30))
    inputs = [torch.randn(3, 8) for _ in range(2)]
    with torch.no_grad():
        expected = [net.q(x) + net.k(x) for x in inputs]
        for _ in range(20):
            with ThreadPoolExecutor(2) as pool:
                results = list(pool.map(torch.no_grad()(net), inputs))
            for got, want in zip(results, expected, strict=True):
                torch.testing.assert_close(got, want)


def test_a_compiled_member_of_an_eager_parent_is_computed_alone():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    net = attention()
    x = torch.randn(3, 8)
    want = net(x)
    net.q.compile(backend="eager", fullgraph=True)
    for _ in range(3):
        torch.testing.assert_close(net(x), want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_nothing_is_kept_after_a_forward(counted):
    net = attention()
    x = torch.randn(3, 8)
    y = net(x)
    assert counted == {"lora_projections": 1}
    gone = weakref.ref(x)
    del x, y
    gc.collect()
    assert gone() is None
    assert net.q._fastlora.scope is None


def test_nothing_is_kept_after_a_forward_that_fails():
    def fail(module, x):
        raise RuntimeError("in the middle")

    net = attention(fail)
    x = torch.randn(3, 8)
    gone = weakref.ref(x)
    with pytest.raises(RuntimeError, match="in the middle"):
        net(x)
    assert net.q._fastlora.scope is None
    del x
    gc.collect()
    assert gone() is None


def test_calls_from_outside_the_parent_are_single(counted):
    net = attention()
    x = torch.randn(3, 8)
    net.q(x), net.k(x)
    assert counted == {"lora_linear": 2}


def test_retain_graph_and_a_second_backward():
    """Two modules share an x that another Function saved; two backwards (L4)."""
    results = []
    for fused in (False, True):
        net = attention() if fused else fastlora.unfuse(attention())
        leaf = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        x = leaf.exp()  # saves its output
        y = net(x)
        y.square().sum().backward(retain_graph=True)
        y.square().sum().backward()
        results.append([leaf.grad, *[p.grad for p in net.parameters() if p.grad is not None]])
    for want, got in zip(*results, strict=True):
        assert relative_error(got, want) <= 1e-5


def test_the_parents_class_keeps_its_name_and_forwards_its_signature():
    import inspect

    _, fused = pair()
    mlp = fused.base_model.model.model.layers[0].mlp
    assert isinstance(mlp, LlamaMLP)
    assert type(mlp) is not LlamaMLP
    assert type(mlp).__name__ == "LlamaMLP"
    assert groups.original_class(type(mlp)) is LlamaMLP
    assert list(inspect.signature(mlp.forward).parameters) == ["x"]
