"""Our training runs on drawn tokens, as pretrain_gpt.py builds them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.gpu.context import Context
from benchmarks.gpu.shapes import Shape
from megatron.config import RunRequest, parse
from megatron.config.schedule import learning_rate
from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.kernels.native.library import library
from megatron.train.build import open_run
from megatron.train.run import Run
from trident.corpus.vocabulary.learning import save_byte_level_vocabulary

END_OF_DOCUMENT = "<|endoftext|>"


def corpus_flags(folder: Path, vocab_size: int, tokens: int) -> list[str]:
    """Writes a corpus of drawn ids and a vocabulary of single bytes; the flags that name them."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix = folder / f"drawn{vocab_size}_text_document"
    if not prefix.with_suffix(".idx").exists():
        drawn = np.random.default_rng(11)
        with IndexedWriter(prefix, np.uint16 if vocab_size <= 65536 else np.int32) as writer:
            for _ in range(max(1, tokens // 4096)):
                writer.add_document([drawn.integers(0, vocab_size, 4096)])
    vocab_file, merge_file = save_byte_level_vocabulary(str(folder / "bytes"), _bytes_vocabulary(), [])
    return [
        *("--data-path", str(prefix), "--split", "100,0,0", "--data-cache-path", str(folder / "cache")),
        *("--vocab-file", str(vocab_file), "--merge-file", str(merge_file)),
    ]


def request_of(context: Context, shape: Shape, length: int, micro_batch: int, *more: str) -> RunRequest:
    """A run of one process: one micro-batch a step, bf16, no saving, no evaluation; a new run folder each."""
    tokens = 8192 if context.is_tiny else 2**22
    chosen = context.kernels or ("csrc" if has_compiled_kernels(context) else None)
    kernels = [] if chosen is None or "--kernels" in more else ["--kernels", chosen]
    context.scratch.mkdir(parents=True, exist_ok=True)
    words = [
        *corpus_flags(context.scratch / "data", shape.vocab, tokens),
        *shape.flags,
        *("--seq-length", str(length), "--max-position-embeddings", str(length)),
        *("--micro-batch-size", str(micro_batch), "--global-batch-size", str(micro_batch)),
        *("--train-iters", "100000", "--eval-iters", "0", "--lr", "3e-4", "--lr-decay-style", "constant"),
        *("--run-dir", tempfile.mkdtemp(dir=context.scratch), *kernels, *more),
    ]
    return parse(words if "--fp16" in more else [*words, "--bf16"])


def has_compiled_kernels(context: Context) -> bool:
    """True if csrc/ops is built for the device."""
    found = library()
    return found is not None and all(found.has(operation, context.device) for operation in ("norm", "adamw"))


@contextlib.contextmanager
def training(request: RunRequest) -> Iterator[tuple[Run, Callable[[], None]]]:
    """A run and its step: reading the batch, forward, backward, update."""
    with open_run(request) as (run, _):

        def step() -> None:
            rate = learning_rate(run.config.optim, run.progress.consumed_samples)
            done = run.engine.train_batch(run.train_batches(), rate)
            tokens = done.sample_count * run.config.data.seq_length
            run.progress = run.progress.after(done.sample_count, tokens)

        yield run, step


def _bytes_vocabulary() -> dict[str, int]:
    """GPT-2's printable stand-ins of the 256 bytes, and the end of a document.

    Source: Radford et al., "Language models are unsupervised multitask learners", 2019, openai/gpt-2 `encoder.py`.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [chr(byte) for byte in printable] + [chr(256 + place) for place in range(len(others))]
    return {character: number for number, character in enumerate([*characters, END_OF_DOCUMENT])}
