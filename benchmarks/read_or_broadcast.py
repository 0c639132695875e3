"""Does each tensor-parallel rank read its micro-batches itself, or does one read and broadcast? Seconds of both.

    python benchmarks/read_or_broadcast.py

Two processes, gloo, the token file of quickstart. The two ways alternate; one JSON line a figure. What the trainer does
(every rank reads) costs no message; a broadcast waits for the reading rank as well.
"""

from __future__ import annotations

import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.figures import print_figure, quickstart_data
from megatron import process_exit
from megatron.config import ConfigSection, DataConfig, flag, parse_flags
from megatron.data.build import build_split_datasets
from megatron.data.datasets.sample import SampleDataset
from megatron.data.loader import MicroBatches
from megatron.data.sources.source import DataRequest


@dataclass(frozen=True)
class ReadFlags(ConfigSection):
    """Flags of this program."""

    micro_batch_size: int = flag(8, "samples per micro-batch", at_least=1)
    seq_length: int = flag(1024, "tokens per sample", at_least=1)
    micro_batches: int = flag(16, "micro-batches per global batch", at_least=1)
    rounds: int = flag(15, "global batches measured in each way", at_least=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures both ways and prints the figures."""
    words = sys.argv[1:] if argv is None else argv
    flags = parse_flags(ReadFlags, words, prog="read_or_broadcast.py", description=__doc__ or "")
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        quickstart_data(Path(folder))
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        spawn(measure, (flags, f"{folder}/data/demo_text_document", port), nprocs=2)
    return 0


def measure(rank: int, flags: ReadFlags, prefix: str, port: int) -> None:
    """One of the two ranks; the first prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    samples = flags.micro_batch_size * flags.micro_batches
    data = DataConfig(seq_length=flags.seq_length, data_path=(prefix,), split="1,0,0")
    wanted = (samples * (2 * flags.rounds + 2), 0, 0)
    if rank == 0:
        build_split_datasets(DataRequest(data, flags.seq_length, 1, wanted, build_indices=True))
    dist.barrier()
    datasets, _ = build_split_datasets(DataRequest(data, flags.seq_length, 1, wanted, build_indices=False))
    if datasets.train is None:
        raise RuntimeError("the benchmark's corpus holds no training data")
    seconds: dict[str, list[float]] = {"every_rank_reads": [], "one_reads_and_broadcasts": []}
    for turn in range(2 * flags.rounds + 2):
        name = "one_reads_and_broadcasts" if turn % 2 else "every_rank_reads"
        dist.barrier()
        started_at = time.perf_counter()
        take_global_batch(datasets.train, flags, turn * samples, reads=rank == 0 or turn % 2 == 0, sends=turn % 2 == 1)
        if turn > 1:
            seconds[name].append(time.perf_counter() - started_at)
    if rank == 0:
        for name, found in seconds.items():
            spread = (1000 * min(found), 1000 * max(found))
            print_figure("read_or_broadcast", name, 1000 * statistics.median(found), "ms a global batch", spread=spread)
        pairs = zip(seconds["one_reads_and_broadcasts"], seconds["every_rank_reads"], strict=True)
        ratios = [broadcast / read for broadcast, read in pairs]
        spread = (min(ratios), max(ratios))
        print_figure("read_or_broadcast", "broadcast_to_read", statistics.median(ratios), "ratio", spread=spread)
    dist.destroy_process_group()


def take_global_batch(dataset: SampleDataset, flags: ReadFlags, first: int, *, reads: bool, sends: bool) -> None:
    """Brings the tokens and labels of one global batch to this rank."""
    size, count = flags.micro_batch_size, flags.micro_batches
    shape = (size, flags.seq_length)
    batches = iter(MicroBatches(dataset, first_sample=first, global_batch_size=size * count, micro_batch_size=size))
    for _ in range(count):
        tensors = [torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64)]
        if reads:
            batch = next(batches)
            tensors = [torch.from_numpy(batch.tokens), torch.from_numpy(batch.labels)]
        if sends:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)


if __name__ == "__main__":
    process_exit.exit_with(main)
