"""Rows, labels and batches: what is left out is counted, what is trained is the answer alone."""

import json

import pytest

from fastlora.finetune.batches import Collator, LengthBuckets, padding_share
from fastlora.finetune.encoding import IGNORED, Prompting, encode_rows
from fastlora.finetune.rows import Cleaning, Row, parse_row, read_rows, split_rows
from tests.finetune import tiny


def test_cleaning_counts_every_line(tmp_path):
    good, other = {"input": "a", "output": "b"}, {"input": "a", "output": "c"}
    records = [good, {"input": " ", "output": "b"}, good, other, {"input": "x", "output": ""}]
    file = tiny.write(tmp_path / "rows.jsonl", records)
    file.write_text(file.read_text() + "\n", "utf-8")
    rows, cleaning = read_rows([file])
    assert [row.messages[1]["content"] for row in rows] == ["b", "c"]
    assert cleaning.as_dict() == {
        "read": 6,
        "kept": 2,
        "blank": 1,
        "empty": 2,
        "duplicate": 1,
        "too_long": 0,
    }
    assert "1 duplicate" in cleaning.describe()
    assert f"{file}:3" in cleaning.describe()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'input': 1}", r"rows\.jsonl:2: not JSON"),
        ('["a"]', "got a JSON list"),
        ('{"input": "a"}', "missing output"),
        ('{"input": "a", "output": 3}', "output must be a string, got int"),
        ('{"messages": []}', "messages must be a list"),
        ('{"messages": [{"role": "user"}]}', "message 1 must have role and content"),
        ('{"messages": [{"role": "judge", "content": "a"}]}', "has role"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "need an assistant turn"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"input": "a", "output": "b"}\n' + line + "\n", "utf-8")
    with pytest.raises(ValueError, match=message) as error:
        read_rows([file])
    assert f"{file}:2" in str(error.value)


def test_nothing_left(tmp_path):
    file = tiny.write(tmp_path / "rows.jsonl", [{"input": "", "output": ""}])
    with pytest.raises(ValueError, match="no row left"):
        read_rows([file])
    with pytest.raises(ValueError, match="data: cannot read"):
        read_rows([tmp_path / "absent.jsonl"])


def test_the_split_depends_on_the_prompt_alone(tmp_path):
    records = tiny.rows(200)
    forward, _ = read_rows([tiny.write(tmp_path / "a.jsonl", records)])
    backward, _ = read_rows([tiny.write(tmp_path / "b.jsonl", records[::-1] + tiny.rows(30, 9))])
    held = {row.messages for row in map(_plain, split_rows(forward, 0.2)[1])}
    held_again = {row.messages for row in map(_plain, split_rows(backward, 0.2)[1])}
    assert 20 < len(held) < 60
    assert held <= held_again


def _plain(row):
    return Row(tuple(json.dumps(m) for m in row.messages), row.source, row.plain)


def _decoded(tokenizer, encoded, index=0):
    """(text of all ids, text of the ids that carry a loss)."""
    item = encoded[index]
    trained = [label for label in item["labels"] if label != IGNORED]
    return tokenizer.decode(item["input_ids"]), tokenizer.decode(trained)


def test_plain_form_trains_the_output_and_eos():
    tokenizer = tiny.tokenizer()
    prompting = Prompting.choose(tokenizer, "auto")
    row = parse_row('{"input": "one two", "output": "two one"}', "here")
    encoded = encode_rows([row], prompting, 100, Cleaning())
    text, trained = _decoded(tokenizer, encoded)
    assert text == "one two\ntwo one<|end|>"
    assert trained == "two one<|end|>"
    item = encoded[0]
    for token, label in zip(item["input_ids"], item["labels"], strict=True):
        assert label in (IGNORED, token)


def test_chat_trains_every_answer_and_its_end():
    tokenizer = tiny.tokenizer(chat=True)
    prompting = Prompting.choose(tokenizer, "auto")
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
    ]
    row = parse_row(json.dumps({"messages": messages}), "here")
    text, trained = _decoded(tokenizer, encode_rows([row], prompting, 200, Cleaning()))
    assert "be brief" in text
    assert trained.replace("\n", "") == "two<|end|>four<|end|>"


def test_a_prompt_is_what_training_saw():
    tokenizer = tiny.tokenizer(chat=True)
    prompting = Prompting.choose(tokenizer, "auto")
    row = parse_row('{"input": "one", "output": "two"}', "here")
    item = encode_rows([row], prompting, 200, Cleaning())[0]
    prompt = prompting.prompt_ids("one")
    assert item["input_ids"][: len(prompt)] == prompt
    assert item["labels"][: len(prompt)] == [IGNORED] * len(prompt)
    assert item["labels"][len(prompt)] != IGNORED


def test_over_long_rows_are_counted():
    prompting = Prompting.choose(tiny.tokenizer(), "plain")
    rows = [parse_row(json.dumps({"input": "a" * n, "output": "b"}), f"f:{n}") for n in (3, 50)]
    cleaning = Cleaning()
    assert len(encode_rows(rows, prompting, 10, cleaning)) == 1
    assert cleaning.left_out["too_long"] == 1
    with pytest.raises(ValueError, match=r"no row left|max_length"):
        encode_rows(rows[1:], prompting, 10, Cleaning())


@pytest.mark.parametrize("count", [7, 64, 203])
def test_buckets_hold_every_row_once(count):
    lengths = [(37 * i) % 61 + 1 for i in range(count)]
    buckets = LengthBuckets(lengths, 4, seed=1)
    orders = []
    for epoch in range(2):
        buckets.set_epoch(epoch)
        orders.append(list(buckets))
        assert sorted(orders[-1]) == list(range(count))
    assert orders[0] != orders[1]
    buckets.set_epoch(0)
    assert list(buckets) == orders[0]
    if count > 7:
        assert padding_share(orders[0], lengths, 4) < 0.5 * padding_share(range(count), lengths, 4)


def test_collator_pads_on_the_right():
    rows = [{"input_ids": [5, 6, 7], "labels": [IGNORED, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    batch = Collator(pad_id=0, multiple_of=4)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 0], [8, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100], [8, -100, -100, -100]]
