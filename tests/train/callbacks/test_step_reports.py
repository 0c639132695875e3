"""When bad or empty steps end a run."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.checkpoint.record import Progress
from megatron.config.sections.computation import PrecisionConfig
from megatron.config.sections.safety import SafetyConfig
from megatron.errors import DataError, ExitCode, NumericsError
from megatron.parallel.mesh import ParallelMesh, standard_axes
from megatron.train.callbacks.step_reports import StepReports, check_numbers
from megatron.train.steps import TrainedStep
from megatron.train.stop import StopVerdict
from tests.helpers.tiny_run import steps, train, write_tiny_corpus
from tests.train.samples import Outcome

AFTER = Progress(7, 56, 560)


def run_with(*, rank: int = 0, **safety: Any) -> Any:
    """As much of a run as the checks look at."""
    return SimpleNamespace(
        config=SimpleNamespace(safety=SafetyConfig(**safety)),
        mesh=ParallelMesh.at(standard_axes(2), rank),
        engine="engine",
        progress=AFTER,
        stopping=SimpleNamespace(steps_in_flight=0, verdict=StopVerdict.CONTINUE),
        is_due=lambda interval: bool(interval) and AFTER.step % interval == 0,
    )


def test_a_step_that_was_applied_passes() -> None:
    check_numbers(run_with(), AFTER, Outcome(loss=math.nan))  # in fp16 the loss scaler lets it pass


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.5), (math.inf, 1.5), (2.5, math.nan), (2.5, math.inf)])
def test_the_first_bad_step_ends_a_run_that_allows_none(loss: float, norm: float) -> None:
    sentence = (
        rf"^iteration 7: loss {loss}, gradient norm {norm}. The update was not applied \(samples 48 to 55\); this "
        r"exceeds --max-bad-steps 0\. The last checkpoint is intact\..*--lr"
    )
    with pytest.raises(NumericsError, match=sentence) as caught:
        check_numbers(run_with(), AFTER, Outcome(loss=loss, gradient_norm=norm, consecutive_bad=1))
    assert caught.value.step == 7


def test_empty_steps_are_counted_and_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    run = run_with()
    run.engine = SimpleNamespace(update_count=0)
    run.report = SimpleNamespace(step=lambda *told: None)
    steps = StepReports()
    steps.trained(run)
    empty = Outcome(loss=None, token_count=0)
    for outcome in (empty, empty):
        steps.after_step(run, TrainedStep(AFTER, outcome, 0.1, 1.0, 0.1, None))
    assert capsys.readouterr().err.startswith(
        "warning: iteration 7 has no loss and did not change the weights: no token of its batch (samples 48 to 55) "
        "counts. This warning is not repeated."
    )
    with pytest.raises(DataError, match="^nothing was trained: no token counts in the loss in any of the 2 steps"):
        steps.trained(run)
    run.engine.update_count = 3  # in earlier starts of the run
    steps.trained(run)
    run.engine.update_count = 0
    steps.after_step(run, TrainedStep(AFTER, Outcome(), 0.1, 1.0, 0.1, None))
    steps.trained(run)


def test_overflows_with_a_loss_scale_that_cannot_fall_end_a_run() -> None:
    run = run_with()
    run.config.precision = PrecisionConfig(fp16=True, hysteresis=2, min_loss_scale=1.0)
    run.report = SimpleNamespace(step=lambda *told: None)
    steps = StepReports()

    def add(skipped: bool, loss_scale: float) -> None:
        steps.after_step(run, TrainedStep(AFTER, Outcome(skipped=skipped, loss_scale=loss_scale), 0.1, 1.0, 0.1, None))

    for skipped, loss_scale in ((True, 2.0), (True, 1.0), (True, 1.0), (False, 1.0), (True, 1.0), (True, 1.0)):
        add(skipped, loss_scale)
    with pytest.raises(NumericsError, match=r"the minimum loss scale, 1 \(--min-loss-scale\), 3 times in a row"):
        add(True, 1.0)
    run.config.precision, steps = PrecisionConfig(fp16=True, loss_scale=8.0, hysteresis=2), StepReports()
    run.config.safety = SafetyConfig(max_bad_steps=3)
    for _ in range(3):
        add(True, 8.0)
    with pytest.raises(
        NumericsError, match=r"the constant loss scale, 8 \(--loss-scale\), 4 times in a row.*without --loss-scale"
    ):
        add(True, 8.0)


def test_allowed_bad_steps_are_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    step = Outcome(loss=math.nan, gradient_norm=1.5, consecutive_bad=2)
    check_numbers(run_with(max_bad_steps=2), AFTER, step)
    check_numbers(run_with(max_bad_steps=2, rank=1), AFTER, step)
    assert capsys.readouterr().err == (
        "warning: iteration 7: loss nan, gradient norm 1.5. The update was not applied (samples 48 to 55); 2 of at "
        "most 2 consecutive such steps.\n"
    )
    with pytest.raises(NumericsError, match=r"exceeds --max-bad-steps 2"):
        check_numbers(run_with(max_bad_steps=2), AFTER, Outcome(loss=math.nan, consecutive_bad=3))


def test_a_spike_is_called_one(capsys: pytest.CaptureFixture[str]) -> None:
    step = Outcome(loss=9.5, gradient_norm=1.5, is_spike=True, consecutive_bad=1)
    check_numbers(run_with(max_bad_steps=2, skip_spikes=6.0), AFTER, step)
    said = capsys.readouterr().err
    assert "loss 9.5, gradient norm 1.5, more than 6 standard deviations above the recent mean (--skip-spikes)" in said


def test_a_resume_skips_the_same_spikes(tmp_path: Path) -> None:
    """The window from which spikes are told, and the number of skipped steps in a row, are part of a checkpoint."""
    corpus = write_tiny_corpus(tmp_path)
    guards = {"max_bad_steps": 40, "skip_spikes": 0.7, "train_iters": 42, "lr_decay_iters": 46, "save_interval": 100}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = {"micro_batch_size": 1, "seq_length": 8, "eval_iters": 0, **guards}
    assert train(corpus.flags(folder=whole, **flags)) == (0, "")
    fields = ("lm_loss", "gradient_norm", "learning_rate", "skipped_iterations")
    expected = steps(whole, *fields)
    spikes = [step for step, values in expected.items() if values[-1]]
    first = next(step for step in spikes if step + 1 in spikes)
    assert train(corpus.flags(folder=parts, exit_interval=first, **flags)) == (0, "")
    code, text = train(corpus.flags(folder=parts, **{**flags, "max_bad_steps": 1}))
    assert (code, f"iteration {first + 1}: loss " in text) == (ExitCode.NUMERICS, True)
    assert train(corpus.flags(folder=parts, **flags)) == (0, "")
    assert steps(parts, *fields) == expected
