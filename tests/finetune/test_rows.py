"""Reading and cleaning JSONL: what is kept, what is counted, and what stops a run with its file and line."""

import json

import pytest

from fastlora.finetune.rows import parse_row, read_rows, shared_prompts, split_rows
from tests.finetune import tiny


def test_every_line_left_out_is_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [
        '\ufeff{"input": "a", "output": "b"}',  # a byte order mark is not data
        "",
        '{"input": "a", "output": "b", "id": 7}',  # equal in what counts
        '{"input": " ", "output": "b"}',
        '{"input": "c", "output": "\\t"}',
        '{"input": "a", "output": "another"}',  # one input, two outputs: both stay
        '{"input": "x\u2028y", "output": "z"}',  # U+2028 is no line end
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]}',
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    rows, cleaning = read_rows([path])
    assert [row.messages[0]["content"] for row in rows] == ["a", "a", "x\u2028y"]
    assert cleaning.as_dict() == {
        "read": 8, "kept": 3, "blank": 1, "empty": 3, "duplicate": 1, "too_long": 0,
    }  # fmt: skip
    assert rows[0].source == f"{path}:1"
    assert cleaning.where["duplicate"] == [f"{path}:3"]
    assert "3 empty" in cleaning.describe() and f"{path}:4" in cleaning.describe()


def test_duplicates_are_found_across_files(tmp_path):
    one = tiny.write(tmp_path / "1.jsonl", tiny.rows(5))
    two = tiny.write(tmp_path / "2.jsonl", tiny.rows(8))
    rows, cleaning = read_rows([one, two])
    assert len(rows) == 8
    assert cleaning.left_out["duplicate"] == 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json}", "not JSON"),
        ('"text"', "got a JSON str, takes an object"),
        ("[1]", "got a JSON list"),
        ('{"input": "a"}', "missing output (got input)"),
        ('{"prompt": "a", "completion": "b"}', "missing input and output (got prompt, completion)"),
        ('{"input": 3, "output": "b"}', "input must be a string, got int"),
        ('{"input": "a", "output": null}', "output must be a string, got NoneType"),
        ('{"messages": "hello"}', "messages must be a list"),
        ('{"messages": []}', "messages must be a list"),
        ('{"messages": [{"role": "user"}]}', "message 1 must have role and content"),
        ('{"messages": [{"role": "boss", "content": "a"}]}', 'message 1 has role "boss", takes system'),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', "content of message 1 must be a string, got list"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "need an assistant turn"),
        ('{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}, '
         '{"role": "assistant", "content": "c"}]}', "message 1 is the assistant's"),
        ('{"input": "\\ud800", "output": "b"}', "input holds \\ud800, half of a surrogate pair"),
        ('{"input": "a", "output": "b \\udfff"}', "output holds \\udfff"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "c"}]}',
         "message 1 holds \\ud800"),
        ('{"input": "a", "output": "b", "input": "c"}', "input is given twice"),
        ('{"messages": [{"role": "user", "role": "user", "content": "a"}]}', "role is given twice"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "need an assistant turn that follows"),
    ],
)  # fmt: skip
def test_a_malformed_line_names_file_and_line(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"input": "a", "output": "b"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError) as refusal:
        read_rows([path])
    assert f"{path}:2: " in str(refusal.value)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("9" * 10_000, "not JSON (Exceeds the limit"),
        ("[" * 200_000, "nested too deep"),
        ("[" * 200_000 + "]" * 200_000, "nested too deep"),
    ],
    ids=["digits", "open", "closed"],
)
def test_what_python_does_not_read_names_file_and_line(value, message):
    with pytest.raises(ValueError) as refusal:
        parse_row('{"input": "a", "output": "b", "other": ' + value + "}", "x.jsonl:7")
    assert str(refusal.value).startswith(f"x.jsonl:7: {message}")


def test_other_keys_are_left_alone_even_twice():
    row = parse_row('{"input": "a", "output": "b", "id": 1, "id": 2}', "x:1")
    assert row.messages[0]["content"] == "a"


def test_bytes_that_are_not_utf8_are_refused(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"input": "é", "output": "b"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.jsonl:1: not JSON"):
        read_rows([path])


def test_nothing_left_is_refused_with_the_counts(tmp_path):
    path = tiny.write(tmp_path / "empty.jsonl", [{"input": "", "output": "a"}] * 3)
    with pytest.raises(ValueError, match=r"data: no row left in .* 3 empty"):
        read_rows([path])
    path.write_text("")
    with pytest.raises(ValueError, match="no row left"):
        read_rows([path])


def test_a_missing_file_names_its_argument(tmp_path):
    with pytest.raises(ValueError, match=r"eval_data: cannot read .*nowhere.jsonl \(No such file"):
        read_rows([tmp_path / "nowhere.jsonl"], "eval_data")


def test_the_split_depends_on_the_input_alone(tmp_path):
    rows, _ = read_rows([tiny.write(tmp_path / "a.jsonl", tiny.rows(200))])
    training, held_out = split_rows(rows, 0.25)
    assert 30 <= len(held_out) <= 70  # a binomial's 4 sigma about 50
    again, again_out = split_rows(rows[::-1], 0.25)
    assert {r.source for r in again_out} == {r.source for r in held_out}
    assert len(again) == len(training)
    # A larger share only adds: whoever was held out at 10 % is held out at 25 %.
    assert {r.source for r in split_rows(rows, 0.1)[1]} <= {r.source for r in held_out}
    assert shared_prompts(training, held_out) == 0


def test_rows_of_one_input_fall_on_one_side():
    rows = [
        parse_row(json.dumps({"input": f"q{i // 2}", "output": str(i)}), f"x:{i}")
        for i in range(100)
    ]
    training, held_out = split_rows(rows, 0.5)
    assert training
    assert held_out
    assert shared_prompts(training, held_out) == 0


def test_what_follows_the_last_answer_is_cut():
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "thanks"},
    ]
    row = parse_row(json.dumps({"messages": messages}), "x:1")
    assert len(row.messages) == 2
    assert [m["content"] for m in row.prompt] == ["q"]
