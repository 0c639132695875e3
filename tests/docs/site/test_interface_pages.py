"""The pages of interfaces name modules that exist."""

from __future__ import annotations

import re
from pathlib import Path

from docs.site.interface_pages import interface_pages, missing_modules

ROOT = Path(__file__).resolve().parents[3]


def test_every_module_that_is_named_exists(tmp_path: Path) -> None:
    assert missing_modules(ROOT) == []
    assert "megatron.errors" in missing_modules(tmp_path)


def test_pages_and_their_index() -> None:
    pages = interface_pages(ROOT)
    index = pages.pop("reference/interfaces/index.md")
    assert len(pages) >= 8
    for path, text in pages.items():
        assert f"({path.rpartition('/')[2]})" in index
        modules = re.findall(r"^::: (megatron\.\S+)", text, flags=re.M)
        assert text.startswith("# ") and modules and len(modules) == len(set(modules))
