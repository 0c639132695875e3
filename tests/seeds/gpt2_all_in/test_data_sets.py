"""A file for a GPU runs on a CPU with a warning, and dataset full is read from local shards."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from examples.gpt2_all_in import train
from megatron.config import parse_flags
from tests.helpers.projects.all_in_one import losses, write_config
from tools.corpus import featurize

DATA = Path(train.__file__).with_name("data")
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


def test_full_is_read_from_local_shards(tmp_path: Path) -> None:
    """Parquet windows in several files, each pass over all of them."""
    texts = [json.dumps({"text": f"the number {number} comes before {number + 1}. " * 8}) for number in range(40)]
    (tmp_path / "texts.jsonl").write_text("\n".join(texts))
    words = [
        *("--input", str(tmp_path / "texts.jsonl"), "--output-path", str(tmp_path / "full"), "--num-shards", "3"),
        *("--vocab-file", str(DATA / "vocab.json"), "--merge-file", str(DATA / "merges.txt"), "--no-overlap"),
        *("--min-sequence-length", "8", "--max-sequence-length", "32", "--num-workers", "1"),
    ]
    assert featurize.run(parse_flags(featurize.FeaturizeFlags, words)) == 0
    shards = sorted(tmp_path.glob("full-*"))
    assert len(shards) == 3
    path = write_config(tmp_path, "full", trainer={"dataset": f"{tmp_path}/full-*", "n_epochs": 2, "batch_size": 32})
    assert train.main(["--config", str(path), "--eval-iters", "1"]) == 0
    (run,) = (tmp_path / "logs").glob("[a-z]*")
    resolved = json.loads((run / "config.json").read_text())
    rows = resolved["optim"]["train_tokens"] // 32 // 2
    assert len(losses(run)) == math.ceil(2 * rows / 32) > 4 and losses(run)[-1] < losses(run)[0] - 1


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
