"""Ends a run whose numbers can no longer be trusted: bad steps in a row, or copies that differ between ranks."""

from __future__ import annotations

from megatron import log
from megatron.checkpoint.record import Progress
from megatron.engine.replicas import find_differences
from megatron.errors import NumericsError
from megatron.observe.metrics import StepOutcome
from megatron.train.run import Run

_DESCRIBED = 5


def check_numbers(run: Run, progress: Progress, step: StepOutcome) -> None:
    """Warns of a step whose update was not applied because of its loss or gradient, and ends the run if there were too
    many in a row.

    Args:
        progress: after the step.

    Raises:
        NumericsError: more than --max-bad-steps consecutive steps were not applied.
    """
    if step.bad_in_a_row == 0:
        return
    safety = run.config.safety
    found = f"iteration {progress.step}: loss {step.loss}, gradient norm {step.gradient_norm}"
    if step.is_spike:
        found += f", more than {safety.skip_spikes:g} standard deviations above the recent mean (--skip-spikes)"
    first = progress.consumed_samples - step.sample_count
    found += f". The update was not applied (samples {first} to {progress.consumed_samples - 1})"
    if step.bad_in_a_row <= safety.max_bad_steps:
        if run.mesh.control.rank == 0:
            log.warning(f"{found}; {step.bad_in_a_row} of at most {safety.max_bad_steps} consecutive such steps.")
        return
    raise NumericsError(
        f"{found}, and --max-bad-steps {safety.max_bad_steps} allows no more such steps in a row. The last checkpoint "
        "is intact. Resume from it with a higher --max-bad-steps if single batches are bad, else with a lower --lr, a "
        "longer warm-up or --skip-train-iteration-range.",
        step=progress.step,
    )


def check_before_save(run: Run) -> None:
    """Checks that all ranks hold the same values before they are saved, unless that is turned off; collective.

    Raises:
        NumericsError: see `check_replicas`.
    """
    interval = run.config.safety.check_replicas_interval
    if interval != 0 and not run.is_due(interval):  # if it is due, they were checked after this step already
        check_replicas(run)


def check_replicas(run: Run) -> None:
    """Checks that all ranks hold the same values wherever they hold copies; collective over the mesh.

    Raises:
        NumericsError: they do not.
    """
    differences = find_differences(run.engine)
    if differences:
        raise NumericsError(
            f"iteration {run.progress.step}: copies of the same values differ between ranks. {_listed(differences)}. "
            f"They were not saved; earlier checkpoints are intact: run the same command again. If it happens again, a "
            f"device or its memory is faulty: exclude the machine whose rank differs. --check-replicas-interval 0 "
            f"turns this check off."
        )


def _listed(texts: list[str]) -> str:
    left = len(texts) - _DESCRIBED
    return "; ".join(texts[:_DESCRIBED]) + (f"; and {left} more" if left > 0 else "")
