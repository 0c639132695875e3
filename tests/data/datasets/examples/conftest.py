"""Fixtures of the tests of examples: a tokenizer, and files of conversations."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.tokenizers.library import Tokenizer
from megatron.tokenizers.tokenizer import build_tokenizer
from tests.helpers.vocabulary import write_vocabulary


@pytest.fixture(scope="package")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return build_tokenizer(write_vocabulary(tmp_path_factory.mktemp("vocabulary"), 400))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes records, one a line, and gives the path."""

    def written(records: Sequence[Any], name: str = "chat.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
        return str(path)

    return written
