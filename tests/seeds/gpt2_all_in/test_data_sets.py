"""A GPU configuration runs on a CPU with a warning; dataset full is streamed from a local data set."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.gpt2_all_in import train
from tests.helpers.projects.all_in_one import losses, write_config

pytestmark = pytest.mark.full

TINY = [
    *("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "32"),
    *("--micro-batch-size", "1", "--train-iters", "2", "--eval-iters", "0"),
]


def test_002_3_the_gpu_file_runs_on_a_cpu_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The file as it is, with a network that a CPU has the time for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert train.main(["--config", "gpu.json", *TINY]) == 0
    (run,) = Path("logs").glob("[a-z]*")
    assert len(losses(run)) == 2
    assert 'gpu.json: "trainer.device" is cuda, but this run uses cpu' in capfd.readouterr().err


def test_full_is_streamed_from_a_local_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that `datasets` saved, named like one of the hub; the second run takes the tokens that are there."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    texts = [f"The number {number * 7919 % 1000} comes before {number * 31 % 1000}. " * 12 for number in range(300)]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk("web")
    path = write_config(tmp_path, "full", trainer={"dataset": "hf://web"})
    words = ["--config", str(path), "--train-iters", "2", "--eval-iters", "0"]
    assert train.main(words) == 0
    (tokens,) = tmp_path.glob("logs/.full-hf-web/train_text_document.bin")
    made_at = tokens.stat().st_mtime_ns
    assert train.main(words) == 0
    assert tokens.stat().st_mtime_ns == made_at
    assert [len(losses(run)) for run in (tmp_path / "logs").glob("[a-z]*")] == [2, 2]
