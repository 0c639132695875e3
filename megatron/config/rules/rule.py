"""A rule between flags, and the phase of its check."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass


class Phase(enum.Enum):
    """The phase of a rule's check, and its arguments."""

    MODEL = "an architecture is built, with or without a run: (model)"
    RUN = "a configuration is built, or loaded from a checkpoint: (run)"
    REQUEST = "flags are read, with their values as given: (run)"
    NOTICE = "flags without a problem are read; the sentences are notices: (run)"
    WORLD = "the number of processes is known: (run, world_size)"
    RESOLVED = "the configuration is resolved for a machine: (config, machine)"


@dataclass(frozen=True)
class Rule:
    """A rule between flags: a generator of a sentence for each violation."""

    phase: Phase
    sentences: Callable[..., Iterator[str]]

    def __call__(self, *facts: object) -> Iterator[str]:
        return self.sentences(*facts)


model_rule = functools.partial(Rule, Phase.MODEL)
run_rule = functools.partial(Rule, Phase.RUN)
request_rule = functools.partial(Rule, Phase.REQUEST)
notice = functools.partial(Rule, Phase.NOTICE)
world_rule = functools.partial(Rule, Phase.WORLD)
resolved_rule = functools.partial(Rule, Phase.RESOLVED)
