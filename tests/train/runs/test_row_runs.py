"""Training on rows, from flags to losses: Parquet windows in every layout, stopped and resumed, and what counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.window_names import shard_name
from tests.data.databases import Database, numbered
from tests.data.windows_files import padded_windows, write_windows
from tests.helpers.tiny_run import TinyCorpus, losses, saved_config, steps, train, write_tiny_corpus

pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")

LENGTH = 32


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    """The tiny corpus as windows, the start of each document, filled up where it is short; and a store of texts."""
    corpus = write_tiny_corpus(tmp_path_factory.mktemp("corpus"))
    documents = IndexedDataset(corpus.prefix)
    rows = [documents[number][:LENGTH].tolist() for number in range(len(documents))]
    for number in range(3):
        part = padded_windows(rows[20 * number : 20 * number + 20], LENGTH)
        write_windows(corpus.folder / shard_name("tiny.train", number, 3), part)
    texts = [f"the text of document {number} of the store" for number in range(50)]
    Database("sqlite", "", corpus.folder / "store.db").write({"web": numbered(texts)})
    return corpus


def test_a_run_on_windows_and_a_store_resumes_in_another_layout(corpus: TinyCorpus, tmp_path: Path) -> None:
    fields = ("lm_loss", "consumed_samples")
    blend = ("2", f"{corpus.folder}/tiny.train*", "1", f"sqlite:///{corpus.folder}/store.db?table=web")
    flags = {"data_path": blend, "hidden_dropout": 0, "attention_dropout": 0}
    assert train(corpus.flags(folder=tmp_path / "whole", **flags)) == (0, "")
    stopped = corpus.flags(folder=tmp_path / "cut", tensor_model_parallel_size=2, exit_interval=4, **flags)
    assert train(stopped, world_size=2) == (0, "")
    assert sorted(losses(tmp_path / "cut")) == [1, 2, 3, 4]
    assert train(corpus.flags(folder=tmp_path / "cut", **flags)) == (0, "")
    whole, cut = (steps(tmp_path / name, *fields) for name in ("whole", "cut"))
    assert sorted(whole) == sorted(cut) == list(range(1, 9))
    for step in whole:
        assert cut[step] == pytest.approx(whole[step], rel=1e-4)
    assert whole[8][0] < whole[1][0]


def test_mock_data_needs_no_files_and_resumes_in_another_layout(corpus: TinyCorpus, tmp_path: Path) -> None:
    fields = {"data_path": None, "vocab_file": None, "merge_file": None, "data_cache_path": None, "train_iters": 4}
    fields |= {"tokenizer_type": "NullTokenizer", "vocab_size": 512, "hidden_dropout": 0, "attention_dropout": 0}
    assert train(corpus.flags("--mock-data", folder=tmp_path / "whole", **fields)) == (0, "")
    cut = {"folder": tmp_path / "cut", **fields}
    assert train(corpus.flags("--mock-data", "--tensor-model-parallel-size", "2", exit_interval=2, **cut), 2) == (0, "")
    assert train(corpus.flags("--mock-data", **cut), 2) == (0, "")
    whole, cut = (steps(tmp_path / name, "lm_loss", "consumed_samples") for name in ("whole", "cut"))
    assert sorted(whole) == sorted(cut) == [1, 2, 3, 4]
    for step in whole:
        assert cut[step] == pytest.approx(whole[step], rel=1e-4)
    config = saved_config(tmp_path / "cut")
    assert (config.model.vocab_size, config.data.data_path) == (512, ("mock:",))
    assert "test" in (tmp_path / "whole" / "run" / "log.txt").read_text()


@pytest.mark.full
def test_epochs_are_passes_over_the_rows_and_may_be_raised_at_a_resume(corpus: TinyCorpus, tmp_path: Path) -> None:
    """Of 60 rows, 48 train: in batches of 20, two passes take five steps, of which the last begins a third pass."""
    flags = {
        "data_path": f"{corpus.folder}/tiny.train*", "train_iters": None, "lr_decay_style": "constant",
        "global_batch_size": 20, "hidden_dropout": 0, "attention_dropout": 0, "save_interval": 5,
    }  # fmt: skip
    once, twice = (corpus.flags(folder=tmp_path / "raised", epochs=epochs, **flags) for epochs in (1, 2))
    assert train(once) == (0, "") and max(losses(tmp_path / "raised")) == 3
    assert train(corpus.flags(folder=tmp_path / "whole", epochs=2, **flags)) == (0, "")
    assert train(twice, 2) == (0, "")
    whole, raised = (steps(tmp_path / name, "consumed_samples", "learning_rate") for name in ("whole", "raised"))
    assert whole[5][0] == raised[5][0] == 100 and max(whole) == max(raised) == 5
    log = (tmp_path / "whole" / "run" / "log.txt").read_text()
    assert "epoch 1/2 is complete after iteration 3" in log and "epoch 2/2 is complete after iteration 5" in log
