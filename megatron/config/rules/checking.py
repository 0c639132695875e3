"""All rules, and the violations in each phase."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from megatron.config.rules import (
    batches,
    checkpoints,
    data,
    deepspeed,
    experts,
    kernels,
    layout,
    megatron_lm,
    network,
    objective,
    optimizer,
    pipeline,
    precision,
    safety,
    schedule,
    sequence,
)
from megatron.config.rules.rule import Phase, Rule
from megatron.config.run_sections import ReadFlags, RunSections
from megatron.config.sections.model import ModelRequest
from megatron.errors import ConfigError

Model = TypeVar("Model", bound=ModelRequest)

# In the order of their messages.
_SUBJECTS = (
    *(network, precision, sequence, layout, pipeline, experts, batches, schedule, optimizer, objective),
    *(data, checkpoints, kernels, safety, deepspeed, megatron_lm),
)
RULES = tuple(rule for subject in _SUBJECTS for rule in vars(subject).values() if isinstance(rule, Rule))


def sentences(phase: Phase, *facts: object) -> Iterator[str]:
    """Yields the sentences of violated rules of a phase, called with `facts`."""
    for rule in RULES:
        if rule.phase is phase:
            yield from rule(*facts)


def checked_model(model: Model) -> Model:
    """Returns the model if no rule is violated.

    Raises:
        ConfigError: with all problems at once.
    """
    if problems := list(sentences(Phase.MODEL, model)):
        raise ConfigError(problems)
    return model


def run_problems(run: RunSections) -> Iterator[str]:
    """Yields the violations of a run, requested or resolved."""
    yield from sentences(Phase.MODEL, run.model)
    yield from sentences(Phase.RUN, run)


def request_problems(run: ReadFlags) -> Iterator[str]:
    """Yields the violations of a run's flags, before the machine and the tokenizer are known."""
    yield from run_problems(run)
    yield from sentences(Phase.REQUEST, run)


def world_problems(run: RunSections, world_size: int) -> list[str]:
    """Sentences of the first violated rule on this many processes; later rules depend on earlier ones."""
    for rule in RULES:
        if rule.phase is Phase.WORLD and (problems := list(rule(run, world_size))):
            return problems
    return []
