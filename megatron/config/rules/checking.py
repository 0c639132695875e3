"""All rules, and the sentences of those that are broken at each moment."""

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

# In the order in which what is wrong is shown.
_SUBJECTS = (
    *(network, precision, sequence, layout, pipeline, experts, batches, schedule, optimizer, objective),
    *(data, checkpoints, kernels, safety, deepspeed, megatron_lm),
)
RULES = tuple(rule for subject in _SUBJECTS for rule in vars(subject).values() if isinstance(rule, Rule))


def sentences(phase: Phase, *facts: object) -> Iterator[str]:
    """Sentences of the rules of a moment that are broken by the facts that they are called with."""
    for rule in RULES:
        if rule.phase is phase:
            yield from rule(*facts)


def checked_model(model: Model) -> Model:
    """The network, if its flags can be combined.

    Raises:
        ConfigError: with all problems at once.
    """
    if problems := list(sentences(Phase.MODEL, model)):
        raise ConfigError(problems)
    return model


def run_problems(run: RunSections) -> Iterator[str]:
    """Broken rules of a run, requested or resolved."""
    yield from sentences(Phase.MODEL, run.model)
    yield from sentences(Phase.RUN, run)


def request_problems(run: ReadFlags) -> Iterator[str]:
    """Broken rules of a run's flags, before the machine and the tokenizer are known."""
    yield from run_problems(run)
    yield from sentences(Phase.REQUEST, run)


def world_problems(run: RunSections, world_size: int) -> list[str]:
    """Sentences of the first broken rule of a run on so many processes; later ones rely on it."""
    for rule in RULES:
        if rule.phase is Phase.WORLD and (problems := list(rule(run, world_size))):
            return problems
    return []
