"""Folders with tiny models and with their imported checkpoints, written once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trident.convert.tiny_models import write_tiny_model
from trident.convert.hugging_face.importing import ModelImportRequest, import_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model by its name in `TINY_MODELS`; written when it is first asked for."""
    folders: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in folders:
            folders[name] = write_tiny_model(name, tmp_path_factory.mktemp(name))
        return folders[name]

    return folder_of


@pytest.fixture(scope="session")
def imported_model(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The folder of a tiny model's checkpoint by its name; imported when it is first asked for."""
    folders: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in folders:
            target = tmp_path_factory.mktemp(f"imported-{name}") / "checkpoints"
            folders[name] = import_model(ModelImportRequest(tiny_model(name), target))
        return folders[name]

    return folder_of
