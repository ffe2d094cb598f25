"""Everything PEFT does to adapters, before and after ``fuse`` (L3, L12)."""

import copy
import logging

import pytest
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict

import fastlora

from . import models
from .models import assert_parity, kinds, lora, pair, peft_model

ALL = {"projections": 6, "linear": 2, "mlp": 6}


def both(models_, act):
    for model in models_:
        torch.manual_seed(3)
        act(model)


def test_add_set_and_delete_adapter_after_fuse():
    reference, fused = pair()
    two = (reference, fused)
    both(two, lambda m: m.add_adapter("second", lora(r=3)))
    assert_parity(fused, reference)
    both(two, lambda m: m.set_adapter("second"))
    assert kinds(fused) == ALL
    assert_parity(fused, reference)
    both(two, lambda m: m.delete_adapter("default"))
    assert_parity(fused, reference)


def test_an_adapter_of_other_modules_waits_for_the_next_fuse():
    reference, fused = pair(target_modules=["q_proj"])
    two = (reference, fused)
    both(two, lambda m: m.add_adapter("wide", lora()))
    both(two, lambda m: m.set_adapter("wide"))
    assert kinds(fused) == {"linear": 2, "peft": 12}
    assert "since PEFT made" in models.row(fused, "k_proj").reason
    assert_parity(fused, reference)
    fastlora.fuse(fused)
    assert kinds(fused) == ALL
    assert_parity(fused, reference)


def test_disable_adapter():
    reference, fused = pair()
    with fused.disable_adapter(), reference.disable_adapter():
        assert kinds(fused) == {"peft": 14}
        assert models.row(fused, "q_proj").reason == "the adapters are disabled"
        torch.testing.assert_close(models.logits(fused), models.logits(reference), rtol=0, atol=0)
    assert_parity(fused, reference)


def test_several_active_adapters(caplog):
    reference, fused = pair()
    two = (reference, fused)
    both(two, lambda m: m.add_adapter("second", lora(r=3)))
    both(two, lambda m: m.base_model.set_adapter(["default", "second"]))
    assert models.row(fused, "q_proj").reason == "several adapters are active at once"
    with caplog.at_level(logging.INFO, logger="fastlora"):
        assert_parity(fused, reference)
        assert_parity(fused, reference)
    assert [r.message for r in caplog.records] == [
        "fastlora: a layer runs PEFT's own forward: several adapters are active at once"
    ]
    both(two, lambda m: m.base_model.set_adapter(["second"]))
    assert kinds(fused) == ALL
    assert_parity(fused, reference)


def test_two_active_adapters_of_different_layers_are_fused():
    reference, fused = pair(target_modules=["q_proj"])
    two = (reference, fused)
    both(two, lambda m: m.add_adapter("second", lora(target_modules=["k_proj"])))
    both(two, lambda m: m.base_model.set_adapter(["default", "second"]))
    fastlora.fuse(fused)
    assert kinds(fused) == {"projections": 4}
    assert_parity(fused, reference)


def test_adapter_names_mixed_in_one_batch():
    reference, fused = pair()
    two = (reference, fused)
    both(two, lambda m: m.add_adapter("second", lora(r=3)))
    both(two, lambda m: m.eval())
    names = ["default", "__base__", "second"]
    ids = models.ids(3)
    want = models.logits(reference, ids, adapter_names=names)
    torch.testing.assert_close(models.logits(fused, ids, adapter_names=names), want)
    assert_parity(fused, reference)


def test_dora_runs_pefts_forward(caplog):
    reference = peft_model(use_dora=True)
    with caplog.at_level(logging.WARNING, logger="fastlora"):
        fused = fastlora.fuse(copy.deepcopy(reference))
        assert kinds(fused) == {"peft": 14}
        assert_parity(fused, reference)
    assert [r.message for r in caplog.records if "Dora" in r.message]
    assert "is a variant of LoRA (DoraLinearVariant)" in models.row(fused, "q_proj").reason


def test_dora_added_later():
    reference, fused = pair()
    two = (reference, fused)
    both(two, lambda m: m.add_adapter("dora", lora(use_dora=True)))
    assert kinds(fused) == ALL
    assert_parity(fused, reference)
    both(two, lambda m: m.set_adapter("dora"))
    assert kinds(fused) == {"peft": 14}
    assert_parity(fused, reference)


@pytest.mark.parametrize("combination", ["linear", "cat", "svd"])
def test_add_weighted_adapter(combination):
    reference, fused = pair()
    two = (reference, fused)
    both(two, lambda m: m.add_adapter("second", lora()))
    names = ["default", "second"]
    both(
        two,
        lambda m: m.add_weighted_adapter(names, [0.5, 2.0], "mix", combination_type=combination),
    )
    both(two, lambda m: m.set_adapter("mix"))
    assert kinds(fused) == ALL
    # PEFT makes svd's factors with torch.linalg.svd: the same bits on both sides
    assert_parity(fused, reference)


def test_scale_changes_take_effect():
    from peft.helpers import rescale_adapter_scale

    reference, fused = pair()
    with rescale_adapter_scale(reference, 0.3), rescale_adapter_scale(fused, 0.3):
        assert_parity(fused, reference)
    for model in (reference, fused):
        model.base_model.model.model.layers[0].self_attn.q_proj.set_scale("default", 5.0)
    assert_parity(fused, reference)


def test_save_and_load_round_trips(tmp_path):
    reference, fused = pair(modules_to_save=["lm_head"])
    fused.save_pretrained(tmp_path / "fused")
    reference.save_pretrained(tmp_path / "reference")
    names = sorted(path.name for path in (tmp_path / "fused").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "reference").iterdir())
    file = "adapter_model.safetensors"
    assert (tmp_path / "fused" / file).read_bytes() == (tmp_path / "reference" / file).read_bytes()
    torch.manual_seed(0)
    loaded = PeftModel.from_pretrained(
        models.MODELS["llama"][0](), tmp_path / "fused", is_trainable=True
    )
    assert_parity(fastlora.fuse(loaded), reference)


def test_load_adapter_into_a_fused_model(tmp_path):
    reference, fused = pair()
    torch.manual_seed(9)
    other = copy.deepcopy(reference)
    for name, parameter in other.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    other.save_pretrained(tmp_path)
    for model in (reference, fused):
        model.load_adapter(str(tmp_path), "loaded", is_trainable=True)
        model.set_adapter("loaded")
    assert kinds(fused) == ALL
    assert_parity(fused, reference)
    state = get_peft_model_state_dict(fused, adapter_name="loaded")
    for name, value in get_peft_model_state_dict(other).items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)


def test_get_peft_model_on_a_fused_model():
    reference, fused = pair()
    again = [get_peft_model(m.base_model.model, lora(), "again") for m in (reference, fused)]
    fastlora.fuse(again[1])
    for model in again:
        model.set_adapter("again")
    with torch.no_grad():
        for (_, p), (_, q) in zip(
            again[0].named_parameters(), again[1].named_parameters(), strict=True
        ):
            q.copy_(p)
    assert kinds(again[1]) == ALL
    assert_parity(again[1], again[0])


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3"])
def test_generate(kind):
    reference, fused = pair(kind)
    both((reference, fused), lambda m: m.eval())
    outputs = [
        m.generate(
            input_ids=models.ids(), max_new_tokens=6, min_new_tokens=6, do_sample=False, num_beams=2
        )
        for m in (reference, fused)
    ]
    assert torch.equal(*outputs)


def test_a_trained_base_weight_runs_pefts_forward():
    reference, fused = pair()
    for model in (reference, fused):
        model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight.requires_grad_()
    assert "base weight is being trained" in models.row(fused, "0.self_attn.q_proj").reason
    assert_parity(fused, reference)
