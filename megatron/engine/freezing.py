"""Frozen parameters.

A frozen parameter needs no gradient, and the optimizer holds neither a master weight nor moments for it. If a resumed
run trains it again, its moments start at zero, and Adam's bias correction counts its updates from there: with the count
of the run, its first updates would be several times too large.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from megatron.errors import ConfigError, printable

_SUGGESTIONS = 3


@dataclass(frozen=True)
class FreezeSpec:
    """The division of a network's parameters into frozen and trained ones.

    Attributes:
        frozen: global names of the parameters that keep their values.
        thawed: names of trained parameters that were frozen in the checkpoint to load, which has no moments for them.
        began_at: for trained parameters that were frozen earlier in the run, the number of optimizer updates when their
            training began; 0 for all others.
        averaged_from: for the same parameters, `Engine.averaging_weight` at that time.
    """

    frozen: frozenset[str] = frozenset()
    thawed: frozenset[str] = frozenset()
    began_at: Mapping[str, int] = field(default_factory=dict)
    averaged_from: Mapping[str, float] = field(default_factory=dict)

    def as_of(self, update_count: int, weight: float) -> FreezeSpec:
        """Adapts it to a checkpoint, perhaps an older one, with this many updates and this averaging weight."""
        counts = {name: min(count, update_count) for name, count in self.began_at.items()}
        weights = {name: min(earlier, weight) for name, earlier in self.averaged_from.items()}
        return dataclasses.replace(self, began_at=counts, averaged_from=weights)


NOTHING_FROZEN = FreezeSpec()


def is_frozen(parameter: nn.Parameter) -> bool:
    """Returns True if a parameter of a built network is frozen."""
    return not parameter.requires_grad


def freeze(parameters: Iterable[nn.Parameter], frozen: frozenset[str]) -> None:
    """Freezes the parameters whose global name is in `frozen`."""
    for parameter in parameters:
        if parameter.global_name in frozen:  # type: ignore[attr-defined]
            parameter.requires_grad_(False)


def frozen_names(patterns: Sequence[str], names: Sequence[str]) -> frozenset[str]:
    """The names that any of the patterns matches.

    Args:
        patterns: of --freeze, with the wildcards of file names; `*` matches dots, too.
        names: of all parameters of the network.

    Raises:
        ConfigError: a pattern matches nothing, or the patterns match all parameters.
    """
    matched = {pattern: fnmatch.filter(names, pattern) for pattern in patterns}
    problems = [_nothing_matched(pattern, names) for pattern, hits in matched.items() if not hits]
    frozen = frozenset(name for hits in matched.values() for name in hits)
    if names and len(frozen) == len(set(names)):
        problems.append(
            f"--freeze {printable(' '.join(patterns), 200, quoted=False)} matches all {len(frozen)} parameters of the "
            "network, so nothing would be trained. Use fewer patterns, or --eval-only."
        )
    if problems:
        raise ConfigError(problems)
    return frozen


def _nothing_matched(pattern: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(pattern[:200], list(dict.fromkeys(names)), _SUGGESTIONS, cutoff=0.0)
    return (
        f"--freeze {printable(pattern, 200)} matches none of the {len(set(names))} parameters of the network. Similar "
        f"names: {', '.join(near)}. A pattern must match a whole name, as in 'decoder.layers.0.*'."
    )
