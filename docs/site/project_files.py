"""Links from the site to files of the project outside docs/: such files become a part of the site.

Markdown files become pages under `project/`, all others are copied there as they are.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

DOCS = "docs/"
PROJECT = "project/"

_LINK = re.compile(r"(?P<begin>\]\(|(?:src|href)=\")(?P<target>[^)#\s\"]+)(?P<anchor>#[^)\s\"]*)?(?P<end>\)|\")")
_FENCE = re.compile(r"(^```.*?^```[^\n]*$|`[^`\n]+`)", flags=re.MULTILINE | re.DOTALL)
_ADDRESS = re.compile(r"[a-z]+:", flags=re.IGNORECASE)


def linked_files(root: Path, first: Sequence[str] = ()) -> list[str]:
    """Files outside of docs/ that pages of the site link to, also by way of one another, as paths in the project.

    Args:
        first: files that are a part of the site in any case.
    """
    pages = [path.relative_to(root).as_posix() for path in sorted((root / DOCS).rglob("*.md"))]
    linked = list(first)
    pages += [path for path in first if path.endswith(".md")]
    while pages:
        page = pages.pop()
        for target in _targets(root, page):
            if not target.startswith(DOCS) and target not in linked:
                linked.append(target)
                if target.endswith(".md"):
                    pages.append(target)
    return sorted(linked)


def site_path(path: str) -> str:
    """The path of a file of the project in the sources of the site."""
    return path.removeprefix(DOCS) if path.startswith(DOCS) else PROJECT + path


def with_site_links(text: str, page: str, root: Path) -> str:
    """The text of a page with its links to files of the project as they are in the site.

    Args:
        page: its path in the project, such as `docs/data.md`.
    """
    here = posixpath.dirname(site_path(page))

    def replaced(link: re.Match[str]) -> str:
        path = _project_path(link["target"], page)
        if path is None or not (root / path).is_file():
            return link[0]
        target = posixpath.relpath(site_path(path), here or ".")
        return f"{link['begin']}{target}{link['anchor'] or ''}{link['end']}"

    return _outside_code(text, lambda part: _LINK.sub(replaced, part))


def _targets(root: Path, page: str) -> Iterator[str]:
    targets: list[str] = []

    def noted(part: str) -> str:
        targets.extend(link["target"] for link in _LINK.finditer(part))
        return part

    _outside_code((root / page).read_text(encoding="utf-8"), noted)
    for target in targets:
        path = _project_path(target, page)
        if path is not None and (root / path).is_file():
            yield path


def _project_path(target: str, page: str) -> str | None:
    """The path in the project that a link of a page leads to; None if it leads elsewhere."""
    if _ADDRESS.match(target) or target.startswith("/"):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    return None if path.startswith("..") else path


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    return "".join(part if part.startswith("`") else change(part) for part in _FENCE.split(text))
