"""The ``fastlora`` command: exit codes, messages, and that it stays out of the way of imports."""

import io
import os
import subprocess
import sys

import pytest

import fastlora
from fastlora import cli


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python -m fastlora ARGUMENTS`` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "fastlora", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"fastlora {fastlora.__version__}\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert all(f"  {command}" in printed for command in cli.COMMANDS)


def test_no_command_prints_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "commands:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("docter", "'doctor'"),
        ("fintune", "'finetune'"),
        ("finetuner", "'finetune'"),
        ("x", None),
    ],
)
def test_unknown_command_suggests_the_nearest(
    given: str, nearest: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([given])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert f"command: got {given!r}, takes doctor, finetune." in error
    assert (f"Did you mean {nearest}?" in error) if nearest else ("Did you mean" not in error)


@pytest.mark.parametrize("arguments", [["--verbose"], ["doctor", "--jsn"], ["doctor", "extra"]])
def test_unknown_option_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert arguments[-1] in capsys.readouterr().err


def test_finetune_gets_its_arguments_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    import fastlora.finetune

    seen: list[list[str]] = []

    def record(arguments: list[str]) -> int:
        seen.append(arguments)
        return 3

    monkeypatch.setattr(fastlora.finetune, "main", record)
    assert cli.main(["finetune", "--help", "--r=8", "--version"]) == 3
    assert seen == [["--help", "--r=8", "--version"]]


def test_finetune_help() -> None:
    done = run("finetune", "--help")
    assert done.returncode == 0, done.stderr
    assert all(flag in done.stdout for flag in ("--model", "--data", "--output_dir", "--config"))


def test_finetune_without_its_packages_names_the_extra() -> None:
    """As in an environment with torch alone: one line, exit code 1, no traceback."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['transformers', 'peft', 'accelerate']));"
        "from fastlora import cli; sys.exit(cli.main(["
        "'finetune', '--model', 'x', '--data', 'x.jsonl', '--output_dir', 'out']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stderr
    assert "fastlora[finetune]" in done.stderr
    assert "Traceback" not in done.stderr


def test_module_runs_as_the_command_does() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"fastlora {fastlora.__version__}\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_doctor_on_a_terminal_that_is_not_utf8(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    monkeypatch.setattr(sys, "stdout", out)
    assert cli.main(["doctor"]) == 0
    assert b"Backends" in out.buffer.getvalue()  # type: ignore[attr-defined]
