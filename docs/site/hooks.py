"""What `mkdocs build` calls: adds the generated pages, and finishes those that are partly generated."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mkdocs.structure.files import File

from docs.site.flags_page import flags_page, programs_page
from docs.site.interface_pages import interface_pages
from docs.site.messages import read_messages
from docs.site.project_files import DOCS, PROJECT, linked_files, site_path, with_site_links
from docs.site.topics import assign, page_with_messages, read_topics

TROUBLESHOOTING = "troubleshooting.md"
PROJECT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md")  # of the navigation
# How much more or less than others a page counts in a search: who looks for a sentence wants to know what it means.
_SEARCH_WEIGHTS = ((TROUBLESHOOTING, 4), ("reference/flags.md", 2), ("reference/interfaces/", 0.2), (PROJECT, 0.2))


def _root(config: Any) -> Path:
    return Path(config.config_file_path).resolve().parent


def on_config(config: Any) -> Any:
    """Adds pages of docs/ that the navigation does not name yet at its end, so that none is out of reach."""
    named = set(_paths(config.nav))
    left = [path.relative_to(config.docs_dir).as_posix() for path in sorted(Path(config.docs_dir).rglob("*.md"))]
    left = [path for path in left if path not in named]
    if left:
        config.nav.append({"More": left})
    return config


def _paths(nav: Any) -> Iterator[str]:
    """The pages that a part of the navigation names."""
    if isinstance(nav, str):
        yield nav
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _paths(part)


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the pages that are made from the source code, and the files of the project that pages link to."""
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
    """Points links into the site, and lists the messages of each paragraph about errors."""
    root, path = _root(config), page.file.src_uri
    weight = next((weight for start, weight in _SEARCH_WEIGHTS if path.startswith(start)), 1)
    page.meta.setdefault("search", {"boost": weight})
    if path == TROUBLESHOOTING:
        source = read_messages(root)
        by_topic, _ = assign(source.messages, read_topics(markdown))
        markdown = page_with_messages(markdown, by_topic, source.exit_codes)
    is_of_docs = not path.startswith((PROJECT, "reference/"))
    return with_site_links(markdown, DOCS + path, root) if is_of_docs else markdown


def on_post_build(*, config: Any) -> None:
    """Removes what would have to know the address that the site is found under."""
    for name in ("404.html", "sitemap.xml", "sitemap.xml.gz"):
        Path(config.site_dir, name).unlink(missing_ok=True)
