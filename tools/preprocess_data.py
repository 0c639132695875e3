r"""Tokenizes jsonl, Parquet or text files to token files for training: `<prefix>_<key>_document.bin`, `.idx`.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix my-gpt2 --vocab-file vocab.json \
        --merge-file merges.txt --tokenizer-type GPT2BPETokenizer --append-eod --workers 2
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log, process_exit
from megatron.config import PathUse, flag, parse_flags
from megatron.config.flags.paths import prefix_problems
from megatron.config.sections.data import WORDPIECE_TOKENIZERS, TokenizerFileFlags, required_tokenizer_type

_SHOWN_FILES = 8


@dataclass(frozen=True)
class PreprocessFlags(TokenizerFileFlags):
    """Upstream's flags of this tool, and `--on-bad-line`, `--document-separator`, `--shard`."""

    input: tuple[str, ...] = flag(
        help="jsonl and .txt files, also .gz .bz2 .xz .zst, and .parquet; patterns; folders; - for standard input; "
        "sqlite:///file.db?table=name, mongodb://host/database, db.json; hf://name:split",
        nargs="+",
        path=PathUse.CORPUS,
    )
    output_prefix: str = flag(
        help="path of the output, without _<key>_document.bin/.idx or _<key>_sentence.bin/.idx", path=PathUse.NEW_PREFIX
    )
    tokenizer_type: str = required_tokenizer_type()
    json_keys: tuple[str, ...] = flag(
        ("text",),
        "keys of the texts to encode, each into separate files; a.b is key b of the object under a",
        nargs="+",
        spelled=("--json-key",),
    )
    append_eod: bool = flag(False, "append the end-of-document id to every non-empty document")
    dataset_impl: str = flag(
        "mmap",
        "output format: mmap, which current trainers read; cached and lazy are an older format with int32 ids",
        choices=("mmap", "cached", "lazy"),
    )
    workers: int = flag(1, "number of worker processes; 1 for none. The output does not depend on it", at_least=1)
    log_interval: int = flag(100, "documents between progress lines (at most one line per second)", at_least=1)
    on_bad_line: str = flag(
        "error",
        "invalid lines: stop with an error, or skip and count them",
        choices=("error", "skip"),
    )
    document_separator: str | None = flag(
        None,
        r"separator of documents in .txt files, a newline (\n) by default; if given, standard input is plain text too",
    )
    shard: str | None = flag(
        None,
        "i/n: encode only the i-th of n equal shards, into <prefix>_shard<i>of<n>, to be merged in order",
    )
    partitions: int = flag(
        1,
        "number of partitions; with 2 or more, a killed run can be resumed with the same command. Merging them "
        "temporarily doubles the disk space; the output does not depend on it",
        at_least=1,
    )
    split_sentences: bool = flag(False, "write one sequence per sentence, into <prefix>_<key>_sentence.bin/.idx")
    keep_newlines: bool = flag(
        False,
        "with --split-sentences: keep whitespace between sentences, at the end of the preceding one, instead of "
        "dropping it",
    )
    lang: str = flag("en", "with --split-sentences: language of the texts, as a code (en, tr, zh) or name (english)")
    datasets: tuple[str, ...] = flag((), "accepted and ignored, as in upstream", nargs="+")
    seq_length: int | None = flag(None, "accepted and ignored; documents are kept whole", at_least=1)
    vocab_size: int | None = flag(None, "accepted and ignored; the tokenizer determines it", at_least=1)
    trust_remote_code: bool = flag(False, "accepted and ignored; code of a tokenizer is never executed")
    make_vocab_size_divisible_by: int = flag(
        128, "accepted and ignored; the id width is derived from the unpadded vocabulary", at_least=1
    )
    pad_vocab_size_to: int | None = flag(
        None, "accepted and ignored; the id width is derived from the unpadded vocabulary", at_least=1
    )

    def problems(self) -> Iterator[str]:
        """Yields violated rules between the flags."""
        suffix = f"_{next(iter(self.json_keys), '')}_document.bin"
        yield from prefix_problems("--output-prefix", self.output_prefix, suffix, self.input)
        if len(set(self.json_keys)) != len(self.json_keys):
            yield (
                f"--json-keys {' '.join(self.json_keys)} contains a key twice. Each key gets separate files: list it "
                "once."
            )
        if self.document_separator is not None and len(self.json_keys) > 1:
            yield (
                f"--document-separator reads plain text without keys, but --json-keys has {len(self.json_keys)}. Use "
                "one key, which becomes part of the output's name."
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool on the command line's flags."""
    arguments = sys.argv[1:] if argv is None else argv
    return run(parse_flags(PreprocessFlags, arguments, prog="preprocess_data.py", description=__doc__ or ""))


def run(flags: PreprocessFlags) -> int:
    """Runs preprocessing; also called by `preprocess_data_many_cores.py`."""
    from megatron.tokenizers.tokenizer import TokenizerChoice
    from trident.corpus.inputs.input_blocks import total_bytes
    from trident.corpus.inputs.input_paths import InputPart, Shard, expand_inputs, read_separator
    from trident.corpus.preprocess.encode import EncodeOptions
    from trident.corpus.preprocess.partitions import divide, preprocess_in_parts
    from trident.corpus.preprocess.preprocess_corpus import preprocess, warn_if_no_tokens
    from trident.corpus.preprocess.sentences import SentenceSplitter
    from trident.corpus.workers.progress_line import ProgressLine

    process_exit.interrupt_on_sigterm()
    for name, given in (
        ("--datasets", flags.datasets),
        ("--keep-newlines", flags.keep_newlines and not flags.split_sentences),
        ("--seq-length", flags.seq_length),
        ("--vocab-size", flags.vocab_size),
        ("--trust-remote-code", flags.trust_remote_code),
    ):
        if given:
            log.warning(f"{name} has no effect and is ignored.")
    if flags.tokenizer_type in WORDPIECE_TOKENIZERS and not flags.split_sentences:
        log.warning(f"--tokenizer-type {flags.tokenizer_type} without --split-sentences: BERT trains on sentences.")
    separator = None if flags.document_separator is None else read_separator(flags.document_separator)
    files = expand_inputs(flags.input, separator)
    log.info(f"Opening {', '.join(files[:_SHOWN_FILES])}{', ...' * (len(files) > _SHOWN_FILES)} ({len(files)} in all)")
    shard = None if flags.shard is None else Shard.of(flags.shard)
    prefix = flags.output_prefix + ("" if shard is None else shard.suffix)
    options = EncodeOptions(
        TokenizerChoice.of(flags),
        flags.json_keys,
        flags.append_eod,
        flags.on_bad_line == "skip",
        separator,
        SentenceSplitter(flags.lang, flags.keep_newlines) if flags.split_sentences else None,
        is_cached=flags.dataset_impl != "mmap",
    )
    inputs: Sequence[str | InputPart] = files
    if shard is not None or flags.partitions > 1:
        shares = divide(files, flags.partitions, shard, separator, flags.json_keys)
        inputs = [part for share in shares for part in share]
    progress = ProgressLine(total_bytes(inputs), flags.log_interval, log.info, log.status_line())
    try:
        if flags.partitions > 1:
            result = preprocess_in_parts(shares, prefix, options, flags.workers, progress)
        else:
            result = preprocess(inputs, prefix, options, flags.workers, progress)
    except BaseException:
        progress.clear()
        raise
    progress.finish()
    log.info(
        f"Wrote {', '.join(result.prefixes)} (.bin, .idx): {result.documents} documents, {result.tokens} tokens; "
        f"skipped {result.empty} empty documents and {result.skipped} bad lines."
    )
    warn_if_no_tokens(result.prefixes, result.tokens_of_key, result.empty, result.skipped)
    return 0


if __name__ == "__main__":
    process_exit.exit_with(main)
