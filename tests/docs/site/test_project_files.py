"""Links from pages to files outside of docs/ lead to their copies in the site."""

from pathlib import Path

import pytest

from docs.site.project_files import linked_files, site_path, with_site_links


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with pages and files that link to one another."""
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    (tmp_path / "examples").mkdir()
    links = "[r](../README.md#train) `[c](../no.md)` [w](https://x.org) [gone](../no.md)"
    (tmp_path / "docs" / "data.md").write_text(links)
    (tmp_path / "docs" / "deep" / "page.md").write_text("[d](../data.md)\n```\n[e](../../no.md)\n```\n")
    (tmp_path / "README.md").write_text('[n](examples/demo.ipynb) [d](docs/data.md) <img src="docs/a.svg">')
    (tmp_path / "docs" / "a.svg").write_text("<svg/>")
    (tmp_path / "examples" / "demo.ipynb").write_text("{}")
    (tmp_path / "LICENSE").write_text("free")
    return tmp_path


def test_files_are_found_by_way_of_other_files(project: Path) -> None:
    assert linked_files(project) == ["README.md", "examples/demo.ipynb"]
    assert linked_files(project, ["LICENSE"]) == ["LICENSE", "README.md", "examples/demo.ipynb"]
    assert [site_path(path) for path in ("docs/data.md", "README.md")] == ["data.md", "project/README.md"]


def test_links_are_those_of_the_site(project: Path) -> None:
    text = (project / "docs" / "data.md").read_text()
    assert with_site_links(text, "docs/data.md", project) == text.replace("../README.md#", "project/README.md#")
    text = (project / "README.md").read_text()
    assert with_site_links(text, "README.md", project) == (
        '[n](examples/demo.ipynb) [d](../data.md) <img src="../a.svg">'
    )
    text = (project / "docs" / "deep" / "page.md").read_text()
    assert with_site_links(text, "docs/deep/page.md", project) == text, "links within docs and code stay"
