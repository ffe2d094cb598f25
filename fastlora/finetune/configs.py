"""A `--config` file, or a mapping from Python, as a command line."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any


class _Twice(Exception):
    """A key that a mapping has twice."""


class _Finder(argparse.ArgumentParser):
    """Raises instead of printing usage and exiting."""

    def error(self, message: str) -> Any:
        raise ValueError(message)


def config_path(argv: Sequence[str]) -> str | None:
    """The file that `--config` names on this command line."""
    finder = _Finder(allow_abbrev=False, add_help=False)
    finder.add_argument("--config")
    return finder.parse_known_args(list(argv))[0].config


def read_config(path: str) -> Mapping[str, Any]:
    """The mapping in a YAML or JSON file; ValueError when there is none, or a key is given twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML keeps the last of two equal keys and says nothing."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key, _ in node.value:
                if not isinstance(key.value, str):
                    continue  # a list as a key, which PyYAML refuses itself
                if key.value in seen:
                    line = key.start_mark.line + 1
                    raise _Twice(f"{path}:{line}: {key.value} is given twice")
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    try:
        with open(path, encoding="utf-8") as file:
            config = yaml.load(file, Loader)  # JSON is YAML
    except OSError as error:
        raise ValueError(f"config: cannot read {path} ({error.strerror})") from None
    except _Twice as error:
        raise ValueError(f"config: {error}") from None
    except (yaml.YAMLError, ValueError) as error:  # a date of no calendar is a ValueError
        raise ValueError(f"config: {path} is not YAML ({' '.join(str(error).split())})") from None
    except RecursionError:
        raise ValueError(f"config: {path} is nested too deep; takes names and values") from None
    if not isinstance(config, Mapping):
        raise ValueError(
            f"config: {path} holds a {type(config).__name__}, takes a mapping of names to values"
        )
    return config


def to_argv(config: Mapping[str, Any], parser: argparse.ArgumentParser, source: str) -> list[str]:
    """A mapping as a command line, so that types are checked in one place (YAML reads 2e-4 as a string)."""
    known = names(parser)
    actions = {action.dest: action for action in parser._actions}
    argv: list[str] = []
    for key, value in config.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ValueError(f"{source}: unknown key {key!r}{nearest(name, known, '')}")
        if value is None:
            continue
        if value is False and "no" in (actions[name].choices or ()):
            value = "no"  # YAML reads an unquoted `no` as false
        if isinstance(value, Mapping):
            argv.append(f"--{name}={json.dumps(value)}")
        elif isinstance(value, (list, tuple)):
            _check_list(value, actions[name], f"{source}: {key}")
            argv += [f"--{name}", *map(str, value)] if value else []
        else:
            argv.append(f"--{name}={value}")
    try:
        parser.parse_known_args(argv)
    except ValueError as error:  # here, where it is known to be this file's
        raise ValueError(f"{source}: {error}") from None
    return argv


def _check_list(value: Sequence[Any], action: argparse.Action, where: str) -> None:
    if action.nargs not in ("+", "*"):
        raise ValueError(f"{where}: got {list(value)}, takes one value")
    for item in value:
        # On a command line it would be an option's name
        if isinstance(item, str) and item.startswith("-"):
            raise ValueError(f"{where}: got {item!r}, takes values that do not start with -")


def names(parser: argparse.ArgumentParser) -> list[str]:
    """Every option's name, without dashes."""
    return sorted({action.dest for action in parser._actions} - {"help", "config"})


def nearest(name: str, known: Sequence[str], prefix: str) -> str:
    """`; did you mean …?`, or where to look."""
    close = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else "; see fastlora finetune --help"
