r"""Converts texts, or a `.bin/.idx` pair, to fixed-length windows in Parquet shards: `<output-path>-00000-of-0000N`.

    python tools/corpus/featurize.py --input corpus.jsonl --tokenizer-model ./my-tokenizer --output-path out/wt.train \
        --min-sequence-length 128 --max-sequence-length 256 --stride 128 --num-workers 2
    python tools/corpus/featurize.py --data-prefix my-gpt2_text_document --no-overlap --output-path out/wt.train

The columns are input_ids, attention_mask and labels, for training and `datasets.Dataset.from_parquet("out/wt.train*")`.
Every token is in a window. With any option of Apache Beam (--runner, --direct_running_mode, --project, ...), the tool
runs as a Beam pipeline.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import log, process_exit
from megatron.config import PathUse, flag, parse_flags
from megatron.config.flags.fields import flags_of
from megatron.config.sections.data import TokenizerFileFlags, optional_tokenizer_type

if TYPE_CHECKING:
    from trident.corpus.featurize.featurize_corpus import FeaturizeResult, WindowOptions
    from trident.corpus.preprocess.encode import EncodeOptions

_LOCAL = "local"
_DEFAULT_STRIDE = 128
# Options of Beam's direct runner for its number of processes.
_MODE, _COUNT = "--direct_running_mode", "--direct_num_workers"


@dataclass(frozen=True)
class FeaturizeFlags(TokenizerFileFlags):
    """jax-lm-training's flags of this step, and the input flags of `tools/preprocess_data.py`."""

    input: tuple[str, ...] = flag(
        (),
        "jsonl and .txt files, also .gz .bz2 .xz .zst, and .parquet; patterns; folders; - for standard input; "
        "sqlite:///file.db?table=name, mongodb://host/database, db.json; hf://name:split",
        nargs="+",
        path=PathUse.CORPUS,
    )
    dataset_name: str | None = flag(
        None, "dataset of the datasets library: hub name or local folder", path=PathUse.FILE_OR_FOLDER
    )
    dataset_sub_name: str | None = flag(None, "configuration of --dataset-name")
    dataset_split_type: str = flag("train", "split of --dataset-name")
    data_prefix: str | None = flag(None, "prefix of a .bin/.idx pair to read instead of texts", path=PathUse.PREFIX)
    output_path: str = flag(help="path of the shards, without -00000-of-0000N", path=PathUse.NEW_PREFIX)
    tokenizer_type: str | None = optional_tokenizer_type(
        "type of tokenizer; GPT2BPETokenizer with --vocab-file, else PretrainedFromHF if unset"
    )
    json_key: str = flag(
        "text", "key or column of the text; a.b is key b of the object under a", spelled=("--json-keys",)
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
    min_sequence_length: int = flag(
        128, "minimum window length; shorter windows are padded, or dropped with --drop-short", at_least=1
    )
    max_sequence_length: int = flag(256, "window length, special tokens included", at_least=1)
    num_special_token_reserved: int = flag(
        2, "special tokens per window: 2 for start and end, 1 for end, 0 for none", choices=(0, 1, 2)
    )
    ignore_label: int = flag(-100, "label of positions that are ignored in the loss")
    stride: int | None = flag(
        None,
        f"tokens between the starts of consecutive windows; {_DEFAULT_STRIDE} if unset and windows overlap",
        at_least=1,
    )
    overlap: bool | None = flag(
        None,
        "overlapping windows; --no-overlap: every token is in exactly one window; derived from --stride if unset",
    )
    mask_overlap: bool = flag(False, "set --ignore-label for tokens that are also in the previous window")
    drop_short: bool = flag(False, "drop windows shorter than --min-sequence-length instead of padding them")
    bos_id: int | None = flag(
        None,
        "start id of a window; the tokenizer's beginning-of-text id, or else its end-of-document id if unset",
        at_least=0,
    )
    eos_id: int | None = flag(None, "end id of a window; the tokenizer's end-of-document id if unset", at_least=0)
    pad_id: int | None = flag(None, "padding id; --eos-id if unset", at_least=0)
    num_shards: int | None = flag(
        None, "number of files; determined by --rows-per-shard if unset", at_least=1, below=100000
    )
    rows_per_shard: int = flag(1 << 16, "maximum number of windows per file", at_least=1)
    num_workers: int = flag(1, "number of worker processes; the output does not depend on it", at_least=1)
    log_interval: int = flag(100, "documents between progress lines (at most one line per second)", at_least=1)
    runner: str = flag(
        _LOCAL, "local, beam, or a runner of Apache Beam: DirectRunner, DataflowRunner, FlinkRunner, ..."
    )

    def complete(self) -> None:
        """Sets the type of tokenizer and the stride."""
        if self.tokenizer_type is None and self.vocab_file is not None:
            self.set_derived("tokenizer_type", "GPT2BPETokenizer")
        elif self.tokenizer_type is None and self.tokenizer_name_or_path is not None:
            self.set_derived("tokenizer_type", "PretrainedFromHF")
        if self.stride is None and self.overlap is not False:
            self.set_derived("stride", min(_DEFAULT_STRIDE, self._tokens_per_window))

    @property
    def _tokens_per_window(self) -> int:
        return max(1, self.max_sequence_length - self.num_special_token_reserved)

    @property
    def texts(self) -> tuple[str, ...]:
        """The inputs: the values of `--input`, or the dataset in the form of one."""
        if self.dataset_name is None:
            return self.input
        names = (self.dataset_name, self.dataset_sub_name, self.dataset_split_type)
        return ("hf://" + ":".join(name for name in names if name),)

    def problems(self) -> Iterator[str]:
        """Yields violated rules between the flags."""
        sources = [name for name in ("input", "dataset_name", "data_prefix") if getattr(self, name)]
        if len(sources) != 1:
            given = " and ".join("--" + name.replace("_", "-") for name in sources) or "none"
            yield f"expected exactly one of --input, --dataset-name and --data-prefix, got {given}."
        if self.tokenizer_type is None and not self.data_prefix:
            yield "--tokenizer-model (or --vocab-file and --merge-file) is required to tokenize texts."
        if self.data_prefix and self.runner != _LOCAL:
            yield f"--data-prefix {self.data_prefix} cannot be combined with --runner {self.runner}: Beam reads texts."
        room = self._tokens_per_window
        if self.overlap is False and self.stride is not None and self.stride != room:
            yield (
                f"--no-overlap requires --stride {room}, the tokens of a window, not {self.stride}. Drop one of them, "
                f"or use --stride {room}."
            )
        if self.overlap and self.stride == room:
            yield f"--overlap requires a --stride below the {room} tokens of a window, not {self.stride}."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool on the command line's flags."""
    arguments, beam = divide(sys.argv[1:] if argv is None else argv)
    flags = parse_flags(FeaturizeFlags, arguments, prog="featurize.py", description=__doc__ or "")
    process_exit.interrupt_on_sigterm()
    return run(flags, beam)


def divide(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line into this tool's flags, spelled with dashes, and Apache Beam options."""
    known = {spelling for known_flag in flags_of(FeaturizeFlags) for spelling in known_flag.spellings} | {"--help"}
    tool: list[str] = []
    beam: list[str] = []
    current = tool
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            dashed = name.replace("_", "-")
            current = tool if dashed in known else beam
            argument = dashed + equals + value if current is tool else argument
        current.append(argument)
    return tool, beam


def workers_without_beam(beam: Sequence[str]) -> int | None:
    """Number of worker processes that replace Beam's direct runner if Beam is not installed.

    Args:
        beam: the options for Beam.

    Returns:
        None if Beam is installed, or if the options require more than processes on this machine.
    """
    values = dict(zip(*[iter(" ".join(beam).replace("=", " ").split())] * 2, strict=False))
    if importlib.util.find_spec("apache_beam") or not beam or not values.keys() <= {_MODE, _COUNT}:
        return None
    count = values.get(_COUNT, "1")
    if values.get(_MODE) != "multi_processing" or not count.isdecimal():
        return 1 if values.get(_MODE, "in_memory") in ("in_memory", "multi_threading") else None
    return int(count) or len(os.sched_getaffinity(0))


def run(flags: FeaturizeFlags, beam: Sequence[str] = ()) -> int:
    """Runs the conversion.

    Args:
        beam: options for Apache Beam.
    """
    from megatron.tokenizers.tokenizer import TokenizerChoice
    from trident.corpus.featurize.featurize_corpus import WindowOptions
    from trident.corpus.inputs.input_paths import read_separator
    from trident.corpus.preprocess.encode import EncodeOptions

    options = WindowOptions(**{name: getattr(flags, name) for name in WindowOptions.__dataclass_fields__})
    separator = None if flags.document_separator is None else read_separator(flags.document_separator)
    encoding = EncodeOptions(
        TokenizerChoice.of(flags),
        (flags.json_key,),
        skip_bad_lines=flags.on_bad_line == "skip",
        document_separator=separator,
    )
    if flags.data_prefix is not None:
        result = _of_tokens(flags, encoding, options)
    elif flags.runner == _LOCAL and (workers := workers_without_beam(beam)) is not None:
        log.info(f"apache-beam is not installed: using {workers} local processes, which write the same rows.")
        result = _of_texts(flags, encoding, options, max(workers, flags.num_workers))
    elif beam or flags.runner != _LOCAL:
        result = _with_beam(flags, encoding, options, beam)
    else:
        result = _of_texts(flags, encoding, options, flags.num_workers)
    for text in result.report(flags.max_sequence_length):
        log.info(text)
    if not result.tally.windows:
        log.warning(f"{flags.output_path}: the output contains no windows. Check the input.")
    return 0


def make_in_worker(element: str, folder: str, job: str) -> None:
    """A step of the Beam pipeline; pickled by value, as workers do not have the package on their path."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from trident.corpus.featurize.beam import make_shard

    make_shard(element, job)


def _of_texts(flags: FeaturizeFlags, encoding: EncodeOptions, options: WindowOptions, workers: int) -> FeaturizeResult:
    from trident.corpus.featurize.featurize_corpus import featurize
    from trident.corpus.inputs.input_blocks import total_bytes
    from trident.corpus.inputs.input_paths import expand_inputs
    from trident.corpus.workers.progress_line import ProgressLine

    path = flags.output_path
    files = expand_inputs(flags.texts, encoding.document_separator)
    log.info(f"Opening {', '.join(files[:8])}{', ...' * (len(files) > 8)} ({len(files)} in all)")
    progress = ProgressLine(total_bytes(files), flags.log_interval, log.info, log.status_line())
    try:
        return featurize(files, path, encoding, options, workers, progress)
    except BaseException:
        progress.clear()
        raise


def _of_tokens(flags: FeaturizeFlags, encoding: EncodeOptions, options: WindowOptions) -> FeaturizeResult:
    from megatron.data.formats.sidecar import check_tokenizer_fits
    from megatron.tokenizers.record import TokenizerRecord
    from megatron.tokenizers.tokenizer import build_tokenizer
    from trident.corpus.featurize.featurize_corpus import featurize_tokens

    record = None
    if flags.tokenizer_type is not None:
        tokenizer = build_tokenizer(encoding.tokenizer)
        check_tokenizer_fits([str(flags.data_prefix)], tokenizer)
        record = TokenizerRecord.of(tokenizer)
    return featurize_tokens(str(flags.data_prefix), flags.output_path, record, options, flags.num_workers)


def _with_beam(
    flags: FeaturizeFlags, encoding: EncodeOptions, options: WindowOptions, arguments: Sequence[str]
) -> FeaturizeResult:
    """Runs the Beam pipeline; translates `--num-workers` to the runner's option."""
    from trident.corpus.featurize.beam import featurize_with_beam
    from trident.corpus.inputs.input_paths import expand_inputs
    from trident.corpus.inputs.tables import is_table

    arguments = list(arguments)
    is_direct = flags.runner in (_LOCAL, "beam", "DirectRunner")
    if not is_direct:
        arguments += ["--runner", flags.runner]
    if flags.num_workers > 1 and is_direct:
        arguments += ["--direct_num_workers", str(flags.num_workers), "--direct_running_mode", "multi_processing"]
    elif flags.num_workers > 1:
        arguments += ["--num_workers", str(flags.num_workers)]
    files = [
        path
        for text in flags.texts
        for path in (
            [text] if "://" in text and not is_table(text) else expand_inputs([text], encoding.document_separator)
        )
    ]
    return featurize_with_beam(files, flags.output_path, encoding, options, arguments, make_in_worker)


if __name__ == "__main__":
    process_exit.exit_with(main)
