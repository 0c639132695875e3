"""Command lines that tests of the configuration start from."""

from __future__ import annotations

import shlex

from megatron.config import RunRequest, parse

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
