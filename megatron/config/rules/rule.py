"""A rule between flags, and the moment at which it is checked."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass


class Phase(enum.Enum):
    """When a rule is checked, and what it is called with."""

    MODEL = "a network is described, with or without a run: (model)"
    RUN = "a configuration is built, a saved one included: (run)"
    REQUEST = "flags are read, and only then; it sees them as they were given: (run)"
    NOTICE = "flags without a problem are read; its sentences are shown and the run goes on: (run)"
    WORLD = "the number of processes is known: (run, world_size)"
    RESOLVED = "the machine is known, and what it decides: (config, machine)"


@dataclass(frozen=True)
class Rule:
    """A rule between flags: a generator of one sentence for each way in which it is broken."""

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
