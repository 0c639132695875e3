"""Command lines that tests of the configuration start from."""

from __future__ import annotations

import shlex

from megatron.config import RunRequest, parse
from megatron.config.flags.legacy import legacy_flags
from megatron.config.flags.shorthands import shorthand_flags
from megatron.config.flags.status_table import IGNORED, SUPPORTED
from megatron.config.parse import field_flags

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --train-iters 10 --data-path corpus_text_document "
    "--vocab-file vocab.json --merge-file merges.txt"
)


def words(text: str = "", drop: str = "") -> list[str]:
    """The small command line without the flags named in `drop` (and their one value), followed by `text`, which
    may give another --data-path.
    """
    found, more = shlex.split(SMALL), shlex.split(text)
    for name in {*drop.split(), *({"--data-path"} & {*more})}:
        place = found.index(name)
        del found[place : place + 2]
    return found + more


def small(text: str = "", drop: str = "") -> RunRequest:
    """The small command line, parsed."""
    return parse(words(text, drop))


def flag_table() -> list[tuple[str, str, str, str]]:
    """Name, type, default and status of every flag the trainer knows, in the order of the help."""
    rows = [
        (flag.name, flag.type_name, flag.shown_default, IGNORED if flag.facts.ignored else SUPPORTED)
        for flag in field_flags().values()
    ]
    rows += [
        (entry.flag.positive_name, entry.flag.type_name, entry.flag.shown_default, SUPPORTED)
        for entry in shorthand_flags().values()
    ]
    others = [
        (entry.flag.positive_name, entry.flag.type_name, entry.flag.shown_default, entry.status)
        for entry in legacy_flags().values()
    ]
    return rows + sorted(others, key=lambda row: (row[3], row[0]))
