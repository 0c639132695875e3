"""Text to token ids and back: one small protocol, and behind it byte-level BPE files and Hugging Face tokenizers.

`tokenizers` is the reference: it defines what the right ids are. `gigatoken` encodes where it is installed, supports
the tokenizer and agrees with the reference on a fixed set of hard texts, checked at every load; else the
reference does.

Special-token strings inside a text:

* `GPT2BPETokenizer` treats them as plain text, as Megatron's does: no document can forge an end of document.
* `PretrainedFromHF` and `HFTokenizer` do what `tokenizer.json` says, which is usually that they become the special
  token. They also add what its post-processor adds (a beginning-of-sequence token, say), as Megatron does by calling
  `encode`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron import log
from megatron.data.fast_encoder import FastEncoder, added_ids, fast_encoder, without_panics
from megatron.errors import ConfigError, DataError

GPT2_END_OF_DOCUMENT = "<|endoftext|>"
TOKENIZER_TYPES = ("GPT2BPETokenizer", "PretrainedFromHF", "HFTokenizer")
_END_OF_DOCUMENT_GUESSES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
_HF_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

Ids = npt.NDArray[np.uint32]
Lengths = npt.NDArray[np.int64]


class TokenizerFlags(Protocol):
    """The flags that choose a tokenizer: `DataConfig` and the tools' own dataclasses have them."""

    @property
    def tokenizer_type(self) -> str | None: ...
    @property
    def vocab_file(self) -> str | None: ...
    @property
    def merge_file(self) -> str | None: ...
    @property
    def tokenizer_name_or_path(self) -> str | None: ...


@dataclass(frozen=True)
class TokenizerChoice:
    """The four flags by themselves, small enough to hand to another process."""

    tokenizer_type: str | None
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_name_or_path: str | None = None

    @staticmethod
    def of(flags: TokenizerFlags) -> TokenizerChoice:
        """Copies the four flags out of a larger bag of them."""
        return TokenizerChoice(flags.tokenizer_type, flags.vocab_file, flags.merge_file, flags.tokenizer_name_or_path)


class Tokenizer(Protocol):
    """What the project asks of a tokenizer. Ids are in `[0, vocab_size)`."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eod_id(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]: ...
    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Lengths]: ...
    def decode(self, ids: Iterable[int]) -> str: ...


def build_tokenizer(flags: TokenizerFlags, known_library: str | None = None) -> LibraryTokenizer:
    """Loads the tokenizer that the flags name.

    Only a hub name of `--tokenizer-name-or-path` may touch the network.

    Args:
        known_library: what `library` of the same tokenizer was in another process, so that the check which decided it
            need not be made again.

    Raises:
        ConfigError: a flag is missing, names nothing, or is not a known type.
        DataError: a tokenizer file is damaged.
    """
    kind = flags.tokenizer_type
    if kind == "GPT2BPETokenizer":
        return _gpt2(flags.vocab_file, flags.merge_file, known_library)
    if kind in ("PretrainedFromHF", "HFTokenizer"):
        source = flags.tokenizer_name_or_path or (flags.vocab_file if kind == "HFTokenizer" else None)
        return _hugging_face(kind, source, known_library)
    raise ConfigError(
        f"--tokenizer-type {kind} is not known here; choose one of {', '.join(TOKENIZER_TYPES)} "
        "(a SentencePiece or WordPiece model works as PretrainedFromHF once it is saved as tokenizer.json)."
    )


class LibraryTokenizer:
    """A `tokenizers.Tokenizer` with, where possible, a faster library doing its encoding.

    Args:
        reference: the `tokenizers.Tokenizer`.
        fast: encodes like the reference without its post-processor, or None.
        identity: what the fingerprint is taken over; asked for once, when somebody wants the fingerprint.
        vocab_size: one more than the largest id; asked of the reference if left out.
    """

    def __init__(
        self,
        name: str,
        reference: Any,
        fast: FastEncoder | None,
        eod_id: int | None,
        identity: Callable[[], str],
        vocab_size: int | None = None,
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size or 1 + max(reference.get_vocab(with_added_tokens=True).values())
        self._identity = identity
        self._reference = reference
        self._fast = fast
        self._eod_id = eod_id
        self._prefix, self._suffix = added_ids(reference)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the tokenizer's files in a normal form."""
        return _sha256(self._identity())

    @property
    def library(self) -> str:
        """Which library encodes: gigatoken or tokenizers."""
        return "gigatoken" if self._fast is not None else "tokenizers"

    @property
    def eod_id(self) -> int:
        """The id that ends a document.

        Raises:
            ConfigError: the tokenizer has none.
        """
        if self._eod_id is None:
            raise ConfigError(
                f"The tokenizer {self.name} names no end-of-document token. Give it an eos_token in "
                "tokenizer_config.json, "
                "or leave out --append-eod."
            )
        return self._eod_id

    def encode(self, text: str) -> list[int]:
        """Ids of one text."""
        ids, _ = self.encode_flat([text])
        return [int(token) for token in ids]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, uint32; the arrays are views of one buffer."""
        ids, lengths = self.encode_flat(texts)
        return np.split(ids, np.cumsum(lengths)[:-1]) if len(lengths) else []

    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        """Ids of all texts back to back (uint32), and how many belong to each (int64)."""
        if self._fast is not None:
            ids, lengths = self._fast.encode_flat(texts)
            if self._prefix or self._suffix:
                return surround(ids, lengths, self._prefix, self._suffix)
            return ids, lengths
        rows = [self._reference.encode(text).ids for text in texts]
        lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
        flat = np.fromiter((token for row in rows for token in row), dtype=np.uint32, count=int(lengths.sum()))
        return flat, lengths

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; special tokens are written out, broken UTF-8 becomes U+FFFD."""
        return str(self._reference.decode([int(token) for token in ids], skip_special_tokens=False))


def surround(
    ids: npt.NDArray[Any],
    lengths: Lengths,
    prefix: Sequence[int],
    suffix: Sequence[int],
    dtype: npt.DTypeLike | None = None,
) -> tuple[npt.NDArray[Any], Lengths]:
    """Puts the same ids before and after every row of a flat batch.

    Shapes:
        ids [total], lengths [rows] -> ids [total + rows * (prefix + suffix)], lengths [rows].

    Args:
        dtype: of the result, that of `ids` if left out; converting here saves a copy.
    """
    extra = len(prefix) + len(suffix)
    longer = lengths + extra
    ends = np.cumsum(longer)
    starts = ends - longer
    result = np.empty(len(ids) + extra * len(lengths), dtype=ids.dtype if dtype is None else dtype)
    if len(ids) > 256 * len(lengths):  # long rows: one copy each is cheaper than a mask over every token
        first = 0
        for start, length in zip((starts + len(prefix)).tolist(), lengths.tolist(), strict=True):
            result[start : start + length] = ids[first : first + length]
            first += length
    else:
        is_text = np.ones(len(result), dtype=bool)
        for place in range(len(prefix)):
            is_text[starts + place] = False
        for place in range(len(suffix)):
            is_text[ends - 1 - place] = False
        result[is_text] = ids
    for place, token in enumerate(prefix):
        result[starts + place] = token
    for place, token in enumerate(reversed(suffix)):
        result[ends - 1 - place] = token
    return result, longer


def read_tokenizer_file(path: str | Path, what: str) -> str:
    """Reads a tokenizer file as UTF-8 text.

    Raises:
        ConfigError: there is no such file.
        DataError: it cannot be read or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as failure:
        raise ConfigError(f"{what} {path} is not a file. Give the path of an existing one.") from failure
    except (OSError, UnicodeDecodeError) as failure:
        raise DataError(
            f"{path} ({what}) cannot be read as UTF-8 text: {failure}. Fetch or write the file again."
        ) from failure


def parse_json(text: str, path: str | Path) -> Any:
    """Parses the JSON of a tokenizer file.

    Raises:
        DataError: it is not JSON; the text says where.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as failure:
        raise DataError(f"{path} is not valid JSON: {failure}. Fetch or write the file again.") from failure


# --- GPT-2 ----------------------------------------------------------------------------------------


def _gpt2(vocab_file: str | None, merge_file: str | None, known_library: str | None) -> LibraryTokenizer:
    problems = [
        f"--tokenizer-type GPT2BPETokenizer needs {flag} (a {what} file)."
        for flag, value, what in (
            ("--vocab-file", vocab_file, "vocab.json"),
            ("--merge-file", merge_file, "merges.txt"),
        )
        if not value
    ]
    if problems or vocab_file is None or merge_file is None:
        raise ConfigError(problems)
    vocabulary = _gpt2_vocabulary(vocab_file)
    merges = _gpt2_merges(merge_file, vocabulary, vocab_file)
    eod_id = vocabulary.get(GPT2_END_OF_DOCUMENT)
    if eod_id is None:
        raise DataError(
            f"{vocab_file} has no {GPT2_END_OF_DOCUMENT} entry, so documents could not be ended. Use "
            "GPT-2's vocabulary, or one "
            "written by tools/train_tokenizer.py."
        )
    reference = _byte_level_reference(vocabulary, merges)
    fast = _checked_fast_encoder(reference, "GPT2BPETokenizer", known_library)
    content = {"vocab": vocabulary, "merges": merges}
    vocab_size = 1 + max(vocabulary.values())
    return LibraryTokenizer("GPT2BPETokenizer", reference, fast, eod_id, lambda: _canonical(content), vocab_size)


def _gpt2_vocabulary(path: str) -> dict[str, int]:
    vocabulary = parse_json(read_tokenizer_file(path, "--vocab-file"), path)
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise DataError(f"{path} (--vocab-file) must hold one JSON object of token to id, as GPT-2's vocab.json does.")
    for token, number in vocabulary.items():
        if type(number) is not int or not 0 <= number < 2**31:
            raise DataError(
                f"{path} (--vocab-file): token {token!r} has id {number!r}; ids are whole numbers from 0 to 2^31 - 1."
            )
    if len(set(vocabulary.values())) != len(vocabulary):
        raise DataError(f"{path} (--vocab-file) gives one id to two tokens; every token needs an id of its own.")
    return vocabulary


def _gpt2_merges(path: str, vocabulary: dict[str, int], vocab_file: str) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(read_tokenizer_file(path, "--merge-file").split("\n"), start=1):
        line = line.rstrip("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            raise DataError(f"{path}:{number} (--merge-file) is not two tokens with one blank between: {line[:80]!r}.")
        for token in (left, right, left + right):
            if token not in vocabulary:
                raise DataError(
                    f"{path}:{number} merges {left!r} and {right!r}, but {token!r} is not in {vocab_file}: "
                    "--vocab-file and --merge-file must come from the same tokenizer."
                )
        merges.append((left, right))
    return merges


def _byte_level_reference(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """GPT-2's rules in `tokenizers`: its split pattern, bytes as printable characters, no added tokens."""
    from tokenizers import Tokenizer as Reference
    from tokenizers import decoders, models, pre_tokenizers

    reference = Reference(models.BPE(vocab=vocabulary, merges=merges))
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.decoder = decoders.ByteLevel()
    return reference


# --- Hugging Face ---------------------------------------------------------------------------------


def _hugging_face(kind: str, source: str | None, known_library: str | None) -> LibraryTokenizer:
    if not source:
        raise ConfigError(
            f"--tokenizer-type {kind} needs --tokenizer-name-or-path (a folder with tokenizer.json, that "
            "file itself, or a hub name)."
        )
    files = _hugging_face_files(source)
    if "tokenizer.json" in files:
        description = parse_json(
            read_tokenizer_file(files["tokenizer.json"], "tokenizer.json"), files["tokenizer.json"]
        )
        where = str(files["tokenizer.json"])
    else:
        description = _converted_by_transformers(source)
        where = source
    reference = _reference_from_json(description, where)
    eod_id = _hugging_face_eod(reference, files)
    fast = _checked_fast_encoder(reference, source, known_library)
    return LibraryTokenizer(f"{kind}:{source}", reference, fast, eod_id, lambda: _canonical(description))


def _hugging_face_files(source: str) -> dict[str, Path]:
    """Paths of the tokenizer's files that exist, by name: from a folder, beside a tokenizer.json, or from the hub."""
    path = Path(source)
    if path.is_file():
        beside = {name: path.parent / name for name in _HF_FILES[1:] if (path.parent / name).is_file()}
        return {"tokenizer.json": path, **beside}
    if path.is_dir():
        return {name: path / name for name in _HF_FILES if (path / name).is_file()}
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or source.endswith((".json", ".model")):
        raise ConfigError(f"--tokenizer-name-or-path {source} is neither a file nor a folder here, and not a hub name.")
    return _hub_files(source)


def _hub_files(source: str) -> dict[str, Path]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    found = {}
    for name in _HF_FILES:
        try:
            found[name] = Path(hf_hub_download(source, name))
        except EntryNotFoundError:
            continue
        except Exception as failure:
            raise ConfigError(
                f"--tokenizer-name-or-path {source}: there is no such folder here, and the hub gave no {name} "
                f"({type(failure).__name__}: {str(failure).splitlines()[0][:200]}). Check the name and "
                "the network, or give a local folder."
            ) from failure
    return found


def _converted_by_transformers(source: str) -> Any:
    """The description of a tokenizer that has no tokenizer.json, made by `transformers` if that is installed."""
    try:
        from transformers import AutoTokenizer
    except ImportError as failure:
        raise ConfigError(
            f"--tokenizer-name-or-path {source} has no tokenizer.json, and transformers, which could "
            "convert its files, is not "
            "installed. Install it (pip install transformers), or save the tokenizer as tokenizer.json."
        ) from failure
    try:
        loaded = AutoTokenizer.from_pretrained(source)
        return json.loads(loaded.backend_tokenizer.to_str())
    except Exception as failure:
        raise ConfigError(
            f"--tokenizer-name-or-path {source} has no tokenizer.json and transformers could not convert what is there "
            f"({type(failure).__name__}: {str(failure)[:300]}). Save the tokenizer as tokenizer.json."
        ) from failure


def _reference_from_json(description: Any, path: str) -> Any:
    from tokenizers import Tokenizer as Reference

    if isinstance(description, dict):  # these cut or fill texts; a corpus must have all of each text and nothing else
        description = {**description, "truncation": None, "padding": None}
    try:
        return without_panics(lambda: Reference.from_str(json.dumps(description)))
    except ValueError as failure:
        raise DataError(f"{path} is not a tokenizer that the tokenizers library can load: {failure}.") from failure


def _hugging_face_eod(reference: Any, files: dict[str, Path]) -> int | None:
    """The end-of-sequence token that the files name, else a well-known one that the vocabulary holds."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if name not in files:
            continue
        named = parse_json(read_tokenizer_file(files[name], name), files[name])
        token = named.get("eos_token") if isinstance(named, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            number = reference.token_to_id(token)
            if number is None:
                raise DataError(
                    f"{files[name]} names eos_token {token!r}, which is not in the vocabulary of tokenizer.json."
                )
            return int(number)
    found = (reference.token_to_id(token) for token in _END_OF_DOCUMENT_GUESSES)
    return next((int(number) for number in found if number is not None), None)


# --- shared ---------------------------------------------------------------------------------------


def _checked_fast_encoder(reference: Any, name: str, known_library: str | None) -> FastEncoder | None:
    if known_library is not None:
        return FastEncoder(reference.to_str()) if known_library == "gigatoken" else None
    encoder, reason = fast_encoder(reference)
    if encoder is None:
        log.info(f"{name}: encoding with the tokenizers library ({reason})")
    return encoder


def _canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()
