"""TensorBoard tags and axes: upstream's dashboards must keep working."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint.record import Progress
from megatron.observe.destinations.tensorboard import TensorBoard, evaluation_scalars, step_scalars
from tests.train.samples import WORKLOAD, Measured, metrics, report_config

AXES = ("", " vs samples", " vs tokens")


def on(tag: str, *suffixes: str) -> set[str]:
    """A tag with each of its suffixes."""
    return {tag + suffix for suffix in suffixes}


ALWAYS = (
    {f"steps-vs-{what}/y=steps,x={what}" for what in ("samples", "tokens")}
    | {f"steps-vs-{what}/y={what},x=steps" for what in ("samples", "tokens")}
    | on("learning-rate/learning-rate", *AXES)
    | on("lm-loss-training/lm loss", *AXES, " vs gigaflos (without embeddings)")
    | on("grad-norm/grad-norm", *AXES)
)


def test_tags_of_a_plain_run() -> None:
    assert set(step_scalars(metrics(), report_config(), WORKLOAD)) == ALWAYS


def test_optional_tags_can_be_switched_off() -> None:
    config = report_config(log_learning_rate_to_tensorboard=False, log_loss_scale_to_tensorboard=False)
    found = step_scalars(metrics(loss_scale=2.0, gradient_norm=None), config, WORKLOAD)
    assert not [tag for tag in found if tag.startswith(("learning-rate", "loss-scale", "grad-norm"))]


def test_evaluation_tags() -> None:
    progress = Progress(7, 56, 896)
    tag = "lm-loss-validation/valid/lm loss validation"
    found = evaluation_scalars(progress, "valid", 1.0, report_config(), WORKLOAD)
    assert set(found) == on(tag, *AXES, " vs gigaflos (without embeddings)")
    config = report_config(log_validation_ppl_to_tensorboard=True)
    found = evaluation_scalars(progress, "valid", 0.0, config, WORKLOAD)
    assert found[tag + " ppl vs tokens"] == (1.0, 896)
    assert len(found) == 8


def test_the_events_file_reads_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoard(str(tmp_path), report_config(tensorboard_log_interval=2), WORKLOAD)
    writer.start(Progress(4), {"seed": 1234})
    for step in (5, 6, 7, 8):
        writer.step(metrics(iteration=step, lm_loss=float(step)))
    writer.interval(metrics())
    writer.skipped_batch(Progress(8, 72, 1152), {"step": 9}, 2)
    writer.failed_save(Progress(8, 64, 1024), 6, "the disk is full", 2)
    writer.evaluation(Progress(8, 64, 1024), "valid", 2.0)
    writer.evaluation(Progress(9, 72, 1152), "valid", None)
    writer.step(metrics(iteration=10, lm_loss=None, gradient_norm=None))
    writer.task(Progress(8, 64, 1024), Measured())
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("lm-loss-training/lm loss")] == [(6, 6.0), (8, 8.0)]
    assert [(event.step, event.value) for event in events.Scalars("iteration-time/world_size")] == [(4, 4.0), (5, 0.0)]
    assert [(event.step, event.value) for event in events.Scalars("passed-batches")] == [(9, 2.0)]
    assert [(event.step, event.value) for event in events.Scalars("failed-saves")] == [(6, 2.0)]
    for axis, x in (("", 8), (" vs samples", 64), (" vs tokens", 1024)):
        assert [(event.step, event.value) for event in events.Scalars(f"tasks/cloze/ppl{axis}")] == [(x, 7.5)]
    assert "seed/text_summary" in events.Tags()["tensors"]
    writer.close()
    assert len(list(tmp_path.glob("events*"))) == 1
