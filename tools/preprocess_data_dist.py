"""preprocess_data.py on the ranks of a launcher, on one node or many: each encodes a share, then all merge.

    torchrun --nproc-per-node 4 tools/preprocess_data_dist.py --input corpus.jsonl --output-prefix my-gpt2 \
        --vocab-file vocab.json --merge-file merges.txt --tokenizer-type GPT2BPETokenizer --append-eod

The files are byte for byte those of preprocess_data.py, for any number of ranks. All ranks must see the same file
system. The width of an id follows from the unpadded vocabulary, as there (upstream's uses the padded one).
"""

from __future__ import annotations

import glob
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log
from megatron.config import ParallelConfig
from megatron.config.data import TOKENIZERS
from megatron.config.flags import Area, flag, parse_flags
from megatron.errors import ConfigError

_LONGEST_WAIT_MINUTES = 7 * 24 * 60


@dataclass(frozen=True)
class DistributedPreprocessFlags(Area):
    """Upstream's flags of this tool, and `--on-bad-line`."""

    input: tuple[str, ...] = flag(
        help="jsonl files, which the ranks divide; compressed or .parquet files, each one rank's; patterns; folders",
        nargs="+",
    )
    output_prefix: str = flag(help="path of the outputs without _<column>_document.bin/.idx")
    tokenizer_type: str = flag(help=f"tokenizer family: {', '.join(TOKENIZERS)}", choices=TOKENIZERS)
    columns: tuple[str, ...] = flag(
        ("text",),
        "JSON keys whose texts are encoded, each into files of its own",
        nargs="+",
        spelled=("--json-keys", "--json-key"),
    )
    vocab_file: str | None = flag(None, "vocabulary file (vocab.json or vocab.txt)", spelled=("--vocab",))
    merge_file: str | None = flag(None, "byte-pair merges (merges.txt)")
    tokenizer_name_or_path: str | None = flag(
        None,
        "folder, tokenizer.json or hub name of a Hugging Face tokenizer, or a SentencePiece .model",
        spelled=("--tokenizer-model",),
    )
    append_eod: bool = flag(False, "end every document that is not empty with the end-of-document id")
    merge: str = flag(
        "parallel",
        "parallel: all ranks write the result together; serial: rank 0 does",
        choices=("parallel", "serial"),
        way_out="What both compared, parallel checks by itself before it publishes.",
    )
    scratch: str | None = flag(None, "folder for the files of the single ranks; beside the output if unset")
    torch_backend: str = flag(
        "gloo",
        "communication library",
        choices=("gloo",),
        way_out="gloo needs no special build of PyTorch and works under mpirun too.",
    )
    local_rank: int | None = flag(None, "number of this process on its node", spelled=("--local_rank",))
    log_interval: int = flag(30, "seconds between two progress lines of rank 0's share; 0 shows none", at_least=0)
    on_bad_line: str = flag(
        "error",
        "what a line that is no good JSON document does: stop, or be left out and counted",
        choices=("error", "skip"),
    )
    dataset_impl: str = flag(
        "mmap",
        "layout of the outputs: mmap is what every current trainer reads; cached and lazy are one older layout with "
        "ids of int32",
        choices=("mmap", "cached", "lazy"),
    )
    split: str = flag("train", "accepted; a jsonl file has no splits")
    count: int | None = flag(None, "documents to take (not available)", at_least=1)
    shuffle: bool = flag(False, "change the order of the documents (not available)")
    seed: int | None = flag(None, "seed of --shuffle (not available)")
    split_sentences: bool = flag(False, "one sequence a sentence, into <prefix>_<column>_sentence.bin/.idx")
    keep_newlines: bool = flag(
        False, "with --split-sentences: whitespace between sentences stays at the end of the first; else it is dropped"
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
        for name, given in (
            ("--count", self.count is not None),
            ("--shuffle", self.shuffle),
            ("--seed", self.seed is not None),
        ):
            if given:
                yield (
                    f"{name} is not available: documents are taken in the order of the file. Prepare the file with "
                    "`shuf` or `head`; training draws its own order in any case."
                )
        if len(set(self.columns)) != len(self.columns):
            yield f"--columns {' '.join(self.columns)} names a key twice; name it once."


def main() -> int:
    """Runs the tool on the command line's flags."""
    flags = parse_flags(
        DistributedPreprocessFlags, sys.argv[1:], prog="preprocess_data_dist.py", description=__doc__ or ""
    )
    _check_inputs(flags.input)
    from megatron.corpus.crew import Crew
    from megatron.parallel.mesh import close_mesh, open_mesh
    from megatron.parallel.messages import gather_json

    signal.signal(signal.SIGTERM, _interrupt)
    mesh = open_mesh(
        ParallelConfig(
            distributed_backend=flags.torch_backend,
            distributed_timeout_minutes=_LONGEST_WAIT_MINUTES,
            local_rank=flags.local_rank,
        )
    )
    crew = Crew(mesh.world.rank, mesh.world.size, lambda value: gather_json(value, mesh.world))
    _preprocess(flags, crew)
    close_mesh(mesh)
    return 0


def _check_inputs(paths: Sequence[str]) -> None:
    """Refuses what is no file before any rank waits for another."""
    missing = [path for path in paths if not os.path.exists(path) and not glob.has_magic(path)]
    if missing:
        raise ConfigError(
            f"--input {missing[0]} is no file here, and names of data sets are not looked up. Write the data set as "
            "jsonl first (datasets.load_dataset(...).to_json)."
        )


def _preprocess(flags: DistributedPreprocessFlags, crew: Any) -> None:
    from megatron.corpus.encode import EncodeOptions
    from megatron.corpus.inputs import Shard, expand_inputs, share_of
    from megatron.corpus.merge import merge, remove_pair
    from megatron.corpus.preprocess import preprocess, warn_of_no_tokens
    from megatron.corpus.progress import Progress
    from megatron.corpus.sentences import SentenceSplitter
    from megatron.data.tokenizer import TokenizerChoice

    options = EncodeOptions(
        TokenizerChoice.of(flags),
        flags.columns,
        flags.append_eod,
        flags.on_bad_line == "skip",
        sentences=SentenceSplitter(flags.lang, flags.keep_newlines) if flags.split_sentences else None,
        is_cached=flags.dataset_impl != "mmap",
    )
    place = os.path.join(flags.scratch, os.path.basename(flags.output_prefix)) if flags.scratch else flags.output_prefix
    shards = [f"{place}_{rank}" for rank in range(crew.size)]
    wholes = options.prefixes(flags.output_prefix)
    progress = Progress(None, 1, _line_writer(flags.log_interval))
    log.info(f"Opening {', '.join(flags.input)} on {crew.size} ranks")

    def encode() -> list[int]:
        share = share_of(expand_inputs(flags.input), Shard(crew.rank + 1, crew.size))
        result = preprocess(share, shards[crew.rank], options, 1, progress)
        return [result.documents, result.tokens, result.empty, result.skipped, *result.tokens_of_key]

    try:
        counts = [sum(column) for column in zip(*crew.together(encode), strict=True)]
        for whole, *parts in zip(wholes, *map(options.prefixes, shards), strict=True):
            if flags.merge == "parallel":
                merge(parts, whole, crew, is_one_corpus=True)
            else:
                crew.on_first(lambda parts=parts, whole=whole: merge(parts, whole, is_one_corpus=True).tokens)
    finally:
        for part in options.prefixes(shards[crew.rank]):
            remove_pair(part)
    log.info(
        f"Wrote {flags.output_prefix} (.bin, .idx): {counts[0]} documents, {counts[1]} tokens; "
        f"{counts[2]} empty documents and {counts[3]} bad lines left out."
    )
    if crew.rank == 0:
        warn_of_no_tokens(wholes, counts[4:], counts[2], counts[3])


def _line_writer(interval_seconds: int) -> Callable[[str], None]:
    """Shows a line when enough seconds have passed since the last one."""
    shown_at = [time.monotonic()]

    def write(text: str) -> None:
        if interval_seconds and time.monotonic() - shown_at[0] >= interval_seconds:
            shown_at[0] = time.monotonic()
            log.info(text)

    return write


def _interrupt(number: int, frame: object) -> None:
    """Turns SIGTERM into the keyboard's interrupt, so that temporary files are removed."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    log.exit_with(main)
