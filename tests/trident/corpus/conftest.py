"""Fixtures of the tests of corpora: a small tokenizer, and each parser of JSON."""

from __future__ import annotations

import pytest

from megatron.tokenizers.tokenizer import TokenizerChoice
from tests.helpers.vocabulary import write_vocabulary
from trident.corpus.inputs import lines as lines_module


@pytest.fixture(scope="module")
def choice(tmp_path_factory: pytest.TempPathFactory) -> TokenizerChoice:
    """A small byte-level tokenizer."""
    return write_vocabulary(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(params=["orjson", "standard library"])
def json_parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test with each parser of JSON (skipping orjson where it is not installed)."""
    if request.param == "orjson":
        pytest.importorskip("orjson")
    else:
        monkeypatch.setattr(lines_module, "_LOADS", lines_module._standard_loads)
