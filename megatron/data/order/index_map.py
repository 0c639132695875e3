"""The order of sequences in a GPT run: document, sample and shuffle index, bit-identical to Megatron's.

The documents of all epochs are laid end to end in a shuffled order (document index), cut into samples of `sequence
length + 1` tokens that overlap by one (sample index), and the samples are shuffled (shuffle index). The compiled
builder (`csrc/index_builder`) and the NumPy code below produce the same bytes.

Source: bigscience Megatron-DeepSpeed `megatron/data/gpt_dataset.py` (`_build_index_mappings`) and `helpers.cpp`; the
0.80 rule is NVIDIA Megatron-LM's and deepspeedai's.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import numpy as np

from megatron import log
from megatron.errors import DataError

try:
    from megatron.data.order import _index_builder as _compiled
except ImportError:
    _compiled = None  # type: ignore[assignment]

SEPARATE_BELOW_RATIO = {"bigscience": 0.95, "nvidia": 0.80}
"""The last epoch is shuffled on its own when less than this share of it is needed."""

_LARGEST_INT32 = 2**31 - 1
_LARGEST_SEED = 2**32 - 1
_MOST_ENTRIES = 2**33
_BUILDER_INTERFACE = 3
_DRAWS_AT_ONCE = 1 << 16


class Indices(NamedTuple):
    """The three arrays that define an order of samples.

    Shapes:
        document: int32 [epochs * documents], sequence numbers.
        sample: int32 or int64 [samples + 1, 2], (position in `document`, token offset) of each sample's first token.
        shuffle: uint32 or int64 [samples].
    """

    document: np.ndarray
    sample: np.ndarray
    shuffle: np.ndarray


@dataclass(frozen=True)
class EpochPlan:
    """The epochs that an index covers.

    Args:
        epochs: whole passes over the documents.
        samples: samples in all of them.
        first_samples: samples of the first `epochs - 1` passes if the last is separate, all otherwise.
    """

    epochs: int
    samples: int
    first_samples: int

    @property
    def separate(self) -> bool:
        """True if the last epoch is shuffled on its own, after all others."""
        return self.first_samples < self.samples


def plan_epochs(tokens: int, sequence_length: int, samples: int, epoch_rule: str) -> EpochPlan:
    """Returns the epochs required for a number of samples.

    Args:
        tokens: tokens of one epoch.
        samples: required samples; the plan has at least as many.
        epoch_rule: a key of `SEPARATE_BELOW_RATIO`.

    Raises:
        DataError: the documents hold no tokens.
    """
    if tokens <= 0:
        raise DataError(
            f"{samples} samples were requested from documents that hold {tokens} tokens. Use a corpus with text."
        )
    epochs = max(1, -(-(samples * sequence_length + 1) // tokens))
    total = (epochs * tokens - 1) // sequence_length
    if epochs == 1:
        return EpochPlan(1, total, total)
    earlier = ((epochs - 1) * tokens - 1) // sequence_length
    samples_per_epoch = (tokens - 1) // sequence_length
    separate = samples - earlier < int(SEPARATE_BELOW_RATIO[epoch_rule] * samples_per_epoch)
    return EpochPlan(epochs, total, earlier if separate else total)


def build_indices(
    lengths: np.ndarray,
    documents: np.ndarray,
    sequence_length: int,
    samples: int,
    seed: int,
    epoch_rule: str = "bigscience",
    tokens: int | None = None,
) -> Indices:
    """Builds document, sample and shuffle index.

    Shapes:
        lengths: int32 [N], tokens of every sequence of the file; documents: [D], numbers of the sequences to use.

    Args:
        tokens: tokens in the documents, if known.

    Raises:
        DataError: no tokens, a seed that NumPy rejects, or an order that is too long.
    """
    check_seed(seed)
    if tokens is None:
        tokens = int(lengths[documents].sum(dtype=np.int64))
    plan = plan_epochs(tokens, sequence_length, samples, epoch_rule)
    if plan.epochs * len(documents) > _MOST_ENTRIES:
        raise DataError(
            f"{samples} samples of {sequence_length} tokens need {plan.epochs} epochs of {len(documents)} documents: "
            f"an order of more than {_MOST_ENTRIES} entries. Use a larger corpus or fewer samples."
        )
    random = np.random.RandomState(seed)
    document = _document_index(documents, plan, random)
    sample = sample_index(lengths, document, sequence_length, plan.samples)
    return Indices(document, sample, _shuffle_index(plan, random))


def check_seed(seed: int) -> None:
    """Checks that NumPy accepts a seed.

    Raises:
        DataError: it does not.
    """
    if not 0 <= seed <= _LARGEST_SEED:
        raise DataError(f"The seed {seed} (--seed) cannot shuffle data; it must be from 0 to {_LARGEST_SEED}.")


def sample_index(lengths: np.ndarray, document: np.ndarray, sequence_length: int, samples: int) -> np.ndarray:
    """Cuts the documents, laid end to end in the given order, into samples.

    Row k is the position of token `k * sequence_length`, the last of sample k - 1 and the first of sample k; row 0 is
    (0, 0).

    Shapes:
        result: [samples + 1, 2], int32 if every entry fits, else int64.

    Raises:
        ValueError: the documents hold too few tokens, or name sequences that do not exist.
    """
    wide = max(len(document), int(lengths.max(initial=0))) > _LARGEST_INT32
    builder = compiled_builder()
    if builder is not None:
        contiguous = np.ascontiguousarray(lengths, dtype=np.int32)
        return builder.build_sample_index(contiguous, document, sequence_length, samples, wide)
    return _sample_index_numpy(lengths, document, sequence_length, samples, np.int64 if wide else np.int32)


@functools.cache
def compiled_builder() -> ModuleType | None:
    """Returns the compiled index builder, or None (with one warning) if it is not installed."""
    if _compiled is not None and _compiled.INTERFACE == _BUILDER_INTERFACE:
        return _compiled
    log.warning(
        "the compiled index builder is not installed; NumPy builds the same sample order with more memory, and blends "
        "about 20 times slower. Install it with a C++ compiler and `pip install .`."
    )
    return None


def _sample_index_numpy(
    lengths: np.ndarray, document: np.ndarray, sequence_length: int, samples: int, dtype: type[np.integer]
) -> np.ndarray:
    sizes = lengths[document]
    ends = np.cumsum(sizes, dtype=np.int64)
    if samples and (len(ends) == 0 or ends[-1] <= samples * sequence_length):
        held = int(ends[-1]) if len(ends) else 0
        raise ValueError(f"{samples} samples need {samples * sequence_length + 1} tokens; the documents hold {held}.")
    result = np.empty((samples + 1, 2), dtype)
    result[0] = 0
    chunk = 1 << 20
    for first in range(1, samples + 1, chunk):
        last = min(first + chunk, samples + 1)
        target = np.arange(first, last, dtype=np.int64) * sequence_length
        position = np.searchsorted(ends, target, side="right")
        result[first:last, 0] = position
        result[first:last, 1] = target - ends[position] + sizes[position]
    return result


def shuffle(random: np.random.RandomState, values: np.ndarray) -> None:
    """Equals `random.shuffle(values)`, for the values and the state of `random`; several times faster where compiled.

    The draws come from NumPy in chunks; the last chunk is drawn again as far as it was used.

    Shapes:
        values: [n] integers of 4 or 8 bytes.
    """
    builder = compiled_builder()
    if builder is None or not 1 < len(values) <= _LARGEST_SEED:
        random.shuffle(values)
        return
    index = len(values) - 1
    while index > 0:
        state = random.get_state(legacy=False)
        index, used = builder.shuffle(values, index, _draws(random, min(_DRAWS_AT_ONCE, 2 * index + 64)))
    random.set_state(state)
    _draws(random, used)


def _draws(random: np.random.RandomState, count: int) -> np.ndarray:
    """Returns the generator's next raw 32-bit numbers."""
    return random.randint(0, 2**32, count, dtype=np.uint32)


def _document_index(documents: np.ndarray, plan: EpochPlan, random: np.random.RandomState) -> np.ndarray:
    ids = documents.astype(np.int64 if int(documents.max(initial=0)) > _LARGEST_INT32 else np.int32, copy=False)
    order = np.tile(ids, plan.epochs)
    first_epochs = len(ids) * (plan.epochs - 1 if plan.separate else plan.epochs)
    shuffle(random, order[:first_epochs])
    shuffle(random, order[first_epochs:])
    return order


def _shuffle_index(plan: EpochPlan, random: np.random.RandomState) -> np.ndarray:
    dtype = np.int64 if plan.samples >= 2**32 - 2 else np.uint32
    order = np.arange(plan.samples, dtype=dtype)
    shuffle(random, order[: plan.first_samples])
    shuffle(random, order[plan.first_samples :])
    return order
