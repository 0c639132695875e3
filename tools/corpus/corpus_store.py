"""Manages a corpus in a database: numbered documents for training and preprocessing.

    python tools/corpus/corpus_store.py import corpus/*.jsonl --config db.json --collection web
    python tools/corpus/corpus_store.py import chat.jsonl --config db.json --collection chat --pair-keys q a
    python tools/corpus/corpus_store.py stat --config db.json
    python tools/corpus/corpus_store.py bench --config db.json --n 20000
    python tools/corpus/corpus_store.py fetch --config db.json --nsample 50000 --num-process 2 \\
        --output-prefix vocab/part
    python tools/corpus/corpus_store.py fetch --config db.json --nsample 50000 --output-prefix - | \\
        python tools/train_tokenizer.py --input - --output-prefix vocab/demo
    python tools/corpus/corpus_store.py lengths --config db.json --vocab-file vocab.json --merge-file merges.txt

--config is a JSON file with MONGO_CONNECTION_STRING (mongodb://host:27017, or sqlite:///file.db), MONGO_CONNECTION_DB
and COLLECTIONS, or such an address. Importing a file again does not add it twice.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import log, process_exit
from megatron.config import ConfigSection, PathUse, flag, parse_flags
from megatron.config.sections.data import TokenizerFileFlags, optional_tokenizer_type
from megatron.errors import ConfigError, ExitCode


@dataclass(frozen=True)
class StoreFlags(ConfigSection):
    """Flags of every command."""

    config: str = flag(
        help="JSON file with MONGO_CONNECTION_STRING, MONGO_CONNECTION_DB and COLLECTIONS; or sqlite:///file.db; or "
        "mongodb://host/database",
        spelled=("--config-src", "--config_src"),
        path=PathUse.SMALL_FILE,
    )


@dataclass(frozen=True)
class ImportFlags(StoreFlags):
    """Flags of `import`."""

    input: tuple[str, ...] = flag(
        help="inputs, as for preprocess_data.py: jsonl and .txt (.gz .bz2 .xz .zst), .parquet, patterns, folders, -; "
        "also accepted as positional arguments",
        nargs="+",
        path=PathUse.CORPUS,
    )
    collection: str = flag(help="collection to add the documents to, created if missing")
    json_key: str | None = flag(
        None,
        "key of the text, stored as filt_text; if unset, detected from the first line: text, or filt_text with form in "
        "dsGPT2's schema",
        spelled=("--json-keys",),
    )
    form_key: str | None = flag(None, "key of the text before filtering, stored as form")
    pair_keys: tuple[str, ...] = flag(
        (), "keys of question and answer, such as q a, for a collection of pairs, stored as q and a", nargs="+"
    )
    document_separator: str | None = flag(
        None,
        r"separator of documents in .txt files, a newline (\n) by default; if given, standard input is plain text too",
    )
    on_bad_line: str = flag(
        "error",
        "invalid lines: stop with an error, or skip and count them",
        choices=("error", "skip"),
    )
    on_changed_file: str = flag(
        "error",
        "files that changed since an earlier import: stop with an error, or import them again",
        choices=("error", "add"),
    )
    take_over: bool = flag(False, "MongoDB: resume an import that was killed on another machine")
    log_interval: int = flag(1000, "documents between progress lines (at most one line per second)", at_least=1)

    def problems(self) -> Iterator[str]:
        if self.pair_keys and len(self.pair_keys) != 2:
            yield (
                f"--pair-keys {' '.join(self.pair_keys)}: expected two keys, of the question and the answer, such as "
                "--pair-keys q a."
            )
        if self.pair_keys and self.form_key is not None:
            yield f"--form-key {self.form_key} cannot be combined with --pair-keys. Drop one of them."


@dataclass(frozen=True)
class StatFlags(StoreFlags):
    """Flags of `stat`."""


@dataclass(frozen=True)
class BenchFlags(StoreFlags):
    """Flags of `bench`."""

    n: int = flag(20000, "number of documents to fetch", at_least=1)
    seed: int = flag(1234, "random seed")


@dataclass(frozen=True)
class FetchFlags(StoreFlags):
    """Flags of `fetch`, as in dsGPT2's vocab_downloader.py."""

    nsample: int = flag(help="number of documents to sample, without replacement", at_least=1)
    num_process: int = flag(1, "number of processes and output files", at_least=1, spelled=("--num_process",))
    output_prefix: str = flag(
        help="prefix of the output files <prefix>0.txt, <prefix>1.txt, ...; - writes JSON lines to standard output",
        path=PathUse.NEW_PREFIX,
    )
    document_separator: str = flag(r"\n", r"separator written after every document (\n is a newline)")
    seed: int = flag(1234, "random seed")

    def problems(self) -> Iterator[str]:
        if self.output_prefix == "-" and self.num_process > 1:
            yield (
                f"--num-process {self.num_process} cannot be combined with --output-prefix -, standard output. Use a "
                "prefix, or one process."
            )


@dataclass(frozen=True)
class LengthsFlags(StoreFlags, TokenizerFileFlags):
    """Flags of `lengths`, as in dsGPT2's statistics.py."""

    tokenizer_type: str | None = optional_tokenizer_type("type of tokenizer; GPT2BPETokenizer if unset")
    width: int = flag(10, "bin width in tokens", at_least=1)
    most: int = flag(130, "lower bound of the last bin in tokens", at_least=1)


_COMMANDS: dict[str, type[StoreFlags]] = {
    "import": ImportFlags,
    "stat": StatFlags,
    "bench": BenchFlags,
    "fetch": FetchFlags,
    "lengths": LengthsFlags,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code."""
    command, *arguments = (sys.argv[1:] if argv is None else argv) or [""]
    if command in ("-h", "--help"):
        log.line((__doc__ or "").strip() + f"\n\nCommands: {', '.join(_COMMANDS)}; each has --help.")
        return 0
    section = _COMMANDS.get(command)
    if section is None:
        raise ConfigError(f"corpus_store.py: unknown command {command!r}. Use one of: {', '.join(_COMMANDS)}.")
    positional = "--input" if section is ImportFlags else None
    flags = parse_flags(section, arguments, f"corpus_store.py {command}", __doc__ or "", positional=positional)
    if isinstance(flags, ImportFlags):
        return _import(flags)
    if isinstance(flags, BenchFlags):
        return _bench(flags)
    if isinstance(flags, FetchFlags):
        return _fetch(flags)
    if isinstance(flags, LengthsFlags):
        return _lengths(flags)
    return _stat(flags)


def _import(flags: ImportFlags) -> int:
    from megatron.data.stores.address import StoreAddress
    from trident.corpus.inputs.input_blocks import total_bytes
    from trident.corpus.inputs.input_paths import expand_inputs, read_separator
    from trident.corpus.stores.importing import ImportOptions, import_files
    from trident.corpus.stores.writers import open_writer
    from trident.corpus.workers.progress_line import ProgressLine

    process_exit.interrupt_on_sigterm()
    separator = None if flags.document_separator is None else read_separator(flags.document_separator)
    files = expand_inputs(flags.input, separator)
    key, second_key = flags.pair_keys or (flags.json_key, flags.form_key)
    options = ImportOptions(key, second_key, flags.on_bad_line == "skip", separator, flags.on_changed_file == "add")
    progress = ProgressLine(total_bytes(files), flags.log_interval, log.info, log.status_line())
    address = StoreAddress.of(flags.config)
    if address.collections and flags.collection not in address.collections:
        log.warning(
            f"--collection {flags.collection} is not listed in {address.shown} and will not be read from there. Add it."
        )
    writer = open_writer(address, flags.collection, flags.take_over, bool(flags.pair_keys))
    try:
        for result in import_files(files, writer, flags.collection, options, progress):
            progress.clear()
            if result.record is None:
                log.line(f"{result.source}: already imported; nothing added")
                continue
            first, count = result.record.first_idx, result.record.num_docs
            numbers = f"idx {first} to {first + count - 1}" if count else "no document"
            log.line(
                f"{result.source}: {count} documents into {flags.collection} ({numbers}); {result.skipped} skipped"
            )
    finally:
        progress.clear()
        writer.close()
    progress.finish()
    return 0


def _stat(flags: StoreFlags) -> int:
    from megatron.data.stores.address import StoreAddress
    from megatron.data.stores.document_store import open_backend
    from trident.corpus.stores.inspection import audit

    address = StoreAddress.of(flags.config)
    backend = open_backend(address)
    total = wrong = 0
    for collection in audit(backend, address.collections):
        size = collection.size if collection.counted is None else collection.counted
        log.line(f"{collection.name}: {size} documents (numbers {total} to {total + size - 1} of the store)")
        total += size
        for problem in collection.problems:
            log.line(f"  {problem}")
            wrong += 1
    log.line(f"total: {total} documents")
    return int(ExitCode.DATA if wrong else ExitCode.DONE)


def _bench(flags: BenchFlags) -> int:
    from trident.corpus.stores.inspection import time_fetches

    log.line(json.dumps(time_fetches(flags.config, flags.n, flags.seed)))
    return 0


def _fetch(flags: FetchFlags) -> int:
    from trident.corpus.inputs.input_paths import read_separator
    from trident.corpus.stores.inspection import fetch_samples, stream_samples

    if flags.output_prefix == "-":
        stream_samples(flags.config, flags.nsample, flags.seed, sys.stdout.buffer)
        return 0
    separator = read_separator(flags.document_separator)
    written = fetch_samples(flags.config, flags.nsample, flags.num_process, flags.output_prefix, separator, flags.seed)
    for path, count in written:
        log.line(f"{path}: {count} documents")
    return 0


def _lengths(flags: LengthsFlags) -> int:
    from megatron.data.stores.document_store import open_store
    from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
    from trident.corpus.stores.inspection import length_histogram

    choice = dataclasses.replace(TokenizerChoice.of(flags), tokenizer_type=flags.tokenizer_type or "GPT2BPETokenizer")
    for text in length_histogram(open_store(flags.config), build_tokenizer(choice), flags.width, flags.most).lines():
        log.line(text)
    return 0


if __name__ == "__main__":
    process_exit.exit_with(main)
