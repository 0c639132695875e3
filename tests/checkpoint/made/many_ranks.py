"""What very many ranks would write under ZeRO-3, without their tensors: descriptions, manifest, and what a rank reads.

    python -m tests.checkpoint.made.many_ranks --ranks 16384 --layers 108 --hidden 28672

prints JSON: bytes of the root and of the index files, processor seconds of the first rank and of one that reads its
part, and the memory that the reading took beyond the imports.
"""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron import log, process_exit
from megatron.checkpoint.catalogue import StoredPiece, StoredRun
from megatron.checkpoint.layout import check_complete, plan_piece
from megatron.checkpoint.manifest import MANIFEST_NAME, file_name, read_manifest
from megatron.checkpoint.manifests.compaction import FileDescription, compact, describe
from megatron.checkpoint.manifests.contents import StoredFile
from megatron.checkpoint.manifests.writing import manifest_texts
from megatron.config import ConfigSection, flag, parse_flags
from megatron.parallel.pieces import Kind, PieceKey

KINDS: tuple[Kind, ...] = ("master", "exp_avg", "exp_avg_sq")
CHUNK_BYTES = 16 * 2**20
HEADER_BYTES = 4096


@dataclass(frozen=True)
class Network:
    """A GPT of so many layers, every parameter split evenly over all ranks."""

    ranks: int
    layers: int
    hidden: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters in the order of the network."""
        h = self.hidden
        shapes: dict[str, tuple[int, ...]] = {"embedding.word": (51200, h), "embedding.position": (2048, h)}
        matrices = {"qkv": (3 * h, h), "proj": (h, h), "fc1": (4 * h, h), "fc2": (h, 4 * h)}
        for layer in range(self.layers):
            for name in ("norm1", "norm2"):
                shapes |= {f"decoder.layers.{layer}.{name}.{kind}": (h,) for kind in ("weight", "bias")}
            for name, (rows, columns) in matrices.items():
                shapes[f"decoder.layers.{layer}.{name}.weight"] = (rows, columns)
                shapes[f"decoder.layers.{layer}.{name}.bias"] = (rows,)
        return shapes | {"decoder.norm.weight": (h,), "decoder.norm.bias": (h,)}

    def keys(self, rank: int, ranks: int | None = None) -> Iterator[PieceKey]:
        """What a rank holds, of `ranks` if not of all."""
        for name, shape in self.shapes().items():
            numel = math.prod(shape)
            length = -(-numel // (ranks or self.ranks))
            first, last = rank * length, min((rank + 1) * length, numel)
            if first < last:
                for kind in KINDS:
                    yield PieceKey(name, kind, shape, (0,) * len(shape), shape, first, last)

    def description(self, rank: int) -> FileDescription:
        """What a rank says of its file."""
        return describe(StoredPiece(key, "F32", 4, 0, 0) for key in self.keys(rank))

    def descriptions(self) -> tuple[list[tuple[int, ...]], list[str], dict[str, Sequence[tuple[object, ...]]]]:
        """Those of all ranks, as `compact` wants them. Neighbours that hold whole parts of the same parameters say the
        same but for their number, so one of them is asked.
        """
        sizes = {math.prod(shape) for shape in self.shapes().values()}
        lengths = {numel: -(-numel // self.ranks) for numel in sizes}
        borders = {border for numel in sizes for border in (numel // lengths[numel], -(-numel // lengths[numel]))}
        numbers: list[tuple[int, ...]] = []
        rows_of: list[str] = []
        rows: dict[str, Sequence[tuple[object, ...]]] = {}
        digest = ""
        for rank in range(self.ranks):
            if rank <= 1 or rank in borders:
                described = self.description(rank)
                digest, own = described.digest, described.numbers
                rows[digest] = json.loads(json.dumps(described.rows))
            numbers.append(own if rank <= 1 or rank in borders else (rank,))
            rows_of.append(digest)
        return numbers, rows_of, rows

    def files(self) -> list[StoredFile]:
        """Their files, with digests that no file has."""
        entries, sizes = [], Counter(math.prod(shape) for shape in self.shapes().values())
        for rank in range(self.ranks):
            size = HEADER_BYTES
            for numel, count in sizes.items():
                length = -(-numel // self.ranks)
                size += 4 * len(KINDS) * count * max(0, min(length, numel - rank * length))
            digests = [
                hashlib.sha256(f"{rank} {chunk}".encode()).hexdigest() for chunk in range(-(-size // CHUNK_BYTES))
            ]
            entries.append(StoredFile(file_name(rank), size, digests[0], tuple(digests)))
        return entries

    def runs(self) -> list[StoredRun]:
        """All pieces, compacted."""
        return compact(*self.descriptions())

    def write(self, folder: Path, runs: Sequence[StoredRun], files: Sequence[StoredFile]) -> dict[str, int]:
        """Writes the manifest as the first rank would; returns the bytes of its parts."""
        root, indexes = manifest_texts(7, "run", {"progress": {"step": 7}}, CHUNK_BYTES, files, runs)
        for name, text in {**indexes, MANIFEST_NAME: root}.items():
            (folder / name).write_bytes(text)
        return {"root_bytes": len(root), "index_files": len(indexes), "index_bytes": sum(map(len, indexes.values()))}

    def plan(self, folder: Path, rank: int, ranks: int | None = None) -> int:
        """Finds everything that one rank (of `ranks`, if not of all) wants; returns the number of files it needs."""
        catalogue = read_manifest(folder).catalogue
        sources = [source for key in self.keys(rank, ranks) for source, _ in plan_piece(key, catalogue)]
        return len({source.file for source in sources})


@dataclass(frozen=True)
class ManyRanksFlags(ConfigSection):
    """How many ranks of what network."""

    ranks: int = flag(1024, "how many ranks wrote", at_least=2)
    layers: int = flag(24, "layers of the network", at_least=1)
    hidden: int = flag(1024, "its hidden size", at_least=8)
    folder: str | None = flag(None, "read the manifest in this folder, and write none")
    readers: int | None = flag(None, "how many ranks read; by default as many as wrote", at_least=1)


def peak_bytes() -> int:
    """The most memory that this process has had, and not the one that started it."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split("VmHWM:")[1].split()[0])


def main() -> int:
    """Measures what the flags say."""
    flags = parse_flags(ManyRanksFlags, sys.argv[1:], prog="python -m tests.checkpoint.made.many_ranks", description="")
    network = Network(flags.ranks, flags.layers, flags.hidden)
    before, began = peak_bytes(), time.process_time()
    if flags.folder is not None:
        readers = flags.readers or flags.ranks
        files = network.plan(Path(flags.folder), readers // 2, flags.readers)
        seconds = round(time.process_time() - began, 2)
        figures = {"readers": readers, "read_seconds": seconds, "files_needed": files}
        log.line(json.dumps({**figures, "peak_bytes": peak_bytes(), "before_bytes": before}))
        return 0
    descriptions, files = network.descriptions(), network.files()
    began = time.process_time()
    runs = compact(*descriptions)
    check_complete(run.key for run in runs)
    pieces = sum(run.parts for run in runs)
    with tempfile.TemporaryDirectory() as folder:
        sizes = network.write(Path(folder), runs, files)
        list(read_manifest(Path(folder)).files)
        seconds = round(time.process_time() - began, 2)
        parameters = sum(math.prod(shape) for shape in network.shapes().values())
        figures = {"parameters": parameters, "tensors": len(network.shapes()), "ranks": network.ranks, "pieces": pieces}
        log.line(json.dumps({**figures, "runs": len(runs), **sizes, "first_rank_seconds": seconds}))
        for readers in (flags.ranks, flags.ranks // 2):
            more = ["--folder", folder, *(["--readers", str(readers)] if readers != flags.ranks else [])]
            subprocess.run([sys.executable, "-m", "tests.checkpoint.made.many_ranks", *sys.argv[1:], *more], check=True)
    return 0


if __name__ == "__main__":
    process_exit.exit_with(main)
