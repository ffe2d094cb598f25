"""The demo's data: clean pairs from Django's catalogues, and a stable held-out split."""

import json

import polib
import pytest

from examples import demo, translation_data
from fastlora.finetune.rows import read_rows, split_rows


def _input(row):
    return row.messages[0]["content"]


def test_every_language_gives_clean_pairs():
    for language in translation_data.LANGUAGES:
        pairs = translation_data.pairs(language)
        assert len(pairs) > 400
        assert len({foreign for foreign, _ in pairs}) == len(pairs)
        for foreign, english in pairs:
            assert foreign != english
            assert max(len(foreign), len(english)) <= translation_data.LONGEST
            assert not set("%{}<>\n") & set(foreign + english)


def test_what_is_left_out(tmp_path):
    """Fuzzy, obsolete, plural, untranslated, identical, over-long and non-prose entries."""
    catalogue = polib.POFile()
    for fields in (
        {"msgid": "Hello", "msgstr": "Bonjour"},
        {"msgid": "Hi", "msgstr": "Bonjour"},  # the same input again
        {"msgid": "Fuzzy", "msgstr": "Flou", "flags": ["fuzzy"]},
        {"msgid": "Gone", "msgstr": "Parti", "obsolete": True},
        {"msgid": "day", "msgid_plural": "days", "msgstr_plural": {0: "jour", 1: "jours"}},
        {"msgid": "Missing", "msgstr": ""},
        {"msgid": "Menu", "msgstr": "Menu"},
        {"msgid": "%(count)s left", "msgstr": "%(count)s restants"},
        {"msgid": "<b>bold</b>", "msgstr": "<b>gras</b>"},
        {"msgid": "long " * 40, "msgstr": "long " * 41},
        {"msgid": "…", "msgstr": "..."},
    ):
        catalogue.append(polib.POEntry(**fields))
    folder = tmp_path / "app" / "locale" / "fr" / "LC_MESSAGES"
    folder.mkdir(parents=True)
    catalogue.save(str(folder / "django.po"))
    assert translation_data.pairs("fr", tmp_path) == [("Bonjour", "Hello")]
    with pytest.raises(ValueError, match="language: got 'xx'"):
        translation_data.pairs("xx", tmp_path)


def test_rows_and_the_held_out_split(tmp_path):
    file = tmp_path / "data.jsonl"
    count = translation_data.write(file, translation_data.rows(["zh_Hans", "fr"]))
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == count
    assert all(set(line) == {"input", "output"} for line in lines)
    assert all(line["input"].startswith(translation_data.PROMPT) for line in lines)

    everything, cleaning = read_rows([file])
    assert cleaning.kept == count  # nothing that the cleaning would have to drop
    training, held_out = split_rows(everything, demo.HELD_OUT)
    assert 0 < len(held_out) < 0.1 * len(training)
    assert {_input(row) for row in training}.isdisjoint(_input(row) for row in held_out)

    prompts = demo.held_out_prompts(file)
    assert len(prompts) == 3
    trained = {_input(row) for row in training}
    assert not trained & {prompt["input"] for prompt in prompts}
