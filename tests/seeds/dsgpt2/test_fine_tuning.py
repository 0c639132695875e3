"""A network that is fine-tuned on questions and answers gives the answers."""

from __future__ import annotations

import pytest

from megatron.inference.loaded_model import open_checkpoint
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.chat import load_chat_template
from tests.seeds.conftest import FineTuning
from trident.evaluate.loaded_scorer import LoadedScorer
from trident.evaluate.scoring import Query

pytestmark = pytest.mark.xdist_group("fine-tuning scenarios")  # one worker, so that the network is trained once

LEAST_ACCURACY = 0.95


def test_000_5_answers_of_the_training_pairs_are_learned(fine_tuning: FineTuning) -> None:
    loaded = open_checkpoint(str(fine_tuning.tuned), {}, ParallelMesh.single())
    assert loaded.config.finetuning.chat_template == "dsgpt2"
    template = load_chat_template("dsgpt2", None)
    queries = []
    for question, answer in fine_tuning.pairs:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        ids, is_answer = template.example_ids(messages, loaded.tokenizer)
        assert all(is_answer[is_answer.index(True) :])
        queries.append(Query(tuple(ids), is_answer.index(True)))
    right = [
        predicted == target
        for query, score in zip(queries, LoadedScorer(loaded).score(queries), strict=True)
        for predicted, target in zip(score.predicted, query.targets, strict=True)
    ]
    assert len(right) > 100 and sum(right) / len(right) >= LEAST_ACCURACY
