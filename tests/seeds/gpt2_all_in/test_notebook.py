"""The demo notebook runs from top to bottom."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.gpt2_all_in import train

NOTEBOOK = Path(train.__file__).with_name("demo.ipynb")
pytestmark = pytest.mark.full


@pytest.fixture
def kernel_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel is a separate process without this one's settings folder."""
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    monkeypatch.setenv("DS_ACCELERATOR", os.environ.get("DS_ACCELERATOR", "cpu"))
    yield


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, kernel_environment: None) -> None:
    nbformat = pytest.importorskip("nbformat", reason="notebooks are executed with nbclient")
    nbclient = pytest.importorskip("nbclient", reason="notebooks are executed with nbclient")
    pytest.importorskip("ipykernel", reason="notebooks are executed with ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is stored without outputs"
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    client.execute()
    texts = [
        "".join(output.get("text", "") for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    shown = "\n".join(texts)
    assert "Step: 40 | Loss: " in shown and "bigram" in shown and "sent 1 checkpoints" in shown
    assert texts[-1].strip().endswith("iter_0000050"), texts[-1]
