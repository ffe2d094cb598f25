"""The Python in the README and the manual runs as it stands, one text in one namespace."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def snippets(text: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text.read_text(encoding="utf-8"), re.M | re.S)


def tiny_llama() -> Any:
    """What the texts call `base`: a Transformers model, small enough to make on the spot."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, **heads))


@pytest.mark.parametrize(
    "text",
    [pytest.param(text, id=str(text.relative_to(ROOT))) for text in TEXTS if snippets(text)],
)
def test_snippets_run(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {"base": tiny_llama()}
    for number, snippet in enumerate(snippets(text)):
        exec(compile(snippet, f"{text.name}, snippet {number + 1}", "exec"), namespace)
    if text.name == "README.md":
        printed = capsys.readouterr().out
        assert "q_proj" in printed, "explain() lists the layers"


def test_figures_come_from_the_report_alone() -> None:
    """Outside the generated block the README claims no speed-up and no time."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before, start, rest = text.partition("<!-- bench:start -->")
    block, end, after = rest.partition("<!-- bench:end -->")
    assert start and end and block.strip()
    claim = r"\d+(?:\.\d+)?\s?(?:×|x faster|% faster|ms\b|µs\b|tokens/s)"
    assert not re.findall(claim, before + after)
