"""A killed run continues elsewhere from its copy; the demo notebook runs from top to bottom."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.gpt2_all_in import train
from tests.helpers.machines.fake_ssh import FakeSsh
from tests.helpers.projects.all_in_one import losses, train_in
from tools.runs import sync_run

NOTEBOOK = Path(train.__file__).with_name("demo.ipynb")
pytestmark = pytest.mark.full

STEPS = ("--train-iters", "8")


@pytest.mark.parametrize("way", ["directory", "ssh"])
def test_002_8_a_killed_run_goes_on_from_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, uninterrupted: list[float]
) -> None:
    """The run ends after step 5 with a checkpoint of step 4 and half of another; its machine is then gone."""
    ssh = FakeSsh(tmp_path / "ssh", monkeypatch)
    run = train_in(tmp_path / "first", *STEPS, "--exit-interval", "5", model=DROPOUT, ckpt_interval=2)
    shutil.rmtree(run / "ckpt" / "iter_0000005")
    half = run / "ckpt" / ".tmp-iter_0000006-0123456789abcdef"
    shutil.copytree(run / "ckpt" / "iter_0000004", half)
    to = str(ssh.home / "runs") if way == "directory" else "user@host:runs"
    assert sync_run.main([str(run), "--to", to]) == 0
    shutil.rmtree(tmp_path / "first")
    copy = ssh.home / "runs" / run.name
    assert not list((copy / "ckpt").glob(".tmp*"))
    assert train.main(["--resume", str(copy), "--exit-interval", "100"]) == 0
    assert losses(copy) == uninterrupted
    assert (copy / "ckpt" / "iter_0000008").is_dir()


DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(train_in(tmp_path_factory.mktemp("uninterrupted"), *STEPS, model=DROPOUT, ckpt_interval=2))


@pytest.fixture
def kernel_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel is a process of its own, without this one's settings folder."""
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
