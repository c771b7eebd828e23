"""The house rules that a reader relies on: rooms, direction of imports, one name per folder."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

ORDER = [
    "errors",
    "kv_transfer",
    "build",
    "runtime.core",
    "runtime.engine",
    "runtime.worker",
    "runtime.serve",
    "perf",
    "cli",
]
"""Each room may import itself and those before it."""

CORE_MAY_IMPORT = {*sys.stdlib_module_names, "numpy", "trtpd"}


def room_of(module: str) -> str | None:
    """The room a `trtpd.x.y` module belongs to."""
    rest = module.removeprefix("trtpd.")
    return next((room for room in ORDER if rest == room or rest.startswith(room + ".")), None)


def sources() -> list[tuple[Path, str]]:
    """Every source file with its room."""
    found = [(ROOT / "src/trtpd/errors.py", "errors"), (ROOT / "src/trtpd/cli.py", "cli")]
    for room in ORDER[1:-1]:
        found += [(path, room) for path in sorted((ROOT / room.replace(".", "/")).rglob("*.py"))]
    return found


def imported(path: Path) -> set[str]:
    """Names of modules a file imports, those inside functions and under TYPE_CHECKING included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write trtpd. in full"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize(("path", "room"), sources(), ids=lambda value: str(value).split("/", 3)[-1])
def test_imports_run_one_way(path: Path, room: str) -> None:
    for name in imported(path):
        if name.startswith("trtpd.") and (target := room_of(name)):
            assert ORDER.index(target) <= ORDER.index(room), f"{path} ({room}) imports {name} ({target})"


def test_every_room_holds_source_files() -> None:
    rooms = {room for _, room in sources()}
    assert rooms == set(ORDER)


def test_the_core_imports_only_the_standard_library_and_numpy() -> None:
    for path, room in sources():
        if room == "runtime.core":
            assert {name.split(".")[0] for name in imported(path)} <= CORE_MAY_IMPORT, path


@pytest.mark.parametrize("name", ["runtime", "kv_transfer", "perf", "model_repo"])
def test_no_folder_can_be_imported_by_its_bare_name(name: str) -> None:
    assert importlib.util.find_spec(name) is None


def test_a_bare_build_is_not_ours() -> None:
    spec = importlib.util.find_spec("build")
    assert spec is None or not str(spec.origin).startswith(str(ROOT))


def test_nothing_reads_pickles() -> None:
    for path, _ in sources():
        assert not {name.split(".")[0] for name in imported(path)} & {"pickle", "shelve", "marshal"}, path


def test_the_error_tree_shows_every_error_of_ours() -> None:
    tree = ast.get_docstring(ast.parse((ROOT / "src/trtpd/errors.py").read_text()))
    assert tree is not None
    shown = set(re.findall(r"\b\w+Error\b", tree))
    ours = {"TrtpdError"}
    for path, _ in sources() * 2:  # twice: a file may derive from an error of one that is read later
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any(isinstance(b, ast.Name) and b.id in ours for b in node.bases):
                ours.add(node.name)
    assert shown == ours


def test_git_ignores_none_of_our_sources() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    files = [str(path.relative_to(ROOT)) for path, _ in sources()]
    ignored = subprocess.run(
        ["git", "check-ignore", "--no-index", *files], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ignored.stdout == ""


def test_the_version_stands_in_the_changelog() -> None:
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert f"## {version[1]}" in (ROOT / "CHANGELOG.md").read_text()
    assert f'__version__ = "{version[1]}"' in (ROOT / "src/trtpd/__init__.py").read_text()
