"""Which parameters are trained, and since when.

A frozen parameter needs no gradient, and the optimizer holds nothing for it: neither a master weight nor moments. One
that a resumed run trains again begins with moments of zero, and Adam's bias correction counts its updates from there.
With the count of the run, the first updates of a long-trained optimizer would be several times too large.
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
        thawed: names of trained ones that were frozen in the checkpoint to load, which has no moments for them.
        began_at: for trained ones that were frozen earlier in the run, how many updates the optimizer had made when
            their training began; all others are trained since the first.
        averaged_from: for those, what the iterates of a schedule-free optimizer counted in its mean by then.
    """

    frozen: frozenset[str] = frozenset()
    thawed: frozenset[str] = frozenset()
    began_at: Mapping[str, int] = field(default_factory=dict)
    averaged_from: Mapping[str, float] = field(default_factory=dict)

    def as_of(self, update_count: int, weight: float) -> FreezeSpec:
        """The same for a checkpoint with this many updates, whose iterates count this much in a mean; it may be older
        than the one this was made for.
        """
        counts = {name: min(count, update_count) for name, count in self.began_at.items()}
        weights = {name: min(earlier, weight) for name, earlier in self.averaged_from.items()}
        return dataclasses.replace(self, began_at=counts, averaged_from=weights)


NOTHING_FROZEN = FreezeSpec()


def is_frozen(parameter: nn.Parameter) -> bool:
    """Whether a parameter of a built network keeps its value."""
    return not parameter.requires_grad


def freeze(parameters: Iterable[nn.Parameter], frozen: frozenset[str]) -> None:
    """Marks those parameters as frozen whose global name is in `frozen`."""
    for parameter in parameters:
        if parameter.global_name in frozen:  # type: ignore[attr-defined]
            parameter.requires_grad_(False)


def frozen_names(patterns: Sequence[str], names: Sequence[str]) -> frozenset[str]:
    """The names that any of the patterns matches.

    Args:
        patterns: of --freeze; `*`, `?` and `[...]` mean what they mean in file names, and `*` goes across dots.
        names: of all parameters of the network.

    Raises:
        ConfigError: a pattern matches nothing, or all together match everything.
    """
    matched = {pattern: fnmatch.filter(names, pattern) for pattern in patterns}
    problems = [_nothing_matched(pattern, names) for pattern, hits in matched.items() if not hits]
    frozen = frozenset(name for hits in matched.values() for name in hits)
    if names and len(frozen) == len(set(names)):
        problems.append(
            f"--freeze {printable(' '.join(patterns), 200, quoted=False)} matches all {len(frozen)} parameters of the "
            "network, so there is nothing to train. Leave some out, or use --eval-only."
        )
    if problems:
        raise ConfigError(problems)
    return frozen


def _nothing_matched(pattern: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(pattern[:200], list(dict.fromkeys(names)), _SUGGESTIONS, cutoff=0.0)
    return (
        f"--freeze {printable(pattern, 200)} matches none of the {len(set(names))} parameters of the network. Names "
        f"that come near: {', '.join(near)}. A pattern must match a whole name, as in 'decoder.layers.0.*'."
    )
