"""A run: all its parts, and the one value that changes at every step."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron import log
from megatron.checkpoint import CheckpointLock
from megatron.checkpoint.background.writer import BackgroundWriter
from megatron.checkpoint.record import Progress
from megatron.checkpoint.saving import AfterCommit
from megatron.config import RunConfig
from megatron.config.schedule import global_batch_size, is_done, samples_per_epoch
from megatron.data.datasets.build import SplitDatasets
from megatron.data.datasets.sample import SampleDataset
from megatron.data.loader import Batch, BatchLoader, BatchOptions
from megatron.data.order.plan import DataPlan
from megatron.data.read_ahead import ReadAhead
from megatron.device import Elapsed
from megatron.engine.engine import Engine
from megatron.objective.language_model import LanguageModelObjective
from megatron.observe.activity.activity import Activity
from megatron.observe.profiling.step_profiler import StepProfiler
from megatron.observe.report import Report
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.pending import PendingMaximum
from megatron.tokenizers.tokenizer import Tokenizer
from megatron.train.restarts.history import History
from megatron.train.restarts.identity import RunIdentity
from megatron.train.skip import PassedBatch, pass_batches, skip_data
from megatron.train.stop import StopRules, Verdict
from megatron.train.tasks.completing import SamplePrompts
from megatron.train.tasks.opening import TrainingTask
from megatron.train.tasks.scorer import EngineScorer
from megatron.train.watchdog import Watch


@dataclass
class Run:
    """All parts of a run. `progress` changes at every step.

    Attributes:
        steps_in_flight: number of steps whose metrics and stop verdicts may still be pending while the next step is
            trained: one on a GPU, so that the host does not wait for the device, and none on a CPU, where it would not
            help.
        writer: saves in the background; None if each save holds up training until it is written.
        saved_step: step of the last checkpoint that is committed.
        failed_saves: consecutive failures of the file system.
        after_commit: what follows each save, on every rank: in the writer's thread, or in this one without a writer.
        validation: step and loss of the last evaluation of the validation split.
        save_failure: why no more checkpoints can be saved in the background; this rank may know before others do.
        passes: the steps before which a batch is passed over, because starts of the run ended on it in NaN.
        passed_batches: those that were, in order; part of the record.
        tasks: those of --eval-tasks.
        student: the objective to go on with when the distillation ends; None if the run has no teacher.
        profiler: records the steps of --profile.
        prompts: those of --sample-prompts.
        activity: what the run tells those who watch it.
    """

    config: RunConfig
    mesh: ParallelMesh
    tokenizer: Tokenizer
    engine: Engine
    datasets: SplitDatasets
    plan: DataPlan
    options: BatchOptions
    report: Report
    rules: StopRules
    lock: CheckpointLock | None
    progress: Progress
    steps_in_flight: int = 0
    saved_step: int | None = None
    failed_saves: int = 0
    writer: BackgroundWriter | None = None
    save_failure: Exception | None = None
    after_commit: AfterCommit | None = None
    profiler: StepProfiler = field(default_factory=StepProfiler.idle)
    validation: tuple[int, float] | None = None
    _ahead: ReadAhead = field(default_factory=ReadAhead)
    identity: RunIdentity = field(default_factory=RunIdentity)
    history: History = field(default_factory=History)
    passes: tuple[int, ...] = ()
    passed_batches: tuple[PassedBatch, ...] = ()
    tasks: tuple[TrainingTask, ...] = ()
    student: LanguageModelObjective | None = None
    prompts: SamplePrompts | None = None
    activity: Activity = field(default_factory=Activity)
    watch: Watch = field(default_factory=Watch)
    _loader: BatchLoader | None = None
    _verdicts: deque[PendingMaximum] = field(default_factory=deque)

    @property
    def is_done(self) -> bool:
        """Whether the planned training is finished."""
        ranges, done = self.config.control.skip_ranges, self.progress
        return is_done(self.config.optim, done.step, done.consumed_samples, ranges, done.consumed_tokens)

    @property
    def next_length(self) -> int:
        """Tokens of each sample in the next step; fewer than --seq-length early in a curriculum."""
        return self.config.optim.length_of_step(self.progress.step + 1)

    def train_batches(self) -> Sequence[Batch | None]:
        """This rank's micro-batches of the next global batch; None for each on middle pipeline stages."""
        if self.datasets.train is None:
            raise RuntimeError("this run has no training data")  # build_split_datasets refuses it before
        if self._loader is None:
            options = dataclasses.replace(self.options, sources=self.config.control.log_per_source_loss)
            self._loader = self.loader(self.datasets.train, options)
        size = global_batch_size(self.config.optim, self.progress.consumed_samples)
        batches = self._loader.micro_batches(self.progress.consumed_samples, size)
        if self.next_length == self.config.data.seq_length:
            return batches
        return [None if batch is None else batch.shortened(self.next_length) for batch in batches]

    def loader(self, dataset: SampleDataset, options: BatchOptions | None = None) -> BatchLoader:
        """A loader of this rank's shard of a dataset; `options` defaults to the run's."""
        return BatchLoader(
            dataset,
            micro_batch_size=self.config.optim.micro_batch_size,
            dp_rank=self.mesh.batch.rank,
            dp_size=self.mesh.batch.size,
            options=options or self.options,
            ahead=self._ahead if self.config.data.num_workers > 0 else None,
            reads=self.mesh.is_first_stage or self.mesh.is_last_stage,
        )

    def skip_data_ranges(self) -> None:
        """Skips the data of `--skip-train-iteration-range`, and that of failed starts, without training on it."""
        ranges, length = self.config.control.skip_ranges, self.next_length
        self.progress = skip_data(self.progress, self.config.optim, ranges, length)
        self.progress, passed = pass_batches(self.progress, self.config.optim, self.passes, length)
        self.passed_batches += passed
        for number, batch in enumerate(passed, start=len(self.passed_batches) - len(passed) + 1):
            self.report.passed(self.progress, batch, number)

    def end_distillation(self) -> None:
        """Goes on without the teacher, which is freed, once the steps of --kd-iters are trained."""
        if self.student is not None and self.config.distillation.is_over(self.progress.step):
            log.info(f"the distillation ends after iteration {self.progress.step}: the labels alone are trained on")
            self.engine.objective, self.student = self.student, None

    def completed_epoch(self, consumed_before: int) -> bool:
        """Whether the last step completed a pass of --epochs over the training data. Logs it; of passes shorter than
        the interval between log lines, only those that complete beside one, and the last.

        Args:
            consumed_before: samples that were consumed before the step.
        """
        epochs, optim = self.config.finetuning.epochs, self.config.optim
        samples = samples_per_epoch(epochs, optim)
        if epochs is None or samples is None:
            return False
        completed = self.progress.consumed_samples // samples
        if completed <= consumed_before // samples:
            return False
        is_long = samples >= self.config.control.log_interval * optim.global_batch_size
        if is_long or self.is_done or self.is_due(self.config.control.log_interval):
            log.info(f"epoch {min(completed, epochs)}/{epochs} is complete after iteration {self.progress.step}")
        return True

    def take_messages(self) -> Elapsed | None:
        """What the messages of the last step took; None if they are not timed."""
        return None if self.mesh.stopwatch is None else self.mesh.stopwatch.take()

    def is_due(self, interval: int | None) -> bool:
        """Whether an action that runs every `interval` steps is due after this one."""
        return bool(interval) and self.progress.step % (interval or 1) == 0

    def should_stop(self) -> Verdict:
        """The verdict, common to all ranks, on whether the run ends after this step.

        It takes effect at the same step on all ranks, at most `steps_in_flight` steps after a rank reached it;
        --exit-interval, which every rank evaluates identically, takes effect at once.
        """
        own = self.rules.verdict(self.progress.step)
        if self.save_failure is not None:
            own = max(own, Verdict.FAILED_SAVE)
        self._verdicts.append(PendingMaximum(int(own), self.mesh.control))
        keep = 0 if self.rules.is_interval_over(self.progress.step) else self.steps_in_flight
        verdict = Verdict.CONTINUE
        while len(self._verdicts) > keep:
            verdict = max(verdict, Verdict(self._verdicts.popleft().wait()))
        return verdict

    def evaluation_datasets(self, split: str) -> Mapping[str, SampleDataset]:
        """The named groups of the validation or test split."""
        return self.datasets.valid if split == "valid" else self.datasets.test

    def evaluation_samples(self, split: str, name: str) -> int:
        """How many samples of a named group an evaluation sees, the same first ones each time."""
        dataset, control = self.evaluation_datasets(split)[name], self.config.control
        wanted = control.eval_iters * self.config.optim.global_batch_size
        if control.full_validation and wanted:
            groups = self.plan.valid if split == "valid" else self.plan.test
            wanted = next(group for group in groups if group.name == name).pass_samples(self.plan.sequence_length)
        return min(len(dataset), wanted)

    def scorer(self) -> EngineScorer:
        """Scores queries with the network as it is."""
        batch_tokens = self.config.optim.micro_batch_size * self.config.data.seq_length
        return EngineScorer(self.engine, self.config.model, batch_tokens, self.watch.beat)

    def close(self) -> None:
        """Stops reading ahead."""
        self._verdicts.clear()
        if self._loader is not None:
            self._loader.close()
        self._ahead.close()
