"""The data of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from megatron import log
from megatron.checkpoint.record import Progress
from megatron.config import RunConfig, resolve_epochs
from megatron.config.run_sections import FILE, GIVEN
from megatron.config.schedule import global_batch_size, planned_samples
from megatron.data.build import (
    SplitDatasets,
    build_split_datasets,
    describe,
    empty_splits,
    epoch_samples,
    repetition_notices,
    source_usages,
)
from megatron.data.datasets.examples.example_options import ExampleOptions
from megatron.data.datasets.sample import SampleDataset
from megatron.data.loader import Batch, BatchLoader, BatchOptions
from megatron.data.order.plan import DataPlan
from megatron.data.read_ahead import ReadAhead
from megatron.data.sources.source import DataRequest
from megatron.parallel.agreement import run_on_all, run_on_first
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.tokenizer import Tokenizer
from megatron.train.objectives import batch_options, masked_options, samples_to_learn


class RunData:
    """The training and evaluation samples of this rank.

    Attributes:
        plan: the order of samples.
        source_names: the sources whose losses are reported separately, if any.
    """

    def __init__(
        self, config: RunConfig, mesh: ParallelMesh, tokenizer: Tokenizer, datasets: SplitDatasets, plan: DataPlan
    ) -> None:
        self.tokenizer = tokenizer
        self.datasets = datasets
        self.plan = plan
        separates_sources = config.report.log_per_source_loss
        self.source_names = plan.train.source_names() if separates_sources and plan.train else ()
        self._config = config
        self._mesh = mesh
        self._options = batch_options(config, tokenizer)
        self._ahead = ReadAhead()
        self._loader: BatchLoader | None = None
        self._loaded_length: int | None = None

    def train_batches(self, consumed_samples: int, length: int) -> Sequence[Batch]:
        """This rank's micro-batches of the global batch after `consumed_samples`.

        Args:
            length: tokens per sample.
        """
        if self.datasets.train is None:
            raise RuntimeError("this run has no training data")  # refused earlier by build_split_datasets
        config = self._config
        if self._loader is None:
            options = dataclasses.replace(self._options, sources=config.report.log_per_source_loss)
            self._loader, self._loaded_length = self.loader(self.datasets.train, options), config.data.seq_length
        if length != self._loaded_length:
            self._loader.read_from(samples_to_learn(self.datasets.train, config, self.tokenizer, length))
            self._loaded_length = length
        return self._loader.micro_batches(consumed_samples, global_batch_size(config.optim, consumed_samples))

    def loader(self, dataset: SampleDataset, options: BatchOptions | None = None) -> BatchLoader:
        """A loader of this rank's shard of a dataset, prepared for the objective; by default with the run's options."""
        return BatchLoader(
            samples_to_learn(dataset, self._config, self.tokenizer),
            micro_batch_size=self._config.optim.micro_batch_size,
            dp_rank=self._mesh.batch.rank,
            dp_size=self._mesh.batch.size,
            options=options or self._options,
            ahead=self._ahead if self._config.data.num_workers > 0 else None,
        )

    def evaluation_datasets(self, split: str) -> Mapping[str, SampleDataset]:
        return self.datasets.valid if split == "valid" else self.datasets.test

    def evaluation_samples(self, split: str, name: str) -> int:
        """Number of samples of a named group that each evaluation uses, always the first ones."""
        dataset, evaluation = self.evaluation_datasets(split)[name], self._config.evaluation
        count = evaluation.eval_iters * self._config.optim.global_batch_size
        if evaluation.full_validation and count:
            groups = self.plan.valid if split == "valid" else self.plan.test
            count = next(group for group in groups if group.name == name).pass_samples(self.plan.sequence_length)
        return min(len(dataset), count)

    def close(self) -> None:
        """Stops reading ahead."""
        if self._loader is not None:
            self._loader.close()
        self._ahead.close()


def with_epochs(config: RunConfig, mesh: ParallelMesh, tokenizer: Tokenizer) -> RunConfig:
    """Sets the length of a run with --epochs by counting the training data; collective over the mesh."""
    if config.finetuning.epochs is None or config.evaluation.eval_only:
        return config
    request = _data_request(config, tokenizer)
    count = run_on_first(mesh, lambda: epoch_samples(request))
    return resolve_epochs(config, count)


def open_data(
    config: RunConfig,
    mesh: ParallelMesh,
    tokenizer: Tokenizer,
    progress: Progress,
    stored: DataPlan | None,
    batch_skips: Sequence[int],
) -> RunData:
    """Opens the datasets, after one process per node has written missing index files; collective over the mesh.

    Args:
        progress: at the start of training.
        stored: the plan of the checkpoint that the run resumes from.
        batch_skips: the steps before which a batch is skipped.
    """
    consumed = progress.consumed_samples, progress.consumed_tokens
    train, valid, test = planned_samples(
        config.optim, config.evaluation, progress.step, *consumed, ranges=config.safety.skip_ranges
    )
    train += sum(step > progress.step for step in batch_skips) * config.optim.global_batch_size
    samples = (0 if config.evaluation.eval_only else train, valid, test)

    request = dataclasses.replace(
        _data_request(config, tokenizer), samples=samples, stored=stored, consumed=progress.consumed_samples
    )
    built: list[tuple[SplitDatasets, DataPlan]] = []

    def build_on_first_of_node() -> None:
        if mesh.local_rank == 0:
            built.append(build_split_datasets(request))

    run_on_all(mesh, build_on_first_of_node)
    datasets, plan = built[0] if built else build_split_datasets(dataclasses.replace(request, build_indices=False))
    for text in describe(datasets, plan):
        log.info(text)
    origins = {config.provenance.get(f"evaluation.{name}") for name in ("eval_interval", "eval_iters")}
    is_evaluated = not origins.isdisjoint((GIVEN, FILE))
    notices = empty_splits(config.data, plan, is_evaluated=is_evaluated) if valid != 0 else []
    if plan.train is not None and datasets.train is not None and config.finetuning.epochs is None:
        notices += repetition_notices(
            source_usages(plan.train, datasets.train, plan.sequence_length), plan.sequence_length
        )
    show_notices(notices, mesh)
    return RunData(config, mesh, tokenizer, datasets, plan)


def _data_request(config: RunConfig, tokenizer: Tokenizer) -> DataRequest:
    examples = ExampleOptions.of(config.finetuning, config.loss, config.data, config.optim)
    length, seed, masked = config.data.seq_length, config.random.seed, masked_options(config)
    return DataRequest(config.data, length, seed, tokenizer=tokenizer, examples=examples, masked=masked)


def show_notices(notices: Iterable[str], mesh: ParallelMesh) -> None:
    """Logs notices as warnings, on rank 0 only."""
    for notice in notices if mesh.world.rank == 0 else ():
        log.warning(notice)
