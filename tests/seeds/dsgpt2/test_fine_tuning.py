"""A network that is fine-tuned on questions and answers knows the answers, and learns only those."""

from __future__ import annotations

import pytest

from megatron.config import DataConfig
from megatron.data.build import build_split_datasets
from megatron.data.datasets.examples.example_options import ExampleOptions
from megatron.data.sources.source import DataRequest
from megatron.inference.loaded_model import open_checkpoint
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.chat import load_chat_template
from tests.seeds.conftest import LENGTH, FineTuning
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


def test_the_loss_counts_answers_only(fine_tuning: FineTuning) -> None:
    """dsGPT2's layout is `<usr> <s> q </s> <sys> <s> a </s>`: the answer and the token that ends it are learned."""
    tokenizer = fine_tuning.tokenizer()
    data = DataConfig(
        seq_length=LENGTH,
        train_data_path=(str(fine_tuning.folder / "train.jsonl"),),
        data_cache_path=str(fine_tuning.folder / "cache"),
    )
    options = ExampleOptions(chat_template="dsgpt2", on_targets_only=True)
    datasets, _ = build_split_datasets(DataRequest(data, LENGTH, 1, (24, 0, 0), tokenizer=tokenizer, examples=options))
    assert datasets.train is not None
    answers = dict(fine_tuning.pairs)
    for number in range(24):
        sample = datasets.train.read(number)
        text = tokenizer.decode(sample.tokens.tolist())
        question = text.partition("<usr><s>")[2].partition("</s>")[0]
        counted = tokenizer.decode(sample.tokens[1:][sample.loss_mask].tolist())
        assert counted == answers[question] + "</s>"
