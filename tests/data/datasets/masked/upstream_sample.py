"""A sample of sentences made in the plainest way, from the description of Megatron's algorithm alone.

Lists of token ids, no arrays; every draw is one call of the generator, in the order of the description: the end of
part A, the swap, a coin for every token that is cut off, the shuffle of phrases, then for each phrase its number of
words and for each of its tokens what is shown.
"""

from dataclasses import dataclass

import numpy as np

from tests.data.datasets.masked.corpora import CLS, MASK, PAD, SEP, VOCABULARY, continues


@dataclass(frozen=True)
class PlainSample:
    """What a sample holds."""

    tokens: list[int]
    labels: dict[int, int]
    types: list[int]
    is_swapped: bool


def plain_sample(
    sentences: list[list[int]], target: int, length: int, share: float, seed: int, number: int, *, pairs: bool = True
) -> PlainSample:
    """The sample of some sentences."""
    random = np.random.RandomState((seed + number) % 2**32)
    part_a: list[int] = []
    part_b: list[int] = []
    is_swapped = False
    if pairs:
        end = 1 if len(sentences) < 3 else random.randint(1, len(sentences))
        for place, sentence in enumerate(sentences):
            (part_a if place < end else part_b).extend(sentence)
        is_swapped = random.random_sample() < 0.5
        if is_swapped:
            part_a, part_b = part_b, part_a
    else:
        for sentence in sentences:
            part_a.extend(sentence)
    while len(part_a) + len(part_b) > target:
        longer = part_a if len(part_a) > len(part_b) else part_b
        longer.pop(0 if random.random_sample() < 0.5 else -1)
    tokens = [CLS, *part_a, SEP] + ([*part_b, SEP] if part_b else [])
    types = [0] * (len(part_a) + 2) + [1] * (len(tokens) - len(part_a) - 2)
    shown, labels = _hidden(tokens, share, target, random)
    rest = length - len(tokens)
    return PlainSample(shown + [PAD] * rest, labels, types + [0] * rest, is_swapped)


def _hidden(
    tokens: list[int], share: float, target: int, random: np.random.RandomState
) -> tuple[list[int], dict[int, int]]:
    words: list[list[int]] = []
    for place, token in enumerate(tokens):
        if token in (CLS, SEP):
            continue
        if words and continues(token):
            words[-1].append(place)
        else:
            words.append([place])
    wanted = min(share * target, max(1, round(len(tokens) * share)))
    phrases = [[words[first : first + count] for count in (1, 2, 3)] for first in range(len(words))]
    random.shuffle(phrases)
    shares = 1.0 / np.arange(1, 4)
    shares /= shares.sum()
    shown, labels = list(tokens), {}
    for phrase in phrases:
        if len(labels) >= wanted:
            break
        count = int(random.choice([1, 2, 3], p=shares / shares.sum()))
        places = [place for word in phrase[count - 1] for place in word]
        while len(labels) + len(places) > wanted and count > 1:
            count -= 1
            places = [place for word in phrase[count - 1] for place in word]
        if len(labels) + len(places) > wanted or any(place in labels for place in places):
            continue
        for place in places:
            labels[place] = tokens[place]
            if random.random_sample() < 0.8:
                shown[place] = MASK
            elif random.random_sample() >= 0.5:
                shown[place] = random.randint(0, VOCABULARY)
    return shown, labels
