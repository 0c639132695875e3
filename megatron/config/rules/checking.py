"""All rules, and the sentences of those that are broken at each moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from megatron.config.machine import Machine
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
from megatron.config.rules.rule import Moment, Rule
from megatron.config.run_sections import ReadFlags, ResolvedSections, RunSections
from megatron.config.sections.model import ModelRequest
from megatron.errors import ConfigError

Model = TypeVar("Model", bound=ModelRequest)

# In the order in which what is wrong is shown.
_SUBJECTS = (
    *(network, precision, sequence, layout, pipeline, experts, batches, schedule, optimizer, objective),
    *(data, checkpoints, kernels, safety, deepspeed, megatron_lm),
)
RULES = tuple(rule for subject in _SUBJECTS for rule in vars(subject).values() if isinstance(rule, Rule))


def model_problems(model: ModelRequest) -> Iterator[str]:
    """What is wrong with a network, whatever run it belongs to."""
    return _broken(Moment.MODEL, model)


def checked_model(model: Model) -> Model:
    """The network, if its flags can be combined.

    Raises:
        ConfigError: with all problems at once.
    """
    if problems := list(model_problems(model)):
        raise ConfigError(problems)
    return model


def run_problems(run: RunSections) -> Iterator[str]:
    """What is wrong with a run, asked for or resolved."""
    yield from model_problems(run.model)
    yield from _broken(Moment.RUN, run)


def request_problems(run: ReadFlags) -> Iterator[str]:
    """What is wrong with the flags of a run, before the machine and the tokenizer are known."""
    yield from run_problems(run)
    yield from _broken(Moment.REQUEST, run)


def request_notices(run: ReadFlags) -> Iterator[str]:
    """What the user should know of flags without a problem."""
    return _broken(Moment.NOTICE, run)


def world_problems(run: RunSections, world_size: int) -> list[str]:
    """Why a run does not fit so many processes: the first rule that is broken, as the others count on it."""
    for rule in RULES:
        if rule.moment is Moment.WORLD and (problems := list(rule(run, world_size))):
            return problems
    return []


def resolved_problems(config: ResolvedSections, machine: Machine) -> Iterator[str]:
    """What is wrong with a run that fits the processes of a machine."""
    return _broken(Moment.RESOLVED, config, machine)


def _broken(moment: Moment, *facts: object) -> Iterator[str]:
    for rule in RULES:
        if rule.moment is moment:
            yield from rule(*facts)
