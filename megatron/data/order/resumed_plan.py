"""Reconciling the stored plan of a run with the data that the resumed run names: the same, moved, or another blend.

The content of the files is compared, never their location. See `plan.py` for what a changed blend does.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from megatron import log
from megatron.data.order.blend import blend_counts, blend_order
from megatron.data.order.plan import DataPlan, GroupPlan, Phase, PhaseMember, SourcePlan
from megatron.errors import DataError, printable

_SAME_WEIGHT_RATIO = 1e-9


def resumed_plan(fresh: DataPlan, stored: DataPlan, consumed: int, *, may_change_blend: bool) -> DataPlan:
    """The stored plan with the prefixes that the data has now; evaluation groups that changed start over.

    Args:
        fresh: what a new run with the present flags would plan.
        consumed: training samples consumed so far; a new phase begins there if the training blend is another one.
        may_change_blend: whether that was asked for (`--change-data-blend`).

    Raises:
        DataError: the sequence length or the seed is another one, or the training blend is and was not to be.
    """
    for what, flag in (("sequence_length", "--seq-length"), ("seed", "--seed")):
        asked, had = getattr(fresh, what), getattr(stored, what)
        if asked != had:
            raise DataError(
                f"The order of samples was planned with {flag} {had}, this run has {flag} {asked}. Keep {had}, or "
                "start a new order with --finetune."
            )
    return dataclasses.replace(
        stored,
        train=_resumed_training(fresh.train, stored.train, consumed, may_change_blend),
        valid=_resumed_evaluation(fresh.valid, stored.valid),
        test=_resumed_evaluation(fresh.test, stored.test),
    )


def changed_blend(group: GroupPlan, now: GroupPlan, members: Sequence[PhaseMember], consumed: int) -> GroupPlan:
    """Ends the last phase at `consumed` and opens one with other members.

    Args:
        group: the stored plan.
        now: `group` with the new sources appended.
        members: of the new phase; places in the sources of `now`.
    """
    last = group.phases[-1]
    counts = list(last.consumed) + [0] * (len(group.sources) - len(last.consumed))
    length = consumed - last.first
    if last.blended:
        taken = blend_counts(blend_order(last.weights, length)[0], len(last.members)) if length else ()
    else:
        taken = (length,)
    for member, count in zip(last.members, taken, strict=False):
        counts[member.source] += count
    kept = group.phases if length else group.phases[:-1]
    phase = Phase(consumed, tuple(members), tuple(counts))
    return dataclasses.replace(now, phases=(*kept, phase), samples=consumed)


def _resumed_training(
    fresh: GroupPlan | None, stored: GroupPlan | None, consumed: int, may_change_blend: bool
) -> GroupPlan | None:
    if stored is None:
        return fresh
    if fresh is None:
        raise DataError(_other_data_text(stored, fresh))
    now, members = _in_terms_of(stored, fresh)
    if _is_same_blend(stored.phases[-1], members):
        return now
    if not may_change_blend:
        raise DataError(_other_data_text(stored, fresh))
    changed = changed_blend(stored, now, members, consumed)
    log.shared_warning(_change_text(stored, changed))
    return changed


def _resumed_evaluation(fresh: Sequence[GroupPlan], stored: Sequence[GroupPlan]) -> tuple[GroupPlan, ...]:
    known = {group.name: group for group in stored}
    result = []
    for group in fresh:
        old = known.get(group.name)
        now, members = _in_terms_of(old, group) if old is not None else (group, ())
        is_same = old is not None and _is_same_blend(old.phases[-1], members)
        if old is not None and not is_same:
            log.shared_warning(
                f"the evaluation data {group.name} has changed since the checkpoint; its loss is of other samples now."
            )
        result.append(now if is_same else group)
    return tuple(result)


def _in_terms_of(stored: GroupPlan, fresh: GroupPlan) -> tuple[GroupPlan, tuple[PhaseMember, ...]]:
    """The stored group under the prefixes of the fresh one, its new sources appended, and the members of the new phase.

    Two sources are the same if their identities are; if a blend names one several times, its entries match in order.
    """
    sources = list(stored.sources)
    places = {key: place for place, key in enumerate(_numbered(sources))}
    members = []
    for key, member in zip(_numbered(fresh.sources), fresh.phases[0].members, strict=True):
        source = fresh.sources[member.source]
        place = places.get(key)
        if place is None:
            place = len(sources)
            sources.append(source)
        held = sources[place]
        if (held.tokens, held.is_rows, held.is_mapped) != (source.tokens, source.is_rows, source.is_mapped):
            raise DataError(
                f"The stored data plan says that {source.prefix} [{source.first}, {source.last}) holds {held.tokens} "
                f"tokens, but it holds {source.tokens}. Continue from another checkpoint of the run, or start a new "
                "order with --finetune."
            )
        sources[place] = dataclasses.replace(sources[place], prefix=source.prefix)
        members.append(PhaseMember(place, member.weight))
    return dataclasses.replace(stored, sources=tuple(sources)), tuple(members)


def _numbered(sources: Sequence[SourcePlan]) -> list[tuple[tuple[str, int, int], int]]:
    """The identity of each source, and how many of the same identity stand before it."""
    seen: Counter[tuple[str, int, int]] = Counter()
    keys = []
    for source in sources:
        keys.append((source.identity(), seen[source.identity()]))
        seen[source.identity()] += 1
    return keys


def _is_same_blend(phase: Phase, members: Sequence[PhaseMember]) -> bool:
    """Whether a phase has these members with the same weights, in whatever order they are named."""
    then = {member.source: member.weight for member in phase.members}
    now = {member.source: member.weight for member in members}
    return then.keys() == now.keys() and all(
        math.isclose(then[place], now[place], rel_tol=_SAME_WEIGHT_RATIO) for place in now
    )


def _change_text(stored: GroupPlan, changed: GroupPlan) -> str:
    before, phase = stored.phases[-1], changed.phases[-1]
    then = {member.source: member.weight for member in before.members}
    texts = []
    for member in phase.members:
        old = f"{then[member.source]:.4g} -> " if member.source in then else ""
        count = phase.consumed_of(member.source)
        what = f"continues after {count:,} of its samples" if count else "begins at its first sample"
        source = changed.sources[member.source]
        for other in stored.sources:
            if other.fingerprint == source.fingerprint and other.identity() != source.identity() and not count:
                what += f" (its range was [{other.first}, {other.last}): what both ranges hold may repeat)"
        texts.append(f"{source.prefix} ({old}{member.weight:.4g}) {what}")
    for place in sorted(then.keys() - {member.source for member in phase.members}):
        count = phase.consumed_of(place)
        texts.append(f"{changed.sources[place].prefix} is left out after {count:,} of its samples")
    return f"the blend of the training data changes at sample {phase.first:,}: {'; '.join(texts)}."


def _other_data_text(stored: GroupPlan, fresh: GroupPlan | None) -> str:
    text = (
        f"The training data is not that of the run to be resumed: it had {_sources_text(stored)}; now there is "
        f"{_sources_text(fresh)}. Use the same files, split and weights"
    )
    if fresh is None:
        return f"{text}."
    return (
        f"{text}; or add --change-data-blend to continue with this blend from here, each source where it stopped; or "
        f"start "
        "a new order with --finetune."
    )


def _sources_text(group: GroupPlan | None) -> str:
    if group is None:
        return "none"
    pairs = [(member.weight, group.sources[member.source]) for member in group.phases[-1].members]
    return ", ".join(
        f"{weight:.4g} × {printable(source.prefix, quoted=False)} [{source.first}, {source.last}) "
        f"{printable(source.fingerprint[:12], quoted=False)}"
        for weight, source in pairs
    )
