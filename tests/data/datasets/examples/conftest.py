"""Fixtures of the tests of examples: files of conversations."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes records, one a line, and gives the path."""

    def written(records: Sequence[Any], name: str = "chat.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
        return str(path)

    return written
