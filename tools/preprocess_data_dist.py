r"""Runs preprocess_data.py on distributed ranks: each encodes a shard, then all merge.

    torchrun --nproc-per-node 4 tools/preprocess_data_dist.py --input corpus.jsonl --output-prefix my-gpt2 \
        --vocab-file vocab.json --merge-file merges.txt --tokenizer-type GPT2BPETokenizer --append-eod

The output is byte-identical to preprocess_data.py's for any number of ranks. All ranks must share a file system.
As there, the integer type of ids is derived from the unpadded vocabulary (upstream uses the padded one).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log, process_exit
from megatron.config import ParallelRequest, PathUse, flag, parse_flags
from megatron.config.flags.paths import prefix_problems
from megatron.config.sections.data import TokenizerFileFlags, required_tokenizer_type

_LONGEST_WAIT_MINUTES = 7 * 24 * 60


@dataclass(frozen=True)
class DistributedPreprocessFlags(TokenizerFileFlags):
    """Upstream's flags of this tool, and `--on-bad-line`."""

    input: tuple[str, ...] = flag(
        help="jsonl files, which are divided among the ranks; .txt, compressed or .parquet files, each read by one "
        "rank; patterns; folders; or a dataset of the Hugging Face hub (name or name:configuration). Hub datasets, "
        "save_to_disk folders, and anything with --split, --count or --shuffle are read by the datasets library",
        nargs="+",
        path=PathUse.CORPUS,
    )
    output_prefix: str = flag(
        help="path of the output, without _<column>_document.bin/.idx or _<column>_sentence.bin/.idx",
        path=PathUse.NEW_PREFIX,
    )
    tokenizer_type: str = required_tokenizer_type()
    columns: tuple[str, ...] = flag(
        ("text",),
        "JSON keys of the texts to encode, each into separate files",
        nargs="+",
        spelled=("--json-keys", "--json-key"),
    )
    merge_file: str | None = flag(
        None, "path to the BPE merge file (merges.txt)", path=PathUse.SMALL_FILE
    )  # without --merge as a spelling, which is another flag here
    append_eod: bool = flag(False, "append the end-of-document id to every non-empty document")
    merge: str = flag(
        "parallel",
        "parallel: all ranks write the output; serial: rank 0 writes it; both: do both and compare",
        choices=("parallel", "serial", "both"),
    )
    scratch: str | None = flag(
        None, "folder for temporary files of ranks; next to the output if unset", path=PathUse.FOLDER
    )
    torch_backend: str = flag(
        "gloo",
        "communication backend; mpi is accepted, but gloo is used, as PyTorch from PyPI has no MPI backend",
        choices=("gloo", "mpi"),
    )
    local_rank: int | None = flag(None, "local rank of this process, set by launchers", spelled=("--local_rank",))
    log_interval: int = flag(30, "seconds between progress lines of rank 0; 0 disables them", at_least=0)
    on_bad_line: str = flag(
        "error",
        "invalid lines: stop with an error, or skip and count them",
        choices=("error", "skip"),
    )
    dataset_impl: str = flag(
        "mmap",
        "output format: mmap, which current trainers read; cached and lazy are an older format with int32 ids",
        choices=("mmap", "cached", "lazy"),
    )
    split: str | None = flag(
        None,
        "split of the dataset, or a slice of one, such as train[:10%]; train if unset",
    )
    count: int | None = flag(None, "number of documents to use, after shuffling", at_least=1)
    shuffle: bool = flag(False, "shuffle the documents")
    seed: int | None = flag(None, "seed of --shuffle; random and logged if unset", at_least=0)
    split_sentences: bool = flag(False, "write one sequence per sentence, into <prefix>_<column>_sentence.bin/.idx")
    keep_newlines: bool = flag(
        False,
        "with --split-sentences: keep whitespace between sentences, at the end of the preceding one, instead of "
        "dropping it",
    )
    lang: str = flag("en", "with --split-sentences: language of the texts, as a code (en, tr, zh) or name (english)")
    make_vocab_size_divisible_by: int = flag(
        128, "accepted and ignored; the id width is derived from the unpadded vocabulary", at_least=1
    )
    pad_vocab_size_to: int | None = flag(
        None, "accepted and ignored; the id width is derived from the unpadded vocabulary", at_least=1
    )

    def problems(self) -> Iterator[str]:
        """Yields violated rules between the flags."""
        suffix = f"_{next(iter(self.columns), '')}_document.bin"
        yield from prefix_problems("--output-prefix", self.output_prefix, suffix, self.input)
        if self.seed is not None and not self.shuffle:
            yield f"--seed {self.seed} has no effect without --shuffle. Add it, or drop --seed."
        if len(set(self.columns)) != len(self.columns):
            yield f"--columns {' '.join(self.columns)} contains a key twice. List it once."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool on the command line's flags."""
    arguments = sys.argv[1:] if argv is None else argv
    flags = parse_flags(
        DistributedPreprocessFlags, arguments, prog="preprocess_data_dist.py", description=__doc__ or ""
    )
    if flags.torch_backend == "mpi":
        log.warning("--torch-backend mpi: gloo is used.")
    from megatron.parallel.joining import close_mesh, open_mesh
    from megatron.parallel.messages import all_gather_json
    from trident.corpus.workers.ranks import JobRanks

    process_exit.interrupt_on_sigterm()
    mesh = open_mesh(
        ParallelRequest(
            distributed_backend="gloo",
            distributed_timeout_minutes=_LONGEST_WAIT_MINUTES,
            local_rank=flags.local_rank,
        )
    )
    ranks = JobRanks(mesh.world.rank, mesh.world.size, lambda value: all_gather_json(value, mesh.world))
    _preprocess(flags, ranks)
    close_mesh(mesh)
    return 0


def _preprocess(flags: DistributedPreprocessFlags, ranks: Any) -> None:
    from megatron.tokenizers.tokenizer import TokenizerChoice
    from trident.corpus.preprocess.distributed import DocumentDraw, preprocess_on_ranks, share_of_rank
    from trident.corpus.preprocess.encode import EncodeOptions
    from trident.corpus.preprocess.preprocess_corpus import warn_if_no_tokens
    from trident.corpus.preprocess.sentences import SentenceSplitter
    from trident.corpus.workers.progress_line import ProgressLine

    options = EncodeOptions(
        TokenizerChoice.of(flags),
        flags.columns,
        flags.append_eod,
        flags.on_bad_line == "skip",
        sentences=SentenceSplitter(flags.lang, flags.keep_newlines) if flags.split_sentences else None,
        is_cached=flags.dataset_impl != "mmap",
    )
    log.info(f"Opening {', '.join(flags.input)} on {ranks.size} ranks")
    draw = DocumentDraw(flags.split, flags.count, flags.shuffle, flags.seed)
    encode = share_of_rank(flags.input, draw, options, ranks, ProgressLine(None, 1, _line_writer(flags.log_interval)))
    result = preprocess_on_ranks(encode, flags.output_prefix, options, flags.merge, flags.scratch, ranks)
    log.info(
        f"Wrote {', '.join(result.prefixes)} (.bin, .idx): {result.documents} documents, {result.tokens} tokens; "
        f"skipped {result.empty} empty documents and {result.skipped} bad lines."
    )
    if ranks.rank == 0:
        warn_if_no_tokens(result.prefixes, result.tokens_of_key, result.empty, result.skipped)


def _line_writer(interval_seconds: int) -> Callable[[str], None]:
    """Returns a function that logs a line if enough time has passed since the last one."""
    shown_at = [time.monotonic()]

    def write(text: str) -> None:
        if interval_seconds and time.monotonic() - shown_at[0] >= interval_seconds:
            shown_at[0] = time.monotonic()
            log.info(text)

    return write


if __name__ == "__main__":
    process_exit.exit_with(main)
