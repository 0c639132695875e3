"""TensorBoard tags and axes: upstream's dashboards must keep working."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint.record import Progress
from megatron.observe.destinations.tensorboard import TensorBoard, evaluation_scalars, step_scalars
from megatron.observe.metrics import SourceLoss
from megatron.observe.routing import RoutingFigures
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
OPTIONAL = (
    on("batch-size/batch-size", "", " vs samples")
    | on("loss-scale/loss-scale", *AXES)
    | on("iteration-time/iteration-time", *AXES)
    | on("iteration-time/", "samples per second", "samples per second per replica", "tokens per second")
    | on("iteration-time/", "tokens per second per replica", "TFLOPs per gpu (estimated)")
)


def test_tags_of_a_plain_run() -> None:
    assert set(step_scalars(metrics(), report_config(), WORKLOAD)) == ALWAYS


def test_tags_of_a_run_with_everything() -> None:
    config = report_config(log_timers_to_tensorboard=True, log_batch_size_to_tensorboard=True)
    full = metrics(loss_scale=2.0)
    assert set(step_scalars(full, config, WORKLOAD)) == ALWAYS | OPTIONAL


def test_what_is_known_of_waits_and_the_use_of_devices_is_a_curve() -> None:
    config = report_config(log_timers_to_tensorboard=True)
    known = metrics(model_flops_utilization_ratio=0.4, data_wait_seconds=0.1, bubble_ratio=0.2, memory_bytes=2**31)
    found = step_scalars(known, config, WORKLOAD)
    assert found["iteration-time/model FLOPs utilization"] == (0.4, 7)
    assert found["iteration-time/data wait"] == (0.1, 7)
    assert found["iteration-time/pipeline bubble"] == (0.2, 7)
    assert found["iteration-time/memory (GiB)"] == (2.0, 7)
    assert "iteration-time/communication" not in found


def test_optional_tags_can_be_switched_off() -> None:
    config = report_config(log_learning_rate_to_tensorboard=False, log_loss_scale_to_tensorboard=False)
    found = step_scalars(metrics(loss_scale=2.0, gradient_norm=None), config, WORKLOAD)
    assert not [tag for tag in found if tag.startswith(("learning-rate", "loss-scale", "grad-norm"))]


def test_a_source_has_a_curve_of_its_own() -> None:
    found = step_scalars(metrics(source_losses={"web": SourceLoss(3.0, 2)}), report_config(), WORKLOAD)
    assert found["lm-loss-training-by-source/web"] == (3.0, 7)
    assert found["lm-loss-training-by-source/web vs tokens"] == (3.0, 896)


def test_every_depth_has_a_curve() -> None:
    found = step_scalars(metrics(mtp_losses={"mtp_1": 5.5, "mtp_2": 6.25}), report_config(), WORKLOAD)
    assert [found[f"lm-loss-training/mtp_{depth} loss"] for depth in (1, 2)] == [(5.5, 7), (6.25, 7)]


def test_the_z_loss_is_a_curve_only_if_there_is_one() -> None:
    assert step_scalars(metrics(z_loss=0.5), report_config(), WORKLOAD)["lm-loss-training/z loss"] == (0.5, 7)
    assert "lm-loss-training/z loss" not in step_scalars(metrics(), report_config(), WORKLOAD)


def test_norms_of_weights_are_curves_where_they_were_measured() -> None:
    found = step_scalars(metrics(weight_norm=5.0, weight_norms={"a": 3.0, "b": 4.0}), report_config(), WORKLOAD)
    assert found["params-norm/params-norm"] == (5.0, 7) and found["params-norm-by-layer/b"] == (4.0, 7)
    assert not [tag for tag in step_scalars(metrics(), report_config(), WORKLOAD) if tag.startswith("params-norm")]
    found = step_scalars(metrics(gradient_norms={"a": 3.0}, gradient_zeros=5), report_config(), WORKLOAD)
    assert found["grad-norm-by-layer/a"] == (3.0, 7) and found["num-zeros/num-zeros"] == (5, 7)


def test_values_and_axes() -> None:
    found = step_scalars(metrics(), report_config(log_timers_to_tensorboard=True), WORKLOAD)
    assert found["lm-loss-training/lm loss"] == (9.87654321, 7)
    assert found["lm-loss-training/lm loss vs samples"] == (9.87654321, 56)
    assert found["lm-loss-training/lm loss vs tokens"] == (9.87654321, 896)
    assert found["lm-loss-training/lm loss vs gigaflos (without embeddings)"] == (9.87654321, 6 * 896 // 2)
    assert found["steps-vs-samples/y=samples,x=steps"] == (56, 7)
    assert found["iteration-time/tokens per second per replica"] == (128.0, 7)


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
    writer.passed(Progress(8, 72, 1152), {"step": 9}, 2)
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


def test_the_routing_has_curves_in_a_network_with_experts() -> None:
    routing = RoutingFigures(1.25, 3.5, 0.75, 2.0, 1.5, 3.0)
    found = step_scalars(metrics(routing=routing), report_config(), WORKLOAD)
    assert found["routing/load balancing loss"] == (1.25, 7)
    assert found["routing/idle experts vs tokens"] == (3.0, 896)
