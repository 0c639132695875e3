r"""Trains a tokenizer on jsonl, Parquet or text files, for preprocessing and training.

    python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --output-prefix demo
    python tools/train_tokenizer.py --input 'texts/*.jsonl.gz' --model-type unigram --output-prefix demo \
        --special-tokens dsgpt2 --max-documents 1000000

The output files, printed in the last line, depend on --model-type:

    bpe        demo-vocab.json, demo-merges.txt   --tokenizer-type GPT2BPETokenizer --vocab-file --merge-file
    unigram    demo.model                         --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model
    wordpiece  demo-vocab.txt                     --tokenizer-type BertWordPieceCase (or ...LowerCase) --vocab-file

All types also write demo-tokenizer.json (--tokenizer-type HFTokenizer --tokenizer-name-or-path). The output is
deterministic. tools/corpus/check_tokenizer.py evaluates it on texts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log, process_exit
from megatron.config import ConfigSection, PathUse, flag, parse_flags
from megatron.config.flags.paths import prefix_problems

if TYPE_CHECKING:
    from trident.corpus.workers.progress_line import ProgressLine


@dataclass(frozen=True)
class TrainTokenizerFlags(ConfigSection):
    """Flags of this tool."""

    input: tuple[str, ...] = flag(
        help="jsonl and .txt files, also .gz .bz2 .xz .zst, and .parquet; patterns; folders; - for standard input; "
        "sqlite:///file.db?table=name, mongodb://host/database, db.json; hf://name:split",
        nargs="+",
        path=PathUse.CORPUS,
    )
    output_prefix: str = flag(help="path of the output, without suffixes such as -vocab.json", path=PathUse.NEW_PREFIX)
    model_type: str = flag(
        "bpe",
        "byte-level BPE (GPT-2), Unigram (SentencePiece), or WordPiece (BERT)",
        choices=("bpe", "unigram", "wordpiece"),
    )
    vocab_size: int = flag(50257, "vocabulary size, special tokens included", at_least=1, below=2**31)
    special_tokens: tuple[str, ...] = flag(
        (),
        "special tokens, with ids from 0; dsgpt2: <s> <pad> </s> <unk> <mask> <sys> <usr> and 100 unused ones",
        nargs="+",
    )
    nspecial: int | None = flag(
        None, "number of tokens <unused0>, <unused1>, ... after the special tokens", at_least=0, below=2**20
    )
    lower_case: bool = flag(False, "wordpiece: lower-case the text and strip accents")
    json_keys: tuple[str, ...] = flag(("text",), "JSON keys of the texts", nargs="+", spelled=("--json-key",))
    min_frequency: int = flag(2, "bpe, wordpiece: minimum frequency of a merged pair", at_least=1)
    sample: float = flag(1.0, "fraction of documents to train on, spread evenly over the input", above=0.0, at_most=1.0)
    megabytes: float | None = flag(
        None, "train on about this many megabytes, spread evenly over the input; all if unset", above=0.0
    )
    max_documents: int | None = flag(
        None, "train on at most this many documents, sampled with --seed and held in memory", at_least=1
    )
    seed: int = flag(1234, "seed of --max-documents", at_least=0)
    document_separator: str | None = flag(
        None,
        r"separator of documents in .txt files, a newline (\n) by default; if given, standard input is plain text too",
    )
    on_bad_line: str = flag("error", "invalid lines: stop with an error, or skip them", choices=("error", "skip"))

    def problems(self) -> Iterator[str]:
        """Yields violated rules between the flags."""
        yield from prefix_problems("--output-prefix", self.output_prefix, "-vocab.json", self.input)
        if self.lower_case and self.model_type != "wordpiece":
            yield f"--lower-case has no effect with --model-type {self.model_type}. Drop it."
        if self.model_type == "wordpiece" and "-" in self.input and self.max_documents is None:
            yield (
                "--model-type wordpiece cannot be combined with standard input (-), as it reads the input twice. Use a "
                "file, or hold the texts in memory with --max-documents."
            )
        if self.megabytes is not None and self.sample < 1.0:
            yield f"--megabytes {self.megabytes:g} cannot be combined with --sample {self.sample:g}. Drop one of them."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool on the command line's flags."""
    arguments = sys.argv[1:] if argv is None else argv
    flags = parse_flags(TrainTokenizerFlags, arguments, prog="train_tokenizer.py", description=__doc__ or "")
    from megatron.tokenizers.tokenizer_files import require_tokenizers
    from trident.corpus.vocabulary.learning import check_vocabulary_writable, save_vocabulary, special_tokens

    require_tokenizers()
    check_vocabulary_writable(flags.output_prefix, flags.model_type)
    special = special_tokens(flags.special_tokens, flags.nspecial)
    files = _train(flags, special)
    paths = save_vocabulary(flags.output_prefix, files)
    log.info(f"Wrote {', '.join(map(str, paths))}: {_entries(files)} entries, {len(special)} special tokens requested.")
    return 0


def _train(flags: TrainTokenizerFlags, special: tuple[str, ...]) -> dict[str, bytes]:
    """Trains the tokenizer; returns the contents of its files by suffix."""
    from trident.corpus.vocabulary.learning import byte_level_files, train_byte_level
    from trident.corpus.vocabulary.unigram import train_unigram
    from trident.corpus.vocabulary.wordpiece import train_wordpiece

    shows = sys.stderr.isatty()
    if flags.model_type == "unigram":
        return train_unigram(_texts(flags), flags.vocab_size, special)
    if flags.model_type == "wordpiece":
        texts = None if flags.max_documents is None else list(_texts(flags))
        return train_wordpiece(
            lambda: _texts(flags) if texts is None else texts,
            flags.vocab_size,
            flags.min_frequency,
            special,
            flags.lower_case,
            shows,
        )
    vocabulary, merges = train_byte_level(_texts(flags), flags.vocab_size, flags.min_frequency, special, shows)
    return byte_level_files(vocabulary, merges, special)


def _texts(flags: TrainTokenizerFlags) -> Iterable[str]:
    """The texts to train on, with a progress line."""
    from trident.corpus.inputs.input_blocks import total_bytes
    from trident.corpus.inputs.input_paths import expand_inputs, read_separator
    from trident.corpus.vocabulary.learning import drawn_texts, texts_of
    from trident.corpus.workers.progress_line import ProgressLine

    separator = None if flags.document_separator is None else read_separator(flags.document_separator)
    inputs = expand_inputs(flags.input, separator)
    size = total_bytes(inputs)
    share = flags.sample if flags.megabytes is None or not size else min(1.0, flags.megabytes * 1e6 / size)
    progress = ProgressLine(size, 10_000, log.info, log.status_line())
    texts = texts_of(inputs, flags.json_keys, share, flags.on_bad_line == "skip", progress, separator)
    watched = _until_read(texts, progress, flags.model_type)
    return watched if flags.max_documents is None else drawn_texts(watched, flags.max_documents, flags.seed)


def _until_read(texts: Iterable[str], progress: ProgressLine, model_type: str) -> Iterator[str]:
    """Ends the progress line after the last text, before training starts."""
    try:
        yield from texts
    except BaseException:
        progress.clear()
        raise
    progress.finish()
    log.info(f"Read all texts; training {model_type} (this takes a while for a large vocabulary).")


def _entries(files: dict[str, bytes]) -> int:
    """The vocabulary size."""
    from tokenizers import Tokenizer

    return int(Tokenizer.from_str(files["-tokenizer.json"].decode()).get_vocab_size())


if __name__ == "__main__":
    process_exit.exit_with(main)
