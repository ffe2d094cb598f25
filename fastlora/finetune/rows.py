"""JSONL rows: read, check, clean, split. Plain Python; no tokenizer, no torch.

A line is either `{"input": "…", "output": "…"}` or `{"messages": [{"role": "user", "content": "…"}, …]}`; other keys
are left alone. A line that cannot be used because it is malformed stops the run, with its file and line number. Lines
that are well formed but worth nothing (empty, seen before, too long) are left out, and every one of them is counted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
READ = ("input", "output", "messages", "role", "content")  # the keys that count


@dataclass(frozen=True)
class Row:
    """One example: a conversation that ends in the assistant's turn, and where it was read (`file:line`).

    `plain` says that it was written as input/output, which matters to models without a chat template.
    """

    messages: tuple[dict[str, Any], ...]
    source: str
    plain: bool

    @property
    def prompt(self) -> tuple[dict[str, Any], ...]:
        """What comes before the first assistant turn: the key of the held-out split."""
        for position, message in enumerate(self.messages):
            if message["role"] == "assistant":
                return self.messages[:position]
        return self.messages


@dataclass
class Cleaning:
    """How many lines were read, kept and left out, and why. `where` holds the first few places of each kind."""

    read: int = 0
    kept: int = 0
    left_out: dict[str, int] = field(
        default_factory=lambda: {"blank": 0, "empty": 0, "duplicate": 0, "too_long": 0}
    )
    where: dict[str, list[str]] = field(default_factory=dict)

    def leave_out(self, kind: str, source: str) -> None:
        """Count one line of `kind` that is not used."""
        self.left_out[kind] += 1
        places = self.where.setdefault(kind, [])
        if len(places) < 3:
            places.append(source)

    def describe(self) -> str:
        """`1000 lines: 950 kept, 40 duplicate (a.jsonl:3, …), 10 too long (…)`."""
        parts = [f"{self.kept} kept"]
        for kind, count in self.left_out.items():
            if count:
                places = ", ".join(self.where[kind]) + (
                    ", …" if count > len(self.where[kind]) else ""
                )
                parts.append(f"{count} {kind.replace('_', ' ')} ({places})")
        return f"{self.read} lines: " + ", ".join(parts)

    def as_dict(self) -> dict[str, int]:
        """The counts alone, for metrics.json."""
        return {"read": self.read, "kept": self.kept, **self.left_out}


def read_rows(
    paths: Sequence[str | os.PathLike[str]], name: str = "data"
) -> tuple[list[Row], Cleaning]:
    """Read JSONL files and clean them, up to what needs a tokenizer.

    Args:
        paths: files, read in this order as one.
        name: the argument they came from, for the messages.

    Returns:
        The rows that are neither blank, nor empty (an input or output of white space only), nor equal to an earlier
        one; and the counts.

    Raises:
        ValueError: a file that is not there, a line that is not JSON or lacks a key, or nothing left.
    """
    cleaning = Cleaning()
    rows: list[Row] = []
    seen: set[bytes] = set()
    for source, line in _lines(paths, name):
        cleaning.read += 1
        if not line.strip():
            cleaning.leave_out("blank", source)
            continue
        row = parse_row(line, source)
        if _is_empty(row):
            cleaning.leave_out("empty", source)
            continue
        key = _digest(row.messages)
        if key in seen:
            cleaning.leave_out("duplicate", source)
            continue
        seen.add(key)
        rows.append(row)
    cleaning.kept = len(rows)
    if not rows:
        files = ", ".join(str(path) for path in paths)
        raise ValueError(f"{name}: no row left in {files} after cleaning ({cleaning.describe()})")
    return rows, cleaning


def parse_row(line: bytes | str, source: str) -> Row:
    """One JSONL line to a `Row`; ValueError with `source` in front when it is not one."""
    try:
        record = json.loads(line, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(
            f"{source}: nested too deep; takes input and output, or messages"
        ) from None
    except _Twice as error:
        raise ValueError(f"{source}: {error} is given twice") from None
    except ValueError as error:  # not UTF-8 and a number of too many digits too
        raise ValueError(f"{source}: not JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(
            f"{source}: got a JSON {type(record).__name__}, takes an object with input and output, or messages"
        )
    if "messages" in record:
        return Row(_check_messages(record["messages"], source), source, plain=False)
    missing = [key for key in ("input", "output") if key not in record]
    if missing:
        got = ", ".join(record) or "no keys"
        raise ValueError(
            f"{source}: missing {' and '.join(missing)} (got {got}); takes input and output, or messages"
        )
    for key in ("input", "output"):
        if not isinstance(record[key], str):
            raise ValueError(f"{source}: {key} must be a string, got {type(record[key]).__name__}")
        _check_text(record[key], f"{source}: {key}")
    messages = (
        {"role": "user", "content": record["input"]},
        {"role": "assistant", "content": record["output"]},
    )
    return Row(messages, source, plain=True)


def split_rows(rows: Sequence[Row], fraction: float) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows, by a hash of each row's prompt.

    The same prompt always falls on the same side, whatever else is in the file, in which order, and on which machine.
    """
    training: list[Row] = []
    held_out: list[Row] = []
    for row in rows:
        share = int.from_bytes(_digest(row.prompt)[:8], "big") / 2**64
        (held_out if share < fraction else training).append(row)
    return training, held_out


def shared_prompts(training: Iterable[Row], held_out: Iterable[Row]) -> int:
    """How many held-out rows have a prompt that is also trained on."""
    trained = {_digest(row.prompt) for row in training}
    return sum(_digest(row.prompt) in trained for row in held_out)


class _Twice(Exception):
    """A key that an object has twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Python would keep the last of two equal keys; which one was meant cannot be told."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        for key in READ:
            if keys.count(key) > 1:
                raise _Twice(key)
    return found


def _check_text(text: str, where: str) -> None:
    """ValueError on half of a surrogate pair, which JSON can write (\\ud800) and no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(
            f"{where} holds {code}, half of a surrogate pair, which is no text"
        ) from None


def _check_messages(messages: Any, source: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"{source}: messages must be a list of role and content, got {_short(messages)}"
        )
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise ValueError(
                f"{source}: message {number} must have role and content, got {_short(message)}"
            )
        if message["role"] not in ROLES:
            raise ValueError(
                f"{source}: message {number} has role {_short(message['role'])}, takes {', '.join(ROLES)}"
            )
        if not isinstance(message["content"], str):
            kind = type(message["content"]).__name__
            raise ValueError(f"{source}: content of message {number} must be a string, got {kind}")
        _check_text(json.dumps(message, ensure_ascii=False), f"{source}: message {number}")
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
    if last < 1:
        raise ValueError(f"{source}: messages need an assistant turn that follows another one")
    if messages[0]["role"] == "assistant":
        raise ValueError(f"{source}: message 1 is the assistant's, takes one that it answers")
    return tuple(messages[: last + 1])  # what comes after the last answer would train nothing


def _is_empty(row: Row) -> bool:
    if row.plain:
        return any(not message["content"].strip() for message in row.messages)
    return not any(m["content"].strip() for m in row.messages if m["role"] == "assistant")


def _lines(paths: Sequence[str | os.PathLike[str]], name: str) -> Iterator[tuple[str, bytes]]:
    for path in paths:
        try:
            with open(path, "rb") as file:
                # Bytes, because str.splitlines would also cut at U+2028, which JSON allows inside a string.
                for number, line in enumerate(file, start=1):
                    if number == 1:
                        line = line.removeprefix(b"\xef\xbb\xbf")
                    yield f"{path}:{number}", line
        except OSError as error:
            raise ValueError(f"{name}: cannot read {path} ({error.strerror})") from None


def _digest(messages: Sequence[dict[str, Any]]) -> bytes:
    return hashlib.sha256(
        json.dumps(messages, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
    ).digest()


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
