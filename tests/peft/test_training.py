"""Training around the layers: checkpointing, accumulation, compile, scaler (L5, L13)."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fastlora

from . import models
from .models import assert_same, kinds, pair, peft_model

ONE_LAYER = {"num_hidden_layers": 1}  # tracing is what takes the time


def _seeded(model):
    torch.manual_seed(11)
    return models.step(model)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_activation_checkpointing_replays_the_masks(kind, dropout, reentrant):
    _, fused = pair(kind, lora_dropout=dropout)
    fused.train()
    want = _seeded(fused)
    twin = copy.deepcopy(fused)
    twin.enable_input_require_grads()
    twin.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(_seeded(twin), want, bar=1e-6)
    assert kinds(twin) == kinds(fused)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointing_a_part_of_a_group(reentrant):
    """Recomputation stops early, in the middle of attention."""
    _, fused = pair(lora_dropout=0.3, target_modules=["q_proj", "k_proj", "v_proj"])
    attention = fused.base_model.model.model.layers[0].self_attn.train()
    torch.manual_seed(1)
    x = torch.randn(2, 5, 32)
    rotary = fused.base_model.model.model.rotary_emb(x, torch.arange(5)[None])
    results = []
    for wrapped in (False, True):
        attention.zero_grad()
        leaf = x.clone().requires_grad_()
        torch.manual_seed(2)
        if wrapped:
            out = checkpoint(
                lambda h: attention(h, position_embeddings=rotary)[0],
                leaf,
                use_reentrant=reentrant,
            )
        else:
            out = attention(leaf, position_embeddings=rotary)[0]
        out.square().sum().backward()
        grads = [p.grad for p in attention.parameters() if p.grad is not None]
        results.append([leaf.grad, *[g.clone() for g in grads]])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert attention.q_proj._fastlora.scope is None


def test_gradient_accumulation_adds_up():
    reference, fused = pair()
    batches = [models.ids(1, 5), models.ids(2, 3)]
    sums = []
    for model in (fused, reference):
        model.zero_grad()
        for batch in batches:
            models.logits(model, batch).square().mean().backward()
        sums.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert_same(*sums)


def test_two_runs_give_the_same_bits():
    _, fused = pair(lora_dropout=0.3)
    fused.train()
    first, second = _seeded(fused), _seeded(fused)
    for name in first:
        assert torch.equal(first[name], second[name])


def test_training_with_an_optimizer_follows_peft():
    reference, fused = pair()
    for model in (reference, fused):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for i in range(4):
            optimizer.zero_grad()
            batch = models.ids(2, 4 + i)
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
    torch.testing.assert_close(models.logits(fused), models.logits(reference), rtol=1e-4, atol=1e-4)


def test_the_base_is_unchanged_at_the_start_and_never_trained():
    reference = peft_model(init_lora_weights=True)
    base = models.MODELS["llama"][0]
    torch.manual_seed(0)
    plain = base()
    fused = fastlora.fuse(reference)
    torch.testing.assert_close(models.logits(fused), models.logits(plain), rtol=1e-5, atol=1e-5)
    assert all("lora_" in name for name in models.step(fused) if name != "logits")


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_compile_fullgraph(dropout):
    """One graph, dropout and its replay from the generator included."""
    torch._dynamo.reset()
    # Projections of one x are computed one by one under compile: so too in what it is compared with.
    _, fused = pair(base=ONE_LAYER, lora_dropout=dropout, fuse={"groups": ("mlp",)})
    fused.train()
    compiled = torch.compile(copy.deepcopy(fused), backend="aot_eager", fullgraph=True)
    got = {name.removeprefix("_orig_mod."): value for name, value in _seeded(compiled).items()}
    assert_same(got, _seeded(fused))
    torch._dynamo.reset()


def test_fusing_a_compiled_model_works_on_the_model_inside():
    torch._dynamo.reset()
    reference = peft_model(base=ONE_LAYER)
    model = copy.deepcopy(reference)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert fastlora.fuse(compiled) is compiled
    assert kinds(compiled) == {"projections": 3, "linear": 1, "mlp": 3}
    assert fastlora.explain(compiled).rows[0].name.startswith("_orig_mod.base_model")
    want, got = models.step(reference), models.step(compiled)
    assert_same({name.removeprefix("_orig_mod."): value for name, value in got.items()}, want)
    with compiled._orig_mod.disable_adapter(), reference.disable_adapter():
        torch.testing.assert_close(models.logits(compiled), models.logits(reference))


def test_compile_with_inductor():
    torch._dynamo.reset()
    _, fused = pair(lora_dropout=0.3, layers_to_transform=[0])
    fused.eval()
    layer = fused.base_model.model.model.layers[0].mlp
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(2, 3, 32)
    torch.testing.assert_close(compiled(x), layer(x))


def test_a_loss_scaler_sees_an_overflow():
    """Adapters are fp32 masters: GradScaler unscales them and skips the step (P7)."""
    _, fused = pair()
    parameters = [p for p in fused.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=float(2**40))
    before = [p.detach().clone() for p in parameters]
    with torch.autocast("cpu", torch.float16):
        loss = models.logits(fused).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))
    assert scaler.get_scale() < 2**40
