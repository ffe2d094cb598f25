"""``LoRALinear`` and ``LoRAEmbedding``: what hand-written LoRA layers get wrong."""

import copy

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from fastlora.nn import LoRAEmbedding, LoRALinear
from tests.helpers import relative_error


def test_unchanged_at_first():
    """B is zero: the output is the base layer's, bit for bit, in training and with dropout."""
    linear = nn.Linear(24, 16)
    layer = LoRALinear.from_linear(linear, r=4, lora_alpha=8, lora_dropout=0.1)
    x = torch.randn(2, 5, 24)
    assert torch.equal(layer(x), linear(x))
    assert layer.lora_A.abs().sum() > 0
    assert layer.lora_B.abs().sum() == 0


def test_weight_is_shared_and_frozen():
    linear = nn.Linear(24, 16)
    layer = LoRALinear.from_linear(linear, r=4, lora_alpha=8)
    assert layer.weight is linear.weight
    assert layer.bias is linear.bias
    trainable = {name for name, p in layer.named_parameters() if p.requires_grad}
    assert trainable == {"lora_A", "lora_B"}
    assert layer.lora_A.shape == (4, 24)
    assert layer.lora_B.shape == (16, 4)
    layer(torch.randn(3, 24)).sum().backward()
    assert linear.weight.grad is None


@pytest.mark.parametrize(("use_rslora", "expected"), [(False, 2.0), (True, 4.0)])
def test_scaling(use_rslora, expected):
    layer = LoRALinear.from_linear(nn.Linear(8, 8), r=4, lora_alpha=8, use_rslora=use_rslora)
    assert layer.scaling == expected


@pytest.mark.parametrize("shape", [(24,), (3, 24), (2, 3, 24), (2, 1, 3, 24), (0, 24)])
def test_any_number_of_dimensions(shape):
    layer = LoRALinear.from_linear(nn.Linear(24, 16), r=4, lora_alpha=8)
    nn.init.normal_(layer.lora_B)
    x = torch.randn(shape)
    merged = layer.weight + layer.scaling * layer.lora_B @ layer.lora_A
    expected = nn.functional.linear(x, merged, layer.bias)
    assert layer(x).shape == (*shape[:-1], 16)
    assert relative_error(layer(x), expected) < 1e-5


def test_learns():
    """A rank-1 target is reached: the gradients have the right sign and size."""
    base = nn.Linear(12, 8, bias=False)
    layer = LoRALinear.from_linear(base, r=2, lora_alpha=4)
    target = base.weight.detach() + torch.outer(torch.randn(8), torch.randn(12)) / 4
    optimizer = torch.optim.Adam([p for p in layer.parameters() if p.requires_grad], lr=0.05)
    x = torch.randn(64, 12)
    losses = []
    for _ in range(150):
        loss = nn.functional.mse_loss(layer(x), x @ target.T)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 1e-3 * losses[0]


def test_deepcopy_pickle_and_safetensors(tmp_path):
    layer = LoRALinear.from_linear(nn.Linear(24, 16), r=4, lora_alpha=8)
    nn.init.normal_(layer.lora_B)
    x = torch.randn(3, 24)
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(x), layer(x))
    assert copied.lora_A is not layer.lora_A

    torch.save(layer, tmp_path / "layer.pt")
    assert torch.equal(torch.load(tmp_path / "layer.pt", weights_only=False)(x), layer(x))

    save_model(layer, str(tmp_path / "layer.safetensors"))
    other = LoRALinear.from_linear(nn.Linear(24, 16), r=4, lora_alpha=8)
    load_model(other, str(tmp_path / "layer.safetensors"))
    assert torch.equal(other(x), layer(x))


def test_half_precision_base_and_fp32_adapters():
    """P7: the factors stay fp32 masters unless asked otherwise."""
    linear = nn.Linear(24, 16, dtype=torch.bfloat16)
    layer = LoRALinear.from_linear(linear, r=4, lora_alpha=8)
    assert layer.lora_A.dtype == layer.lora_B.dtype == torch.float32
    x = torch.randn(3, 24, dtype=torch.bfloat16)
    assert layer(x).dtype == torch.bfloat16
    halves = LoRALinear.from_linear(linear, r=4, lora_alpha=8, adapter_dtype=torch.bfloat16)
    assert halves.lora_A.dtype == torch.bfloat16


def test_says_what_it_does():
    layer = LoRALinear.from_linear(nn.Linear(24, 16), r=4, lora_alpha=8, lora_dropout=0.1)
    for part in ("in_features=24", "out_features=16", "r=4", "scaling=2", "lora_dropout=0.1"):
        assert part in repr(layer)


BAD = {
    "rank-0": ({"r": 0}, ValueError, "r: got 0"),
    "rank-float": ({"r": 4.0}, TypeError, "r: got float"),
    "alpha": ({"lora_alpha": "8"}, TypeError, "lora_alpha: got str"),
    "dropout": ({"lora_dropout": 1.0}, ValueError, "lora_dropout: got 1.0"),
    "dtype": ({"adapter_dtype": torch.int8}, ValueError, "adapter_dtype: got torch.int8"),
    "backend": ({"backend": "gpu"}, ValueError, "backend: got 'gpu'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_change_nothing(case):
    changes, error, message = BAD[case]
    linear = nn.Linear(24, 16)
    with pytest.raises(error, match=message):
        LoRALinear.from_linear(linear, **({"r": 4, "lora_alpha": 8} | changes))
    assert linear.weight.requires_grad


def test_bad_bases():
    with pytest.raises(TypeError, match="linear: got Conv2d"):
        LoRALinear.from_linear(nn.Conv2d(3, 3, 1), r=4, lora_alpha=8)
    with pytest.raises(TypeError, match="embedding: got Linear"):
        LoRAEmbedding.from_embedding(nn.Linear(3, 3), r=4, lora_alpha=8)
    with pytest.raises(ValueError, match=r"max_norm=1\.0"):
        LoRAEmbedding.from_embedding(nn.Embedding(5, 3, max_norm=1.0), r=2, lora_alpha=8)


def test_embedding():
    embedding = nn.Embedding(11, 6, padding_idx=2)
    layer = LoRAEmbedding.from_embedding(embedding, r=3, lora_alpha=6, embed_scale=2.0)
    ids = torch.tensor([[1, 2, 2], [10, 0, 1]])
    assert layer.weight is embedding.weight
    assert not layer.weight.requires_grad
    assert torch.equal(layer(ids), embedding(ids) * 2.0)
    nn.init.normal_(layer.lora_A)
    merged = layer.weight + layer.scaling * (layer.lora_B @ layer.lora_A).T
    assert relative_error(layer(ids), merged[ids] * 2.0) < 1e-6
    layer(ids).sum().backward()
    assert layer.lora_A.grad[:, 2].abs().max() == 0
    assert layer.lora_A.grad[:, 1].abs().max() > 0
    assert layer.lora_B.grad.abs().max() > 0


class _Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def _hooked():
    linear = nn.Linear(8, 8)
    linear.register_forward_hook(lambda module, args, output: output * 2)
    return linear


NOT_PLAIN = {
    "forward": (lambda: _Doubled(8, 8), "_Doubled with a forward of its own"),
    "hook": (_hooked, "Linear with a hook"),
    "parametrized": (lambda: parametrizations.weight_norm(nn.Linear(8, 8)), "a parametrization"),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5), "pruned"),
    "lazy": (lambda: nn.LazyLinear(8), "no shape yet"),
}


@pytest.mark.parametrize("case", NOT_PLAIN)
def test_layers_that_do_more_are_refused(case):
    """Wrapped, they would silently stop doing it."""
    make, message = NOT_PLAIN[case]
    with pytest.raises(
        TypeError, match=f"linear: got .*{message}.*, takes a plain torch.nn.Linear"
    ):
        LoRALinear.from_linear(make(), r=2, lora_alpha=2)


def test_an_embedding_that_scales_is_refused():
    scaled = Gemma3TextScaledWordEmbedding(8, 8, 0, embed_scale=3.0)
    with pytest.raises(TypeError, match=r"embedding: got .* forward of its own"):
        LoRAEmbedding.from_embedding(scaled, r=2, lora_alpha=2)


def test_no_input_features():
    layer = LoRALinear.from_linear(nn.Linear(0, 8), r=2, lora_alpha=2)
    assert layer(torch.zeros(200, 0)).shape == (200, 8)
