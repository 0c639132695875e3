"""docs/compatibility.md states the versions that the code has; the files for visitors agree with the package."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import yaml

from megatron import __version__

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in re.findall(r"^\|.*`(?:megatron|trident)/.*\|$", PAGE, flags=re.M)
]
# The constant of a module that is the version in its row, where it is not FORMAT_VERSION.
CONSTANTS = {
    "megatron/data/datasets/examples/tokenized_examples.py": "_FORMAT",
    "megatron/data/order/index_map.py": "_BUILDER_INTERFACE",
    "megatron/kernels/native/library.py": "INTERFACE",
    "trident/convert/megatron_output/universal_output.py": "_FORMAT_VERSION",
}


def versions_in_the_code() -> dict[str, object]:
    """Every module of the packages that states a version of a format, and the version."""
    pattern = re.compile(r"^(?:_?FORMAT(?:_VERSION)?|_?(?:BUILDER_)?INTERFACE) = ([\d.]+)", flags=re.M)
    found = {}
    for path in sorted(path for root in ("megatron", "trident") for path in (ROOT / root).rglob("*.py")):
        if match := pattern.search(path.read_text()):
            found[path.relative_to(ROOT).as_posix()] = match.group(1)
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[-1].strip("`"))
def test_a_row_has_the_version_of_the_code(row: list[str]) -> None:
    name = row[-1].strip("`")
    module = importlib.import_module(name.removesuffix(".py").replace("/", "."))
    assert row[2] == str(getattr(module, CONSTANTS.get(name, "FORMAT_VERSION")))
    format_name = re.search(r"`format` `([\w-]+)`", row[1])
    assert format_name is None or format_name.group(1) == module.FORMAT


def test_no_format_of_the_code_is_missing() -> None:
    assert {row[-1].strip("`"): row[2] for row in ROWS} == versions_in_the_code()


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__ and citation["license"] == "Apache-2.0"
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    changes = re.findall(r"^## \[?([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert changes[0] == __version__, "the newest release of the changelog is this version"


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_issue_forms_are_what_the_host_understands(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert form["blank_issues_enabled"] is True
        return
    assert form["name"] and form["description"]
    kinds = {field["type"] for field in form["body"]}
    assert kinds <= {"textarea", "input", "dropdown", "checkboxes", "markdown"}
    identifiers = [field["id"] for field in form["body"]]
    assert len(set(identifiers)) == len(identifiers)
    for field in form["body"]:
        options = field["attributes"].get("options", ["one"])
        assert field["attributes"]["label"] and all(isinstance(option, (str, dict)) for option in options)
