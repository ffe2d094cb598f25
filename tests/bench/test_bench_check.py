"""No time for a wrong result: the gate, and wrong layers planted behind it."""

import math

import pytest
import torch

from bench import check, runner
from bench.check import Error, Wrong
from bench.layers import LayerWork
from bench.peers import PEERS, Built, Peer, Unavailable
from bench.registry import Case
from bench.settings import Settings

SETTINGS = Settings(sample_s=0.0, row_s=0.0)


def case(op="qkv", dims=(48, 24), m=37, dtype="float32", dropouts=(0.0, 0.1)):
    left_out = {"compile": "not in a test", "fastlora": "planted below"}
    return Case(op, dims, m, dtype, dropouts, left_out, repeats=7)


def with_peer(monkeypatch, build):
    """A row in which "fastlora" is whatever `build` makes of PEFT's layers."""

    def planted(net, targets, dropout):
        return build(PEERS["peft"].build(net, targets, dropout), targets)

    monkeypatch.setitem(PEERS, "fastlora", Peer("planted", planted))


def outcome_of(planted_case):
    left_out = {"compile": "not in a test"}
    return runner.run(
        Case(**(planted_case.__dict__ | {"left_out": left_out})),
        SETTINGS,
    )


def entry_of(outcome, peer="fastlora", dropout=0.0):
    (found,) = [e for e in outcome.entries if e.peer == peer and e.dropout == dropout]
    return found


@pytest.mark.parametrize(
    ("dtype", "m"), [("float32", 1), ("float32", 37), ("bfloat16", 37), ("float16", 1)]
)
@pytest.mark.parametrize(
    ("op", "dims"),
    [("linear", (80, 48)), ("qkv", (48, 24)), ("mlp", (48, 72)), ("embedding", (97, 48))],
)
def test_right_layers_are_timed(op, dims, m, dtype, monkeypatch):
    with_peer(monkeypatch, lambda built, targets: built)
    dropouts = (0.0,) if op == "embedding" else (0.0, 0.1)
    outcome = outcome_of(case(op, dims, m, dtype, dropouts))
    assert outcome.wrong == []
    assert len(outcome.timings.seconds) == 1 + 2 * len(dropouts)
    for i, entry in enumerate(outcome.entries):
        assert entry.status == "ok" and len(outcome.timings.seconds[str(i)]) == 7
        assert entry.check.rms <= entry.check.limit


class Scaled(torch.autograd.Function):
    """Right forward, gradient off by a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def wrong_output(built, targets):
    return Built(lambda x: tuple(y * (1 + 1e-4) for y in built.call(x)), built.module)


def wrong_gradient(built, targets):
    return Built(lambda x: built.call(Scaled.apply(x, 1 + 1e-4)), built.module)


def one_wrong_element(built, targets):
    def call(x):
        q, k, v = built.call(x)
        bump = torch.zeros_like(k)
        bump[-1, -1] = 1e-3
        return q, k + bump, v

    return Built(call, built.module)


def not_a_number(built, targets):
    return Built(lambda x: tuple(y * float("nan") for y in built.call(x)), built.module)


def no_gradient_of_b(built, targets):
    for name, parameter in built.module.named_parameters():
        if "v_proj.lora_B" in name:
            parameter.requires_grad_(False)
    return built


def raising(built, targets):
    def call(x):
        raise RuntimeError("out of luck")

    return Built(call, built.module)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (wrong_output, "y0: relative error"),
        (wrong_gradient, "dx: relative error"),
        (one_wrong_element, "y1: relative error"),
        (not_a_number, "y0: relative error inf"),
        (no_gradient_of_b, "dB of v_proj: not computed"),
        (raising, "RuntimeError: out of luck"),
    ],
)
def test_a_wrong_layer_is_refused_a_time(plant, message, monkeypatch):
    with_peer(monkeypatch, plant)
    outcome = outcome_of(case())
    entry = entry_of(outcome)
    assert entry.status == "wrong" and message in entry.reason
    assert entry.timing is None
    # The others keep theirs, and the row says what happened.
    assert entry_of(outcome, "peft").timing and len(outcome.timings.seconds) == 3
    assert any(message in line for line in outcome.wrong)
    row = outcome.rows()[0]["peers"]["fastlora"]
    assert row["status"] == "wrong" and row["timing"] is None and message in row["reason"]


def dropout_modules(built):
    return [m for m in built.module.modules() if isinstance(m, torch.nn.Dropout)]


def no_dropout(built, targets):
    for module in dropout_modules(built):
        module.p = 0.0
    return built


def more_dropout(built, targets):
    for module in dropout_modules(built):
        module.p = 0.2
    return built


def unscaled_dropout(built, targets):
    for module in dropout_modules(built):
        module.forward = lambda x: x * (torch.rand_like(x) >= 0.1)
    return built


def one_mask_for_all(built, targets):
    for module in dropout_modules(built):

        def forward(x):
            generator = torch.Generator().manual_seed(torch.initial_seed())
            return x * (torch.rand(x.shape, generator=generator) >= 0.1) / 0.9

        module.forward = forward
    return built


class OtherMaskBackward(torch.autograd.Function):
    """Drops by one mask forward and by another one backward."""

    @staticmethod
    def forward(ctx, x):
        return x * (torch.rand_like(x) >= 0.1) / 0.9

    @staticmethod
    def backward(ctx, grad):
        return grad * (torch.rand_like(grad) >= 0.1) / 0.9


def other_mask_backward(built, targets):
    for module in dropout_modules(built):
        module.forward = OtherMaskBackward.apply
    return built


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (no_dropout, "dropout of q_proj: "),
        (more_dropout, "dropout of q_proj: "),
        (unscaled_dropout, "dropout of q_proj: "),
        (one_mask_for_all, "dropout of q_proj and k_proj: one mask"),
        (other_mask_backward, "dx: relative error"),
    ],
)
@pytest.mark.parametrize("op", ["qkv", "mlp"])
def test_wrong_dropout_is_refused_a_time(op, plant, message, monkeypatch):
    with_peer(monkeypatch, plant)
    dims = (48, 24) if op == "qkv" else (48, 72)
    outcome = outcome_of(case(op, dims, dropouts=(0.0, 0.1)))
    entry = entry_of(outcome, dropout=0.1)
    assert entry.status == "wrong" and entry.timing is None
    assert (
        message.replace("q_proj", "gate_proj" if op == "mlp" else "q_proj").replace(
            "k_proj", "up_proj" if op == "mlp" else "k_proj"
        )
        in entry.reason
    )
    assert entry_of(outcome, dropout=0.0).status == "ok"  # nothing dropped there


def test_a_mask_is_read_off_exactly():
    """PEFT's dropout is nn.Dropout under torch's generator: its mask can be drawn again."""
    work = LayerWork(case("linear", (300, 48), 11), "peft", 0.1)
    before = [p.detach().clone() for p in work.net.parameters()]
    (found,) = work.dropped().values()
    torch.manual_seed(1236)
    drawn = torch.nn.functional.dropout(torch.ones(11, 300), 0.1)
    assert torch.equal(found, (drawn > 0).double())
    # Nothing that was lent stays changed.
    assert all(torch.equal(a, b) for a, b in zip(before, work.net.parameters(), strict=True))


def test_a_peer_that_cannot_run_keeps_its_place_with_the_reason(monkeypatch):
    def build(net, targets, dropout):
        raise Unavailable("no such device")

    monkeypatch.setitem(PEERS, "fastlora", Peer("planted", build))
    outcome = outcome_of(case())
    assert entry_of(outcome).status == "unavailable"
    assert outcome.wrong == []
    assert outcome.rows()[0]["peers"]["fastlora"]["reason"] == "no such device"
    assert outcome.rows()[0]["peers"]["compile"]["status"] == "not run"


def test_half_types_are_held_to_twice_the_unfused_error():
    unfused = {"y": Error(1e-3, 2e-3)}
    assert not check.judge({"y": Error(1.9e-3, 7e-3)}, torch.bfloat16, unfused).wrong
    assert check.judge({"y": Error(2.1e-3, 3e-3)}, torch.bfloat16, unfused).wrong
    assert check.judge({"y": Error(1e-3, 9e-3)}, torch.bfloat16, unfused).wrong
    # An unfused path that is all but exact asks for no more than fp32 does.
    assert not check.judge({"y": Error(9e-6, 9e-6)}, torch.bfloat16, {"y": Error(0, 0)}).wrong
    assert check.judge({"y": Error(2e-5, 2e-5)}, torch.float32, unfused).wrong


def test_errors():
    reference = torch.tensor([3.0, -4.0], dtype=torch.float64)
    assert check.error(reference.float(), reference) == Error(0.0, 0.0)
    assert check.error(torch.tensor([3.0, -3.0]), reference).peak == 0.25
    assert check.error(torch.tensor([3.0, math.inf]), reference).rms == math.inf
    zero = torch.zeros(2, dtype=torch.float64)
    assert check.error(torch.zeros(2), zero) == Error(0.0, 0.0)
    assert check.error(torch.tensor([0.0, 1e-30]), zero).rms == math.inf
    with pytest.raises(Wrong, match=r"y: got shape \(3,\), takes \(2,\)"):
        check.errors({"y": torch.zeros(3)}, {"y": reference})
    assert check.judge({"y": Error(math.nan, 0.0)}, torch.float32).wrong
