"""Runs other PyPI packages on the same job: converting jsonl to Megatron's token files.

    python benchmarks/preprocess_peers.py {datatrove,tokenizers} FOLDER TOKENIZER_JSON WORKERS

FOLDER contains `part*.jsonl`; the result is a JSON object with seconds and tokens on standard output. `datatrove` is
Hugging Face's pipeline with its writer of Megatron files. `tokenizers` is the loop of Megatron's own tool around the
Rust library: a process pool with one line per task in chunks of 25, which returns ids to the parent for writing.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

_CHUNK_LINES = 25


def main() -> int:
    """Runs one peer."""
    name, folder, tokenizer, workers = sys.argv[1:]
    peers: dict[str, Callable[[Path, str, int], int]] = {"datatrove": _datatrove, "tokenizers": _pool_of_tokenizers}
    start = time.perf_counter()
    tokens = peers[name](Path(folder), tokenizer, int(workers))
    print(json.dumps({"seconds": time.perf_counter() - start, "tokens": tokens}))
    return 0


def _datatrove(folder: Path, tokenizer: str, workers: int) -> int:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import MegatronDocumentTokenizer

    output = folder / "datatrove"
    pipeline = [
        JsonlReader(str(folder), glob_pattern="part*.jsonl", id_key="source"),
        MegatronDocumentTokenizer(str(output), tokenizer_name_or_path=tokenizer, eos_token=None),
    ]
    LocalPipelineExecutor(pipeline, tasks=workers, workers=workers, logging_dir=str(folder / "logs")).run()
    return sum(path.stat().st_size for path in output.glob("*.bin")) // 2


class _Encode:
    tokenizer = None

    def __init__(self, path: str) -> None:
        self.path = path

    def start(self) -> None:
        from tokenizers import Tokenizer

        _Encode.tokenizer = Tokenizer.from_file(self.path)

    def __call__(self, line: bytes) -> list[int]:
        return _Encode.tokenizer.encode(json.loads(line)["text"]).ids  # type: ignore[union-attr]


def _pool_of_tokenizers(folder: Path, tokenizer: str, workers: int) -> int:
    encode = _Encode(tokenizer)
    tokens = 0
    with multiprocessing.Pool(workers, initializer=encode.start) as pool, (folder / "pool.bin").open("wb") as output:
        for path in sorted(folder.glob("part*.jsonl")):
            with path.open("rb") as lines:
                for ids in pool.imap(encode, lines, _CHUNK_LINES):
                    output.write(np.array(ids, np.uint16).tobytes())
                    tokens += len(ids)
    return tokens


if __name__ == "__main__":
    raise SystemExit(main())
