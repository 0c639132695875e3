"""CONTRIBUTING.md names existing packages in import order, existing files and functions, and the limits in force."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.architecture import tables

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()

WALKS = (
    "### A flag, to a split matrix",
    "### Text, to a batch",
    "### A batch, to an update",
    "### A parameter, into a checkpoint and another layout",
    "### A prompt, to text",
)
TABLES = "trident/convert/hugging_face"


def section(start: str) -> str:
    """The text from a heading up to the next one."""
    return TEXT[TEXT.index(f"\n{start}") + 1 :].partition("\n##")[0]


def steps(start: str) -> list[tuple[str, str]]:
    """File and sentence of each numbered line of a walk."""
    lines = re.findall(r"^(\d+)\. `([\w/]+\.py)` - (.+)$", section(start), flags=re.M)
    assert [int(number) for number, _, _ in lines] == list(range(1, len(lines) + 1))
    assert len(re.findall(r"^\d+\.", section(start), flags=re.M)) == len(lines), "a line names no file"
    return [(path, sentence) for _, path, sentence in lines]


@cache
def definitions(path: str) -> frozenset[str]:
    """Functions, classes, `Class.method`, `Class.field` and constants of a file."""
    found = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        found.update(target.id for target in targets if isinstance(target, ast.Name))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(inner, ast.FunctionDef):
                found.add(f"{node.name}.{inner.name}")
            elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                found.add(f"{node.name}.{inner.target.id}")
    return frozenset(found)


def codes(text: str) -> list[str]:
    return [code for code in re.findall(r"`([^`]+)`", text) if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)?", code)]


@pytest.mark.parametrize("start", WALKS)
def test_every_step_of_a_walk_names_a_function_of_its_file(start: str) -> None:
    assert 5 <= len(steps(start)) <= 8
    assert len({path for path, _ in steps(start)}) == len(steps(start))
    known = frozenset().union(*(definitions(path) for path, _ in steps(start)))
    for path, sentence in steps(start):
        first, *others = codes(sentence)
        assert first in definitions(path), f"{path} has no {first}"
        assert {*others} <= known | {"tp", "RunRequest", "RunConfig"}, sentence


def test_a_wrong_name_is_found() -> None:
    assert "read_command_line" in definitions("megatron/config/flags/command_line.py")
    assert "read_commandline" not in definitions("megatron/config/flags/command_line.py")


def additions() -> list[tuple[str, str]]:
    """Title and text of each entry of "Adding something"."""
    found = re.findall(r"^\* \*([^*]+)\*[^:]*: (.+?)(?=^\* |\Z)", section("## Adding something"), flags=re.M | re.S)
    assert len(found) >= 12
    return [(title, " ".join(text.split())) for title, text in found]


def in_that_file(text: str) -> list[tuple[str, str]]:
    """(name, path) wherever a text says "`name` (`path`)", or "`name` and `other` (`path`)"."""
    pairs = re.findall(r"((?:`[\w.]+`(?: and |, )?)+) \(`([\w/]+\.py)`\)", text)
    return [(name, path) for names, path in pairs for name in codes(names) if name != "config.json"]


@pytest.mark.parametrize("title", [title for title, _ in additions()])
def test_what_one_adds_to_is_in_the_file_that_is_named(title: str) -> None:
    text = dict(additions())[title]
    files = re.findall(r"`([\w/]+/[\w/]+\.py)`", text)
    assert not [path for path in files if not (ROOT / path).is_file()]
    assert [(name, path) for name, path in in_that_file(text) if name not in definitions(path)] == []
    paths = (path for root in ("megatron", "trident") for path in ROOT.glob(f"{root}/**/*.py"))
    defined = frozenset().union(*(definitions(str(path.relative_to(ROOT))) for path in paths))
    named = {code for code in codes(text) if re.match(r"_?[A-Z]|\w+_\w+$", code)}
    assert named - defined == set()


def test_a_name_that_moved_to_another_file_would_be_found() -> None:
    pairs = [pair for _, text in additions() for pair in in_that_file(text)]
    assert len(pairs) >= 15 and ("plan_of", "megatron/engine/optimizers/plans.py") in pairs


def test_every_file_that_is_named_exists() -> None:
    named = re.findall(r"`((?:megatron|tools|tests)/[\w/]*(?:\.py|\.sh|/)?|pretrain_gpt\.py)`", TEXT)
    assert len(named) > 60
    assert not [path for path in named if not (ROOT / path).exists()]


def test_the_packages_stand_in_import_order() -> None:
    rows = re.findall(r"^\| `megatron/(\w+)(?:\.py|/)` \|[^|]+\|([^|]*)\|$", TEXT, flags=re.M)
    places = tables.PACKAGE_PLACES
    assert [name for name, _ in rows] == sorted(places, key=lambda name: places[name])
    companions = re.findall(r"^\| `trident/(\w+)/` \|[^|]+\|([^|]*)\|$", TEXT, flags=re.M)
    assert [name for name, _ in companions] == sorted(tables.COMPANIONS)
    for root, name, sub_packages in (*(("megatron", *row) for row in rows), *(("trident", *row) for row in companions)):
        expected = [entry for entry in tables.SUBPACKAGE_ORDER.get(f"{root}.{name}", ()) if entry != "."]
        named = [code for code in codes(sub_packages) if code in expected]
        assert named == expected, name


def test_the_limits_are_those_of_the_architecture_rules() -> None:
    found = re.search(
        r"files of at most (\d+) lines, functions of at most (\d+), no folder with more than (\d+) files", TEXT
    )
    assert found is not None
    assert [int(number) for number in found.groups()] == [
        tables.MAXIMUM_FILE_LINES,
        tables.MAXIMUM_FUNCTION_LINES,
        tables.MAXIMUM_FOLDER_FILES,
    ]


def test_a_family_is_one_file_and_one_line() -> None:
    """Each family has a file of its own and a line in the registry, as CONTRIBUTING describes."""
    registry = (ROOT / TABLES / "registry.py").read_text()
    for path in (ROOT / TABLES / "families").glob("[!_]*.py"):
        module = f"{TABLES.replace('/', '.')}.families.{path.stem}"
        names = re.findall(rf"^from {re.escape(module)} import (.+)$", registry, flags=re.M)
        assert len(names) == 1, f"{path.name} is not in the registry"
        for name in names[0].split(", "):
            assert name in definitions(f"{TABLES}/families/{path.name}")
            assert re.search(rf"^    {name},$", registry, flags=re.M), f"{name} is not among FAMILIES"
