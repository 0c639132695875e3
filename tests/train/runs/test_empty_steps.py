"""Steps and evaluations of which no token counts in the loss: they have none, change nothing, and are reported."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.observe.metrics_file import read_records
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.helpers.tiny_run import TinyCorpus, losses, steps, train, write_tiny_corpus

CURRICULUM = ["--curriculum-learning", "--curriculum-min-length", "8", "--curriculum-steps", "6"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def silent(corpus: TinyCorpus) -> TinyCorpus:
    """A corpus in which each token ends a document, so that with --eod-mask-loss no label counts."""
    choice = TokenizerChoice("GPT2BPETokenizer", corpus.vocab_file, corpus.merge_file)
    prefix = str(corpus.folder / "silent_text_document")
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(60):
            writer.add_document([np.full(40, build_tokenizer(choice).eod_id)])
    return dataclasses.replace(corpus, prefix=prefix)


def test_a_run_of_empty_steps_ends_with_an_error(silent: TinyCorpus, tmp_path: Path) -> None:
    flags = silent.flags("--eod-mask-loss", folder=tmp_path, train_iters=6, save_interval=4, eval_interval=4)
    code, text = train(flags)
    assert code == 65 and text.startswith("nothing was trained: no token counts in the loss in any of the 6 steps.")
    assert set(losses(tmp_path).values()) == {None}
    kept = steps(tmp_path, "gradient_norm", "empty_iterations", "skipped_iterations", "nan_iterations")
    assert set(kept.values()) == {(None, 1, 0, 0)}
    evaluated = [record for record in read_records(tmp_path / "run") if record["kind"] == "evaluation"]
    assert [(one["lm_loss"], one["perplexity"]) for one in evaluated] == [(None, None)]
    said = (tmp_path / "run" / "log.txt").read_text()
    assert said.count("warning: iteration 1 has no loss and did not change the weights: no token of its batch") == 1
    assert said.count("warning: the evaluation on valid has no loss: none of the tokens of its 8 samples counts") == 1
    assert "| lm loss: none |" in said and "| number of empty iterations:   1 |" in said

    code, text = train([*flags, "--eval-only"])
    assert code == 65 and text.startswith("nothing was evaluated: no token of the samples counts in the loss.")


def test_a_run_with_some_empty_steps_goes_on(corpus: TinyCorpus, silent: TinyCorpus, tmp_path: Path) -> None:
    flags = corpus.flags(folder=tmp_path, train_iters=8, micro_batch_size=1, global_batch_size=2, eval_iters=0)
    flags[flags.index(corpus.prefix) : flags.index(corpus.prefix) + 1] = ["0.2", corpus.prefix, "0.8", silent.prefix]
    assert train([*flags, "--eod-mask-loss"], world_size=2) == (0, "")
    found = losses(tmp_path)
    assert None in found.values() and any(found.values()) and len(found) == 8
    last = steps(tmp_path, "consumed_samples", "learning_rate")
    assert last[8][0] == 16 and len({rate for _, rate in last.values()}) > 5, "data and schedule go on"


@pytest.mark.parametrize("extra", [(), ("--reweight-loss-based-on-position-frequency",)])
def test_prefixes_leave_targets_within_a_curriculum(corpus: TinyCorpus, tmp_path: Path, extra: tuple[str, ...]) -> None:
    flags = corpus.flags("--objective", "prefix", "--loss-on-targets-only", *CURRICULUM, *extra, folder=tmp_path)
    assert train(flags) == (0, "")
    assert len(losses(tmp_path)) == 8 and None not in losses(tmp_path).values()
