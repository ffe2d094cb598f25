"""Forward and every gradient against PEFT, over architectures and kinds of adapter."""

import copy
import warnings

import pytest
import torch

import fastlora

from ..helpers import relative_error, require_backend
from . import models
from .models import assert_parity, kinds, pair


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", {"projections": 6, "linear": 2, "mlp": 6}),
        ("gpt2", {"linear": 8}),
        ("gemma", {"projections": 6, "linear": 2, "mlp": 6}),
        ("gemma3", {"projections": 6, "linear": 2, "mlp": 6, "embedding": 1}),
        ("qwen2", {"projections": 6, "linear": 2, "mlp": 6}),
        ("mistral", {"projections": 6, "linear": 2, "mlp": 6}),
    ],
)
def test_architectures(kind, expected):
    reference, fused = pair(kind)
    assert kinds(fused) == expected
    assert_parity(fused, reference)


@pytest.mark.parametrize("groups", [(), ("projections",), ("mlp",)], ids=lambda g: "+".join(g))
def test_groups_give_the_same(groups):
    reference, fused = pair(fuse={"groups": groups})
    assert (
        kinds(fused)
        == {
            (): {"linear": 14},
            ("projections",): {"projections": 10, "linear": 4},
            ("mlp",): {"linear": 8, "mlp": 6},
        }[groups]
    )
    assert_parity(fused, reference)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_backends(backend):
    require_backend(backend)
    reference, fused = pair(fuse={"backend": backend})
    assert {row.backend for row in fastlora.explain(fused).rows} == {backend}
    assert_parity(fused, reference)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj", "down_proj"]},
        {"rank_pattern": {"q_proj": 1, "down_proj": 13}},
        {"alpha_pattern": {"k_proj": 3, "up_proj": 5}},
        {"use_rslora": True},
        {"lora_bias": True},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"r": 64},
        {"layers_to_transform": [1]},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["embed_tokens", "q_proj", "lm_head"]},
        {"target_modules": "all-linear"},
    ],
    ids=lambda kwargs: ",".join(f"{k}={v}" for k, v in kwargs.items()),
)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_settings_of_loraconfig(kind, kwargs):
    base = {"attention_bias": True} if kind == "llama" and "bias" in kwargs else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own, on lora_bias without a base bias
        reference, fused = pair(kind, base, **kwargs)
    assert "peft" not in kinds(fused)
    assert_parity(fused, reference)


@pytest.mark.parametrize(
    "init", [True, "gaussian", "pissa", "pissa_niter_2", "olora", "orthogonal"]
)
def test_init_variants(init):
    reference, fused = pair(init_lora_weights=init)
    assert "peft" not in kinds(fused)
    assert_parity(fused, reference)


def test_gpt2_with_biases_and_fan_in_fan_out():
    reference, fused = pair("gpt2", lora_bias=True, fan_in_fan_out=True)
    assert kinds(fused) == {"linear": 8}
    assert_parity(fused, reference)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("groups", [(), ("projections", "mlp")], ids=["single", "grouped"])
def test_dropout_with_its_own_masks(kind, groups, monkeypatch):
    """Every projection has its own mask; dropout reaches dX; embeddings have none (L6)."""
    reference, fused = pair(kind, fuse={"groups": groups}, lora_dropout=0.25)
    fused.train(), reference.train()
    with models.recorded_seeds(monkeypatch) as seeds:
        got = models.step(fused)
    assert len(seeds) == len({int(seed) for seed in seeds}) == (8 if kind == "gpt2" else 14)
    models.replay(reference, seeds)
    models.assert_same(got, models.step(reference))
    assert not seeds
    fused.eval(), reference.eval()
    torch.testing.assert_close(models.logits(fused), models.logits(fused), rtol=0, atol=0)


def test_dropout_follows_the_dropout_modules_own_switch():
    reference, fused = pair(lora_dropout=0.5)
    for model in (reference, fused):
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.eval()
    assert_parity(fused, reference)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("lora_bias", [False, True], ids=["", "lora_bias"])
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)],
    ids=["bf16", "bf16-autocast", "fp16-autocast"],
)
@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
def test_half_types_with_fp32_adapters(kind, dtype, autocast, lora_bias):
    """Error against fp64 at most twice PEFT's own; gradients in each parameter's dtype (L2)."""
    reference = models.peft_model(kind, lora_bias=lora_bias)
    if not autocast:
        reference.get_base_model().to(dtype)
        for name, parameter in reference.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
    exact = models.step(copy.deepcopy(reference).double())
    fused = fastlora.fuse(copy.deepcopy(reference))
    results = []
    for model in (fused, reference):
        with torch.autocast("cpu", dtype, enabled=autocast):
            results.append(models.step(model))
    got, unfused = results
    models.assert_as_accurate(got, unfused, exact)


def test_frozen_x_still_trains_adapters():
    """The embedding below is frozen, so that the first layer's x needs no gradient (L5)."""
    reference, fused = pair(target_modules=["q_proj", "k_proj", "v_proj"], layers_to_transform=[0])
    assert_parity(fused, reference)


def test_shapes_of_one_layer():
    """1-D to 4-D inputs, no row, one row, transposed x, expanded gradient (L1, L8)."""
    reference, fused = pair(target_modules=["q_proj"])
    layers = [m.base_model.model.model.layers[0].self_attn.q_proj for m in (reference, fused)]
    x = torch.randn(6, 5, 2, 32)
    for view in (x[0, 0, 0], x[0, 0], x[0], x, x[:, :0], x.transpose(0, 2), x[..., :1, :]):
        outputs = []
        for layer in layers:
            leaf = view.detach().requires_grad_()
            y = layer(leaf)
            y.sum().backward()  # dY is one number expanded
            grads = [layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad]
            outputs.append([y.detach(), leaf.grad, *[g.clone() for g in grads]])
            layer.zero_grad()
        for want, got in zip(*outputs, strict=True):
            assert got.shape == want.shape
            assert relative_error(got, want) <= 1e-5
