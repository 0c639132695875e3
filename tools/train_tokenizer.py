"""Learns a vocabulary from jsonl, Parquet or text files and writes it for preprocessing and training.

    python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --output-prefix demo
    python tools/train_tokenizer.py --input 'texts/*.jsonl.gz' --model-type unigram --output-prefix demo \
        --special-tokens dsgpt2 --max-documents 1000000

writes, and names in its last line, by --model-type:

    bpe        demo-vocab.json, demo-merges.txt   --tokenizer-type GPT2BPETokenizer --vocab-file --merge-file
    unigram    demo.model                         --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model
    wordpiece  demo-vocab.txt                     --tokenizer-type BertWordPieceCase (or ...LowerCase) --vocab-file

and each time demo-tokenizer.json (--tokenizer-type HFTokenizer --tokenizer-name-or-path). The same input gives the same
bytes. tools/check_tokenizer.py says how well the result writes a text.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log
from megatron.config import ConfigSection, flag, parse_flags

if TYPE_CHECKING:
    from megatron.corpus.workers.progress import ProgressLine


@dataclass(frozen=True)
class TrainTokenizerFlags(ConfigSection):
    """What this tool asks for."""

    input: tuple[str, ...] = flag(
        help="jsonl files, also .gz .bz2 .xz .zst, and .parquet; patterns; folders; - is standard input; "
        "sqlite:///file.db?table=name, mongodb://host/database, db.json; hf://name:split",
        nargs="+",
    )
    output_prefix: str = flag(help="path of the outputs without -vocab.json and the like")
    model_type: str = flag(
        "bpe",
        "byte-level BPE as GPT-2's, SentencePiece's Unigram, or BERT's WordPiece",
        choices=("bpe", "unigram", "wordpiece"),
    )
    vocab_size: int = flag(50257, "entries of the vocabulary, special tokens included", at_least=1, below=2**31)
    special_tokens: tuple[str, ...] = flag(
        (),
        "tokens that get the ids from 0 on; dsgpt2 means <s> <pad> </s> <unk> <mask> <sys> <usr> and 100 unused ones",
        nargs="+",
    )
    nspecial: int | None = flag(
        None, "number of tokens <unused0>, <unused1>, ... after the special tokens", at_least=0, below=2**20
    )
    lower_case: bool = flag(False, "wordpiece: learn words in lower case and without accents")
    json_keys: tuple[str, ...] = flag(("text",), "keys whose texts are used", nargs="+", spelled=("--json-key",))
    min_frequency: int = flag(2, "bpe, wordpiece: how often a pair must occur to be merged", at_least=1)
    sample: float = flag(
        1.0, "share of the documents to learn from, spread evenly over the input", above=0.0, at_most=1.0
    )
    megabytes: float | None = flag(
        None, "learn from about so many megabytes, spread evenly over the input; all of it if unset", above=0.0
    )
    max_documents: int | None = flag(
        None, "learn from at most so many documents, drawn by --seed; memory holds no more of them", at_least=1
    )
    seed: int = flag(1234, "seed of --max-documents", at_least=0)
    document_separator: str | None = flag(
        None, r"reads .txt files and standard input as plain text whose documents end with this (\n is a newline)"
    )
    on_bad_line: str = flag(
        "error", "what a line that is no good JSON document does: stop, or be left out", choices=("error", "skip")
    )

    def problems(self) -> Iterator[str]:
        """Rules between the flags."""
        if self.lower_case and self.model_type != "wordpiece":
            yield f"--lower-case has no meaning for --model-type {self.model_type}; leave it out."
        if self.model_type == "wordpiece" and "-" in self.input and self.max_documents is None:
            yield (
                "--model-type wordpiece reads its input twice, which standard input (-) cannot be. Give a file, or "
                "hold the texts in memory with --max-documents."
            )
        if self.megabytes is not None and self.sample < 1.0:
            yield f"--megabytes {self.megabytes:g} and --sample {self.sample:g} both say how much to read; give one."


def main() -> int:
    """Runs the tool on the command line's flags."""
    flags = parse_flags(TrainTokenizerFlags, sys.argv[1:], prog="train_tokenizer.py", description=__doc__ or "")
    from megatron.corpus.vocabulary.learning import check_vocabulary_place, save_vocabulary, special_tokens

    check_vocabulary_place(flags.output_prefix, flags.model_type)
    special = special_tokens(flags.special_tokens, flags.nspecial)
    files = _learned(flags, special)
    paths = save_vocabulary(flags.output_prefix, files)
    log.info(f"Wrote {', '.join(map(str, paths))}: {_entries(files)} entries, {len(special)} special tokens asked for.")
    return 0


def _learned(flags: TrainTokenizerFlags, special: tuple[str, ...]) -> dict[str, bytes]:
    """Contents of the files by suffix."""
    from megatron.corpus.vocabulary.learning import byte_level_files, train_byte_level
    from megatron.corpus.vocabulary.unigram import train_unigram
    from megatron.corpus.vocabulary.wordpiece import train_wordpiece

    shows = sys.stderr.isatty()
    if flags.model_type == "unigram":
        return train_unigram(_texts(flags), flags.vocab_size, special)
    if flags.model_type == "wordpiece":
        held = None if flags.max_documents is None else list(_texts(flags))
        return train_wordpiece(
            lambda: _texts(flags) if held is None else held,
            flags.vocab_size,
            flags.min_frequency,
            special,
            flags.lower_case,
            shows,
        )
    vocabulary, merges = train_byte_level(_texts(flags), flags.vocab_size, flags.min_frequency, special, shows)
    return byte_level_files(vocabulary, merges, special)


def _texts(flags: TrainTokenizerFlags) -> Iterable[str]:
    """The texts to learn from, with a bar or lines of progress while they are read."""
    from megatron.corpus.inputs.files import expand_inputs, read_separator
    from megatron.corpus.inputs.sources import total_bytes
    from megatron.corpus.vocabulary.learning import drawn_texts, texts_of
    from megatron.corpus.workers.progress import ProgressLine

    separator = None if flags.document_separator is None else read_separator(flags.document_separator)
    inputs = expand_inputs(flags.input, separator)
    size = total_bytes(inputs)
    share = flags.sample if flags.megabytes is None or not size else min(1.0, flags.megabytes * 1e6 / size)
    progress = ProgressLine(size, 10_000, log.info, sys.stderr.write if sys.stderr.isatty() else None)
    texts = texts_of(inputs, flags.json_keys, share, flags.on_bad_line == "skip", progress, separator)
    watched = _until_read(texts, progress, flags.model_type)
    return watched if flags.max_documents is None else drawn_texts(watched, flags.max_documents, flags.seed)


def _until_read(texts: Iterable[str], progress: ProgressLine, model_type: str) -> Iterator[str]:
    """Ends the progress with the last text, before the learning itself."""
    try:
        yield from texts
    except BaseException:
        progress.clear()
        raise
    progress.finish()
    log.info(f"The texts are read; {model_type} continues with them (this takes a while for a large vocabulary).")


def _entries(files: dict[str, bytes]) -> int:
    """Entries of the vocabulary."""
    from tokenizers import Tokenizer

    return int(Tokenizer.from_str(files["-tokenizer.json"].decode()).get_vocab_size())


if __name__ == "__main__":
    log.exit_with(main)
