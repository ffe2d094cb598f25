"""Tiny models made from configs, PEFT adapters on them, and the comparison with PEFT itself."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import fastlora
from fastlora.ops import dropout

from ..helpers import relative_error

VOCABULARY = 64
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
}


def _llama(**kwargs: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**(_SIZES | kwargs)))


def _gpt2(**kwargs: Any) -> nn.Module:
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**(sizes | quiet | kwargs)))


MODELS: dict[str, tuple[Callable[..., nn.Module], list[str]]] = {
    "llama": (_llama, ALL_LINEAR),
    "gpt2": (_gpt2, ["c_attn", "c_proj", "c_fc"]),
    "gemma": (
        lambda **kw: GemmaForCausalLM(GemmaConfig(**(_SIZES | {"head_dim": 8} | kw))),
        ALL_LINEAR,
    ),
    "gemma3": (
        lambda **kw: Gemma3ForCausalLM(Gemma3TextConfig(**(_SIZES | {"head_dim": 8} | kw))),
        [*ALL_LINEAR, "embed_tokens"],
    ),
    "qwen2": (lambda **kw: Qwen2ForCausalLM(Qwen2Config(**(_SIZES | kw))), ALL_LINEAR),
    "mistral": (lambda **kw: MistralForCausalLM(MistralConfig(**(_SIZES | kw))), ALL_LINEAR),
}


def lora(**kwargs: Any) -> LoraConfig:
    """A config whose B is random too, so that every gradient is there."""
    defaults = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "target_modules": ALL_LINEAR}
    return LoraConfig(**(defaults | kwargs))


def peft_model(kind: str = "llama", base: dict[str, Any] | None = None, **kwargs: Any) -> PeftModel:
    """A tiny model of ``kind`` with one adapter, as PEFT makes it."""
    torch.manual_seed(0)
    make, targets = MODELS[kind]
    return get_peft_model(make(**(base or {})), lora(**({"target_modules": targets} | kwargs)))


def pair(
    kind: str = "llama", base: dict[str, Any] | None = None, fuse: Any = None, **kwargs: Any
) -> tuple[PeftModel, PeftModel]:
    """PEFT's model, and a copy of it that is fused (with the arguments ``fuse``)."""
    reference = peft_model(kind, base, **kwargs)
    return reference, fastlora.fuse(copy.deepcopy(reference), **(fuse or {}))


def ids(rows: int = 2, length: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, VOCABULARY, (rows, length), generator=generator)


def logits(model: nn.Module, input_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
    input_ids = ids() if input_ids is None else input_ids
    return model(input_ids=input_ids, use_cache=False, **kwargs).logits


def step(model: nn.Module, input_ids: Tensor | None = None) -> dict[str, Tensor]:
    """Logits and every gradient of one training step, by name."""
    model.zero_grad(set_to_none=True)
    out = logits(model, input_ids)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    (out * weight).sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.detach(), **grads}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], bar: float = 1e-5) -> None:
    """Same names, each tensor within ``bar`` relative: fp32 sums in another order."""
    assert got.keys() == want.keys()
    for name, exact in want.items():
        error = relative_error(got[name], exact)
        assert error <= bar, f"{name}: relative error {error:.3g} is beyond {bar:.3g}"
        assert got[name].dtype == exact.dtype


def assert_parity(fused: nn.Module, reference: nn.Module, bar: float = 1e-5) -> None:
    """Forward and every gradient of the fused model against PEFT's.

    Two fp32 results of one deep model may differ by more than ``bar`` where the model amplifies
    rounding; then the fused one must be within twice PEFT's own error against fp64.
    """
    want, got = step(reference), step(fused)
    assert len(want) > 1, "nothing is trained"
    assert got.keys() == want.keys()
    exact: dict[str, Tensor] = {}
    for name in want:
        assert got[name].dtype == want[name].dtype
        if relative_error(got[name], want[name]) > bar:
            exact = exact or step(copy.deepcopy(reference).double())
            unfused = relative_error(want[name], exact[name])
            error = relative_error(got[name], exact[name])
            assert error <= 2.0 * unfused, f"{name}: {error:.3g} beyond twice PEFT's {unfused:.3g}"


def assert_as_accurate(
    got: dict[str, Tensor], unfused: dict[str, Tensor], exact: dict[str, Tensor]
) -> None:
    """Half types: error against fp64 at most twice PEFT's, for the logits and each kind of factor.

    All layers of a kind together: at the end of a model a single tensor's error is a chance.
    """
    assert got.keys() == unfused.keys() == exact.keys()
    pooled: dict[str, list[dict[str, Tensor]]] = {}
    for name in exact:
        assert got[name].dtype == unfused[name].dtype
        parts = pooled.setdefault(name[name.find("lora_") :], [{}, {}, {}])
        for part, source in zip(parts, (got, unfused, exact), strict=True):
            part[name] = source[name].double().flatten()
    for kind, parts in pooled.items():
        mine, theirs, truth = (torch.cat(list(part.values())) for part in parts)
        bar = 2.0 * relative_error(theirs, truth)
        assert relative_error(mine, truth) <= bar, f"{kind}: beyond {bar:.3g}"


def kinds(model: nn.Module) -> dict[str, int]:
    """How many layers of each kind are fused; "peft" for those that are not."""
    counts: dict[str, int] = {}
    for row in fastlora.explain(model).rows:
        key = row.kind if row.fused else "peft"
        counts[key] = counts.get(key, 0) + 1
    return counts


def row(model: nn.Module, suffix: str) -> Any:
    """The first row of ``explain`` whose name ends so."""
    return next(r for r in fastlora.explain(model).rows if r.name.endswith(suffix))


class Replay(nn.Module):
    """PEFT's dropout with masks drawn from given seeds, in the order of the calls."""

    def __init__(self, p: float, seeds: list[Tensor]) -> None:
        super().__init__()
        self.p, self.seeds = p, seeds

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = x.numel() // x.shape[-1], x.shape[-1]
        mask = dropout.keep_mask(self.seeds.pop(0), rows, columns, self.p)
        return x * mask.view(x.shape) / (1.0 - self.p)


@contextmanager
def recorded_seeds(monkeypatch: Any) -> Iterator[list[Tensor]]:
    """All dropout seeds that fused layers draw meanwhile, one a projection, in order."""
    seeds: list[Tensor] = []
    draw = dropout.draw_seeds

    def recording(*args: Any, **kwargs: Any) -> Tensor:
        drawn = draw(*args, **kwargs)
        seeds.extend(drawn.unbind())
        return drawn

    with monkeypatch.context() as patch:
        patch.setattr(dropout, "draw_seeds", recording)
        yield seeds


def replay(reference: nn.Module, seeds: list[Tensor]) -> None:
    """Let the dropouts of PEFT's model replay ``seeds``."""
    for module in reference.modules():
        for name, child in getattr(module, "lora_dropout", {}).items():
            module.lora_dropout[name] = Replay(child.p, seeds)
