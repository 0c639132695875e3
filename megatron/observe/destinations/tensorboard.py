"""TensorBoard scalars under upstream's tags; the only file that imports `torch.utils.tensorboard`.

The x axis is the iteration unless the tag says `vs samples`, `vs tokens` or `vs gigaflos (without embeddings)`.

Source: tags of bigscience-workshop/Megatron-DeepSpeed, megatron/training.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.record import Progress
from megatron.config import ReportConfig
from megatron.errors import ConfigError, StorageError
from megatron.objective.metric import StepMetrics
from megatron.observe.console import perplexity
from megatron.observe.metrics import TaskOutcome
from megatron.observe.names import named
from megatron.observe.speed import Workload


class TensorBoard:
    """Writes one events file; created only on the process that writes files.

    Args:
        directory: folder of the events file (--tensorboard-dir).
        config: optional tags, interval, and queue size.
        workload: for rates per replica.
        loss_tags: additional tags of the training and the validation loss.

    Raises:
        ConfigError: TensorBoard is not installed.
        StorageError: the folder cannot be written.
    """

    is_buffered = True

    def __init__(
        self, directory: str, config: ReportConfig, workload: Workload, loss_tags: tuple[str, str] | None = None
    ) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as failure:
            raise _missing(directory, f"cannot be imported ({failure})") from failure
        self.name = f"TensorBoard in {directory}"
        self.config = config
        self.workload = workload
        self.loss_tags = loss_tags
        try:
            self._writer: Any = SummaryWriter(log_dir=directory, max_queue=config.tensorboard_queue_size)
        except OSError as failure:
            reason = failure.strerror or failure
            raise StorageError(
                f"--tensorboard-dir {directory} cannot be written: {reason}. Use a writable folder."
            ) from failure

    def start(self, progress: Progress, arguments: Mapping[str, Any]) -> None:
        """Writes the arguments, and marks the restart: world size at the loaded iteration, 0 at the next one."""
        for name, value in arguments.items():
            self._writer.add_text(name, str(value), global_step=progress.step)
        self._writer.add_scalar("iteration-time/world_size", self.workload.device_count, progress.step)
        self._writer.add_scalar("iteration-time/world_size", 0, progress.step + 1)
        self._writer.flush()

    def step(self, metrics: StepMetrics) -> None:
        """Writes a step's scalars every --tensorboard-log-interval steps."""
        if metrics.value("iteration") % max(1, self.config.tensorboard_log_interval) == 0:
            self._write(step_scalars(metrics, self.config, self.workload, self.loss_tags))

    def interval(self, metrics: StepMetrics) -> None:
        """Flushes, so that a kill loses nothing that was printed on the console."""
        self._writer.flush()

    def evaluation(self, progress: Progress, group: str, loss: float | None) -> None:
        """Writes a validation or test loss, if there is one."""
        if loss is not None:
            self._write(evaluation_scalars(progress, group, loss, self.config, self.workload, self.loss_tags))
        self._writer.flush()

    def task(self, progress: Progress, task: TaskOutcome) -> None:
        for metric, value in task.figures.items():
            self._write(_on_axes(f"tasks/{task.name}/{metric}", value, progress, self.workload))
        self._writer.flush()

    def skipped_batch(self, progress: Progress, batch: Mapping[str, int], number: int) -> None:
        self._write({"passed-batches": (number, batch["step"])})

    def failed_save(self, progress: Progress, step: int, reason: str, number: int) -> None:
        self._write({"failed-saves": (number, step)})

    def close(self) -> None:
        self._writer.close()

    def _write(self, scalars: Mapping[str, tuple[float, int]]) -> None:
        for tag, (value, x) in scalars.items():
            self._writer.add_scalar(tag, value, x)


def check_tensorboard(directory: str) -> None:
    """Checks that TensorBoard is installed, without importing it, which takes a second.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise _missing(directory, "is not installed")


def _missing(directory: str, what: str) -> ConfigError:
    return ConfigError(
        f"--tensorboard-dir {directory} requires the package tensorboard, which {what}. Install it with: pip install "
        "tensorboard"
    )


def step_scalars(
    metrics: StepMetrics, config: ReportConfig, workload: Workload, loss_tags: tuple[str, str] | None = None
) -> dict[str, tuple[float, int]]:
    """Tag -> (value, x) of one step."""
    progress = Progress(*map(metrics.value, ("iteration", "consumed_samples", "consumed_tokens")))
    scalars: dict[str, tuple[float, int]] = {
        "steps-vs-samples/y=steps,x=samples": (progress.step, progress.consumed_samples),
        "steps-vs-samples/y=samples,x=steps": (progress.consumed_samples, progress.step),
        "steps-vs-tokens/y=steps,x=tokens": (progress.step, progress.consumed_tokens),
        "steps-vs-tokens/y=tokens,x=steps": (progress.consumed_tokens, progress.step),
    }
    is_on = {
        "learning-rate": config.log_learning_rate_to_tensorboard,
        "batch-size": config.log_batch_size_to_tensorboard,
        "loss-scale": config.log_loss_scale_to_tensorboard,
        "iteration-time": config.log_timers_to_tensorboard,
    }
    for tag, value in named(metrics, "tensorboard"):
        family, _, name = tag.partition("/")
        if not is_on.get(family, True):
            continue
        if family != "iteration-time" or name == family:
            scalars |= _on_axes(tag, value, progress, workload)
            continue
        scalars[tag] = (value / 2**30 if name.endswith("(GiB)") else value, progress.step)
        if name in ("samples per second", "tokens per second"):
            scalars[f"{tag} per replica"] = (value / workload.replica_count, progress.step)
    loss = metrics.value("lm_loss")
    if loss_tags is not None and loss is not None:
        scalars[loss_tags[0]] = (loss, progress.step)
    return scalars


def evaluation_scalars(
    progress: Progress,
    group: str,
    loss: float,
    config: ReportConfig,
    workload: Workload,
    loss_tags: tuple[str, str] | None = None,
) -> dict[str, tuple[float, int]]:
    """Tag -> (value, x) of one evaluation."""
    scalars = _on_axes(f"lm-loss-validation/{group}/lm loss validation", loss, progress, workload)
    if config.log_validation_ppl_to_tensorboard:
        scalars |= _on_axes(f"lm-loss-validation/{group}/lm loss validation ppl", perplexity(loss), progress, workload)
    if loss_tags is not None and group == "valid":
        scalars[loss_tags[1]] = (loss, progress.step)
    return scalars


def _on_axes(tag: str, value: float, progress: Progress, workload: Workload) -> dict[str, tuple[float, int]]:
    """A value over all x axes that upstream uses for its tag."""
    scalars = {tag: (value, progress.step), f"{tag} vs samples": (value, progress.consumed_samples)}
    if not tag.startswith("batch-size/"):
        scalars[f"{tag} vs tokens"] = (value, progress.consumed_tokens)
    if tag.startswith("lm-loss-"):
        gigaflops = int(workload.gigaflops_without_embeddings(progress.consumed_tokens))
        scalars[f"{tag} vs gigaflos (without embeddings)"] = (value, gigaflops)
    return scalars
