"""A small WordPiece vocabulary and token files of sentences for tests of masked samples."""

from pathlib import Path

import numpy as np

from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.tokenizers.tokenizer import Tokenizer, TokenizerChoice, build_tokenizer

PAD, UNK, CLS, SEP, MASK = range(5)
WORDS = 60  # of every three words, one continues another
FIRST_WORD = 5
VOCABULARY = FIRST_WORD + WORDS + 2  # and [BOS], [EOS]


def write_vocabulary(folder: Path) -> TokenizerChoice:
    """Writes a `vocab.txt`: BERT's tokens, then words, every third of which continues one."""
    words = [f"{'##' if number % 3 == 2 else ''}w{number}" for number in range(WORDS)]
    path = folder / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    return TokenizerChoice("BertWordPieceLowerCase", str(path))


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of a vocabulary written into the folder."""
    return build_tokenizer(write_vocabulary(folder))


def continues(token: int) -> bool:
    """Whether a token of the vocabulary continues a word, as its text says."""
    return FIRST_WORD <= token < FIRST_WORD + WORDS and (token - FIRST_WORD) % 3 == 2


def write_sentences(prefix: Path, documents: int = 40, seed: int = 3) -> IndexedDataset:
    """Writes documents of 1 to 7 sentences of 2 to 12 random words."""
    random = np.random.RandomState(seed)
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(documents):
            sizes = random.randint(2, 13, random.randint(1, 8))
            writer.add_document([random.randint(FIRST_WORD, FIRST_WORD + WORDS, size) for size in sizes])
    return IndexedDataset(prefix)


def write_texts(prefix: Path, lengths: list[int], seed: int = 5, end: int | None = None) -> IndexedDataset:
    """Writes documents of one sequence each; with an end, it is their last token."""
    random = np.random.RandomState(seed)
    with IndexedWriter(prefix, np.uint16) as writer:
        for length in lengths:
            words = random.randint(FIRST_WORD, FIRST_WORD + WORDS, length)
            writer.add_document([words if end is None else np.append(words, end)])
    return IndexedDataset(prefix)
