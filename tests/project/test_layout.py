"""The shape of the source: which way imports point, how long files are, what the texts promise."""

import ast
import itertools
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
# A module may import from its own layer and from those after it.
LAYERS = (
    ("cli",),
    ("doctor",),
    ("finetune",),
    ("peft", "lisa", "distributed"),
    ("nn",),
    ("functional",),
    ("ops",),
    ("kernels", "_C"),
    ("backend", "memory", "precision"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
CODE = ("fastlora", "kernels", "csrc", "bench", "examples", "tests", "setup.py")
MOST_LINES = 420  # "about 400"


def source_files(*roots: str, suffixes: tuple[str, ...] = (".py",)) -> Iterator[Path]:
    for root in roots:
        path = ROOT / root
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.suffix in suffixes and "__pycache__" not in file.parts:
                yield file


def module_name(file: Path) -> str:
    """Dotted name that a file of fastlora/ or kernels/ is imported under."""
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "kernels":
        parts.insert(0, "fastlora")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(file: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of all that a file imports from fastlora, wherever in it."""
    package = module_name(file).split(".")
    if file.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *(node.module.split(".") if node.module else [])])
            names = [f"{prefix}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "fastlora")


def layer(name: str) -> str | None:
    """The layer's name in ``fastlora.LAYER[...]``; None for the package itself."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LEVEL else None


def test_imports_point_one_way() -> None:
    wrong = []
    for file in source_files("fastlora", "kernels"):
        own = layer(module_name(file))
        if own is None:  # fastlora/__init__.py and __main__.py stand on top
            continue
        for line, name in imported(file):
            other = layer(name)
            if other and LEVEL[other] < LEVEL[own]:
                wrong.append(f"{file.relative_to(ROOT)}:{line} ({own}) imports {name} ({other})")
    assert not wrong, "\n".join(wrong)


def test_every_module_has_a_layer() -> None:
    names = {
        path.stem
        for path in (ROOT / "fastlora").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert names - {"__init__", "__main__"} <= set(LEVEL), "add the new module to LAYERS"


def test_kernels_know_neither_autograd_nor_modules() -> None:
    for file in source_files("kernels"):
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"\bautograd\.|\bimport autograd\b|\bnn\.Module\b", text), file


def test_csrc_knows_nothing_of_torch() -> None:
    for file in source_files("csrc", suffixes=(".cpp", ".h", ".cu", ".cuh")):
        assert not re.search(r"#include\s*[<\"](torch|ATen|c10)/", file.read_text()), file


def test_files_are_short() -> None:
    suffixes = (".py", ".cpp", ".h", ".cu", ".cuh")
    long = {
        str(file.relative_to(ROOT)): lines
        for file in source_files(*CODE, suffixes=suffixes)
        if (lines := len(file.read_text(encoding="utf-8").splitlines())) > MOST_LINES
    }
    assert not long


def test_every_python_file_says_what_it_is() -> None:
    silent = [
        str(file.relative_to(ROOT))
        for file in source_files(*CODE)
        if file.read_text(encoding="utf-8").strip()
        and not ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert not silent


def environment_variables() -> set[str]:
    """Variables of our own that the code gets from the environment, and the one of Triton's."""
    pattern = r"(?:environ|getenv)\S*?[\[(]\s*\"(FASTLORA_[A-Z_]+)\""
    files = source_files("fastlora", "kernels", "csrc", "setup.py", suffixes=(".py", ".cpp", ".h"))
    found = {name for file in files for name in re.findall(pattern, file.read_text("utf-8"))}
    return found | {"TRITON_INTERPRET"}


def test_readme_lists_every_environment_variable() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([A-Z_]+)` \|", readme, re.MULTILINE))
    read = environment_variables()
    assert listed == read


TEXTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(file, id=str(file.relative_to(ROOT)))
        for pattern in TEXTS
        for file in sorted(ROOT.glob(pattern))
    ],
)
def test_links_lead_somewhere(text: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = text.parent / path if path else text
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def anchors(file: Path) -> set[str]:
    """Heading anchors of a Markdown file, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("target", ["demo", "test", "bench", "lint", "types"])
def test_make_targets_do_their_own_setup(target: str, tmp_path: Path) -> None:
    """`make -n` on an environment that is not there yet: it is created first, then used."""
    command = ["make", "-n", "-C", str(ROOT), target, f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    created = next(i for i, line in enumerate(lines) if "-m venv" in line)
    installed = next(i for i, line in enumerate(lines) if "constraints.txt" in line)
    assert created < installed < len(lines) - 1
    assert "llama" not in done.stdout


def test_constraints_hold_what_the_package_asks_for() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {
        Requirement(line).name.lower(): Requirement(line)
        for line in lines
        if line and not line.startswith("#")
    }
    assert str(pins["torch"].specifier) == "==2.13.0"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    for requirement in map(Requirement, itertools.chain(project["dependencies"], *extras)):
        pin = pins.get(requirement.name.lower())
        for exact in pin.specifier if pin else ():
            if exact.operator == "==":
                assert requirement.specifier.contains(exact.version), requirement
