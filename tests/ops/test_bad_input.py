"""Bad input is refused before anything is computed; the error names the argument."""

import pytest
import torch

from fastlora import backend, functional
from tests.helpers import projection


def arguments(**changes):
    weight, lora_A, lora_B, scaling, bias = projection(16, 12, 4, bias=True)
    values = {
        "x": torch.randn(6, 16),
        "weight": weight,
        "lora_A": lora_A,
        "lora_B": lora_B,
        "scaling": scaling,
        "bias": bias,
    }
    values.update(changes)
    return values


BAD = {
    "x-integer": ({"x": torch.ones(6, 16, dtype=torch.int64)}, TypeError, "x: got torch.int64"),
    "x-list": ({"x": [1.0]}, TypeError, "x: got list"),
    "x-complex": ({"x": torch.ones(6, 16, dtype=torch.complex64)}, TypeError, "x: got"),
    "x-scalar": ({"x": torch.tensor(1.0)}, ValueError, "x: got a 0-d"),
    "x-features": ({"x": torch.randn(6, 15)}, ValueError, r"weight: got shape \(12, 16\)"),
    "swapped": ({"weight": torch.randn(16, 12)}, ValueError, "in and out swapped"),
    "weight-3d": ({"weight": torch.randn(1, 12, 16)}, ValueError, "weight: .* 2 dimensions"),
    "weight-int8": ({"weight": torch.ones(12, 16, dtype=torch.int8)}, TypeError, "weight: got"),
    "weight-trained": (
        {"weight": torch.randn(12, 16, requires_grad=True)},
        ValueError,
        "weight: got one that requires grad",
    ),
    "A-shape": ({"lora_A": torch.randn(16, 4)}, ValueError, r"lora_A: got shape \(16, 4\)"),
    "A-none": ({"lora_A": None}, TypeError, "lora_A: got NoneType"),
    "rank-0": (
        {"lora_A": torch.randn(0, 16), "lora_B": torch.randn(12, 0)},
        ValueError,
        "lora_A: got rank 0",
    ),
    "B-shape": ({"lora_B": torch.randn(12, 5)}, ValueError, r"lora_B: got shape \(12, 5\)"),
    "scaling": ({"scaling": "2"}, TypeError, "scaling: got str"),
    "bias": ({"bias": torch.randn(11)}, ValueError, r"bias: got shape \(11,\)"),
    "device": ({"lora_A": torch.randn(4, 16, device="meta")}, ValueError, "lora_A: .* meta"),
    "dropout-1": ({"dropout_p": 1.0}, ValueError, "dropout_p: got 1.0"),
    "dropout-negative": ({"dropout_p": -0.1}, ValueError, "dropout_p: got -0.1"),
    "dropout-nan": ({"dropout_p": float("nan")}, ValueError, "dropout_p: got nan"),
    "dropout-text": ({"dropout_p": "0.1"}, TypeError, "dropout_p: got str"),
    "backend": ({"backend": "cuda"}, ValueError, "backend: got 'cuda'"),
    "backend-list": ({"backend": ["cpu"]}, TypeError, "backend: got list"),
    "x-sparse": ({"x": torch.eye(16).to_sparse()}, TypeError, "x: got layout torch.sparse_coo"),
    "A-sparse": ({"lora_A": torch.ones(4, 16).to_sparse()}, TypeError, "lora_A: got layout"),
    "bias-list": ({"bias": [0.0] * 12}, TypeError, "bias: got list"),
    "bias-true": ({"bias": True}, TypeError, "bias: got bool"),
    "bias-integer": ({"bias": torch.ones(12, dtype=torch.int64)}, TypeError, "bias: got torch.int"),
    "scaling-huge": ({"scaling": 10**400}, ValueError, "scaling: got 1000.* a float can hold"),
    "scaling-nan": ({"scaling": float("nan")}, ValueError, "scaling: got nan"),
    "generator": ({"generator": 42}, TypeError, "generator: got int"),
    "training": ({"training": "no"}, TypeError, "training: got str"),
}


@pytest.mark.parametrize("case", BAD)
def test_lora_linear(case):
    changes, error, message = BAD[case]
    with pytest.raises(error, match=message):
        functional.lora_linear(**arguments(**changes))


def test_backend_that_cannot_serve():
    values = arguments(x=torch.randn(6, 16, dtype=torch.float64), backend="triton")
    with pytest.raises(ValueError, match=r"backend: got 'triton', which cannot serve: .*float64"):
        functional.lora_linear(**values)


def test_environment_names_the_backend(monkeypatch):
    monkeypatch.setenv("FASTLORA_BACKEND", "nonsense")
    with pytest.raises(ValueError, match="backend: got 'nonsense'"):
        functional.lora_linear(**arguments())
    monkeypatch.setenv("FASTLORA_BACKEND", "torch")
    assert backend.choose("auto", torch.device("cpu"), torch.float32) == "torch"


def test_lora_projections():
    q, k = projection(16, 12, 4), projection(16, 8, 2)
    x = torch.randn(6, 16)
    weights, As, Bs, scalings, _ = zip(q, k, strict=True)
    with pytest.raises(ValueError, match="lora_As: got 1, takes 2"):
        functional.lora_projections(x, weights, As[:1], Bs, scalings)
    with pytest.raises(ValueError, match="weights: got none"):
        functional.lora_projections(x, [], [], [], [])
    with pytest.raises(ValueError, match=r"lora_B \(projection 1\): got shape"):
        functional.lora_projections(x, weights, As, (Bs[0], Bs[0]), scalings)


def test_lora_mlp():
    gate, up, down = projection(16, 24, 2), projection(16, 24, 2), projection(24, 16, 2)
    x = torch.randn(6, 16)
    with pytest.raises(ValueError, match="activation: got 'relu'"):
        functional.lora_mlp(x, gate, up, down, activation="relu")
    with pytest.raises(ValueError, match="gate: got 4 items"):
        functional.lora_mlp(x, gate[:4], up, down)
    with pytest.raises(ValueError, match=r"weight \(up\): got out_features 20, takes gate's"):
        functional.lora_mlp(x, gate, projection(16, 20, 2), down)
    with pytest.raises(ValueError, match=r"weight \(down\): got shape"):
        functional.lora_mlp(x, gate, up, projection(16, 24, 2))


def test_lora_embedding():
    weight, A, B = torch.randn(7, 4), torch.randn(2, 7), torch.randn(4, 2)
    ids = torch.tensor([1, 2])
    with pytest.raises(TypeError, match=r"input_ids: got torch\.float32"):
        functional.lora_embedding(ids.float(), weight, A, B, 1.0)
    with pytest.raises(ValueError, match=r"lora_A: got shape \(7, 2\)"):
        functional.lora_embedding(ids, weight, A.T, B, 1.0)
    with pytest.raises(ValueError, match="padding_idx: got 7"):
        functional.lora_embedding(ids, weight, A, B, 1.0, padding_idx=7)
    for wrong in ("a", 1.0, True):
        with pytest.raises(TypeError, match="padding_idx: got"):
            functional.lora_embedding(ids, weight, A, B, 1.0, padding_idx=wrong)
    with pytest.raises(TypeError, match="embed_scale: got str"):
        functional.lora_embedding(ids, weight, A, B, 1.0, embed_scale="x")
    with pytest.raises(ValueError, match=r"embed_scale: got shape \(7,\)"):
        functional.lora_embedding(ids, weight, A, B, 1.0, embed_scale=torch.ones(7))
    one = torch.full((1, 1, 1, 1), 2.0)
    scaled = functional.lora_embedding(ids, weight, A, B, 1.0, embed_scale=one)
    assert torch.equal(scaled, 2.0 * functional.lora_embedding(ids, weight, A, B, 1.0))
    for outside, bounds in (([0, 7], "from 0 to 7"), ([-1, 2], "from -1 to 2")):
        with pytest.raises(ValueError, match=f"input_ids: got ids {bounds}, takes 0 to 6"):
            functional.lora_embedding(torch.tensor(outside), weight, A, B, 1.0)


@pytest.mark.parametrize("name", ["weights", "lora_As", "lora_Bs", "scalings"])
@pytest.mark.parametrize("wrong", [None, 2.0, {0: 1.0}])
def test_lora_projections_take_sequences(name, wrong):
    weight, A, B, scaling, _ = projection(16, 12, 4)
    values = {"weights": [weight], "lora_As": [A], "lora_Bs": [B], "scalings": [scaling]}
    with pytest.raises(TypeError, match=f"{name}: got {type(wrong).__name__}, takes a list"):
        functional.lora_projections(torch.randn(2, 16), **(values | {name: wrong}))


def test_nothing_is_drawn_before_a_refusal():
    """A refused call leaves torch's generator where it was."""
    values = arguments(lora_B=torch.randn(3, 3), dropout_p=0.5)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="lora_B"):
        functional.lora_linear(**values)
    assert torch.equal(torch.get_rng_state(), state)
