"""Prompts that are continued with the network in training: the tokens, the file, and where the positions end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.config import EvaluationConfig
from megatron.errors import ConfigError
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.tokenizer import build_tokenizer
from tests.helpers.vocabulary import write_vocabulary
from tests.train.samples import model_config
from trident.evaluate.scoring import Query, Score
from trident.evaluate.training.sample_prompts import Prompts, complete_greedily, open_prompts, read_prompts

END = 0


class CountingNetwork:
    """Puts one more than the last token after it, and the end after 9."""

    max_length = 9

    def __init__(self) -> None:
        self.asked: list[int] = []

    def score(self, queries: Sequence[Query], on_progress: object = None) -> list[Score]:
        self.asked.append(len(queries))
        found = []
        for query in queries:
            assert len(query.tokens) <= self.max_length
            before = query.tokens[query.first_target - 1 : -1]
            predicted = tuple(END if token == 9 else token + 1 for token in before)
            found.append(Score(0.0, len(predicted), False, predicted))
        return found


def test_continuations_end_with_the_document_the_positions_or_the_limit() -> None:
    network = CountingNetwork()
    prompts = [(7,), (1, 1, 1, 1, 1, 1), (3, 4), (9,)]
    found = complete_greedily(network, prompts, 4, END)
    assert found[0] == [8, 9] and found[2] == [5, 6, 7, 8] and found[3] == []
    assert found[1] == [2, 3, 4], "the network has eight positions, and says what follows the last"
    assert network.asked == [4, 3, 3, 1]


def test_prompts_are_read_and_shortened(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "prompts.txt", build_tokenizer(write_vocabulary(tmp_path))
    path.write_text(
        "one and two \n\n  \nand so on and so on and so on and so on and so on and so on and so on and so on\n"
    )
    evaluation = EvaluationConfig(sample_prompts=str(path), sample_tokens=30)
    model = model_config()
    prompts = open_prompts(evaluation, tokenizer, model, ParallelMesh.single())
    assert prompts is not None and prompts.texts[0] == "one and two " and len(prompts.texts) == 2
    assert len(prompts.tokens[1]) == model.max_position_embeddings // 2 and prompts.new_tokens == 30
    assert tokenizer.decode(prompts.tokens[0]) == "one and two "
    assert open_prompts(replace(evaluation, sample_prompts=None), tokenizer, model, ParallelMesh.single()) is None
    few = Prompts(("a",), ((3,),), 2)
    assert few.complete(CountingNetwork(), tokenizer) == [tokenizer.decode([4, 5])]


def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    for content, says in (
        (None, "prompts.txt cannot be read: No such file"),
        (b"\n \n", "holds 0 prompts, one per line. Give 1 to 64"),
        (b"a\n" * 65, "holds 65 prompts"),
        (b"caf\xe9\n", "is not UTF-8"),
        (b"a" * (1 << 20) + b"\n", "is larger than 1048576 bytes"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=says):
            read_prompts(path)
