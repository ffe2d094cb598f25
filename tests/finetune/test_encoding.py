"""Tokens and labels, to the token: byte-level ids make every row readable again."""

import json

import pytest
import torch

from fastlora.finetune.batches import Collator, LengthBuckets, padding_share
from fastlora.finetune.encoding import IGNORED, Prompting, encode_rows
from fastlora.finetune.rows import Cleaning, parse_row
from tests.finetune import tiny


@pytest.fixture(scope="module")
def plain():
    return tiny.tokenizer()


@pytest.fixture(scope="module")
def chat():
    return tiny.tokenizer(chat=True)


def encode(tokenizer, *records, template="auto", max_length=200):
    rows = [parse_row(json.dumps(r), f"x.jsonl:{i}") for i, r in enumerate(records, start=1)]
    cleaning = Cleaning(read=len(rows), kept=len(rows))
    return encode_rows(rows, Prompting.choose(tokenizer, template), max_length, cleaning), cleaning


def read(tokenizer, item):
    """The whole text, and the text that carries a loss."""
    trained = [i for i in item["labels"] if i != IGNORED]
    assert all(
        label in (IGNORED, i) for i, label in zip(item["input_ids"], item["labels"], strict=True)
    )
    return tokenizer.decode(item["input_ids"]), tokenizer.decode(trained)


def marked(tokenizer, item):
    """The row's text with «» about each stretch of tokens that carry a loss."""
    text, inside = "", False
    for token, label in zip(item["input_ids"], item["labels"], strict=True):
        assert label in (IGNORED, token)
        if (label != IGNORED) != inside:
            text += "»" if inside else "«"
            inside = not inside
        text += tokenizer.decode([token])
    return text + ("»" if inside else "")


def turns(*contents):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]}


def test_plain_form(plain):
    encoded, _ = encode(plain, {"input": "你好", "output": "Hello"})
    assert read(plain, encoded[0]) == ("你好\nHello<|end|>", "Hello<|end|>")


def test_a_form_of_ones_own(plain):
    encoded, _ = encode(plain, {"input": "a", "output": "b"}, template="Q: {input} A: ")
    assert read(plain, encoded[0]) == ("Q: a A: b<|end|>", "b<|end|>")


def test_braces_in_the_data_are_data(plain):
    encoded, _ = encode(plain, {"input": "{output} {0}", "output": "{input}"}, template="plain")
    assert read(plain, encoded[0]) == ("{output} {0}\n{input}<|end|>", "{input}<|end|>")


def test_chat_template_with_the_end_of_turn_trained_and_the_line_break_after_it_not(chat):
    encoded, _ = encode(chat, {"input": "a b", "output": "c d"})
    whole, trained = read(chat, encoded[0])
    assert whole == "<|start|>user\na b<|end|>\n<|start|>assistant\nc d<|end|>"
    assert trained == "c d<|end|>"


def test_every_assistant_turn_is_trained_and_nothing_else(chat):
    encoded, _ = encode(chat, turns("q1", "a1", "q2", "a2"))
    whole, trained = read(chat, encoded[0])
    assert whole == (
        "<|start|>user\nq1<|end|>\n<|start|>assistant\na1<|end|>\n"
        "<|start|>user\nq2<|end|>\n<|start|>assistant\na2<|end|>"
    )
    assert trained == "a1<|end|>a2<|end|>"


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"input": "a a", "output": "a"}, "a a\n«a<|end|>»"),
        (turns("a", "a", "a", "a"), "a\n«a»\na\n«a<|end|>»"),
    ],
    ids=["pair", "turns"],
)
def test_labels_to_the_token_in_the_plain_form(plain, record, expected):
    """Prompt and answer of the same text: only places tell them apart."""
    assert marked(plain, encode(plain, record)[0][0]) == expected


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"input": "a", "output": "a"}, ["a", "a"]),
        (turns("a", "a", "a", "a"), ["a", "a", "a", "a"]),
    ],
    ids=["pair", "turns"],
)
def test_labels_to_the_token_in_the_chat_template(chat, record, expected):
    parts = []
    for prompt, answer in zip(expected[::2], expected[1::2], strict=True):
        parts.append(f"<|start|>user\n{prompt}<|end|>\n<|start|>assistant\n«{answer}<|end|>»")
    assert marked(chat, encode(chat, record)[0][0]) == "\n".join(parts)


def test_system_message_is_prompt(chat):
    record = turns("q", "a")
    record["messages"].insert(0, {"role": "system", "content": "be brief"})
    whole, trained = read(chat, encode(chat, record)[0][0])
    assert whole.startswith("<|start|>system\nbe brief<|end|>\n")
    assert trained == "a<|end|>"


def test_messages_without_a_chat_template(plain):
    encoded, _ = encode(plain, turns("q1", "a1", "q2", "a2"))
    assert read(plain, encoded[0]) == ("q1\na1\nq2\na2<|end|>", "a1a2<|end|>")


def test_the_prompt_is_what_generation_sees(chat, plain):
    for tokenizer in (chat, plain):
        encoded, _ = encode(tokenizer, {"input": "a b", "output": "c"})
        prompt = Prompting.choose(tokenizer, "auto").prompt_ids("a b")
        item = encoded[0]
        assert item["input_ids"][: len(prompt)] == prompt
        assert item["labels"][: len(prompt)] == [IGNORED] * len(prompt)
        assert IGNORED not in item["labels"][len(prompt) :]


def test_a_token_across_the_border_is_split_there():
    """A vocabulary that joins the prompt's last byte with the output's first: the prompt's ids stay generation's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate([*alphabet, "=b"])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[("=", "b")]))
    core.decoder = decoders.ByteLevel()
    joining = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    assert len(joining("a=b")["input_ids"]) == 2
    encoded, _ = encode(joining, {"input": "a", "output": "bc"}, template="{input}=")
    assert joining.convert_ids_to_tokens(encoded[0]["input_ids"]) == ["a", "=", "b", "c", "<|end|>"]
    assert encoded[0]["labels"][:2] == [IGNORED] * 2


def test_bos_goes_in_front_where_the_tokenizer_puts_one():
    from tokenizers import processors

    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|start|>"})
    index = tokenizer.convert_tokens_to_ids("<|start|>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", index)]
    )
    encoded, _ = encode(tokenizer, {"input": "a", "output": "b"})
    assert read(tokenizer, encoded[0]) == ("<|start|>a\nb<|end|>", "b<|end|>")


def test_eos_is_not_doubled(plain):
    encoded, _ = encode(plain, {"input": "a", "output": "b<|end|>"})
    assert read(plain, encoded[0]) == ("a\nb<|end|>", "b<|end|>")


def test_a_template_that_rewrites_history_is_refused(chat):
    tokenizer = tiny.tokenizer(chat=True)
    tokenizer.chat_template = "{{ messages | length }}" + tiny.CHAT_TEMPLATE
    with pytest.raises(ValueError, match=r"x.jsonl:1: .*rewrites earlier text at turn 2"):
        encode(tokenizer, turns("q", "a"))


def test_a_template_that_raises_is_refused_with_the_line():
    tokenizer = tiny.tokenizer(chat=True)
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ValueError, match=r"x.jsonl:1: .*refuses it \(no system role\)"):
        encode(tokenizer, turns("q", "a"))


def test_chat_without_a_template_is_refused(plain):
    with pytest.raises(ValueError, match="prompt_template: got 'chat'"):
        Prompting.choose(plain, "chat")


def test_long_rows_are_left_out_and_counted(plain):
    records = [{"input": "a" * n, "output": "b"} for n in (1, 50, 2)]
    encoded, cleaning = encode(plain, *records, max_length=10)
    assert encoded.lengths == [4, 5]
    assert (cleaning.kept, cleaning.left_out["too_long"]) == (2, 1)
    assert cleaning.where["too_long"] == ["x.jsonl:2"]
    with pytest.raises(ValueError, match=r"max_length: got 3, and every row of data is longer"):
        encode(plain, *records, max_length=3)


def test_encoded_rows_are_counted_and_fingerprinted(plain):
    record = {"input": "ab", "output": "cd"}
    encoded, _ = encode(plain, record, record)
    assert (len(encoded), encoded.trained_tokens, len(list(encoded))) == (2, 6, 2)
    other, _ = encode(plain, record, {"input": "abc", "output": "d"})
    assert encoded.fingerprint() == encode(plain, record, record)[0].fingerprint()
    assert encoded.fingerprint() != other.fingerprint()  # same ids, another border


def test_collator_pads_on_the_right():
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    batch = Collator(pad_id=9, multiple_of=4)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 9], [8, 9, 9, 9]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100], [8, -100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert {t.dtype for t in batch.values()} == {torch.int64}


@pytest.mark.parametrize("count", [1, 7, 8, 103, 1000])
def test_buckets_hold_every_row_once_in_an_order_of_seed_and_epoch(count):
    lengths = torch.randint(1, 100, (count,)).tolist()
    sampler = LengthBuckets(lengths, batch_size=8, seed=3)
    first = list(sampler)
    assert sorted(first) == list(range(count))
    assert first == list(sampler)
    torch.rand(5)  # torch's own generator has no part in it
    assert first == list(LengthBuckets(lengths, batch_size=8, seed=3))
    sampler.set_epoch(1)
    second = list(sampler)
    assert sorted(second) == list(range(count))
    if count > 100:
        assert second != first
        share = {103: 0.7, 1000: 0.15}[count]  # few batches leave little to choose from
        assert padding_share(first, lengths, 8) < share * padding_share(range(count), lengths, 8)


def test_padding_share():
    assert padding_share([0, 1, 2, 3], [4, 4, 1, 1], 2) == 0
    assert padding_share([0, 2, 1, 3], [4, 4, 1, 1], 2) == pytest.approx(6 / 16)
