"""Inputs for preprocessing, runs of it, and the bytes it writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from trident.corpus.inputs.block import InputBlock
from trident.corpus.preprocess.encode import EncodeOptions
from trident.corpus.preprocess.preprocess_corpus import PreprocessResult, preprocess
from trident.corpus.workers.progress_line import ProgressLine

START_METHODS = ["spawn", "fork"] if sys.platform == "linux" else ["spawn"]


def quiet() -> ProgressLine:
    """A progress line that shows nothing."""
    return ProgressLine(None, 1, lambda text: None)


def write_lines(path: Path, texts: list[str]) -> str:
    """Writes a jsonl file of these texts and gives its path as a flag would."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def write_numbered_lines(path: Path, texts: list[str]) -> Path:
    """Writes a jsonl file of these texts, each with its number under another key."""
    path.write_text("".join(json.dumps({"text": text, "n": index}) + "\n" for index, text in enumerate(texts)))
    return path


def endless() -> Iterator[InputBlock]:
    """Blocks without end."""
    data = b'{"text": "some text"}\n' * 1000
    while True:
        yield InputBlock("<test>", 1, len(data), data, 0)


def run(
    inputs: list[Path], prefix: Path, options: EncodeOptions, workers: int = 1, block_bytes: int = 4096
) -> PreprocessResult:
    """Preprocesses files in small blocks, showing no progress."""
    return preprocess(tuple(map(str, inputs)), str(prefix), options, workers, quiet(), block_bytes)


def pair_bytes(prefix: Path) -> tuple[bytes, bytes]:
    """What the `.bin` and `.idx` files of a prefix hold."""
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()
