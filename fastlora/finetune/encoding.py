"""Rows to token ids and labels: the loss is on the assistant's tokens only, and the end of its turn is trained.

With a chat template (the tokenizer's own, unless told otherwise) a turn's prompt is the conversation before it,
rendered with the generation prompt; the answer is what the template adds after that. So training sees exactly the ids
that `generate` will see. Without one, a row is the plain form of the input + output + EOS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from .rows import Cleaning, Row

IGNORED = -100  # what torch's cross entropy leaves out
PLAIN_FORM = "{input}\n"


@dataclass(frozen=True)
class Prompting:
    """How a row becomes text: `chat` (the tokenizer's template) or a plain form with `{input}` in it."""

    tokenizer: Any
    form: str | None  # None: the chat template

    @classmethod
    def choose(cls, tokenizer: Any, template: str) -> Prompting:
        """Read the `prompt_template` argument: auto, chat, plain, or a form of one's own.

        Raises:
            ValueError: `chat` with a tokenizer that has no template.
        """
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if template == "chat" and not has_template:
            raise ValueError(
                "prompt_template: got 'chat', but this tokenizer has no chat template; takes auto, plain or a form "
                "with {input}"
            )
        if template == "chat" or (template == "auto" and has_template):
            return cls(tokenizer, None)
        return cls(tokenizer, PLAIN_FORM if template in ("auto", "plain") else template)

    def prefixes(self, row: Row) -> list[str]:
        """Ever longer beginnings of the row's text: up to answer 1, through answer 1, up to answer 2, …"""
        return self._plain(row) if self.form is not None else self._chat(row)

    def prompt_ids(self, text: str) -> list[int]:
        """What to hand `generate` for an `input` of this text."""
        answer = {"role": "assistant", "content": "x"}
        row = Row(({"role": "user", "content": text}, answer), "prompt", plain=True)
        return self.tokenizer(self.prefixes(row)[0], add_special_tokens=False)["input_ids"]

    def _plain(self, row: Row) -> list[str]:
        assert self.form is not None
        text = self._beginning()
        prefixes = []
        for message in row.messages:
            content = message["content"]
            if message["role"] == "assistant":
                prefixes += [text, text + content]
                text = text + content + "\n"
            elif row.plain or message["role"] == "user":
                text += self.form.replace("{input}", content)
            else:
                text += content + "\n"
        return prefixes

    def _chat(self, row: Row) -> list[str]:
        prefixes: list[str] = []
        for position, message in enumerate(row.messages):
            if message["role"] != "assistant":
                continue
            before = self._render(row, position, add_generation_prompt=True)
            after = self._render(row, position + 1, add_generation_prompt=False)
            if not after.startswith(before) or (prefixes and not before.startswith(prefixes[-1])):
                raise ValueError(
                    f"{row.source}: the tokenizer's chat template rewrites earlier text at turn {position + 1}, "
                    "so the answer's tokens cannot be told apart; split the conversation, or use prompt_template plain"
                )
            prefixes += [before, after]
        return prefixes

    def _render(self, row: Row, end: int, *, add_generation_prompt: bool) -> str:
        messages = list(row.messages[:end])
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # the template is a program of the model's: anything may come
            raise ValueError(
                f"{row.source}: the tokenizer's chat template refuses it ({error})"
            ) from None

    def _beginning(self) -> str:
        """BOS as text, for tokenizers that put one in front."""
        bos = self.tokenizer.bos_token_id
        ids = self.tokenizer("a")["input_ids"]
        return self.tokenizer.bos_token if bos is not None and ids[:1] == [bos] else ""


class Encoded(torch.utils.data.Dataset):
    """Encoded rows: all ids in one int32 tensor, all label masks in one bool tensor.

    Item i is `{"input_ids": list[int], "labels": list[int]}`, with -100 where there is no loss.
    """

    def __init__(self, examples: Sequence[tuple[list[int], list[bool]]]):
        self.lengths = [len(ids) for ids, _ in examples]
        self._ends = torch.tensor([0, *self.lengths], dtype=torch.int64).cumsum(0).tolist()
        self._ids = torch.tensor([i for ids, _ in examples for i in ids], dtype=torch.int32)
        self._trained = torch.tensor([t for _, mask in examples for t in mask], dtype=torch.bool)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if not 0 <= index < len(self):
            raise IndexError(index)  # ends a plain `for` over the data
        span = slice(self._ends[index], self._ends[index + 1])
        ids, trained = self._ids[span], self._trained[span]
        return {"input_ids": ids.tolist(), "labels": ids.masked_fill(~trained, IGNORED).tolist()}

    @property
    def trained_tokens(self) -> int:
        """How many tokens carry a loss."""
        return int(self._trained.sum())

    def fingerprint(self) -> str:
        """A hash of all ids and masks, in order: two runs with one fingerprint see the same data."""
        import hashlib

        digest = hashlib.sha256(str(self.lengths).encode())
        digest.update(self._ids.numpy().tobytes())
        digest.update(self._trained.numpy().tobytes())
        return digest.hexdigest()[:16]


def encode_rows(
    rows: Sequence[Row],
    prompting: Prompting,
    max_length: int,
    cleaning: Cleaning,
    name: str = "data",
) -> Encoded:
    """Tokenise rows; those over `max_length` tokens are left out and counted in `cleaning`.

    `name` is the argument that they came from, for the message.

    Raises:
        ValueError: a row that the chat template refuses, or no row short enough.
    """
    examples = []
    stops = _stops(prompting.tokenizer)
    for start in range(0, len(rows), 1024):
        chunk = rows[start : start + 1024]
        prefixes = [prompting.prefixes(row) for row in chunk]
        flat = [text for texts in prefixes for text in texts]
        # One call for many texts: the Rust tokenizers spread it over the cores.
        encoded = iter(prompting.tokenizer(flat, add_special_tokens=False)["input_ids"])
        for row, texts in zip(chunk, prefixes, strict=True):
            ids, trained = _label(texts, [next(encoded) for _ in texts], prompting.tokenizer, stops)
            if len(ids) > max_length:
                cleaning.leave_out("too_long", row.source)
            else:
                examples.append((ids, trained))
    cleaning.kept = len(examples)
    if not examples:
        raise ValueError(
            f"max_length: got {max_length}, and every row of {name} is longer ({cleaning.describe()})"
        )
    return Encoded(examples)


def _label(
    texts: Sequence[str], prefixes: Sequence[list[int]], tokenizer: Any, stops: frozenset[int]
) -> tuple[list[int], list[bool]]:
    """Ids of the whole row and which of them are trained, from its prefixes (see `Prompting.prefixes`).

    A tokenizer may join characters across the border of prompt and answer. Where every prefix's ids begin the next
    one's, nothing was joined. Where not, the pieces are encoded one by one, so that the prompt's ids are those of
    generation.
    """
    whole = prefixes[-1]
    if not all(whole[: len(ids)] == ids for ids in prefixes):
        pieces = [texts[0]] + [b[len(a) :] for a, b in pairwise(texts)]
        ids_of = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces]
        prefixes, whole = [], []
        for ids in ids_of:
            whole = whole + ids
            prefixes.append(whole)
    trained = [False] * len(whole)
    end = 0
    for before, after in zip(prefixes[0::2], prefixes[1::2], strict=True):
        end = len(before) + _turn_length(whole[len(before) : len(after)], tokenizer, stops)
        trained[len(before) : end] = [True] * (end - len(before))
    # Behind the last turn's end there is only the template's own white space: it would be paid for and train nothing.
    ids, trained = whole[:end], trained[:end]
    if tokenizer.eos_token_id is not None and ids[-1] not in stops:
        ids, trained = [*ids, tokenizer.eos_token_id], [*trained, True]
    return ids, trained


def _turn_length(answer: list[int], tokenizer: Any, stops: frozenset[int]) -> int:
    """Length of a turn through the token that ends it: EOS, or another special token that only white space follows."""
    for position in range(len(answer) - 1, -1, -1):
        if answer[position] in stops:
            rest = answer[position + 1 :]
            if answer[position] == tokenizer.eos_token_id or not tokenizer.decode(rest).strip():
                return position + 1
    return len(answer)


def _stops(tokenizer: Any) -> frozenset[int]:
    """Ids of the tokenizer's special tokens."""
    return frozenset(tokenizer.all_special_ids) | frozenset(
        index for index, token in tokenizer.added_tokens_decoder.items() if token.special
    )
