"""Pairs into English from the gettext catalogues that ship with Django, as JSONL.

    python -m examples.translation_data train.jsonl --languages zh_Hans fr es de

Each row is `{"input": "Translate to English: …", "output": "…"}`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from collections.abc import Iterable
from pathlib import Path

LANGUAGES = ("zh_Hans", "fr", "es", "de")
PROMPT = "Translate to English: "
LONGEST = 80  # characters of either side: short rows, many of them

# Placeholders, markup, addresses and line breaks are not prose.
_NOT_PROSE = re.compile(r"[%{}<>&\n\\]|https?:|^\W*$")


def catalogues() -> Path:
    """Folder of the installed Django.

    Raises:
        ModuleNotFoundError: Django is not installed.
    """
    spec = importlib.util.find_spec("django")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError('django: not installed; pip install "fastlora[demo]"')
    return Path(spec.origin).parent


def pairs(language: str, root: Path | None = None) -> list[tuple[str, str]]:
    """(foreign, English) pairs of one language, in the catalogues' order, each foreign text once.

    Raises:
        ValueError: there is no catalogue of that language.
    """
    import polib

    files = sorted((root or catalogues()).glob(f"**/locale/{language}/LC_MESSAGES/django.po"))
    if not files:
        raise ValueError(f"language: got {language!r}, for which Django has no catalogue")
    found: dict[str, str] = {}
    for file in files:
        for entry in polib.pofile(str(file)):
            english, foreign = entry.msgid.strip(), entry.msgstr.strip()
            if entry.obsolete or entry.fuzzy or entry.msgid_plural or not foreign:
                continue
            if foreign == english or max(len(foreign), len(english)) > LONGEST:
                continue
            if _NOT_PROSE.search(foreign) or _NOT_PROSE.search(english):
                continue
            found.setdefault(foreign, english)
    return list(found.items())


def rows(languages: Iterable[str] = LANGUAGES, root: Path | None = None) -> list[dict[str, str]]:
    """Rows of all languages; an input that two languages share appears once."""
    unique: dict[str, str] = {}
    for language in languages:
        for foreign, english in pairs(language, root):
            unique.setdefault(foreign, english)
    return [{"input": PROMPT + text, "output": english} for text, english in unique.items()]


def write(path: Path, records: Iterable[dict[str, str]]) -> int:
    """Write JSONL; returns the number of rows."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def main() -> None:
    """Write one file for the given languages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--languages", nargs="+", default=list(LANGUAGES))
    arguments = parser.parse_args()
    print(f"{write(arguments.file, rows(arguments.languages))} rows in {arguments.file}")


if __name__ == "__main__":
    main()
