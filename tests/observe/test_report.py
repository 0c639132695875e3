"""What a report prints and passes on."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples.jax_lm_training.jax_lm import log_style as jax_lm
from megatron import log
from megatron.checkpoint.record import Progress
from megatron.errors import ConfigError, StorageError
from megatron.objective.metric import Metric, StepMetrics
from megatron.observe.metrics import TaskOutcome
from megatron.observe.report import Pace, Report, ReportOutputs, check_packages, open_destinations
from megatron.observe.run_directory import RunDirectory
from megatron.observe.styles import megatron
from tests.train.samples import WORKLOAD, Measured, Outcome, optim_config, report_config


class Recorder:
    """A destination that records its calls."""

    name = "the recorder"
    is_buffered = False

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def start(self, progress: Progress, arguments: Mapping[str, Any]) -> None:
        self.told.append(("start", progress.step, dict(arguments)))

    def step(self, metrics: StepMetrics) -> None:
        self.told.append(("step", metrics.value("iteration"), metrics.value("lm_loss")))

    def interval(self, metrics: StepMetrics) -> None:
        self.told.append(("interval", metrics.value("iteration"), metrics.value("lm_loss")))

    def evaluation(self, progress: Progress, group: str, loss: float) -> None:
        self.told.append(("evaluation", progress.step, group, loss))

    def task(self, progress: Progress, task: TaskOutcome) -> None:
        self.told.append(("task", progress.step, task))

    def skipped_batch(self, progress: Progress, batch: Mapping[str, int], number: int) -> None:
        self.told.append(("passed", progress.consumed_samples, dict(batch), number))

    def failed_save(self, progress: Progress, step: int, reason: str, number: int) -> None:
        self.told.append(("failed_save", progress.step, step, reason, number))

    def close(self) -> None:
        self.told.append(("close",))


def progress_at(step: int) -> Progress:
    """Progress after a number of steps of 8 samples of 16 tokens."""
    return Progress(step, 8 * step, 128 * step)


def test_lines_come_at_the_log_interval_and_hold_the_mean(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder()
    report = Report(
        report_config(log_interval=2),
        optim_config(train_iters=5),
        WORKLOAD,
        ReportOutputs(megatron, [recorder]),
        arguments={"lr": 1.0},
    )
    report.started(Progress())
    for step, loss in enumerate([1.0, 2.0, 3.0, 4.0, 5.0], start=1):
        report.step(progress_at(step), Outcome(loss=loss), 0.1, 0.5)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:28] for line in lines] == [" iteration        2/       5", " iteration        4/       5"]
    assert "lm loss: 1.500000E+00" in lines[0]
    assert "lm loss: 3.500000E+00" in lines[1]
    report.close()
    report.close()
    assert capsys.readouterr().out.startswith(" iteration        5/       5")
    assert recorder.told[0] == ("start", 0, {"lr": 1.0})
    assert recorder.told[-3:] == [("step", 5, 5.0), ("interval", 5, 5.0), ("close",)]


def test_the_total_follows_the_samples_left_after_a_resume(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(report_config(), optim_config(train_samples=80), WORKLOAD, ReportOutputs(megatron))
    report.started(Progress(step=4, consumed_samples=16))
    report.step(Progress(5, 24, 384), Outcome(), 0.1, 0.5)
    assert capsys.readouterr().out.startswith(" iteration        5/      12 | consumed samples:           24 |")


def test_every_destination_is_notified_and_closed_even_if_one_fails(capsys: pytest.CaptureFixture[str]) -> None:
    class Failing(Recorder):
        name = "the failing one"

        def step(self, metrics: StepMetrics) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise SystemExit(3)

    recorder = Recorder()
    outputs = ReportOutputs(megatron, [Failing(), recorder])
    report = Report(report_config(), optim_config(train_iters=5), WORKLOAD, outputs)
    report.step(progress_at(1), Outcome(loss=1.0), 0.1, 0.5)
    report.close()
    assert [call[0] for call in recorder.told] == ["step", "interval", "close"]
    assert (
        capsys.readouterr().err.splitlines()[-1] == "warning: the failing one: records of steps 1 to 1 are missing (3)."
    )


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_anything_is_built(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    configs = {"tensorboard": report_config(tensorboard_dir="t"), "wandb": report_config(wandb_project="toys")}
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    monkeypatch.delitem(sys.modules, package, raising=False)
    check_packages(report_config())
    with pytest.raises(ConfigError, match=f"requires the package {package}, which is not installed.*install {package}"):
        check_packages(configs[package])


def test_a_service_that_is_down_is_an_error_of_a_new_run_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def init(**settings: Any) -> None:
        raise SystemExit("api.wandb.ai does not answer")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    config = report_config(wandb_project="toys")
    with pytest.raises(StorageError, match="--wandb-project toys cannot be opened: api.wandb.ai .*WANDB_MODE=offline"):
        open_destinations(config, WORKLOAD, RunDirectory(tmp_path))
    opened = open_destinations(config, WORKLOAD, RunDirectory(tmp_path), is_resume=True)
    assert [destination.name for destination in opened] == [str(tmp_path / "metrics.jsonl")]
    assert "WANDB_MODE=offline" in (said := capsys.readouterr().err) and "continues without it" in said
    opened[0].close()


def test_wandb_receives_one_point_per_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    run = SimpleNamespace(
        config=SimpleNamespace(update=lambda values, allow_val_change: calls.append(("config", values))),
        log=lambda values, step: calls.append((step, values)),
        finish=lambda: calls.append(("finish",)),
    )

    def init(**settings: Any) -> SimpleNamespace:
        calls.append(("init", settings))
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    config = report_config(log_interval=2, wandb_project="toys", wandb_exp_name="first", wandb_entity="team")
    destinations = open_destinations(config, WORKLOAD, RunDirectory(tmp_path))
    report = Report(
        config, optim_config(train_iters=4), WORKLOAD, ReportOutputs(megatron, destinations), arguments={"seed": 1}
    )
    report.started(Progress())
    for step in (1, 2):
        report.step(progress_at(step), Outcome(loss=float(step)), 0.1, 0.5)
    report.evaluation(progress_at(2), "valid", "iteration 2", 0.0)
    report.task(progress_at(2), "iteration 2", Measured())
    report.close()
    assert calls[0] == ("init", {"project": "toys", "name": "first", "dir": str(tmp_path), "entity": "team"})
    assert calls[1] == ("config", {"seed": 1})
    assert calls[2][0] == 2
    assert calls[2][1]["lm-loss-training"] == 1.5
    assert "loss-scale" not in calls[2][1]
    assert calls[3:] == [
        (2, {"lm-loss-validation/valid": 0.0, "lm-loss-validation/valid ppl": math.exp(0.0)}),
        (2, {"tasks/cloze/acc": 0.25, "tasks/cloze/ppl": 7.5}),
        ("finish",),
    ]


def test_the_style_gets_the_epoch_and_the_remaining_time(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 7.0, 9.0, 11.0, 13.0])
    report = Report(
        report_config(log_interval=2, log_style="jax_lm"),
        optim_config(train_iters=6),
        WORKLOAD,
        ReportOutputs(jax_lm),
        samples_per_epoch=16,
        pace=Pace(lambda: next(times)),
    )
    report.started(Progress())
    for step in range(1, 5):
        report.step(progress_at(step), Outcome(loss=1.0), 0.1, 0.5)
    report.evaluation(progress_at(4), "valid", "iteration 4", 2.0)
    assert capsys.readouterr().out.splitlines() == [
        "[TRAIN] epoch: 0 step: 2/6 loss: 1.0000 ppl: 2.72 ETA 0:00:08",
        "[TRAIN] epoch: 1 step: 4/6 loss: 1.0000 ppl: 2.72 ETA 0:00:04",
        "[EVAL] epoch: 1 step: 4/6 loss: 2.0000 ppl: 7.39",
    ]


def test_a_bar_takes_the_place_of_the_lines_of_steps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    seen: list[tuple[int, float | None]] = []
    bar = SimpleNamespace(step=lambda metrics: seen.append((metrics.value("iteration"), metrics.value("eta_seconds"))))
    times = iter([0.0, 10.0, 12.0])
    report = Report(
        report_config(log_interval=2),
        optim_config(train_iters=4),
        WORKLOAD,
        ReportOutputs(megatron, bar=bar, hides_lines=True),
        pace=Pace(lambda: next(times)),
    )
    log.copy_to(tmp_path / "log.txt")
    report.started(Progress())
    for step in (1, 2):
        report.step(progress_at(step), Outcome(), 0.1, 0.5, [Metric("memory_bytes", 7)])
    report.evaluation(progress_at(2), "valid", "iteration 2", 1.0)
    report.close()
    log.copy_to(None)
    assert seen == [(1, 30.0), (2, 4.0)]
    shown, kept = capsys.readouterr().out, (tmp_path / "log.txt").read_text()
    assert "valid loss at iteration 2" in shown and "iteration        2" not in shown
    assert " iteration        2/       4 | " in kept and "| ETA: 0:00:04 |" in kept


def test_events_between_steps_are_printed_and_forwarded(capsys: pytest.CaptureFixture[str]) -> None:
    recorder, task, batch = Recorder(), Measured(), {"step": 3, "first_sample": 16, "last_sample": 23}
    report = Report(report_config(), optim_config(train_iters=5), WORKLOAD, ReportOutputs(megatron, [recorder]))
    report.evaluation(progress_at(2), "valid", "iteration 2", 1.0)
    report.task(progress_at(2), "iteration 2", task)
    report.skipped_batch(Progress(2, 24), batch, 1)
    report.failed_save(progress_at(3), 2, "the disk is full", 1)
    shown = capsys.readouterr().out
    assert "valid loss at iteration 2 | lm loss value: 1.000000E+00 | lm loss PPL: 2.718282E+00 |" in shown
    assert "task cloze at iteration 2 | acc: 0.2500 +- 0.1250 | ppl: 7.5000 | items: 12 |" in shown
    assert "skipped the batch of iteration 3 (samples 16 to 23)" in shown
    assert recorder.told == [
        ("evaluation", 2, "valid", 1.0),
        ("task", 2, task),
        ("passed", 24, batch, 1),
        ("failed_save", 3, 2, "the disk is full", 1),
    ]


def test_the_metrics_file_can_be_elsewhere(tmp_path: Path) -> None:
    config = report_config(metrics_file=str(tmp_path / "elsewhere.jsonl"))
    for destination in open_destinations(config, WORKLOAD, RunDirectory(tmp_path)):
        destination.close()
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere.jsonl"]
