"""What the real DeepSpeed writes is imported and resumed: losses continue as DeepSpeed's own resume does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.inspection import read_record
from megatron.convert.foreign import open_foreign
from megatron.convert.megatron_format.model import ForeignPieces
from megatron.convert.megatron_format.torch_files import Choices
from tests.convert.deepspeed_format.upstream_network import train_with_deepspeed
from tests.convert.foreign_files import VOCABULARY
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import TinyCorpus, losses, train, write_tiny_corpus
from tools.import_megatron import main

# The pipelines come last: DeepSpeed keeps their groups for every later engine of the process.
CASES = [("plain", 1, "fp32"), ("plain", 3, "fp32"), ("pipeline", 1, "fp32"), ("pipeline", 1, "bf16")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def written(corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    folder = tmp_path_factory.mktemp("deepspeed")
    results = run_ranks(train_with_deepspeed, 2, str(folder), corpus.flags(), CASES)
    return folder, results[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_of_deepspeed_is_continued(
    case: tuple[str, int, str], written: tuple[Path, list[list[float]]], corpus: TinyCorpus, tmp_path: Path
) -> None:
    folder, expected = written
    tokenizer = [
        "--tokenizer-type",
        "GPT2BPETokenizer",
        "--vocab-file",
        corpus.vocab_file,
        "--merge-file",
        corpus.merge_file,
    ]
    imported = tmp_path / "imported"
    source = folder / "-".join(map(str, case))
    assert main([str(source), "--save", str(imported), *tokenizer]) == 0
    record = read_record(imported / "iter_0000003")
    assert record["optimizer_updates"] == 3 and record["progress"]["consumed_samples"] == 12
    flags = ["--config", str(imported / "model.yaml"), "--load", str(imported), "--data-path", corpus.prefix]
    flags += ["--train-iters", "6", "--run-dir", str(tmp_path / "run"), "--log-interval", "1", "--eval-iters", "0"]
    flags += ["--data-cache-path", str(corpus.folder / "cache")]
    assert train(flags, world_size=1) == (0, "")
    ours = losses(tmp_path)
    tolerance = 3e-6 if case[2] == "fp32" else 5e-3
    theirs = dict(zip((4, 5, 6), expected[CASES.index(case)], strict=True))
    assert ours == pytest.approx(theirs, abs=tolerance)


def test_what_the_converter_of_deepspeed_makes_of_it_is_the_same(written: tuple[Path, list[list[float]]]) -> None:
    folder = written[0] / "pipeline-1-fp32"
    choices = Choices(VOCABULARY)
    engine, universal = open_foreign(folder, choices), open_foreign(folder / "universal" / "global_step3", choices)
    assert (engine.format, universal.format) == ("DeepSpeed", "DeepSpeed universal")
    universal.check()
    assert engine.state == universal.state and engine.parts.keys() == universal.parts.keys()
    pairs = zip(ForeignPieces(engine), ForeignPieces(universal), strict=True)
    assert all(one[0] == other[0] and torch.equal(one[1], other[1]) for one, other in pairs)
