r"""Runs preprocess_data.py on the ranks of a launcher, on one or more nodes: each encodes a shard, then all merge.

    torchrun --nproc-per-node 4 tools/preprocess_data_dist.py --input corpus.jsonl --output-prefix my-gpt2 \
        --vocab-file vocab.json --merge-file merges.txt --tokenizer-type GPT2BPETokenizer --append-eod

The files are byte for byte those of preprocess_data.py, for any number of ranks. All ranks must share a file system.
The integer type of the ids follows from the unpadded vocabulary, as there (upstream uses the padded one).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
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
        help="path of the outputs without _<column>_document.bin/.idx or _<column>_sentence.bin/.idx",
        path=PathUse.NEW_PREFIX,
    )
    tokenizer_type: str = required_tokenizer_type()
    columns: tuple[str, ...] = flag(
        ("text",),
        "JSON keys whose texts are encoded, each into separate files",
        nargs="+",
        spelled=("--json-keys", "--json-key"),
    )
    merge_file: str | None = flag(
        None, "byte-pair merges (merges.txt)", path=PathUse.SMALL_FILE
    )  # --merge says how the ranks' files are merged
    append_eod: bool = flag(False, "end every non-empty document with the end-of-document id")
    merge: str = flag(
        "parallel",
        "parallel: all ranks write the result; serial: rank 0 writes it; both: do both and compare them",
        choices=("parallel", "serial", "both"),
    )
    scratch: str | None = flag(
        None, "folder for the files of individual ranks; by default next to the output", path=PathUse.FOLDER
    )
    torch_backend: str = flag(
        "gloo",
        "communication backend; mpi is accepted for ranks started by mpirun, but gloo is used: PyTorch from PyPI has "
        "no MPI backend, and the files do not depend on it",
        choices=("gloo", "mpi"),
    )
    local_rank: int | None = flag(None, "local rank of this process on its node", spelled=("--local_rank",))
    log_interval: int = flag(30, "seconds between progress lines of rank 0's shard; 0 shows none", at_least=0)
    on_bad_line: str = flag(
        "error",
        "invalid lines: error stops the run, skip drops and counts them",
        choices=("error", "skip"),
    )
    dataset_impl: str = flag(
        "mmap",
        "format of the outputs: mmap is what every current trainer reads; cached and lazy both mean an older format "
        "with int32 ids",
        choices=("mmap", "cached", "lazy"),
    )
    split: str | None = flag(
        None,
        "split of the dataset, or part of one in the syntax of the datasets library (train[:10%]); train by default",
    )
    count: int | None = flag(None, "number of documents to take, from the start, after shuffling", at_least=1)
    shuffle: bool = flag(False, "take the documents in random order")
    seed: int | None = flag(None, "seed of --shuffle; drawn at random and logged by default", at_least=0)
    split_sentences: bool = flag(False, "write one sequence per sentence, into <prefix>_<column>_sentence.bin/.idx")
    keep_newlines: bool = flag(
        False,
        "with --split-sentences: keep whitespace between sentences at the end of the first one; otherwise it is "
        "dropped",
    )
    lang: str = flag("en", "with --split-sentences: language of the texts, as a code (en, tr, zh) or name (english)")
    make_vocab_size_divisible_by: int = flag(
        128, "accepted; the width of an id follows from the unpadded vocabulary", at_least=1
    )
    pad_vocab_size_to: int | None = flag(
        None, "accepted; the width of an id follows from the unpadded vocabulary", at_least=1
    )

    def problems(self) -> Iterator[str]:
        """Rules between the flags."""
        suffix = f"_{next(iter(self.columns), '')}_document.bin"
        yield from prefix_problems("--output-prefix", self.output_prefix, suffix, self.input)
        if self.seed is not None and not self.shuffle:
            yield f"--seed {self.seed} has no effect without --shuffle. Give both or neither."
        if len(set(self.columns)) != len(self.columns):
            yield f"--columns {' '.join(self.columns)} names a key twice; name it once."


def main() -> int:
    """Runs the tool on the command line's flags."""
    flags = parse_flags(
        DistributedPreprocessFlags, sys.argv[1:], prog="preprocess_data_dist.py", description=__doc__ or ""
    )
    if flags.torch_backend == "mpi":
        log.warning("--torch-backend mpi: the ranks started by mpirun communicate over gloo.")
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
        f"{result.empty} empty documents and {result.skipped} bad lines left out."
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
