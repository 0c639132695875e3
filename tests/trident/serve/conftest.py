"""The model that the tests of the server share."""

from __future__ import annotations

import pytest

from tests.trident.serve.fakes import served_by
from trident.serve.requests.served_model import ServedModel


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """A model with the tests' small vocabulary and no special tokens."""
    return served_by(tmp_path_factory.mktemp("served"))
