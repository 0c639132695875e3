"""docs/compatibility.md states the versions that the code has; the files for visitors agree with the package."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from megatron import __version__

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in re.findall(r"^\|.*`(?:megatron|trident)/.*\|$", PAGE, flags=re.M)
]


def versions_in_the_code() -> dict[str, object]:
    """Every module of the packages that states a version of a format, and the version."""
    pattern = re.compile(r"^(?:_?FORMAT(?:_VERSION)?|_?(?:BUILDER_)?INTERFACE) = ([\d.]+)", flags=re.M)
    found = {}
    for path in sorted(path for root in ("megatron", "trident") for path in (ROOT / root).rglob("*.py")):
        if match := pattern.search(path.read_text()):
            found[path.relative_to(ROOT).as_posix()] = match.group(1)
    return found


def test_no_format_of_the_code_is_missing() -> None:
    assert {row[-1].strip("`"): row[2] for row in ROWS} == versions_in_the_code()


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__ and citation["license"] == "Apache-2.0"
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    changes = re.findall(r"^## \[?([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert changes[0] == __version__, "the newest release of the changelog is this version"
