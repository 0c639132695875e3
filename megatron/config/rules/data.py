"""Data and tokenizer: data sources, tokenizer files, and the vocabulary size."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.flags.blends import shown_split
from megatron.config.machine import TokenizerFacts
from megatron.config.rules.rule import request_rule
from megatron.config.run_sections import RunSections
from megatron.config.sections.data import NULL_TOKENIZER, SENTENCEPIECE_TOKENIZERS, TOKENIZERS, WORDPIECE_TOKENIZERS
from megatron.config.sections.parallel import ParallelRequest


@request_rule
def _sources(run: RunSections) -> Iterator[str]:
    data = run.data
    splits = ("train", "valid", "test")
    weighted = [f"--{split}-weighted-split-paths" for split in splits if getattr(data, f"{split}_weighted_split_paths")]
    separate = [f"--{split}-data-path" for split in splits if getattr(data, f"{split}_data_path")]
    modes = [names for names in (["--data-path"] if data.data_path else [], weighted, separate) if names]
    if not modes:
        yield "--data-path is required: the prefix of token files written by tools/preprocess_data.py."
    if len(modes) > 1:
        yield (
            f"{modes[0][0]} cannot be combined with {' and '.join(names[0] for names in modes[1:])}. Keep one of them."
        )
    if len(modes) == 1 and not data.data_path:
        if run.was_given("data.split"):
            yield (
                f"--split {shown_split(data.split)} cannot be combined with {modes[0][0]}, which defines the splits. "
                "Drop --split."
            )
        training = ("--train-weighted-split-paths", "--train-data-path")
        if modes[0][0] not in training:
            yield f"{modes[0][0]} requires {training[0] if modes[0] is weighted else training[1]}, the training data."


@request_rule
def _tokenizer_files(run: RunSections) -> Iterator[str]:
    data = run.data
    kind = data.tokenizer_type
    if kind == "GPT2BPETokenizer":
        for name, value in (("--vocab-file", data.vocab_file), ("--merge-file", data.merge_file)):
            if value is None:
                yield f"{name} is required by --tokenizer-type GPT2BPETokenizer."
    elif kind in WORDPIECE_TOKENIZERS:
        if data.vocab_file is None:
            yield f"--vocab-file is required by --tokenizer-type {kind}: a vocab.txt with one token per line."
    elif kind in SENTENCEPIECE_TOKENIZERS:
        if data.tokenizer_name_or_path is None and data.vocab_file is None:
            yield f"--tokenizer-model is required by --tokenizer-type {kind}: a SentencePiece .model file."
    elif kind == NULL_TOKENIZER and data.tokenizer_name_or_path is None:
        yield f"--vocab-size is required by --tokenizer-type {kind}: the number of token ids."
    elif data.tokenizer_name_or_path is None and kind in TOKENIZERS:
        yield f"--tokenizer-name-or-path is required by --tokenizer-type {kind}: a folder or a hub name."


def vocabulary_problems(parallel: ParallelRequest, vocabulary: int, tokenizer: TokenizerFacts) -> Iterator[str]:
    """Yields problems of the vocabulary size and of the padded vocabulary size.

    The vocabulary may exclude tokens that the data does not contain, but not the end-of-document token.
    """
    if vocabulary <= tokenizer.eod_id:
        yield (
            f"--vocab-size {vocabulary} excludes the end-of-document token, id {tokenizer.eod_id} of the tokenizer's "
            f"{tokenizer.vocab_size} tokens. Use --vocab-size {tokenizer.vocab_size}, or drop it."
        )
    size = parallel.pad_vocab_size_to
    if size is not None and size < vocabulary:
        yield f"--pad-vocab-size-to {size} is less than the vocabulary size {vocabulary}. Use at least {vocabulary}."
