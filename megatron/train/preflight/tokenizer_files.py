"""The files of the tokenizer: whether they can be read, and begin as their formats do."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from megatron.config.run import RunRequest
from megatron.config.sections.data import SENTENCEPIECE_TOKENIZERS, WORDPIECE_TOKENIZERS, DataConfig
from megatron.errors import ConfigError, DataError, MegatronError
from megatron.tokenizers.hugging_face import local_files
from megatron.tokenizers.tokenizer_files import check_tokenizer_file
from megatron.train.preflight.packages import is_installed


def tokenizer_failures(request: RunRequest, wrong: Collection[str]) -> Iterator[MegatronError]:
    """What is wrong with the files that the tokenizer flags name; flags that are missing have been asked for.

    Args:
        wrong: fields of the request that hold no usable value.
    """
    if "tokenizer_type" in wrong:
        return
    try:
        files = list(_files(request.data))
    except MegatronError as failure:
        yield failure
        return
    except OSError as failure:
        yield DataError(
            f"the tokenizer {failure.filename} cannot be read: {failure.strerror}. Give one that this user can read."
        )
        return
    for path, what, beginning in files:
        try:
            check_tokenizer_file(path, what, beginning)
        except MegatronError as failure:
            yield failure


def _files(data: DataConfig) -> Iterator[tuple[str | Path, str, bytes]]:
    """(path, what it is, what it begins with) of each file.

    Raises:
        ConfigError: a Hugging Face tokenizer is neither here nor can it come from the hub.
    """
    kind, named = data.tokenizer_type, data.tokenizer_name_or_path
    if kind == "GPT2BPETokenizer":
        wanted = [(data.vocab_file, "--vocab-file", b"{"), (data.merge_file, "--merge-file", b"")]
    elif kind in WORDPIECE_TOKENIZERS:
        wanted = [(data.vocab_file, "--vocab-file", b"")]
    elif kind in SENTENCEPIECE_TOKENIZERS:
        wanted = [(named or data.vocab_file, "--tokenizer-model", b"")]
    else:
        wanted = []
        source = named or (data.vocab_file if kind == "HFTokenizer" else None)
        local = None if source is None else local_files(source)
        if local is not None and "tokenizer.json" in local:
            yield local["tokenizer.json"], "tokenizer.json", b"{"
        elif source is not None and local is None and not is_installed("huggingface_hub"):
            raise ConfigError(
                f"--tokenizer-name-or-path {source} is not a folder here, and the package huggingface_hub, which would "
                "fetch it, is not installed. Install it with: pip install huggingface_hub, or give a local folder."
            )
    for path, what, beginning in wanted:
        if path is not None:
            yield path, what, beginning
