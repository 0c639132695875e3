"""The sidecar of a token file: `<prefix>.json` records the sources and the tokenizer of the pair `<prefix>.bin/.idx`.

Training reads it to check the tokenizer, since the same ids mean other text under another tokenizer. A pair without a
sidecar (written by another tool) is not checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron import log
from megatron.errors import DataError
from megatron.files.plain import read_plain_json
from megatron.files.replacing import write_temporary
from megatron.tokenizers.record import TokenizerRecord, check_same_tokenizer

if TYPE_CHECKING:
    from megatron.tokenizers.tokenizer import Tokenizer

FORMAT = "megatron-corpus-sidecar"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class SourceRecord:
    """One input of a corpus.

    Args:
        path: as given.
        text_bytes: uncompressed bytes of its lines, or the size of a Parquet file.
        xxh3_64: XXH3 (64 bits, hexadecimal) over those bytes; None without the xxhash package.
    """

    path: str
    text_bytes: int
    xxh3_64: str | None


@dataclass(frozen=True)
class Sidecar:
    """The contents and provenance of a pair of token files.

    Args:
        empty: skipped documents that gave no ids.
        skipped: skipped bad lines.
        versions: of the programs and libraries that wrote the pair.
    """

    documents: int
    empty: int
    skipped: int
    sequences: int
    tokens: int
    append_eod: bool
    tokenizer: TokenizerRecord
    versions: Mapping[str, str] = field(default_factory=dict)
    sources: tuple[SourceRecord, ...] = ()

    @property
    def counts(self) -> tuple[int, int, int]:
        """Sequences, documents and tokens, as `IndexedDataset.counts`."""
        return self.sequences, self.documents, self.tokens


def sidecar_path(prefix: str | Path) -> Path:
    """Returns the path of a data prefix's sidecar."""
    return Path(f"{prefix}.json")


def read_sidecar(prefix: str | Path) -> Sidecar | None:
    """Returns the sidecar of a data prefix; None if the file does not exist or is not a sidecar.

    Raises:
        DataError: the file is a sidecar, but damaged or of a later version.
    """
    path = sidecar_path(prefix)
    content = _parsed(path)
    if not _is_sidecar(content):
        return None
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise DataError(
            f"{path} has format version {version!r}, expected {FORMAT_VERSION}. Use the release that wrote it, or "
            "remove the file: the data can be read without it."
        )
    try:
        return _from_json(content)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as failure:
        raise DataError(
            f"{path} is a damaged sidecar ({type(failure).__name__}: {failure}). Restore it, or remove it: the data "
            "can be read without it."
        ) from failure


def write_temporary_sidecar(prefix: str | Path, sidecar: Sidecar) -> Path:
    """Writes a sidecar under a temporary name and returns that name.

    Raises:
        StorageError: writing failed.
    """
    return write_temporary(sidecar_path(prefix), _content(sidecar))


def check_replaceable(prefix: str | Path) -> None:
    """Checks that writing the sidecar of a prefix does not overwrite another file.

    Raises:
        DataError: a file of that name exists and is not a sidecar.
    """
    path = sidecar_path(prefix)
    if path.exists() and not is_sidecar(path):
        raise DataError(
            f"{path} exists and does not describe token files, so it will not be overwritten. Move it away, or use "
            "another --output-prefix."
        )


def remove_sidecar(prefix: str | Path) -> None:
    """Removes the sidecar of a data prefix, but no other file of that name."""
    path = sidecar_path(prefix)
    if is_sidecar(path):
        path.unlink()


def check_tokenizer_fits(prefixes: Iterable[str], tokenizer: Tokenizer) -> None:
    """Checks that token files were written with an equal tokenizer.

    Raises:
        DataError: the tokenizers differ.
    """
    for prefix in prefixes:
        sidecar = read_sidecar(prefix)
        if sidecar is None or not _describes(prefix, sidecar):
            continue
        advice = f", or preprocess the corpus again (without {sidecar_path(prefix)} nothing is checked)"
        made, ends_matter = f"the data {prefix} was made", sidecar.append_eod
        check_same_tokenizer(made, sidecar.tokenizer, tokenizer, advice=advice, ends_matter=ends_matter)


def _describes(prefix: str, sidecar: Sidecar) -> bool:
    """Returns True if a sidecar describes the pair next to it; another tool may have rewritten the pair."""
    path = Path(f"{prefix}.bin")
    size = path.stat().st_size if path.is_file() else 0
    if sidecar.tokens == 0 or size in (sidecar.tokens * width for width in (1, 2, 4, 8)):
        return True
    log.warning(
        f"{sidecar_path(prefix)} lists {sidecar.tokens} tokens, which do not match the {size} bytes of {path}: it "
        "describes other data and is ignored."
    )
    return False


def _parsed(path: Path) -> Any:
    try:
        return read_plain_json(path)
    except (OSError, ValueError):
        return None


def _content(sidecar: Sidecar) -> bytes:
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(sidecar)}
    return (json.dumps(content, indent=1, ensure_ascii=True) + "\n").encode()


def is_sidecar(path: Path) -> bool:
    return _is_sidecar(_parsed(path))


def _is_sidecar(content: Any) -> bool:
    return isinstance(content, dict) and content.get("format") == FORMAT


def _from_json(content: Mapping[str, Any]) -> Sidecar:
    return Sidecar(
        documents=int(content["documents"]),
        empty=int(content["empty"]),
        skipped=int(content["skipped"]),
        sequences=int(content["sequences"]),
        tokens=int(content["tokens"]),
        append_eod=bool(content["append_eod"]),
        tokenizer=TokenizerRecord.from_json(content["tokenizer"]),
        versions={str(name): str(version) for name, version in content["versions"].items()},
        sources=tuple(
            SourceRecord(str(source["path"]), int(source["text_bytes"]), source["xxh3_64"])
            for source in content["sources"]
        ),
    )
