"""Files that a test depends on: what it imports, directly or not, and what it or those modules name in a string.

Names in strings count because many tests start programs (`tools/serve.py`, `-m trident.dashboard`) or read documents. A
name that fits several files counts for all of them, so a test is selected too often rather than too rarely.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

from tests.helpers.architecture.syntax import imported_names

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("megatron", "trident", "tools", "tasks", "tests", "campaigns", "benchmarks", "examples", "docs")
EVERYTHING = {"pyproject.toml", "tests/conftest.py", "tests/run.sh"}  # a change of these selects every test
# Imported by all tests, or only to make forked ranks start faster: not followed.
NOT_FOLLOWED = {"tests/conftest.py", "tests/helpers/preloaded.py"}
_FILE = re.compile(r"[\w./-]*\w\.(?:py|sh|md|toml|txt|ya?ml|json|cpp|cuh?|h|ipynb|csv|css|js|html|ds)\b")
_MODULE = re.compile(rf"\b(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
_FOLDER = re.compile(r"[\w-]+(?:/[\w-]+)*")
_MOST_NAMESAKES = 8  # `__init__.py` or `README.md` alone names nothing in particular


def changed_since(reference: str) -> set[str]:
    """Paths that differ from the merge base with a reference, uncommitted and untracked files included."""
    base = _git("merge-base", "HEAD", reference).strip()
    return {
        *_git("diff", "--name-only", base).split("\n"),
        *_git("ls-files", "-o", "--exclude-standard").split("\n"),
    } - {""}


def affected(tests: set[str], changed: set[str]) -> set[str]:
    """The test files, given as paths relative to the root, that depend on a changed file."""
    if changed & EVERYTHING:
        return tests
    return {test for test in tests if not changed.isdisjoint(dependencies(test))}


def dependencies(path: str) -> set[str]:
    """All files that a file depends on, itself included."""
    seen: set[str] = set()
    waiting = {path}
    while waiting:
        seen |= waiting
        waiting = set().union(*(_direct(name) for name in waiting - NOT_FOLLOWED)) - seen
    return seen


@cache
def _tracked() -> frozenset[str]:
    listing = _git("ls-files") + _git("ls-files", "-o", "--exclude-standard")
    return frozenset(name for name in listing.split("\n") if name and (ROOT / name).is_file())


@cache
def _by_name() -> dict[str, list[str]]:
    """Tracked files by their base name."""
    files = defaultdict(list)
    for path in _tracked():
        files[PurePosixPath(path).name].append(path)
    return dict(files)


@cache
def _folders() -> dict[str, frozenset[str]]:
    """The files below each folder."""
    files = defaultdict(set)
    for path in _tracked():
        for parent in PurePosixPath(path).parents:
            files[str(parent)].add(path)
    return {folder: frozenset(paths) for folder, paths in files.items() if folder != "."}


@cache
def _direct(path: str) -> frozenset[str]:
    """The files that one file imports or names."""
    if path.endswith(".py"):
        return frozenset(_direct_of_python(path))
    if path.endswith((".sh", ".md", ".ipynb", ".yml", ".yaml")):
        return frozenset(
            name for name in _named_in((ROOT / path).read_text(encoding="utf-8")) if name.endswith((".py", ".sh"))
        )
    return frozenset()


def _direct_of_python(path: str) -> set[str]:
    """As above; in the library, which names files and modules in messages, only a string that is a module counts."""
    nodes = list(ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))))
    is_test = path.startswith(("tests/", "campaigns/", "benchmarks/", "docs/"))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    names = {file for module in imported_names(nodes) for file in _files_of_module(module)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            text = node.value
            if is_test or _MODULE.fullmatch(text):
                names.update(_named_in(text))
            if (is_test and _FOLDER.fullmatch(text)) or text == "csrc":
                names.update(_folders().get(text, ()))
    if is_test:
        parents = [str(parent / "conftest.py") for parent in PurePosixPath(path).parents]
        names.update(parent for parent in parents if parent in _tracked())
    return names


def _files_of_module(module: str) -> Iterator[str]:
    """The file of a module of this project, and those of the packages around it."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        stem = "/".join(parts[:end])
        yield from {f"{stem}.py", f"{stem}/__init__.py", f"{stem}/__main__.py"} & _tracked()


def _named_in(text: str) -> Iterator[str]:
    """Files and modules named anywhere in a text."""
    for match in _FILE.findall(text):
        name = match.lstrip("./")
        candidates = _by_name().get(PurePosixPath(name).name, [])
        fitting = [path for path in candidates if path == name or path.endswith("/" + name)]
        if len(fitting) <= _MOST_NAMESAKES:
            yield from fitting
    for module in _MODULE.findall(text):
        yield from _files_of_module(module)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout
