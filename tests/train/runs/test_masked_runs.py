"""Training on masked samples, from flags to losses: stopped, resumed in another layout, evaluated."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config import parse
from megatron.errors import ConfigError
from megatron.train.start_up import environment
from tests.data.datasets.masked.corpora import write_sentences, write_vocabulary
from tests.helpers.tiny_run import TinyCorpus, steps, train, write_tiny_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    """Documents of sentences with a WordPiece vocabulary."""
    folder = tmp_path_factory.mktemp("masked")
    return TinyCorpus(
        folder, write_sentences(folder / "tiny_text_sentence", 60).prefix, write_vocabulary(folder).vocab_file, ""
    )


def masked_flags(corpus: TinyCorpus, *more: str, **changes: object) -> list[str]:
    fixed = {"tokenizer_type": "BertWordPieceLowerCase", "merge_file": None, "objective": "masked", "eval_interval": 8}
    dropout = {"hidden_dropout": 0, "attention_dropout": 0}
    return corpus.flags("--bidirectional", "--masked-lm-head", *more, **fixed, **dropout, **changes)


def test_a_run_on_sentence_pairs_resumes_in_another_layout(corpus: TinyCorpus, tmp_path: Path) -> None:
    """Four steps take more samples than one pass has, so the order goes over its end as well."""
    changes = {"global_batch_size": 16, "train_iters": 4, "save_interval": 2, "eval_iters": 1}
    assert train(masked_flags(corpus, "--sentence-order-head", folder=tmp_path / "whole", **changes)) == (0, "")
    for ranks, stop in ((2, 2), (1, None)):
        flags = masked_flags(corpus, "--sentence-order-head", folder=tmp_path / "cut", exit_interval=stop, **changes)
        assert train(flags, ranks) == (0, "")
    whole, cut = (steps(tmp_path / name, "lm_loss", "consumed_samples") for name in ("whole", "cut"))
    assert sorted(whole) == sorted(cut) == [1, 2, 3, 4] and whole[4][1] == 64
    for step in whole:
        assert cut[step] == pytest.approx(whole[step], rel=1e-4)


def test_a_tokenizer_without_a_mask_token_is_refused_before_ranks_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "open_mesh", None)
    flags = write_tiny_corpus(tmp_path).flags("--bidirectional", objective="masked", masked_samples="stream")
    refused = pytest.raises(ConfigError, match=r"GPT2BPETokenizer has no mask token .* train a vocabulary")
    with refused, environment.open_environment(parse(flags)):
        pass
