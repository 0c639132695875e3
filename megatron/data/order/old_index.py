"""Index files that bigscience Megatron-DeepSpeed left next to a corpus: read where they match this data, never written.

Their names say nothing about the split or the range, so upstream uses files of an earlier split without noticing. Here
they are used only after their content was checked: every document the right number of times, the end of the shuffle
recomputed from the seed, and the samples measured against the lengths of their documents.

Source: names, `megatron/data/gpt_dataset.py` (`_build_index_mappings`) of bigscience Megatron-DeepSpeed; the shuffle is
NumPy's (`RandomState`), a Fisher-Yates from the end.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np

from megatron import log
from megatron.data.order.index_map import EpochPlan, Indices, plan_epochs
from megatron.files.plain import open_plain

_CHECKED_ROWS = 1024
_CHUNK_ENTRIES = 1 << 22
_LARGEST_INT32 = 2**31 - 1
_LARGEST_HEADER_BYTES = 1 << 10
_FIXED_BYTES = 10  # before the header's text: magic, version, length
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(?P<length>..)\{'descr': '(?P<dtype><[iu][48])', 'fortran_order': False, "
    rb"'shape': \((?P<shape>\d{1,15}L?,|\d{1,15}L?, 2L?)\), \} *\n",
    re.DOTALL,
)
_UNUSED_TEXT = "{path} or a file next to it is not used ({reason}); the index is built from the data."


def read_old_index(
    stem: str, lengths: np.ndarray, first: int, last: int, sequence_length: int, samples: int, seed: int
) -> Indices | None:
    """The index arrays under upstream's names, or None if there are none or they are of other data; says which.

    Args:
        stem: the data prefix, an underscore, and the name of the dataset (`train`, or the name of a weighted group).
        lengths: int32 [N], tokens of every sequence of the file.
        first, last: the sequences that the dataset may use.
        samples: samples asked for; part of the names.
    """
    paths = [
        Path(f"{stem}_indexmap_{samples}ns_{sequence_length}sl_{seed}s_{name}_idx.npy")
        for name in ("doc", "sample", "shuffle")
    ]
    if not any(path.is_file() for path in paths):
        return None
    try:
        document, sample, shuffle = (_mapped(path) for path in paths)
    except (OSError, ValueError) as failure:
        log.warning(_UNUSED_TEXT.format(path=paths[0], reason=failure))
        return None
    plan = plan_epochs(int(lengths[first:last].sum(dtype=np.int64)), sequence_length, samples, "bigscience")
    problem = (
        _shape_problem(document, sample, shuffle, plan, last - first)
        or _document_problem(document, plan, first, last, seed)
        or _sample_problem(sample, document, lengths, sequence_length)
        or _shuffle_problem(shuffle, plan)
    )
    if problem:
        log.warning(_UNUSED_TEXT.format(path=paths[0], reason=problem))
        return None
    log.info(f"the order of samples is read from {paths[0]} and the two files next to it, which fit this data.")
    rows = sample.astype(np.int64 if len(document) > _LARGEST_INT32 else np.int32, copy=False)
    return Indices(document, rows, shuffle)


def _mapped(path: Path) -> np.ndarray:
    """Maps an array as `np.save` writes integers; whatever else the file may be is refused unread.

    Raises:
        ValueError: it is no such file.

    Source: NumPy, `numpy/lib/format.py` (format version 1.0).
    """
    with open_plain(path) as stream:
        start = stream.read(_LARGEST_HEADER_BYTES)
        size = stream.seek(0, 2)
    header = _HEADER.match(start)
    if header is None:
        raise ValueError(f"{path.name} begins with {start[:16]!r} and is not an array of integers")
    dtype = np.dtype(header["dtype"].decode())
    shape = tuple(int(number) for number in header["shape"].replace(b"L", b"").split(b",") if number.strip())
    offset = _FIXED_BYTES + int.from_bytes(header["length"], "little")
    entries = math.prod(shape)
    if not entries or offset + entries * dtype.itemsize != size:
        raise ValueError(f"{path.name} has {size} bytes; its header announces {list(shape)} {dtype.name}")
    return np.memmap(path, dtype, "r", offset, shape)


def _shape_problem(
    document: np.ndarray, sample: np.ndarray, shuffle: np.ndarray, plan: EpochPlan, sequences: int
) -> str | None:
    expected = (
        ("document index", document, (plan.epochs * sequences,), (np.int32,)),
        ("sample index", sample, (plan.samples + 1, 2), (np.int32, np.int64)),
        ("shuffle index", shuffle, (plan.samples,), (np.uint32,)),
    )
    for name, array, shape, dtypes in expected:
        if array.shape != shape or array.dtype not in dtypes:
            return f"the {name} is {array.dtype.name} {list(array.shape)}; this data needs {list(shape)}"
    return None


def _document_problem(document: np.ndarray, plan: EpochPlan, first: int, last: int, seed: int) -> str | None:
    """Why this is not the shuffled order of whole epochs over sequences [first, last) that the seed gives."""
    sequences = last - first
    first_epochs = (plan.epochs - 1 if plan.separate else plan.epochs) * sequences
    for part, times in ((document[:first_epochs], first_epochs // sequences), (document[first_epochs:], 1)):
        counts = np.zeros(sequences, np.uint32)
        for start in range(0, len(part), _CHUNK_ENTRIES):
            chunk = part[start : start + _CHUNK_ENTRIES]
            if chunk.min() < first or chunk.max() >= last:
                return f"it names sequences outside [{first}, {last})"
            np.add.at(counts, chunk - first, 1)
        if len(part) and not (counts == times).all():
            wrong = int(np.flatnonzero(counts != times)[0])
            return f"it names sequence {first + wrong} {int(counts[wrong])} times instead of {times}"
    end = shuffled_end(first_epochs, sequences, seed, _CHECKED_ROWS) + first
    if not np.array_equal(document[first_epochs - len(end) : first_epochs], end):
        return f"its order does not match seed {seed}"
    return None


def shuffled_end(size: int, period: int, seed: int, count: int) -> np.ndarray:
    """The last `count` entries of [0, 1, ..., period - 1] repeated to `size` and shuffled by `RandomState(seed)`.

    The shuffle settles its entries from the last one on, so the end takes only its first draws.
    """
    random = np.random.RandomState(seed)
    moved: dict[int, int] = {}
    end = []
    for place in range(size - 1, max(size - 1 - count, 0), -1):
        chosen = int(random.randint(0, place + 1))
        here = moved.pop(place, place)
        end.append(moved.get(chosen, chosen) if chosen != place else here)
        if chosen != place:
            moved[chosen] = here
    return np.array(end[::-1], np.int64) % period


def _sample_problem(sample: np.ndarray, document: np.ndarray, lengths: np.ndarray, sequence_length: int) -> str | None:
    """Why the rows are not every `sequence_length`-th token of the documents; most rows are not looked at."""
    rows = len(sample) - 1
    if sample[0].any():
        return f"its first sample begins at {sample[0].tolist()} and not at [0, 0]"
    if sample.min() < 0 or int(sample[:, 0].max()) >= len(document):
        return f"it names places outside the {len(document)} entries of the document index"
    last_place, last_offset = (int(value) for value in sample[rows])
    before = sum(
        int(lengths[document[start : min(start + _CHUNK_ENTRIES, last_place)]].sum(dtype=np.int64))
        for start in range(0, last_place, _CHUNK_ENTRIES)
    )
    if before + last_offset != rows * sequence_length:
        return f"its {rows} samples end after {before + last_offset} tokens and not {rows * sequence_length}"
    for row in np.unique(np.linspace(0, rows - 1, min(rows, _CHECKED_ROWS)).astype(np.int64)):
        (place, offset), (end_place, end_offset) = sample[row].tolist(), sample[row + 1].tolist()
        between = int(lengths[document[place:end_place]].sum(dtype=np.int64))
        is_inside = place <= end_place and end_offset < int(lengths[document[end_place]])
        if not is_inside or between - offset + end_offset != sequence_length:
            return f"its sample {row} does not hold {sequence_length} tokens of these documents"
    return None


def _shuffle_problem(shuffle: np.ndarray, plan: EpochPlan) -> str | None:
    """Why this does not name every sample once, the separate last epoch after all others."""
    for start, stop in ((0, plan.first_samples), (plan.first_samples, plan.samples)):
        seen = np.zeros(stop - start, bool)
        for at in range(start, stop, _CHUNK_ENTRIES):
            chunk = shuffle[at : min(at + _CHUNK_ENTRIES, stop)].astype(np.int64)
            if chunk.min() < start or chunk.max() >= stop:
                return f"it puts a sample outside [{start}, {stop}) there"
            seen[chunk - start] = True
        if not seen.all():
            return f"it leaves out sample {start + int(np.flatnonzero(~seen)[0])}"
    return None
