"""How often a run passes over its training data, and what there is to say of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron.data.datasets.build import TakenSource

# Muennighoff et al. 2023, "Scaling Data-Constrained Language Models", section 6: data that are repeated up to 4 times
# are worth almost as much as new ones, and after 16 times further passes are worth little.
_MOST_USEFUL_PASSES = 16


def repetition_notices(taken: Iterable[TakenSource], sequence_length: int) -> Iterator[str]:
    """A sentence for each source of the training data that does not fill a sample, or is repeated very often."""
    for part in taken:
        source = part.source
        if part.epochs <= 1:
            continue
        shown, advice = f"{part.epochs:,.0f} times", "Use more text or train for fewer samples."
        if source.pass_samples(sequence_length) < 1:
            yield (
                f"the training data {source.prefix} have {source.tokens:,} tokens, which do not fill one sample of "
                f"--seq-length {sequence_length}: they are repeated {shown}, several times in each sample. {advice} A "
                "shorter --seq-length fits short texts."
            )
        elif part.epochs > _MOST_USEFUL_PASSES:
            yield (
                f"the {source.tokens:,} tokens of the training data {source.prefix} are repeated {shown} in this run. "
                f"After about {_MOST_USEFUL_PASSES} times a network learns little more from a text than to recite it. "
                f"{advice}"
            )
