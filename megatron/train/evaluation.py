"""Validation and test losses, and the tasks of --eval-tasks.

Every evaluation uses the same first samples, weights losses by tokens, and leaves the training state unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron import log
from megatron.data.datasets.sample import SampleDataset
from megatron.errors import printable
from megatron.train.run import Run

_SHOWN_CHARACTERS = 120


def evaluate(run: Run, prefix: str, *, split: str = "valid") -> Mapping[str, float]:
    """Evaluates every named group of a split and reports its loss; runs the tasks with the validation split.

    Args:
        run: the run; its progress and data position stay as they are. Its `validation` is the mean over the groups.
        prefix: the point in training, for the log ("iteration 100").
        split: "valid" or "test".

    Returns:
        Mean loss per counted token, in nats, by group name; empty if the split is empty.
    """
    losses = {}
    for name, dataset in run.evaluation_datasets(split).items():
        count = run.evaluation_samples(split, name)
        if count == 0:  # a resumed plan may hold samples that --eval-iters 0 does not ask for
            continue
        run.watch.enter("evaluation", run.progress.step)
        losses[name] = mean_loss(run, dataset, count)
        run.report.evaluation(run.progress, name, prefix, losses[name])
    if split == "valid":
        evaluate_tasks(run, prefix)
        write_samples(run, prefix)
    if losses and split == "valid":
        run.validation = (run.progress.step, math.fsum(losses.values()) / len(losses))
    return losses


def evaluate_tasks(run: Run, prefix: str) -> None:
    """Runs the tasks of --eval-tasks on the network as it is, and reports their figures."""
    for task in run.tasks:
        run.watch.enter("evaluation", run.progress.step)
        run.report.task(run.progress, prefix, task.run(run.scorer()))


def write_samples(run: Run, prefix: str) -> None:
    """Continues the prompts of --sample-prompts with the network as it is, and shows and records the texts."""
    if run.prompts is None:
        return
    run.watch.enter("evaluation", run.progress.step)
    texts = run.prompts.complete(run.scorer(), run.tokenizer)
    for prompt, text in zip(run.prompts.texts, texts, strict=True):
        log.info(f"sample at {prefix}: {printable(prompt, _SHOWN_CHARACTERS)} -> {printable(text, _SHOWN_CHARACTERS)}")
    run.activity.sampled(run.progress.step, run.prompts.texts, texts)


def mean_loss(run: Run, dataset: SampleDataset, count: int) -> float:
    """Mean loss per token over the first `count` samples; the last global batch may be incomplete."""
    loss_sum, token_count = 0.0, 0
    batch_size = run.config.optim.global_batch_size
    run.engine.expect_length(run.config.data.seq_length)
    with run.loader(dataset) as loader:
        for first in range(0, count, batch_size):
            run.watch.beat()
            batch_sum, batch_tokens = run.engine.evaluate(loader.micro_batches(first, batch_size, count))
            loss_sum += batch_sum
            token_count += batch_tokens
    return loss_sum / max(token_count, 1)
