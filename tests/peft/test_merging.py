"""Merging gives PEFT's weights, and unmerging gives the originals back to the bit (L10, L11)."""

import copy
import io
import warnings

import peft
import pytest
import torch
from torch import nn

import fastlora

from . import models
from .models import assert_parity, kinds, lora, pair


def _weights(model):
    return {n: p.detach().clone() for n, p in model.named_parameters() if "base_layer" in n}


def _assert_equal(got, want):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("safe_merge", [False, True], ids=["merge", "safe_merge"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3"])
def test_merge_gives_pefts_weights_and_unmerge_the_original_parameters(kind, safe_merge):
    untied = None if kind == "gpt2" else {"tie_word_embeddings": False}
    reference, fused = pair(kind, untied)
    before = _weights(fused)
    originals = {name: id(p) for name, p in fused.named_parameters()}
    for model in (reference, fused):
        model.merge_adapter(safe_merge=safe_merge)
    _assert_equal(_weights(fused), _weights(reference))
    assert list(fused.state_dict()) == list(reference.state_dict())
    torch.testing.assert_close(models.logits(fused), models.logits(reference), rtol=0, atol=0)
    assert {row.reason for row in fastlora.explain(fused).rows} == {
        "the adapters are merged into the base weight"
    }
    fused.unmerge_adapter()
    _assert_equal(_weights(fused), before)
    assert {name: id(p) for name, p in fused.named_parameters()} == originals
    assert "peft" not in kinds(fused)


def test_a_thousand_rounds_in_bf16():
    net = nn.Sequential(nn.Linear(24, 24), nn.Embedding(9, 24)).bfloat16()
    model = peft.inject_adapter_in_model(lora(target_modules=["0", "1"]), net)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    fastlora.fuse(model)
    before = _weights(model)
    for _ in range(1000):
        for layer in model:
            layer.merge()
        for layer in model:
            layer.unmerge()
    _assert_equal(_weights(model), before)


@pytest.mark.parametrize("merged", ["embed_tokens", "lm_head"])
def test_merging_one_of_two_tied_layers_leaves_the_other(merged):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own, on tied weights
        _, fused = pair(base={"tie_word_embeddings": True}, target_modules=[merged])
    inner = fused.base_model.model
    embedding, head = inner.model.embed_tokens, inner.lm_head
    layer, other = (embedding, head) if merged == "embed_tokens" else (head, embedding)
    assert other.weight is layer.base_layer.weight
    before = other.weight.detach().clone()
    fused.merge_adapter()
    assert torch.equal(other.weight, before)
    assert not torch.equal(layer.base_layer.weight, before)
    fastlora.unfuse(copy.deepcopy(fused))
    fused.unmerge_adapter()
    assert other.weight is layer.base_layer.weight
    assert torch.equal(other.weight, before)


def test_merge_and_unload_gives_plain_modules():
    reference, fused = pair()
    plain, unloaded = reference.merge_and_unload(), fused.merge_and_unload()
    assert [type(m) for m in unloaded.modules()] == [type(m) for m in plain.modules()]
    assert not any("_fastlora" in m.__dict__ for m in unloaded.modules())
    _assert_equal(unloaded.state_dict(), plain.state_dict())
    torch.testing.assert_close(models.logits(unloaded), models.logits(plain), rtol=0, atol=0)


def test_unload_gives_the_base_model():
    reference, fused = pair()
    plain, unloaded = reference.unload(), fused.unload()
    assert [type(m) for m in unloaded.modules()] == [type(m) for m in plain.modules()]
    _assert_equal(unloaded.state_dict(), plain.state_dict())


def test_disabling_unmerges_as_in_peft():
    reference, fused = pair()
    before = _weights(fused)
    fused.merge_adapter()
    with fused.disable_adapter(), reference.disable_adapter():
        torch.testing.assert_close(models.logits(fused), models.logits(reference), rtol=0, atol=0)
    _assert_equal(_weights(fused), before)
    assert_parity(fused, reference)


def test_two_adapters_merged_one_after_the_other():
    reference, fused = pair()
    for model in (reference, fused):
        torch.manual_seed(5)
        model.add_adapter("second", lora(r=2))
    before = _weights(fused)
    for model in (reference, fused):
        model.merge_adapter(["default"])
        model.merge_adapter(["second"])
    _assert_equal(_weights(fused), _weights(reference))
    fused.unmerge_adapter()
    _assert_equal(_weights(fused), before)


def test_lora_bias_is_merged_and_unmerged():
    reference, fused = pair("gpt2", lora_bias=True)
    before = _weights(fused)
    for model in (reference, fused):
        model.merge_adapter()
    _assert_equal(_weights(fused), _weights(reference))
    fused.unmerge_adapter()
    _assert_equal(_weights(fused), before)
    reference.unmerge_adapter()
    assert_parity(fused, reference, bar=1e-5)


@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
def test_a_copy_of_a_merged_model_unmerges_exactly(how):
    _, fused = pair()
    before = _weights(fused)
    fused.merge_adapter()
    if how == "deepcopy":
        twin = copy.deepcopy(fused)
    else:
        file = io.BytesIO()
        torch.save(fused, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    twin.unmerge_adapter()
    _assert_equal(_weights(twin), before)
    assert fused.base_model.model.model.layers[0].self_attn.q_proj.merged


def test_a_merged_model_changes_its_dtype():
    _, fused = pair()
    before = {name: value.bfloat16() for name, value in _weights(fused).items()}
    fused.merge_adapter()
    fused.to(torch.bfloat16)
    fused.unmerge_adapter()
    _assert_equal(_weights(fused), before)


def test_weights_loaded_into_a_merged_model_are_not_lost():
    reference, fused = pair()
    for model in (reference, fused):
        model.merge_adapter()
        state = {k: v + 1 if "base_layer" in k else v for k, v in model.state_dict().items()}
        model.load_state_dict(state)
        model.unmerge_adapter()
    _assert_equal(_weights(fused), _weights(reference))


def test_an_adapter_deleted_while_merged_stays_in_the_weight():
    reference, fused = pair()
    for model in (reference, fused):
        torch.manual_seed(5)
        model.add_adapter("second", lora(r=2))
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        layer.merge(adapter_names=["default"])
        layer.delete_adapter("default")  # which PeftModel.delete_adapter refuses
        layer.unmerge()
    _assert_equal(_weights(fused), _weights(reference))


def test_a_merge_that_fails_changes_nothing():
    _, fused = pair()
    layer = fused.base_model.model.model.layers[0].self_attn.q_proj
    weight, before = layer.base_layer.weight, layer.base_layer.weight.detach().clone()
    with torch.no_grad():
        layer.lora_A["default"].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        layer.merge(safe_merge=True)
    assert layer.base_layer.weight is weight
    assert torch.equal(weight, before)
    assert not layer.merged


def test_unfusing_a_merged_model_leaves_pefts_state():
    reference, fused = pair()
    originals = {name: id(p) for name, p in fused.named_parameters()}
    for model in (reference, fused):
        model.merge_adapter()
    fastlora.unfuse(fused)
    assert {name: id(p) for name, p in fused.named_parameters()} == originals
    _assert_equal(_weights(fused), _weights(reference))
    for model in (reference, fused):
        model.unmerge_adapter()
    _assert_equal(_weights(fused), _weights(reference))


def test_fusing_a_merged_model():
    reference, fused = pair()
    fastlora.unfuse(fused)
    for model in (reference, fused):
        model.merge_adapter()
    fastlora.fuse(fused)
    for model in (reference, fused):
        model.unmerge_adapter()
    _assert_equal(_weights(fused), _weights(reference))
    assert_parity(fused, reference)
