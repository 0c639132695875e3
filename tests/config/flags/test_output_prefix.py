"""A prefix that is a folder is refused with a name that would do."""

from __future__ import annotations

import pytest

from megatron.config.flags.paths import prefix_problems


@pytest.mark.parametrize(
    ("inputs", "proposed"),
    [
        ((), "data/corpus"),
        (("texts/wiki.jsonl.gz", "b.jsonl"), "data/wiki"),
        (("texts/*.jsonl",), "data/corpus"),
        (("sqlite:///file.db?table=web",), "data/corpus"),
        (("-",), "data/corpus"),
    ],
)
def test_a_folder_is_no_prefix(inputs: tuple[str, ...], proposed: str) -> None:
    (text,) = prefix_problems("--output-prefix", "data/", "_text_document.bin", inputs)
    assert text.startswith(
        "--output-prefix data/ is a folder, not a prefix: files would be named data/_text_document.b"
    )
    assert text.endswith(f"for example --output-prefix {proposed}.")


def test_other_prefixes_are_taken_as_they_are() -> None:
    for prefix in ("data", "data/corpus", "data/.", "./x", ""):
        assert list(prefix_problems("--output-prefix", prefix, ".bin")) == []
