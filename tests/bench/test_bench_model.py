"""The model's row, on a Llama of two layers in place of the pretrained one."""

import pytest
import torch

from bench import bars, model, results, runner
from bench.measure import Timings
from bench.peers import PEERS, Built, Peer
from bench.registry import Case
from bench.settings import Settings


@pytest.fixture(autouse=True)
def _two_layers(monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=211,
        hidden_size=48,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        use_cache=False,
    )
    made = LlamaForCausalLM(config).requires_grad_(False).train()
    monkeypatch.setattr(model, "_pretrained", lambda dtype: made.to(dtype))
    monkeypatch.setattr(model, "B_STD", 0.1)


def run(dtype="float32", repeats=2):
    left_out = {"compile": "not in a test"}
    case = Case("model", (2, 9), 18, dtype, (0.0, 0.1), left_out, repeats)
    return runner.run(case, Settings())


def plant(monkeypatch, change):
    def build(net, targets, dropout):
        return change(PEERS["peft"].build(net, targets, dropout))

    monkeypatch.setitem(PEERS, "fastlora", Peer("planted", build))


def entry_of(outcome, peer, dropout):
    (found,) = [e for e in outcome.entries if e.peer == peer and e.dropout == dropout]
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peft_and_fastlora_are_checked_and_timed(dtype):
    outcome = run(dtype)
    assert outcome.wrong == []
    assert len(outcome.timings.seconds) == 5
    for entry in outcome.entries:
        assert entry.status == "ok", entry
        if entry.peer != "frozen":
            assert entry.check.rms <= entry.check.limit
    for dropout in (0.0, 0.1):
        assert "14 of 14 layers fused" in entry_of(outcome, "fastlora", dropout).note


def test_bytes_alone_take_no_time():
    outcome = run(repeats=0)
    assert outcome.timings == Timings({}, 1)
    frozen, peft, peft_dropped, ours, ours_dropped = (
        entry_of(outcome, peer, dropout).saved_bytes
        for peer, dropout in (
            ("frozen", 0.0),
            ("peft", 0.0),
            ("peft", 0.1),
            ("fastlora", 0.0),
            ("fastlora", 0.1),
        )
    )
    # PEFT saves a mask and a dropped copy of x for each layer; a fused one regenerates them.
    assert 0 < frozen < peft < peft_dropped
    # (On this few rows and without dropout, plain ops serve, which save what PEFT saves.)
    assert ours <= peft
    assert ours_dropped < peft_dropped
    rows = outcome.rows()
    assert rows[1]["peers"]["fastlora"]["saved_bytes"] == ours_dropped
    assert rows[0]["peers"]["frozen"]["saved_bytes"] == frozen


class OtherMaskBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * (torch.rand_like(x) >= 0.1) / 0.9

    @staticmethod
    def backward(ctx, grad):
        return grad * (torch.rand_like(grad) >= 0.1) / 0.9


class Replaced(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x) if self.training else x


def with_dropout(function):
    def change(built):
        for name, module in list(built.module.named_modules()):
            if name.endswith("lora_dropout") and isinstance(module["default"], torch.nn.Dropout):
                module["default"] = Replaced(function)
        return built

    return change


def one_scaling_off(built):
    for name, module in built.module.named_modules():
        if name.endswith("layers.1.self_attn.v_proj"):
            module.scaling["default"] *= 1 + 1e-3
    return built


def one_factor_frozen(built):
    for name, parameter in built.module.named_parameters():
        if "layers.1.mlp.up_proj.lora_A" in name:
            parameter.requires_grad_(False)
    return built


def detached(built):
    def call(**inputs):
        output = built.call(**inputs)
        output.loss = output.loss * 1.01
        return output

    return Built(call, built.module)


@pytest.mark.parametrize(
    ("change", "dropout", "message"),
    [
        (one_scaling_off, 0.0, "relative error"),
        (detached, 0.0, "loss: relative error"),
        (one_factor_frozen, 0.0, "up_proj.lora_A.default.weight: not computed"),
        (with_dropout(OtherMaskBackward.apply), 0.1, "dropout: the loss's slope"),
        (with_dropout(lambda x: x), 0.1, "dropout: two seeds give one loss"),
    ],
)
def test_a_wrong_model_is_refused_a_time(change, dropout, message, monkeypatch):
    plant(monkeypatch, change)
    outcome = run()
    entry = entry_of(outcome, "fastlora", dropout)
    assert entry.status == "wrong" and message in entry.reason, entry
    assert entry.timing is None
    assert entry_of(outcome, "peft", dropout).timing


def test_no_reference_no_time(monkeypatch):
    def build(net, targets, dropout):
        raise RuntimeError("no PEFT")

    fastlora = PEERS["fastlora"]
    monkeypatch.setitem(PEERS, "peft", Peer("planted", build))
    monkeypatch.setitem(PEERS, "fastlora", fastlora)
    outcome = run()
    assert entry_of(outcome, "peft", 0.0).status == "wrong"
    assert entry_of(outcome, "fastlora", 0.0).reason.startswith("no reference")
    assert set(outcome.timings.seconds) == {"0"}


def test_every_peer_runs_over_one_set_of_weights():
    case = Case("model", (2, 9), 18, "float32", (0.0,), {}, 1)
    peft, ours = (model.ModelWork(case, peer, 0.0) for peer in ("peft", "fastlora"))
    shared = {p.data_ptr() for p in peft.net.parameters() if not p.requires_grad}
    assert shared == {p.data_ptr() for p in ours.net.parameters() if not p.requires_grad}
    for (name, a), b in zip(peft.trained.items(), ours.trained.values(), strict=True):
        assert a.data_ptr() != b.data_ptr() and torch.equal(a, b), name


def test_the_bars_look_for_the_row_that_the_default_run_has():
    assert bars.STEP_BARS[0][0] == "float32"
    case = Case("model", (4, 128), 512, "float32", (0.0, 0.1))
    assert case.row_ids == ("model-4x128-float32-p0", "model-4x128-float32-p0.1")
    assert results.SCHEMA == 1
