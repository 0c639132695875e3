"""Balance of attention over the ranks of a ring, for real samples with several documents.

    python benchmarks/sequence_balance.py --data-path data/demo_text_document \\
        --vocab-file data/demo-vocab.json --merge-file data/demo-merges.txt
    python benchmarks/sequence_balance.py --data-path chat.jsonl --seq-length 4096 --vocab-file V --merge-file M

Reads token files as `--reset-attention-mask` does, and examples as `--pack-examples`, all samples of one pass. Prints
JSON lines per length and number of ranks: the pairs of a query and a key that the costliest rank computes, relative to
the mean over the ranks, `costliest_rank_mean` over all samples and `costliest_rank_worst` of one. The pairs are counted
from the plan of each rank; no attention is computed.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import print_figure
from megatron import process_exit
from megatron.config import ConfigSection, DataConfig, flag, parse_flags
from megatron.data.build import build_split_datasets, epoch_samples
from megatron.data.datasets.examples.example_options import ExampleOptions
from megatron.data.loader import BatchOptions, MicroBatches
from megatron.data.sources.source import DataRequest
from megatron.parallel.mesh import ParallelMesh, standard_axes
from megatron.parallel.sequence.split import SequenceSplit
from megatron.parallel.sequence.tiles import Visibility, tiles_of
from megatron.tokenizers.tokenizer import Tokenizer, TokenizerChoice, build_tokenizer


@dataclass(frozen=True)
class SequenceBalanceFlags(ConfigSection):
    """Flags of this program."""

    data_path: tuple[str, ...] = flag(help="token files or examples, as those of training", nargs="+")
    vocab_file: str = flag(help="of the GPT-2 tokenizer, whose end of document separates documents")
    merge_file: str = flag(help="of the same")
    seq_length: tuple[int, ...] = flag((8192, 32768), "tokens of a sample", nargs="+", at_least=2)
    ranks: tuple[int, ...] = flag((2, 4, 8), "ranks of the ring", nargs="+", at_least=2)
    attention_window: int | None = flag(None, "tokens that each token attends to", at_least=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Counts the pairs of every length and number of ranks."""
    words = sys.argv[1:] if argv is None else argv
    flags = parse_flags(SequenceBalanceFlags, words, prog="sequence_balance.py", description=__doc__ or "")
    tokenizer = build_tokenizer(TokenizerChoice("GPT2BPETokenizer", flags.vocab_file, flags.merge_file))
    for length in flags.seq_length:
        samples = list(segments_of(flags.data_path, length, tokenizer))
        documents = sum(int(row[-1]) + 1 for row in samples)
        for ranks in flags.ranks:
            ratios = [costliest(row, ranks, flags.attention_window) for row in samples]
            settings = {"seq_length": length, "ranks": ranks, "window": flags.attention_window}
            counts = {"samples": len(samples), "documents": documents}
            for of, value in {"mean": statistics.mean(ratios), "worst": max(ratios)}.items():
                print_figure("sequence_balance", f"costliest_rank_{of}", value, "ratio", **settings, **counts)
    return 0


def segments_of(paths: Sequence[str], length: int, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """The document of each token, of every sample of one pass. Shapes: each `[s]` int64."""
    with tempfile.TemporaryDirectory() as cache:
        data = DataConfig(seq_length=length, data_path=tuple(paths), split="1,0,0", data_cache_path=cache)
        request = DataRequest(data, length, 1, tokenizer=tokenizer, examples=ExampleOptions(pack=True))
        count = epoch_samples(request)
        datasets, _ = build_split_datasets(dataclasses.replace(request, samples=(count, 0, 0)))
        options = BatchOptions(eod_id=tokenizer.eod_id, segments=True)
        if datasets.train is None:
            raise RuntimeError(f"{' '.join(paths)} fill no sample of {length} tokens")
        for batch in MicroBatches(
            datasets.train, first_sample=0, global_batch_size=count, micro_batch_size=1, options=options
        ):
            if batch.segment_ids is not None:
                yield batch.segment_ids[0]


def costliest(segment_ids: np.ndarray, ranks: int, window: int | None) -> float:
    """The pairs that the costliest rank computes, relative to the mean. Shapes: segment_ids `[s]`."""
    mesh = ParallelMesh.at(standard_axes(ranks, cp=ranks), 0)
    split = SequenceSplit(mesh.cp, mesh.sp, by_document=True, window=window)
    rows = segment_ids[None]
    parts, seen = split.parts(len(segment_ids), rows), Visibility(window=window)
    pairs = [sum(tile.pairs for tiles in tiles_of(parts, rows, rank, seen) for tile in tiles) for rank in range(ranks)]
    return max(pairs) / statistics.mean(pairs)


if __name__ == "__main__":
    process_exit.exit_with(main)
