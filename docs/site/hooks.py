"""Hooks of `mkdocs build`: add the generated pages, and point links into the site."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mkdocs.structure.files import File

from docs.site.flags_page import flags_page, programs_page
from docs.site.interface_pages import interface_pages
from docs.site.project_files import DOCS, PROJECT, linked_files, site_path, with_site_links

TROUBLESHOOTING = "troubleshooting.md"
PROJECT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md")  # of the navigation
# The weight of a page in searches: someone who searches for a message needs its cause first.
_SEARCH_WEIGHTS = ((TROUBLESHOOTING, 4), ("reference/flags.md", 2), ("reference/interfaces/", 0.2), (PROJECT, 0.2))


def _root(config: Any) -> Path:
    return Path(config.config_file_path).resolve().parent


def on_config(config: Any) -> Any:
    """Appends pages of docs/ that the navigation lacks, so that every page can be reached."""
    named = set(_paths(config.nav))
    left = [path.relative_to(config.docs_dir).as_posix() for path in sorted(Path(config.docs_dir).rglob("*.md"))]
    left = [path for path in left if path not in named]
    if left:
        config.nav.append({"More": left})
    return config


def _paths(nav: Any) -> Iterator[str]:
    """Yields the pages in a part of the navigation."""
    if isinstance(nav, str):
        yield nav
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _paths(part)


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the pages generated from the source code, and the project's files that pages link to."""
    root = _root(config)
    pages = {"reference/flags.md": flags_page(), "reference/programs.md": programs_page(root), **interface_pages(root)}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    for path in linked_files(root, PROJECT_PAGES):
        source = (root / path).read_bytes()
        text = with_site_links(source.decode("utf-8"), path, root) if path.endswith(".md") else source
        files.append(File.generated(config, site_path(path), content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Points links into the site, and weights the page in searches."""
    root, path = _root(config), page.file.src_uri
    weight = next((weight for start, weight in _SEARCH_WEIGHTS if path.startswith(start)), 1)
    page.meta.setdefault("search", {"boost": weight})
    is_of_docs = not path.startswith((PROJECT, "reference/"))
    return with_site_links(markdown, DOCS + path, root) if is_of_docs else markdown


def on_post_build(*, config: Any) -> None:
    """Removes the files that depend on the address of the site."""
    for name in ("404.html", "sitemap.xml", "sitemap.xml.gz"):
        Path(config.site_dir, name).unlink(missing_ok=True)
