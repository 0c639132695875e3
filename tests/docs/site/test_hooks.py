"""The site is built without a warning, its links lead somewhere, it needs nothing from elsewhere, and search works."""

import os
import posixpath
import re
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.slow, pytest.mark.full]


@dataclass
class Page:
    """The anchors of a page, its links, and the files that it loads."""

    names: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)


class PageReader(HTMLParser):
    """Collects what is of interest in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.page = Page()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.page.names.update(found[name] for name in ("id", "name") if name in found)
        if tag == "a" and "href" in found:
            self.page.links.append(found["href"])
        elif tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            self.page.loads.append(found["href"])
        elif "src" in found:
            self.page.loads.append(found["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    for package in ("mkdocs", "material", "mkdocstrings_handlers"):
        pytest.importorskip(package, reason="pip install -e '.[docs]' builds the site")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    """The pages by their path in the site."""
    return {
        path.relative_to(site).as_posix(): PageReader(path.read_text(encoding="utf-8")).page
        for path in sorted(site.rglob("*.html"))
    }


def outside(address: str) -> bool:
    """Returns True if an address leads out of the site."""
    return re.match(r"[a-z]+:|//", address) is not None


def test_every_link_leads_to_a_page_and_a_place_in_it(site: Path, pages: dict[str, Page]) -> None:
    broken = []
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if outside(link):
                assert link.startswith(("https://", "mailto:", "http://localhost", "http://127.0.0.1")), (path, link)
                continue
            file = posixpath.normpath(posixpath.join(posixpath.dirname(path), target)) if target else path
            is_there = (site / file).is_file() and not target.startswith("/")
            if not is_there or (anchor and file in pages and anchor not in pages[file].names | {"__skip"}):
                broken.append((path, link))
    assert not broken, broken[:20]
    assert len(pages) > 40


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[str, Page]) -> None:
    for path, page in pages.items():
        for address in page.loads:
            assert not outside(address) or address.startswith("data:"), f"{path} loads {address}"
            assert not address.startswith("/"), f"{path} loads {address}, which is elsewhere under a sub-path"
            assert (site / posixpath.normpath(posixpath.join(posixpath.dirname(path), address))).is_file(), address
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", sheet.read_text(encoding="utf-8")), sheet


def test_every_page_of_docs_is_in_the_navigation(pages: dict[str, Page]) -> None:
    start = {posixpath.normpath(link.partition("#")[0]) for link in pages["index.html"].links if not outside(link)}
    named = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert named <= start | {"index.html"}, f"add to nav in mkdocs.yml: {sorted(named - start)}"
