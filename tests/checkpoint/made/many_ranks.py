"""What very many ranks would write under ZeRO-3, without their tensors: descriptions, manifest, and what a rank reads.

    python -m tests.checkpoint.made.many_ranks --ranks 16384 --layers 108 --hidden 28672
    python -m tests.checkpoint.made.many_ranks --ranks 1024 --layers 24 --hidden 1024 [--with-tensors]

prints JSON: bytes of the root and of the index files, processor seconds of the first rank and of one that reads its
part, and the memory that the reading took beyond the imports. With tensors, one process writes the files of all ranks
with values that follow from their place, commits them, and reads them as half as many ranks would.
"""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron import log, process_exit
from megatron.checkpoint import SaveOptions, saving
from megatron.checkpoint.catalogue import StoredPiece, StoredRun
from megatron.checkpoint.layout import check_complete, plan_piece
from megatron.checkpoint.manifest import MANIFEST_NAME, file_name, folder_name, read_manifest
from megatron.checkpoint.manifests.compaction import FileDescription, compact, describe
from megatron.checkpoint.manifests.contents import StoredFile
from megatron.checkpoint.manifests.writing import manifest_texts
from megatron.checkpoint.publish import open_temporary, temporary_folder
from megatron.checkpoint.reader import read_pieces
from megatron.checkpoint.snapshot import take_snapshot
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

    def pieces(self, rank: int, ranks: int | None = None) -> Iterator[tuple[PieceKey, torch.Tensor]]:
        """What a rank holds, with its values: each follows from parameter, kind and place."""
        for key in self.keys(rank, ranks):
            salt = zlib.crc32(f"{key.name} {key.kind}".encode())
            yield key, (torch.arange(key.first, key.last).mul_(7919).add_(salt) % 65521).to(torch.float32)

    def save(self, directory: Path, options: SaveOptions) -> Path:
        """Writes the files of all ranks one after the other, and commits them as the first rank would."""
        temporary = temporary_folder(directory, 7, "run")
        open_temporary(temporary, 0, options.storage)
        files, described = [], []
        for rank in range(self.ranks):
            taken = take_snapshot(self.pieces(rank))
            if taken.listed:
                path = temporary / file_name(rank)
                file, stored = saving.write_pieces(path, taken, options.chunk_bytes, options.storage)
                files.append(file)
                described.append(describe(stored))
        rows = {each.digest: json.loads(json.dumps(each.rows)) for each in described}
        numbers, rows_of = [[*each.numbers] for each in described], [each.digest for each in described]
        written = saving._WrittenFiles(files, numbers, rows_of, rows)
        saving._commit(temporary, 7, "run", {"progress": {"step": 7}}, written, options)
        return directory / folder_name(7)

    def load(self, folder: Path, rank: int, ranks: int) -> int:
        """Reads what one of `ranks` ranks holds and compares it; returns the elements.

        Raises:
            AssertionError: a value is another one.
        """
        expected = list(self.pieces(rank, ranks))
        values = read_pieces(folder, read_manifest(folder), [key for key, _ in expected])
        for (key, right), found in zip(expected, values, strict=True):
            assert torch.equal(found, right), key
        return sum(len(found) for found in values)

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
    with_tensors: bool = flag(False, "write and read values as well")
    readers: int | None = flag(None, "how many ranks read; by default as many as wrote", at_least=1)


def peak_bytes() -> int:
    """The most memory that this process has had, and not the one that started it."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split("VmHWM:")[1].split()[0])


def save_and_load(network: Network) -> dict[str, float]:
    """Seconds of saving as all ranks and of loading as half as many, and what was there."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        saved = network.save(Path(folder), SaveOptions())
        written = time.monotonic()
        readers = network.ranks // 2
        elements = sum(network.load(saved, rank, readers) for rank in range(readers))
        sizes = [path.stat().st_size for path in saved.iterdir()]
        figures = {"ranks": network.ranks, "files": len(sizes), "bytes": sum(sizes), "elements": elements}
        seconds = {"save_seconds": written - began, "load_seconds": time.monotonic() - written}
        return {**figures, **{name: round(value, 1) for name, value in seconds.items()}, "peak_bytes": peak_bytes()}


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
    if flags.with_tensors:
        log.line(json.dumps(save_and_load(network)))
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
