"""Reconciles the stored plan of a run with the data of the resumed run: the same, moved, or another blend.

The content of the files is compared, never their location. See `plan.py` for the effect of a changed blend.
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
    """Returns the stored plan with the current prefixes of the data; evaluation groups that changed start over.

    Args:
        fresh: the plan of a new run with the current flags.
        consumed: training samples consumed so far; a new phase begins there if the training blend changed.
        may_change_blend: allow another training blend (`--change-data-blend`).

    Raises:
        DataError: the sequence length or the seed differs, or the training blend does and may not.
    """
    for name, flag in (("sequence_length", "--seq-length"), ("seed", "--seed")):
        now, before = getattr(fresh, name), getattr(stored, name)
        if now != before:
            raise DataError(
                f"The order of samples was planned with {flag} {before}, this run has {flag} {now}. Keep {before}, or "
                "start a new order with --finetune."
            )
    return dataclasses.replace(
        stored,
        train=_resumed_training(fresh.train, stored.train, consumed, may_change_blend),
        valid=_resumed_evaluation(fresh.valid, stored.valid),
        test=_resumed_evaluation(fresh.test, stored.test),
    )


def changed_blend(group: GroupPlan, now: GroupPlan, members: Sequence[PhaseMember], consumed: int) -> GroupPlan:
    """Ends the last phase at `consumed` and starts one with other members.

    Args:
        group: the stored plan.
        now: `group` with the new sources appended.
        members: of the new phase, indexing the sources of `now`.
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
                f"the evaluation data {group.name} changed since the checkpoint; its loss is now of other samples."
            )
        result.append(now if is_same else group)
    return tuple(result)


def _in_terms_of(stored: GroupPlan, fresh: GroupPlan) -> tuple[GroupPlan, tuple[PhaseMember, ...]]:
    """Returns the stored group with the prefixes and new sources of the fresh one, and the members of the new phase.

    Sources match by identity; if a blend lists one several times, its entries match in order.
    """
    sources = list(stored.sources)
    indices = {key: index for index, key in enumerate(_numbered(sources))}
    members = []
    for key, member in zip(_numbered(fresh.sources), fresh.phases[0].members, strict=True):
        source = fresh.sources[member.source]
        index = indices.get(key)
        if index is None:
            index = len(sources)
            sources.append(source)
        known = sources[index]
        if (known.tokens, known.is_rows, known.is_mapped) != (source.tokens, source.is_rows, source.is_mapped):
            raise DataError(
                f"The stored data plan lists {source.prefix} [{source.first}, {source.last}) with {known.tokens} "
                f"tokens, but it holds {source.tokens}. Continue from another checkpoint of the run, or start a new "
                "order with --finetune."
            )
        sources[index] = dataclasses.replace(known, prefix=source.prefix)
        members.append(PhaseMember(index, member.weight))
    return dataclasses.replace(stored, sources=tuple(sources)), tuple(members)


def _numbered(sources: Sequence[SourcePlan]) -> list[tuple[tuple[str, int, int], int]]:
    """Returns the identity of each source and the number of earlier sources with the same identity."""
    seen: Counter[tuple[str, int, int]] = Counter()
    keys = []
    for source in sources:
        keys.append((source.identity(), seen[source.identity()]))
        seen[source.identity()] += 1
    return keys


def _is_same_blend(phase: Phase, members: Sequence[PhaseMember]) -> bool:
    """Returns True if a phase has these members with the same weights, in any order."""
    before = {member.source: member.weight for member in phase.members}
    now = {member.source: member.weight for member in members}
    return before.keys() == now.keys() and all(
        math.isclose(before[source], now[source], rel_tol=_SAME_WEIGHT_RATIO) for source in now
    )


def _change_text(stored: GroupPlan, changed: GroupPlan) -> str:
    phase = changed.phases[-1]
    before = {member.source: member.weight for member in stored.phases[-1].members}
    texts = []
    for member in phase.members:
        old = f"{before[member.source]:.4g} -> " if member.source in before else ""
        count = phase.consumed_of(member.source)
        start = f"continues after {count:,} of its samples" if count else "begins at its first sample"
        source = changed.sources[member.source]
        for other in stored.sources:
            if other.fingerprint == source.fingerprint and other.identity() != source.identity() and not count:
                start += f" (its range was [{other.first}, {other.last}): the overlap may repeat)"
        texts.append(f"{source.prefix} ({old}{member.weight:.4g}) {start}")
    for removed in sorted(before.keys() - {member.source for member in phase.members}):
        count = phase.consumed_of(removed)
        texts.append(f"{changed.sources[removed].prefix} is removed after {count:,} of its samples")
    return f"the blend of the training data changes at sample {phase.first:,}: {'; '.join(texts)}."


def _other_data_text(stored: GroupPlan, fresh: GroupPlan | None) -> str:
    text = (
        f"The training data differs from the run to resume: it had {_sources_text(stored)}; this run has "
        f"{_sources_text(fresh)}. Use the same files, split and weights"
    )
    if fresh is None:
        return f"{text}."
    return (
        f"{text}; or add --change-data-blend to continue with this blend, each source where it stopped; or start a new "
        "order with --finetune."
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
