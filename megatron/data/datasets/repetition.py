"""How often a run passes over its training data, and what there is to say of it."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.data.datasets.blended import BlendedDataset, PhasedDataset
from megatron.data.datasets.sample import SampleDataset
from megatron.data.order.plan import GroupPlan, Member

# Muennighoff et al. 2023, "Scaling Data-Constrained Language Models", section 6: data that are repeated up to 4 times
# are worth almost as much as new ones, and after 16 times further passes are worth little.
_MOST_USEFUL_PASSES = 16


def taken_samples(group: GroupPlan, dataset: SampleDataset) -> Iterator[tuple[Member, int, int]]:
    """Each source of a group's last phase, with the samples that this and that all earlier phases take of it."""
    phase = group.phases[-1]
    newest = dataset.newest if isinstance(dataset, PhasedDataset) else dataset
    taken = newest.taken if isinstance(newest, BlendedDataset) else (group.length_of(-1),)
    for member, count in zip(phase.members, taken, strict=True):
        yield member, count, phase.consumed_of(member.source)


def repetition_notices(group: GroupPlan, dataset: SampleDataset, sequence_length: int) -> Iterator[str]:
    """A sentence for each source of the training data that does not fill a sample, or is repeated very often."""
    for member, count, before in taken_samples(group, dataset):
        source = group.sources[member.source]
        passes = (before + count) * sequence_length / source.tokens
        if passes <= 1:
            continue
        shown, advice = f"{passes:,.0f} times", "Use more text or train for fewer samples."
        if source.pass_samples(sequence_length) < 1:
            yield (
                f"the training data {source.prefix} have {source.tokens:,} tokens, which do not fill one sample of "
                f"--seq-length {sequence_length}: they are repeated {shown}, several times in each sample. {advice} A "
                "shorter --seq-length fits short texts."
            )
        elif passes > _MOST_USEFUL_PASSES:
            yield (
                f"the {source.tokens:,} tokens of the training data {source.prefix} are repeated {shown} in this run. "
                f"After about {_MOST_USEFUL_PASSES} times a network learns little more from a text than to recite it. "
                f"{advice}"
            )
