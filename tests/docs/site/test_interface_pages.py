"""The pages of interfaces name modules that exist."""

from pathlib import Path

from docs.site.interface_pages import missing_modules

ROOT = Path(__file__).resolve().parents[3]


def test_every_module_that_is_named_exists(tmp_path: Path) -> None:
    assert missing_modules(ROOT) == []
    assert "megatron.errors" in missing_modules(tmp_path)
